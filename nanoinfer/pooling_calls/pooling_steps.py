"""Steps of whole texts, for models that pool: without a scheduler, since nothing of a text outlives such a step.

An encoder computes a text in one step, caches nothing and samples nothing; so does a decoder that only pools, if texts
have no beginning in common. The texts of a call are laid end to end, as many as a step takes, and each step has all
rows and blocks to itself: the device runs one after another. What the scheduler does for each request costs more than
a short text's forward pass. The scheduler's steps give the same outputs. They serve asyncio, long texts, those that
begin alike, and whoever wants each step reported.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engine.hidden_states_request import FoundStates, PooledVectors
from nanoinfer.engine.interfaces import SILENT, Action, Recipient, SampledStep
from nanoinfer.engine.interrupts import postponed_interrupt
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.packet import SECTION_DTYPES, Packet, join_sections
from nanoinfer.engine.preparer import Portions
from nanoinfer.engine.request_queue import TURN_SECONDS
from nanoinfer.engine.row_options import NAMES
from nanoinfer.outputs import RequestMetrics
from nanoinfer.text.prompts import PreparedRequest

MAX_IN_FLIGHT = 2  # steps: the device computes one while the host prepares the next
MIN_SHARED_TOKENS = 32  # that texts begin with, so that the prefix cache saves more than the scheduler costs


class PooledTexts(NamedTuple):
    """The texts of a step that was computed.

    values: (num_texts, size); or a list with an array (num_tokens, size) for each text. aborted: places of those that
    are wanted no more.
    """

    requests: list[PreparedRequest]
    request_ids: range
    values: Any
    aborted: list[int]
    metrics: RequestMetrics


class PoolingStep(NamedTuple):
    """A step in flight. started: perf_counter."""

    requests: list[PreparedRequest]
    handle: SampledStep
    num_tokens: int
    started: float


class PoolingSteps:
    """Runs the texts of a call in steps of their own. Any thread may call it.

    lock: that of the engine's queue, whose steps and these take turns. keeps_nothing: whether the model generates
    nothing and has no other memory than blocks.
    """

    def __init__(self, engine: LLMEngine, lock: RLock, keeps_nothing: bool) -> None:
        self._engine, self._lock, self._keeps_nothing = engine, lock, keeps_nothing

    def serves(self, first: Sequence[PreparedRequest]) -> bool:
        """Return whether a call's texts can be computed in such steps. first: some of them, usually the longest."""
        engine, first = self._engine, [request for request in first if request.error is None]
        if engine.scheduler.listener is not SILENT or engine.scheduler.paused:
            return False
        if engine.scheduler.whole_prompts:
            return True
        return (
            self._keeps_nothing
            and all(map(self._is_whole, first))
            and not (engine.config.enable_prefix_caching and _begin_alike(first))
        )

    def complete(
        self, portions: Portions, make: Callable[[PooledTexts], list[Any]], show: Callable[[int], object]
    ) -> list[Any]:
        """Compute all texts of a call, and return the outputs in the order in which the texts come.

        make: makes the outputs of a step's texts. show: is told how many are done, after each step.
        """
        reserved, ids = self._engine.reserved_ids, range(0)
        done: list[Any] = []
        refusals: dict[int, Any] = {}  # by the place of the text in the call
        waiting: deque[PreparedRequest] = deque()
        in_flight: deque[PoolingStep] = deque()
        arrived, num_taken = time.perf_counter(), 0
        try:
            with self._lock, postponed_interrupt():  # ids that are reserved must be released
                ids = reserved.reserve(portions.num_requests)
            with portions:
                while len(done) + len(refusals) < portions.num_requests:
                    for request in portions.take(wait=not (waiting or in_flight)):
                        if request.error is None:
                            waiting.append(request)
                        else:
                            refusals[num_taken] = request.refusal(ids[-1 - len(refusals)])
                        num_taken += 1
                    if waiting and len(in_flight) < MAX_IN_FLIGHT and self._is_whole(waiting[0]):
                        in_flight.append(self._launch(waiting))
                    elif in_flight:
                        step = in_flight.popleft()
                        metrics = RequestMetrics(queue_time=step.started - arrived)
                        values, own_ids = self._collect(step), ids[len(done) : len(done) + len(step.requests)]
                        asked = map(reserved.take, own_ids)
                        aborted = [place for place, actions in enumerate(asked) if Action.ABORT in actions]
                        done += make(PooledTexts(step.requests, own_ids, values, aborted, metrics))
                        show(len(done) + len(refusals))
                    elif waiting:
                        done.append(self._in_chunks(waiting.popleft(), ids[len(done)]))
                        show(len(done) + len(refusals))
        finally:
            reserved.release(ids)
        served = iter(done)
        return [refusals[place] if place in refusals else next(served) for place in range(portions.num_requests)]

    def _is_whole(self, request: PreparedRequest) -> bool:
        """Return whether a step takes all of a text."""
        return len(request.token_ids) <= self._engine.config.max_num_batched_tokens

    def _launch(self, waiting: deque[PreparedRequest]) -> PoolingStep:
        """Start a step of the first texts that wait, as many as it takes."""
        engine = self._engine
        budget, num_blocks = engine.config.max_num_batched_tokens, engine.block_manager.num_blocks
        block_size, num_tokens = engine.block_manager.block_size, 0
        requests: list[PreparedRequest] = []
        while waiting and len(requests) < engine.scheduler.max_num_seqs:
            size = len(waiting[0].token_ids)
            budget, num_blocks = budget - size, num_blocks - -(-size // block_size)
            if requests and min(budget, num_blocks) < 0:
                break
            num_tokens += size
            requests.append(waiting.popleft())
        packet = pack_texts(requests, block_size)
        while True:
            with self._lock, postponed_interrupt():
                runner = engine.check_open()
                if self._others_have_ended():
                    started = time.perf_counter()
                    with engine.guard:
                        handle = runner.sample(runner.launch(packet))
                    engine.stats.num_prompt_tokens += num_tokens
                    return PoolingStep(requests, handle, num_tokens, started)
                engine.step()

    def _in_chunks(self, request: PreparedRequest, request_id: int) -> Any:
        """Return the output of a text that is too long for a step, by the scheduler."""
        outputs: list[Any] = []
        try:
            with self._lock, postponed_interrupt():
                self._engine.add_request(request_id, request, Recipient(outputs))
            while not outputs:
                with self._lock, postponed_interrupt():
                    self._engine.step()
                if self._engine.num_only_paused():
                    time.sleep(TURN_SECONDS)
        finally:
            if not outputs:
                with self._lock, postponed_interrupt():
                    self._engine.abort({request_id})
        return outputs[0]

    def _others_have_ended(self) -> bool:
        """Return whether no request holds rows and blocks; paused ones give them up, and the prefix cache is cleared.

        The requests of an encoder hold rows and blocks only within a step.
        """
        engine = self._engine
        if engine.scheduler.whole_prompts:
            return True
        if not engine.scheduler.is_finished():
            return False
        while engine.scheduler.reclaim():
            pass
        engine.reset_prefix_cache()
        return True

    def _collect(self, step: PoolingStep) -> Any:
        """Wait for a step; return the values of its texts, see PooledTexts."""
        engine = self._engine
        with self._lock, postponed_interrupt(), engine.guard:
            engine.check_open().wait(step.handle)
            engine.count_step(step.started, time.perf_counter(), True, step.num_tokens, 0)
        [found] = step.handle.found
        if isinstance(found, PooledVectors):
            return found.values.numpy()
        assert isinstance(found, FoundStates), "each token of a text was pooled"
        return [part.values.numpy() for part in found.parts]


def pack_texts(requests: list[PreparedRequest], block_size: int) -> Packet:
    """Return the packet of a step that computes these texts alone, in the first rows and blocks."""
    sizes = np.array([len(request.token_ids) for request in requests])
    rows, blocks = np.arange(len(sizes)), -(-sizes // block_size)
    row_records = np.zeros(len(sizes), SECTION_DTYPES["row_records"])
    row_records["row"], row_records["num_tokens"], row_records["num_prompt_tokens"] = rows, sizes, sizes
    new_blocks = np.zeros(blocks.sum(), SECTION_DTYPES["new_blocks"])
    new_blocks["row"] = rows.repeat(blocks)
    new_blocks["block_id"] = np.arange(len(new_blocks))
    new_blocks["column"] = new_blocks["block_id"] - (blocks.cumsum() - blocks).repeat(blocks)
    chunks = np.zeros(len(sizes), SECTION_DTYPES["chunks"])
    chunks["row"], chunks["length"] = rows, sizes
    wanted = [one.hidden_states_request.asked(size) for one, size in zip(requests, sizes.tolist(), strict=True)]
    asked = np.zeros(len(sizes), SECTION_DTYPES["asked"])
    asked["row"], asked["option"], asked["size"] = rows, NAMES.index("hidden_states_request"), len(wanted[0])
    sections = {
        "row_records": row_records,
        "known_tokens": np.concatenate([_ids(request) for request in requests]),
        "new_blocks": new_blocks,
        "chunks": chunks,
        "asked": asked,
        "asked_values": [*chain.from_iterable(wanted)],
    }
    return join_sections(sections, int(sizes.sum()), num_samples=0, num_blocks=len(new_blocks))


def _begin_alike(requests: Sequence[PreparedRequest]) -> bool:
    """Return whether all of these begin with the same tokens."""
    all_ids = [request.token_ids for request in requests]
    return len(all_ids) > 1 and min(all_ids)[:MIN_SHARED_TOKENS] == max(all_ids)[:MIN_SHARED_TOKENS]


def _ids(request: PreparedRequest) -> NDArray[np.int32]:
    if request.packed_ids is None:
        return np.array(request.token_ids, np.int32)
    return np.frombuffer(request.packed_ids, np.int32)
