"""Which replica gets which request: no processes, and work in round numbers."""

from array import array

from nanoinfer.engine.engine import Recipient
from nanoinfer.engine.hidden_states_request import HiddenStatesRequest
from nanoinfer.replicas.dispatcher import PREFIX_TOKENS, SHORT_ANSWER_TOKENS, Dispatcher, QueuedRequest, expected_work
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.prompts import PreparedRequest


def make_request(
    request_id: int, work: int, prompt: list[int] | None = None, priority: int = 0, n: int = 1
) -> QueuedRequest:
    params = SamplingParams(max_tokens=work, n=n)
    prepared = PreparedRequest(prompt=None, token_ids=prompt or [1], sampling_params=params, priority=priority)
    return QueuedRequest(request_id, prepared, Recipient([]), work * n)


def alike(number: int, *own: int) -> list[int]:
    """A prompt that begins with a prefix of its own number."""
    return [number] * (PREFIX_TOKENS + 1) + [*own]


def feed(dispatcher: Dispatcher) -> list[list[int]]:
    """The ids of the requests that each replica takes, in order."""
    taken: list[list[int]] = [[] for _ in dispatcher.work]
    while found := dispatcher.take():
        taken[found[0]].append(found[1].request_id)
    return taken


def test_work_is_what_a_request_generates_at_most_and_a_little_for_its_prompt() -> None:
    params = SamplingParams(max_tokens=10, n=2)
    prepared = PreparedRequest(prompt=None, token_ids=[1] * 32, sampling_params=params)
    assert expected_work(prepared, max_model_len=100) == 2 * 10 + 2
    assert expected_work(prepared, max_model_len=36) == 2 * 4 + 2
    prepared.sampling_params = SamplingParams(max_tokens=None)
    assert expected_work(prepared, max_model_len=100) == 68 + 2


def test_the_longest_go_first_each_to_the_replica_with_the_least_work() -> None:
    dispatcher = Dispatcher(num_replicas=2, num_rows=8)
    for request_id, work in enumerate([10, 50, 20, 40]):
        dispatcher.add(make_request(request_id, work))
    assert feed(dispatcher) == [[1, 0], [3, 2]]
    assert dispatcher.work == [60, 60]


def test_a_higher_priority_goes_before_longer_work_and_what_was_queued_earlier_before_later() -> None:
    dispatcher = Dispatcher(num_replicas=1, num_rows=8)
    for request_id, work, priority in ((0, 10, 0), (1, 90, 0), (2, 5, 1)):
        dispatcher.add(make_request(request_id, work, priority=priority))
    first = dispatcher.take()
    dispatcher.add(make_request(3, 99))
    assert first is not None
    assert [first[1].request_id, *feed(dispatcher)[0]] == [2, 1, 0, 3]


def test_a_replica_gets_what_fills_its_rows_and_a_quarter_more_and_the_rest_as_it_runs_short() -> None:
    dispatcher = Dispatcher(num_replicas=2, num_rows=40)
    requests = [make_request(request_id, 10) for request_id in range(120)]
    for request in requests:
        dispatcher.add(request)
    assert [len(ids) for ids in feed(dispatcher)] == [50, 50]
    for request in requests:
        if request.replica == 1 and request.request_id < 14:
            dispatcher.finish(request)
    assert [len(ids) for ids in feed(dispatcher)] == [0, 7]
    assert len(dispatcher) == 13


def test_n_samples_count_as_so_many_and_stay_together() -> None:
    dispatcher = Dispatcher(num_replicas=2, num_rows=32)
    for request_id in range(10):
        dispatcher.add(make_request(request_id, 10, n=20))
    assert [len(ids) for ids in feed(dispatcher)] == [2, 2]
    assert dispatcher.num_seqs == [40, 40]


def test_requests_that_begin_alike_go_to_one_replica_and_later_ones_follow_them() -> None:
    dispatcher = Dispatcher(num_replicas=2, num_rows=100)
    for request_id in range(32):
        dispatcher.add(make_request(request_id, 10, alike(request_id % 8, request_id)))
    where = feed(dispatcher)
    assert [len(ids) for ids in where] == [16, 16]
    homes = [{request_id % 8 for request_id in ids} for ids in where]
    assert homes[0].isdisjoint(homes[1])
    for request_id in range(32, 48):
        dispatcher.add(make_request(request_id, 10, alike(request_id % 8, request_id)))
    assert [{request_id % 8 for request_id in ids} for ids in feed(dispatcher)] == homes


def test_a_prefix_with_more_than_its_share_of_the_work_is_cut_where_prompts_part() -> None:
    dispatcher = Dispatcher(num_replicas=2, num_rows=100)
    for request_id in range(40):  # four kinds of prompts after the prefix of all
        dispatcher.add(make_request(request_id, 10, alike(7, request_id % 4, request_id)))
    where = feed(dispatcher)
    kinds = [{request_id % 4 for request_id in ids} for ids in where]
    assert [len(ids) for ids in where] == [20, 20]
    assert [len(kind) for kind in kinds] == [2, 2]
    assert kinds[0].isdisjoint(kinds[1])


def test_a_replica_that_is_about_to_run_out_takes_half_of_what_waits_for_another() -> None:
    dispatcher = Dispatcher(num_replicas=2, num_rows=4)  # 12 at a time
    one = [make_request(request_id, 10, alike(1, request_id)) for request_id in range(40)]
    others = [make_request(request_id, 10, alike(request_id)) for request_id in range(100, 220)]
    for request in [*one, *others]:
        dispatcher.add(request)
    feed(dispatcher)
    home = one[-1].replica if one[-1].replica is not None else next(r.replica for r in one if r.replica is not None)
    assert {request.replica for request in one} == {home, None}, "a quarter of the work stays on one replica"
    for request in others:
        dispatcher.finish(request) if request.replica is not None else dispatcher.remove(request.request_id)
    feed(dispatcher)
    assert {request.replica for request in one} == {0, 1, None}, "which now has all that is left, but for that"


def test_a_removed_request_is_not_taken_and_one_put_back_keeps_its_turn() -> None:
    dispatcher = Dispatcher(num_replicas=2, num_rows=4)
    requests = [make_request(request_id, 10) for request_id in range(3)]
    for request in requests:
        dispatcher.add(request)
    assert dispatcher.remove(1) is requests[1]
    assert dispatcher.remove(1) is None
    assert feed(dispatcher) == [[0], [2]]
    dispatcher.add(make_request(3, 90))
    dispatcher.close(0)
    dispatcher.finish(requests[0])
    dispatcher.add(requests[0])
    assert feed(dispatcher) == [[], [0, 3]]


def test_what_is_paused_on_a_replica_leaves_room_for_others() -> None:
    dispatcher = Dispatcher(num_replicas=1, num_rows=8)
    requests = [make_request(request_id, 10) for request_id in range(20)]
    for request in requests:
        dispatcher.add(request)
    assert len(feed(dispatcher)[0]) == 16
    for request in requests[:3]:
        dispatcher.pause(request)
        dispatcher.pause(request)
    assert len(feed(dispatcher)[0]) == 3
    dispatcher.resume(requests[0])
    assert dispatcher.num_seqs == [17]
    for request in requests[:19]:
        dispatcher.finish(request)
    assert (dispatcher.num_seqs, dispatcher.work) == ([0], [0])


def test_texts_that_are_pooled_count_half_since_a_replica_needs_them_for_two_steps() -> None:
    dispatcher = Dispatcher(num_replicas=1, num_rows=8)
    for request_id in range(40):
        request = make_request(request_id, 10)
        request.prepared.hidden_states_request = HiddenStatesRequest(pools=request_id < 30, first=0)
        dispatcher.add(request)
    assert len(feed(dispatcher)[0]) == 30 + 1
    assert dispatcher.num_seqs == [16]


def test_what_generates_little_counts_half_too() -> None:
    dispatcher = Dispatcher(num_replicas=1, num_rows=8)
    for request_id in range(40):
        dispatcher.add(make_request(request_id, SHORT_ANSWER_TOKENS + (request_id >= 30)))
    assert len(feed(dispatcher)[0]) == 10 + 2 * (16 - 10)


def test_a_full_replica_gets_what_has_a_higher_priority_than_something_that_it_has() -> None:
    dispatcher = Dispatcher(num_replicas=1, num_rows=8)
    for request_id in range(20):
        dispatcher.add(make_request(request_id, 10))
    assert len(feed(dispatcher)[0]) == 16
    dispatcher.add(make_request(99, 10, priority=1))
    assert feed(dispatcher) == [[99]]


def test_packed_prompts_and_lists_have_the_same_prefix() -> None:
    prompt = alike(3, 4, 5)
    packed = make_request(0, 10, prompt)
    packed.prepared.packed_ids = array("i", prompt).tobytes()
    assert packed.prefix == make_request(1, 10, prompt).prefix == array("i", prompt[:PREFIX_TOKENS]).tobytes()
    assert make_request(2, 10, prompt[:PREFIX_TOKENS]).prefix is None
