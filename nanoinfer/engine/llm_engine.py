"""Runs the engine's loop: requests in, finished outputs out, one step at a time."""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Set
from dataclasses import replace
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from nanoinfer.config import EngineConfig
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.engine import Action, Engine, Recipient
from nanoinfer.engine.interfaces import SILENT, ConstraintManager, Listener, Runner, SampledStep
from nanoinfer.engine.packet import pack
from nanoinfer.engine.proposer import Proposer, drawn_in_turns
from nanoinfer.engine.request import Completion, Request
from nanoinfer.engine.request_logprobs import PromptLogprobs
from nanoinfer.engine.routed_experts import RoutedExperts
from nanoinfer.engine.row_options import identity_of
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus, seed_of
from nanoinfer.engine.token_masks import TokenMasks
from nanoinfer.errors import EngineStateError, RequestError, closed_error
from nanoinfer.flat_logprobs import FlatLogprobs
from nanoinfer.metrics import EngineMetrics
from nanoinfer.text.prompts import PreparedRequest
from nanoinfer.text.tokenizer import Tokenizer
from nanoinfer.token_ids import NO_TOKEN

logger = logging.getLogger("nanoinfer")


class Step(NamedTuple):
    """Describes a step in flight: its batch, where its tokens will be, and when it was launched (perf_counter)."""

    batch: ScheduledBatch
    handle: SampledStep
    started: float


class LLMEngine(Engine):
    """Holds the requests and drives scheduler and runner. Most users want `LLM`, which wraps it.

    runner: runs the steps. tokenizer: makes text of tokens; None if the model has none. stop_token_ids: the model's
    stop tokens. constraints: makes the token masks of steps, from the grammars that it has compiled.
    new_listener: makes the scheduler's listener, an EventSource, while functions are registered with `on_step`.
    new_scheduler: the class of the scheduler, or a function that takes the same arguments.
    """

    block_manager_class: Callable[..., BlockManager] = BlockManager

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer | None,
        stop_token_ids: frozenset[int],
        constraints: ConstraintManager | None = None,
        new_listener: Callable[[Scheduler], Listener] = lambda _: SILENT,
        new_scheduler: Callable[..., Scheduler] = Scheduler,
    ) -> None:
        super().__init__(config)
        self.constraints = constraints
        self.runner: Runner | None = runner
        self.proposer: Proposer | None = None
        self.tokenizer = tokenizer
        limits = runner.limits
        self.block_manager = self.block_manager_class(
            limits.num_blocks,
            config.kvcache_block_size,
            config.enable_prefix_caching,
            limits.cache_specs,
            max_num_seqs=limits.max_num_seqs,
            max_chunk_tokens=limits.max_chunk_tokens,
        )
        self._routed_experts = RoutedExperts(runner) if config.enable_return_routed_experts else None
        self.scheduler = new_scheduler(
            self.block_manager,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            stop_token_ids=stop_token_ids,
            max_prefix_sharers=limits.max_prefix_sharers,
            whole_prompts=limits.whole_prompts,
            max_row_tokens=limits.max_row_tokens,
            on_finish=self._routed_experts.on_finish if self._routed_experts else None,
        )
        self._new_listener = new_listener
        self._launches_early = config.overlap and limits.computes_beside_host
        self.stats = EngineMetrics()
        self._in_flight: deque[Step] = deque()  # sampled and not collected, the oldest first
        self._finished: deque[Sequence] = deque()  # ended, and without an output so far
        self._last_collected = 0.0  # perf_counter
        self._num_sequences = 0
        self._requests: dict[int, Request] = {}
        self._watched: dict[int, Completion] = {}  # by seq_id: samples that `_watch` looks at after each token

    def _queue(self, request_id: int, prepared: PreparedRequest, recipient: Recipient) -> Request:
        """Have the scheduler queue the samples of a request."""
        params, states = prepared.sampling_params, prepared.hidden_states_request
        new_logprobs: Any = FlatLogprobs if params.flat_logprobs else list
        prompt_logprobs = PromptLogprobs.of(prepared, self.tokenizer)
        request = Request(request_id, prepared.prompt, [], recipient, prompt_logprobs, states)
        for sample in range(params.n):
            seq = Sequence(
                seq_id=self._num_sequences,
                prompt_token_ids=prepared.token_ids,
                sampling_params=params,
                seed=seed_of(params, self.config.seed, request_id, sample),
                priority=prepared.priority,
                request_id=request_id,
                sample=sample,
                identity=identity_of(params, prepared.adapter),
                adapter=prepared.adapter,
                packed_ids=prepared.packed_ids,
            )
            seq.constraint = prepared.constraint.start(prepared.token_ids) if prepared.constraint else None
            self._num_sequences += 1
            request.completions.append(Completion(seq, self.tokenizer, recipient, new_logprobs()))
        first = request.completions[0].seq  # it alone returns the prompt's log-probabilities and states
        first.hidden_states_request, first.prompt_logprobs_start = states, prepared.first_prompt_logprob
        for completion in request.completions:
            self.scheduler.add(completion.seq)
            self.scheduler.listener.arrived(completion.seq, recipient.arrival_time)
        return request

    def _step(self) -> None:
        """Launch the next step, collect the one before it, and hand over the requests that finished.

        If a step fails, the requests that were in it are queued again and the error is raised.
        """
        if self._pending_actions:
            self._apply_actions()
        launched = self._launch()
        self._collect_until(max_in_flight=1 if launched and self.config.overlap else 0)
        if self.scheduler.is_finished():
            self._collect_until(max_in_flight=0)  # launched before a stop was known: its tokens are dropped
        try:
            if self._launches_early and not self._in_flight:
                self._launch()  # rows are free now: the device computes while outputs are made
        finally:
            self._finish_requests()

    def _settle(self) -> None:
        self._apply_actions()
        self._finish_requests()

    def _finish_requests(self) -> None:
        """Finish the samples whose sequences have ended, and each request with its last sample."""
        while self._finished:  # one at a time, so that an error in one loses no other
            seq = self._finished[0]
            self._watched.pop(seq.seq_id, None)
            request = self._requests[seq.request_id]
            completion = request.completions[seq.sample]
            if error := completion.finish().error:
                logger.warning("request %d ends in an error: %s", seq.request_id, error)
            if (output := request.output()) is not None:
                request.recipient.outputs.append(output)
                del self._requests[seq.request_id]  # only now: a request without an output is unfinished
            self.scheduler.listener.finished(self._finished.popleft())

    def abort(self, request_ids: Collection[int]) -> None:
        self.act_later(Action.ABORT, request_ids)
        try:
            self._collect_until(max_in_flight=0)
        finally:  # also if a step fails, which leaves none in flight: the caller has stopped waiting for the requests
            self._apply_actions()
            self._forget({*request_ids})

    def _forget(self, dropped: Set[int]) -> None:
        """Forget these requests, which compute nothing any more."""
        self._watched = {key: one for key, one in self._watched.items() if one.seq.request_id not in dropped}
        for seq in [seq for seq in self._finished if seq.request_id in dropped]:
            self.scheduler.listener.finished(seq)
        self._finished = deque(seq for seq in self._finished if seq.request_id not in dropped)
        for request_id in dropped:
            self._requests.pop(request_id, None)

    def num_only_paused(self) -> int:
        scheduler = self.scheduler
        is_only = scheduler.is_finished() and not self.reserved_ids
        return len({seq.request_id for seq in scheduler.paused}) if is_only else 0

    def reset_prefix_cache(self) -> None:
        self.block_manager.reset_prefix_cache()

    def may_bypass_scheduler(self) -> bool:
        """Return whether steps may bypass the scheduler: no callback wants events of steps, and nothing is paused."""
        return not (self._callbacks or self.scheduler.paused)

    def free_all_blocks(self) -> bool:
        """Free rows, blocks and prefixes for a step that bypasses the scheduler; return False if requests need any."""
        if not self.scheduler.whole_prompts:  # an encoder's requests hold no blocks between steps
            if not self.scheduler.is_finished():
                return False
            while self.scheduler.reclaim():  # from paused requests
                pass
            self.reset_prefix_cache()
        return True

    def metrics(self) -> EngineMetrics:
        return replace(
            self.stats,
            num_preemptions=self.scheduler.num_preemptions,
            num_used_blocks=self.block_manager.num_used_blocks,
            num_blocks=self.block_manager.num_blocks,
            num_snapshots=self.block_manager.num_snapshots,
        )

    def _listen(self) -> None:
        is_listening = self.events is not SILENT
        if is_listening != bool(self._callbacks):
            self.events = self._new_listener(self.scheduler) if self._callbacks else SILENT
            self.scheduler.listener = self.events

    def close(self) -> None:
        self.guard.check()
        if self.runner is not None:
            self._in_flight.clear()
            self.runner.close()
            self.runner = None

    def check_open(self, is_for_steps: bool = True) -> Runner:
        """Return the runner. Raises the closing error, or EngineClosedError; EngineStateError if the engine sleeps."""
        if self.runner is None or self.runner.closed:
            raise closed_error(self.runner.failure if self.runner else None)
        if is_for_steps and self.runner.unready_reason:
            raise EngineStateError(self.runner.unready_reason)
        return self.runner

    def _launch(self) -> bool:
        """Schedule a step and start it; return False if there is nothing to do until the one in flight is collected."""
        runner = self.check_open()
        started = time.perf_counter()
        batch = self.scheduler.schedule(bool(self._in_flight), self.proposer)
        if not batch:
            return False
        try:
            self._note_admissions(batch, started)
            is_constrained = any(map(attrgetter("constraint"), batch.sampled))
            self.scheduler.listener.launching(batch, started)
            launched = runner.launch(pack(batch, awaits_masks=is_constrained))
            masks = self._masks(batch) if is_constrained else None
            handle = runner.sample(launched, masks)
            for output in handle.side_outputs:
                output.launched(batch)
            self._in_flight.append(Step(batch, handle, started))
            self.scheduler.listener.launched(batch)
        except BaseException:
            self._discard(batch)
            raise
        for seq in batch.admitted:  # their texts are made while the device computes
            if not seq.stopping.ends_with_prompt:
                self._requests[seq.request_id].completions[seq.sample].text()
        return True

    def _masks(self, batch: ScheduledBatch) -> TokenMasks | None:
        """Return the masks for a launched step; wait for the tokens in flight first, if the masks depend on them."""
        sampled = batch.sampled
        if any(seq.constraint and seq.constraint.follows_tokens and seq.num_pending_tokens > 1 for seq in sampled):
            self._collect_until(max_in_flight=0)
        running = [seq.constraint if seq.status is SequenceStatus.RUNNING else None for seq in sampled]
        return self.constraints.masks(running, batch.proposals, batch.num_tokens) if self.constraints else None

    def _collect(self) -> None:
        """Wait for the oldest step in flight and keep the sequences that it finished."""
        runner, step = self.check_open(is_for_steps=False), self._in_flight[0]
        try:
            token_ids = runner.wait(step.handle)
        except BaseException:
            self._discard()
            raise
        now = time.perf_counter()
        self._in_flight.popleft()
        for batch_idx, error in step.handle.errors.items():
            if token_ids[batch_idx] == NO_TOKEN:
                step.batch.sampled[batch_idx // step.batch.num_tokens].error = RequestError(error, "logits_processor")
        num_wanted = 0
        for batch, ids, wanted in drawn_in_turns(step.batch, token_ids, self.stats, self.block_manager, self._watched):
            self._note_finished(self.scheduler.update(batch, ids))
            for output in step.handle.side_outputs:
                output.collected(step.batch, self._requests, wanted)
            if self._watched:
                self._watch(batch, now)
            num_wanted += sum(wanted)
        self.count_step(step.started, now, step.batch.num_prefill_tokens, num_wanted)
        self.scheduler.listener.collected(step.batch, now)

    def count_step(self, started: float, now: float, num_prefill_tokens: int, num_tokens: int) -> None:
        """Count a step that was launched and collected at these times (perf_counter)."""
        seconds = now - max(started, self._last_collected)  # the step before may have ended after this launch
        self.stats.count_step(num_prefill_tokens, num_tokens, seconds)
        self._last_collected = now

    def _note_finished(self, finished: list[Sequence]) -> None:
        """Queue sequences that have just finished, for `_finish_requests`."""
        self._finished += finished
        if self._routed_experts is not None:
            self._routed_experts.read(self._requests, finished)

    def _collect_until(self, max_in_flight: int) -> None:
        while len(self._in_flight) > max_in_flight:
            self._collect()

    def _note_admissions(self, batch: ScheduledBatch, now: float) -> None:
        for seq in batch.admitted:
            completion = self._requests[seq.request_id].completions[seq.sample]
            if completion.start_time is None:
                completion.start_time = now
                self._watched[seq.seq_id] = completion
                self.stats.num_prompt_tokens += seq.num_prompt_tokens
                self.stats.cached_tokens += seq.num_cached_tokens or 0

    def _watch(self, batch: ScheduledBatch, now: float) -> None:
        """Note the times of first tokens; extend the texts of streams and of samples that a stop string may end."""
        stopped = []
        for seq in batch.sampled:
            completion = self._watched.get(seq.seq_id)
            if completion is None:
                continue
            if completion.first_token_time is None and len(seq.token_ids) > seq.num_prompt_tokens:
                completion.first_token_time = now
            if not completion.is_followed:
                del self._watched[seq.seq_id]
            elif seq.status is SequenceStatus.RUNNING and completion.advance():
                stopped.append((seq, "stop"))
        self._note_finished(self.scheduler.finish(stopped))

    def _apply_actions(self) -> None:
        self._collect_until(max_in_flight=0)  # if a step in flight fails, its sequences must not have changed
        scheduler = self.scheduler
        methods = {Action.ABORT: scheduler.abort, Action.PAUSE: scheduler.pause, Action.RESUME: scheduler.resume}
        for action, its_pairs in groupby(self._take_actions(), key=itemgetter(0)):
            request_ids = sorted({request_id for _, request_id in its_pairs})
            seqs = [completion.seq for one in request_ids for completion in self._requests[one].completions]
            unfinished = [seq for seq in seqs if seq.status is not SequenceStatus.FINISHED]
            methods[action]({seq.seq_id for seq in unfinished})
            self._note_finished([seq for seq in unfinished if seq.status is SequenceStatus.FINISHED])

    def _discard(self, *batches: ScheduledBatch) -> None:
        """Requeue the sequences of all steps in flight, and of these batches, which were not launched."""
        in_flight = [step.batch for step in self._in_flight]
        self._in_flight.clear()
        self.scheduler.discard([*in_flight, *batches])
        self.scheduler.listener.failed()
