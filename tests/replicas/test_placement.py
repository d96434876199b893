"""Where whole queues of requests went when this was recorded: a change of how they are placed has to be meant.

Replicas are simulated: each runs `NUM_ROWS` requests at a time, and a request takes a turn for each of its tokens. Most
end before they have all that they may have. A digest stands for who took what in which order.
"""

import random
from collections.abc import Callable
from itertools import islice

import pytest
import xxhash

from nanoinfer.replicas.dispatcher import PREFIX_TOKENS, Dispatcher, QueuedRequest
from tests.replicas.test_dispatch import make_request

NUM_REPLICAS, NUM_ROWS = 4, 8


def few_shot_queue() -> list[QueuedRequest]:
    """Short answers after long prefixes: one prefix of half the prompts, and a dozen of the others."""
    rng = random.Random(0)
    prefixes = [[number] * (PREFIX_TOKENS + rng.randint(1, 40)) for number in range(13)]
    requests = []
    for index in range(400):
        prefix = prefixes[0] if index % 2 else rng.choice(prefixes[1:])
        requests.append(make_request(index, rng.randint(2, 12), [*prefix, rng.randint(20, 22), 100 + index]))
    return requests


def long_tail_queue() -> list[QueuedRequest]:
    """Few answers that are far longer than most, some with samples or a higher priority, and few shared prefixes."""
    rng = random.Random(1)
    requests = []
    for index in range(300):
        work = min(400, int(rng.paretovariate(1.1) * 4))
        prompt = [rng.randint(0, 5)] * (PREFIX_TOKENS + 1) if index % 7 == 0 else [1000 + index]
        requests.append(make_request(index, work, [*prompt, index], int(index % 29 == 0), 1 + (index % 11 == 0)))
    return requests


def placed(requests: list[QueuedRequest], portion: int, loses_a_replica: bool) -> list[tuple[int, int]]:
    """Run a queue to its end, a portion of it added every fourth turn; return who took what: (request, replica)."""
    dispatcher, coming = Dispatcher(NUM_REPLICAS, NUM_ROWS), iter(requests)
    taken: list[tuple[int, int]] = []
    held: list[list[QueuedRequest]] = [[] for _ in range(NUM_REPLICAS)]
    turns_left = {one.request_id: 1 + one.request_id**2 % int(one.work) for one in requests}
    turn, unfinished = 0, len(requests)
    while unfinished:
        if turn % 4 == 0:
            for request in islice(coming, portion):
                dispatcher.add(request)
        if turn == 10 and loses_a_replica:
            dispatcher.close(1)
            lost, held[1] = held[1], []
            for request in lost:
                dispatcher.finish(request)
                dispatcher.add(request)
        while found := dispatcher.take():
            replica, request = found
            taken.append((request.request_id, replica))
            held[replica].append(request)
        for mine in held:
            for request in mine[:NUM_ROWS]:
                turns_left[request.request_id] -= 1
                if turns_left[request.request_id] <= 0:
                    mine.remove(request)
                    dispatcher.finish(request)
                    unfinished -= 1
        turn += 1
    assert dispatcher.work == [0] * NUM_REPLICAS
    return taken


@pytest.mark.parametrize(
    ("make_queue", "portion", "loses_a_replica", "counts", "digest"),
    [  # prefixes are cut, and bundles are stolen whole and by halves
        (few_shot_queue, 32, False, [96, 90, 102, 112], "baf2302ba57fcde5"),
        (few_shot_queue, 32, True, [122, 16, 135, 129], "d111d27b0df0e179"),
        (few_shot_queue, 64, False, [97, 95, 105, 103], "d4d0e1f704e37ea2"),
        (few_shot_queue, 64, True, [119, 39, 128, 133], "a674afe476d577ab"),
        (few_shot_queue, 400, False, [98, 95, 97, 110], "e4bd50bac2f2d756"),
        (few_shot_queue, 400, True, [129, 25, 116, 145], "3f4326b3cd7737ea"),
        (long_tail_queue, 32, False, [78, 65, 91, 66], "4ef22c3cda6eec59"),
        (long_tail_queue, 32, True, [93, 23, 121, 73], "7c6ffccf92e6600c"),
        (long_tail_queue, 64, False, [79, 72, 79, 70], "9fae5b965d9e0449"),
        (long_tail_queue, 64, True, [109, 37, 87, 85], "5fc8b3ef9318ecb7"),
        (long_tail_queue, 400, False, [73, 76, 67, 84], "cb90629932ed0e2e"),
        (long_tail_queue, 400, True, [121, 18, 90, 86], "05dd40cc3ab5ea02"),
    ],
)
def test_a_queue_is_placed_as_it_was_when_this_was_recorded(
    make_queue: Callable[[], list[QueuedRequest]], portion: int, loses_a_replica: bool, counts: list[int], digest: str
) -> None:
    taken = placed(make_queue(), portion, loses_a_replica)
    assert [sum(replica == one for _, one in taken) for replica in range(NUM_REPLICAS)] == counts
    assert xxhash.xxh64_hexdigest(repr(taken).encode()) == digest
