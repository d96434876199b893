"""Steps of whole texts, for models that pool: without a scheduler, since nothing of a text outlives such a step.

An encoder computes a text in one step, caches nothing and samples nothing; so does a decoder that only pools, if texts
have no beginning in common. The texts of a call are laid end to end, as many as a step takes, and each step has all
rows and blocks to itself: the device runs one after another. What the scheduler does for each request costs more than
a short text's forward pass. The scheduler's steps give the same outputs. They serve asyncio, long texts, those that
begin alike, and whoever wants each step reported.
"""

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engine.engine import Action, Recipient
from nanoinfer.engine.interfaces import SampledStep
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.packet import SECTION_DTYPES, Packet, join_sections
from nanoinfer.engine.row_options import OPTION_NAMES
from nanoinfer.engine.side_outputs import HiddenStates, PooledVectors
from nanoinfer.integers import ceil_div
from nanoinfer.outputs import RequestMetrics
from nanoinfer.pooling_outputs import PoolingRequestOutput
from nanoinfer.text.prompts import PreparedRequest

logger = logging.getLogger("nanoinfer")

MAX_IN_FLIGHT = 2  # steps: the device computes one while the host prepares the next
MIN_SHARED_TOKENS = 32  # that texts begin with, so that the prefix cache saves more than the scheduler costs


class Text(NamedTuple):
    """Describes a text that waits for its step, or is in it."""

    request_id: int
    prepared: PreparedRequest
    recipient: Recipient


class PoolingStep(NamedTuple):
    """Describes a step in flight. started: perf_counter."""

    texts: list[Text]
    handle: SampledStep
    num_tokens: int
    started: float


class PoolingSteps:
    """Runs texts in steps of their own, behind a RequestQueue that shares the lock of the engine's.

    keeps_nothing: whether the model generates nothing and has no other memory than blocks.
    """

    def __init__(self, engine: LLMEngine, keeps_nothing: bool) -> None:
        self._engine, self._keeps_nothing = engine, keeps_nothing
        self._waiting: deque[Text] = deque()
        self._in_flight: deque[PoolingStep] = deque()  # the oldest first

    def serves(self, first: Sequence[PreparedRequest]) -> bool:
        """Return whether a call's texts can be computed in such steps. first: some of them, usually the longest.

        Prompts with images cannot: the engine knows their images.
        """
        if any(request.images for request in first):
            return False
        engine, served = self._engine, [request for request in first if request.error is None]
        if not engine.may_bypass_scheduler():
            return False
        if engine.check_open().limits.whole_prompts:
            return True
        return (
            self._keeps_nothing
            and all(map(self._is_whole, served))
            and not (engine.config.enable_prefix_caching and _begin_alike(served))
        )

    def add_request(self, request_id: int, prepared: PreparedRequest, recipient: Recipient) -> None:
        """Queue a text. Its id stays reserved until its output is there, so that an abort is remembered."""
        if prepared.error is None:
            self._waiting.append(Text(request_id, prepared, recipient))
        else:
            self._engine.add_request(request_id, prepared, recipient)  # refuses it

    def step(self) -> None:
        """Launch a step, or collect one. A text that is too long for one is left to the engine's own steps."""
        engine, waiting = self._engine, self._waiting
        if waiting and len(self._in_flight) < MAX_IN_FLIGHT and self._is_whole(waiting[0].prepared):
            if engine.free_all_blocks():
                self._launch()
            else:
                engine.step()
        elif self._in_flight:
            self._collect()
        else:
            if waiting:
                engine.add_request(*waiting.popleft())
            engine.step()

    def abort(self, request_ids: Collection[int]) -> None:
        """Drop these texts. Nobody reads what a step in flight still brings of them."""
        self._waiting = deque(text for text in self._waiting if text.request_id not in request_ids)
        self._engine.reserved_ids.release(request_ids)
        self._engine.abort(request_ids)

    def _is_whole(self, request: PreparedRequest) -> bool:
        """Return whether a step takes all of a text."""
        return len(request.token_ids) <= self._engine.scheduler.max_num_batched_tokens

    def _launch(self) -> None:
        """Start a step of the first texts that wait, as many as it takes."""
        runner, config = self._engine.check_open(), self._engine.config
        block_size, num_tokens, num_blocks = config.kvcache_block_size, 0, 0
        texts: list[Text] = []
        while self._waiting and len(texts) < runner.limits.max_num_seqs:
            size = len(self._waiting[0].prepared.token_ids)
            num_tokens, num_blocks = num_tokens + size, num_blocks + ceil_div(size, block_size)
            if texts and (num_tokens > runner.limits.max_num_batched_tokens or num_blocks > runner.limits.num_blocks):
                num_tokens -= size
                break
            texts.append(self._waiting.popleft())
        try:
            packet = pack_texts([text.prepared for text in texts], block_size)
            started = time.perf_counter()
            with self._engine.guard:
                handle = runner.sample(runner.launch(packet))
        except BaseException:
            self._waiting.extendleft(reversed(texts))
            raise
        self._engine.stats.num_prompt_tokens += num_tokens
        self._in_flight.append(PoolingStep(texts, handle, num_tokens, started))

    def _collect(self) -> None:
        """Wait for the oldest step, and hand over the outputs of its texts."""
        engine, step = self._engine, self._in_flight[0]
        try:
            with engine.guard:
                engine.check_open().wait(step.handle)
        except BaseException:
            for failed in reversed(self._in_flight):
                self._waiting.extendleft(reversed(failed.texts))
            self._in_flight.clear()
            raise
        self._in_flight.popleft()
        engine.count_step(step.started, time.perf_counter(), step.num_tokens, 0)
        reserved, [pooled] = engine.reserved_ids, step.handle.side_outputs
        if isinstance(pooled, PooledVectors):
            values: Any = pooled.values.numpy()
        else:
            assert isinstance(pooled, HiddenStates), "each token of a text was pooled"
            values = [part.values.numpy() for part in pooled.parts]
        check_finite((text.request_id for text in step.texts), values)
        for place, text in enumerate(step.texts):
            if Action.ABORT in reserved.take(text.request_id):
                values[place] = np.full_like(values[place][:1], np.nan)
        recipients = {text.recipient for text in step.texts}
        metrics = {recipient: RequestMetrics(step.started - recipient.arrival_time) for recipient in recipients}
        made: list[Any] = []
        for make_output, group in groupby(text.prepared.hidden_states_request.make_output for text in step.texts):
            made += make_output.make_all(values[len(made) : len(made) + len([*group])])
        for (request_id, request, recipient), one in zip(step.texts, made, strict=True):
            output = PoolingRequestOutput(request_id, request.prompt, request.token_ids, 0, one, metrics[recipient])
            recipient.outputs.append(output)


def check_finite(request_ids: Iterable[int], values: Any) -> None:
    """Log which texts have values that are NaN or infinite.

    values: (num_texts, size); or a list with an array (num_tokens, size) for each text.
    """
    if isinstance(values, np.ndarray) and np.isfinite(values).all():
        return
    for request_id, one in zip(request_ids, values, strict=True):
        if not np.isfinite(one).all():
            logger.warning("request %d: the model's values are NaN or infinite", request_id)


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
    wanted = [one.hidden_states_request.row_value(size) for one, size in zip(requests, sizes.tolist(), strict=True)]
    records = np.zeros(len(sizes), SECTION_DTYPES["option_records"])
    records["row"], records["size"] = rows, len(wanted[0])
    records["option"] = OPTION_NAMES.index("hidden_states_request")
    sections = {
        "row_records": row_records,
        "known_tokens": np.concatenate([_ids(request) for request in requests]),
        "new_blocks": new_blocks,
        "chunks": chunks,
        "option_records": records,
        "option_values": [*chain.from_iterable(wanted)],
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
