"""Decides which replica gets which request, and when: the queue in front of all of them.

Each request waits for the replica that has the least to do when the request comes. A replica that runs short gets more
of its requests: higher priorities first, then those queued earlier, then the longest, so that short ones fill the gaps
at the end.

Requests that begin alike stay on one replica, which computes what they share once. If they are more than
1 / (2 * num_replicas) of the work in the queue, they are sorted by their token ids and cut into parts of that size, so
that the requests of a part share more than their beginning. A replica with free rows and no waiting requests takes a
bundle from the replica with the most work, if that has more than twice as much; or half of its open bundle.
"""

import heapq
import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from nanoinfer.engine.engine import Recipient
from nanoinfer.text.prompts import PreparedRequest

PREFIX_TOKENS = 64  # prompts that are equal so far begin alike
PROMPT_SHARE = 1 / 16  # the work of a prompt's token, in that of a generated one
MIN_MARGIN = 8  # sequences that a replica is given beyond its rows, at least; or a quarter of its rows
SHORT_ANSWER_TOKENS = 8  # an answer of so many leaves its row soon
MAX_HOMES = 65536  # prefixes whose replica is remembered


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """Describes a request on its way to a replica, or on one, until its output is there."""

    request_id: int
    prepared: PreparedRequest
    recipient: Recipient
    work: float  # expected, in generated tokens
    sent: float = 0.0  # to the replica that has it (perf_counter)
    streamed: dict[int, bool] = field(default_factory=dict)  # sample -> whether the stream has its last chunk
    is_paused: bool = False  # if no replica has it, it does not wait for one
    is_aborted: bool = False  # its output is on its way
    # Written by the Dispatcher:
    round: int = -1  # the same for requests that were queued together
    replica: int | None = None  # where it is; None while it waits
    is_counted: bool = False  # as work of that replica

    @property
    def num_seqs(self) -> float:
        """How many sequences it counts as: half its samples if it is pooled or short, and so leaves its row soon."""
        wanted, params = self.prepared.hidden_states_request, self.prepared.sampling_params
        is_short = params.max_tokens is not None and params.max_tokens <= SHORT_ANSWER_TOKENS
        return params.n * 0.5 if is_short or (wanted is not None and wanted.pools) else params.n

    @property
    def priority(self) -> int:
        return self.prepared.priority

    @property
    def prompt(self) -> bytes:
        """The prompt's token ids, as int32."""
        return self.prepared.packed_ids or array("i", self.prepared.token_ids).tobytes()

    @property
    def prefix(self) -> bytes | None:
        """What prompts that begin alike share: PREFIX_TOKENS token ids, and the adapter; None for a shorter prompt."""
        if len(self.prepared.token_ids) <= PREFIX_TOKENS:
            return None
        adapter = self.prepared.adapter
        return self.prompt[: 4 * PREFIX_TOKENS] + (b"" if adapter is None else adapter.number.to_bytes(8, "little"))


def expected_work(prepared: PreparedRequest, max_model_len: int) -> float:
    """Return how long a request takes at most, in generated tokens."""
    params, num_prompt_tokens = prepared.sampling_params, len(prepared.token_ids)
    longest = max_model_len - num_prompt_tokens
    num_generated = longest if params.max_tokens is None else min(params.max_tokens, longest)
    return params.n * num_generated + PROMPT_SHARE * num_prompt_tokens


@dataclass(slots=True, eq=False)
class Bundle:
    """Holds requests of one priority that are to run on one replica, the next one last."""

    serial: int
    requests: list[QueuedRequest]
    prefix: bytes | None  # by which they are kept together later too; None: they are not
    work: float = field(init=False)  # of the requests that are left
    rank: tuple[int, int, float, int] = field(init=False)  # lower goes first

    def __post_init__(self) -> None:
        self.requests.sort(key=lambda request: (request.work, -request.request_id))
        self.work = sum(request.work for request in self.requests)
        self.rank = -self.requests[0].priority, self.requests[0].round, -self.work, self.serial

    @property
    def priority(self) -> int:
        return -self.rank[0]

    def __lt__(self, other: "Bundle") -> bool:
        return self.rank < other.rank


class Dispatcher:
    """Holds requests until a replica takes them, and counts what each has.

    num_replicas: at first; `close` takes one away. num_rows: sequences that run on each at the same time.
    """

    def __init__(self, num_replicas: int, num_rows: int) -> None:
        self.num_rows = num_rows
        self.capacity = num_rows + max(MIN_MARGIN, num_rows // 4)  # sequences that a replica is given
        self.num_seqs = [0.0] * num_replicas  # on each replica
        self.work = [0.0] * num_replicas  # likewise
        self._priorities = [Counter[int]() for _ in range(num_replicas)]
        self._alive = [*range(num_replicas)]
        self._waiting: dict[int, QueuedRequest] = {}
        self._waiting_work = 0.0
        self._new: list[QueuedRequest] = []
        self._own: list[list[Bundle]] = [[] for _ in range(num_replicas)]  # heaps: what waits for each
        self._open: list[Bundle | None] = [None] * num_replicas  # what each takes from
        self._homes: dict[bytes, int] = {}  # where the prompts with a prefix went
        self._serial, self._round = count(), 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: QueuedRequest) -> None:
        """Queue a request, or queue it again. Requests added until the next `take` are arranged together."""
        if request.round < 0:
            request.round = self._round
        self._waiting[request.request_id] = request
        self._waiting_work += request.work
        self._new.append(request)

    def remove(self, request_id: int) -> QueuedRequest | None:
        """Take a request out of the queue; None where it does not wait there."""
        request = self._waiting.pop(request_id, None)  # its bundle still has it, and skips it
        if request is not None:
            self._waiting_work -= request.work
        return request

    def finish(self, request: QueuedRequest) -> None:
        """Note that a replica has a request no longer."""
        self.pause(request)
        request.replica = None

    def pause(self, request: QueuedRequest) -> None:
        """Note that a request computes nothing on its replica, which can take others meanwhile."""
        self._count(request, is_counted=False)

    def resume(self, request: QueuedRequest) -> None:
        """Note that a request that is on a replica computes there, again or for the first time."""
        self._count(request, is_counted=True)

    def _count(self, request: QueuedRequest, is_counted: bool) -> None:
        replica, change = request.replica, 1 if is_counted else -1
        assert replica is not None, f"request {request.request_id} is on no replica"
        if request.is_counted is not is_counted:
            request.is_counted = is_counted
            self.num_seqs[replica] += change * request.num_seqs
            self.work[replica] += change * request.work
            self._priorities[replica][request.priority] += change
            if not is_counted:
                self._priorities[replica] += Counter()  # drops what is 0

    def close(self, replica: int) -> None:
        """Give no more requests to a replica, and give the ones that wait for it to others."""
        self._alive.remove(replica)
        waiting = [*self._own[replica], self._open[replica]]
        bundles = [bundle for bundle in waiting if bundle is not None and bundle.requests]
        self._own[replica], self._open[replica] = [], None
        loads = self._loads()
        for bundle in bundles:
            self._push(bundle, loads)
        self._homes = {prefix: home for prefix, home in self._homes.items() if home != replica}

    def take(self) -> tuple[int, QueuedRequest] | None:
        """Choose a replica with room and its next request; None if no replica has room, or no request waits."""
        self._arrange()
        candidates = [replica for replica in self._alive if self._has_room(replica)] if self._waiting else []
        while candidates:
            replica = min(candidates, key=self.work.__getitem__)
            if request := self._take_for(replica):
                self._place(request, replica)
                return replica, request
            candidates.remove(replica)
        return None

    def give(self, request: QueuedRequest) -> int:
        """Give a request that was removed from the queue to the replica with the least work, whatever room it has."""
        replica = min(self._alive, key=self.work.__getitem__)
        self._place(request, replica)
        return replica

    def _place(self, request: QueuedRequest, replica: int) -> None:
        request.replica = replica
        self.resume(request)

    def _has_room(self, replica: int) -> bool:
        """Return whether a replica runs short, or the next request has a higher priority than some that it has."""
        if self.num_seqs[replica] < self.capacity:
            return True
        own = self._own[replica]
        return bool(own) and own[0].priority > min(self._priorities[replica])

    def _take_for(self, replica: int) -> QueuedRequest | None:
        while bundle := self._next_bundle(replica):
            while bundle.requests:
                request = bundle.requests.pop()
                bundle.work -= request.work
                if self._waiting.get(request.request_id) is request:
                    return self.remove(request.request_id)
        return None

    def _next_bundle(self, replica: int) -> Bundle | None:
        """Return the bundle that a replica takes its next request from."""
        bundle, own = self._open[replica], self._own[replica]
        if bundle is not None and not bundle.requests:
            bundle = self._open[replica] = None
        if own and (bundle is None or own[0].priority > bundle.priority):
            bundle = heapq.heappop(own) if bundle is None else heapq.heapreplace(own, bundle)
        elif bundle is None and self.num_seqs[replica] < self.num_rows:
            bundle = self._steal(replica)
        self._open[replica] = bundle
        return bundle

    def _steal(self, replica: int) -> Bundle | None:
        """Take a bundle, or half of one, from the replica with the most work, if that is more than twice this one's."""
        left = {other: self._work_left(other) for other in self._alive if other != replica}
        victim = max(left, key=lambda other: left[other] + self.work[other], default=None)
        if victim is None or left[victim] + self.work[victim] <= 2 * self.work[replica]:
            return None
        if self._own[victim]:
            return heapq.heappop(self._own[victim])
        bundle = self._open[victim]
        if bundle is None or not bundle.requests:
            return None
        taken, kept = bundle.requests[::2], bundle.requests[1::2]
        self._open[victim] = self._bundle(kept, bundle.prefix) if kept else None
        return self._bundle(taken, bundle.prefix)

    def _arrange(self) -> None:
        """Put new requests into bundles, and each bundle into the queue of a replica."""
        if not self._new:
            return
        new, self._new = [request for request in self._new if self._waiting.get(request.request_id) is request], []
        alike: dict[tuple[int, int, bytes | None], list[QueuedRequest]] = {}
        for request in new:
            alike.setdefault((request.priority, request.round, request.prefix), []).append(request)
        largest = self._waiting_work / (2 * len(self._alive))
        loads = self._loads()
        loose: dict[tuple[int, int], list[QueuedRequest]] = {}  # requests without a shared prefix
        for (priority, round_, prefix), requests in alike.items():
            if prefix is None or (len(requests) == 1 and prefix not in self._homes):
                loose.setdefault((priority, round_), []).extend(requests)
                continue
            parts = _cut(requests, largest)
            if len(parts) > 1:
                self._homes.pop(prefix, None)  # it will be everywhere
                prefix = None
            for part in parts:
                home = None if prefix is None else self._homes.get(prefix)
                home = self._push(self._bundle(part, prefix), loads, home)
                if prefix is not None and len(part) > 1:
                    self._homes[prefix] = home
        for requests in loose.values():  # last: they fill the gaps that the others leave
            self._spread(requests, loads)
        while len(self._homes) > MAX_HOMES:
            del self._homes[next(iter(self._homes))]
        self._round += 1

    def _spread(self, requests: list[QueuedRequest], loads: dict[int, float]) -> None:
        """Make one bundle for each replica: the longest request goes first, each to the replica with the least work."""
        bundles: dict[int, list[QueuedRequest]] = {replica: [] for replica in loads}
        for request in sorted(requests, key=lambda request: -request.work):
            replica = min(loads, key=loads.__getitem__)
            bundles[replica].append(request)
            loads[replica] += request.work
        for replica, its_requests in bundles.items():
            if its_requests:
                heapq.heappush(self._own[replica], self._bundle(its_requests, None))

    def _push(self, bundle: Bundle, loads: dict[int, float], home: int | None = None) -> int:
        """Have a bundle wait for a replica, by default for the one with the least load; return which."""
        home = min(loads, key=loads.__getitem__) if home is None else home
        loads[home] += bundle.work
        heapq.heappush(self._own[home], bundle)
        return home

    def _loads(self) -> dict[int, float]:
        """Return the work that each replica has, and that waits for it."""
        return {replica: self.work[replica] + self._work_left(replica) for replica in self._alive}

    def _work_left(self, replica: int) -> float:
        """Return the work that waits for a replica."""
        return sum(bundle.work for bundle in [*self._own[replica], self._open[replica]] if bundle is not None)

    def _bundle(self, requests: list[QueuedRequest], prefix: bytes | None) -> Bundle:
        return Bundle(next(self._serial), requests, prefix)


def _cut(requests: list[QueuedRequest], largest: float) -> list[list[QueuedRequest]]:
    """Cut requests that begin alike into parts of about equal work, about `largest` at most, or of one request."""
    total = sum(request.work for request in requests)
    if total <= largest or len(requests) == 1:
        return [requests]
    parts: list[list[QueuedRequest]] = [[]]
    work, part_work = 0.0, total / math.ceil(total / largest)
    for request in sorted(requests, key=lambda request: request.prompt):
        if parts[-1] and work + request.work / 2 > len(parts) * part_work:
            parts.append([])
        parts[-1].append(request)
        work += request.work
    return parts
