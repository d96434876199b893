"""Makes StepEvents, for the functions of `LLM.on_step`, of what the engine tells its `Listener` while it works.

Counts are read from the scheduler when a step is launched.

A thread may begin to listen in the middle of another thread's step. That step gets no event: the listener ignores
what the engine tells it of a step whose launch it has not seen.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from nanoinfer.engine.interfaces import Listener
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.metrics import RequestChange, StepEvent


class GpuTimer:
    """Marks places in the GPU's queue of work, and says how long it took from one to another. It waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two marks. The second one is to follow work that has ended."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3


@dataclass(slots=True, eq=False)
class OpenStep:
    """Describes a step that was launched and has no event yet."""

    batch: ScheduledBatch
    facts: dict[str, Any]  # fields of its StepEvent, as they become known
    changes: list[RequestChange]  # what the step itself does to requests
    lengths: list[int]  # of the sequences for which tokens are proposed, without these
    start: torch.cuda.Event | None = None  # on a GPU: right before and right after its work
    end: torch.cuda.Event | None = None


class StepEventListener(Listener):
    """Makes a StepEvent of each step. device: computes the steps; a GPU is asked how long they took."""

    def __init__(self, scheduler: Scheduler, device: torch.device) -> None:
        self._scheduler = scheduler
        self._timer = GpuTimer(device) if device.type == "cuda" else None
        self._num_steps = 0
        self._launched: deque[OpenStep] = deque()  # the oldest first
        self._collected: deque[OpenStep] = deque()
        self._changes: list[RequestChange] = []  # since the last event
        self._preempted: dict[int, Sequence] = {}  # by seq_id: sequences that wait to be recomputed, or are paused

    def arrived(self, seq: Sequence, time: float) -> None:
        self._changes.append(_change(seq, "arrived", time, seq.num_prompt_tokens))

    def paused(self, seq: Sequence) -> None:
        self._changes.append(_change(seq, "paused", perf_counter(), seq.num_computed_tokens))

    def resumed(self, seq: Sequence) -> None:
        if seq.status is SequenceStatus.WAITING and seq.num_cached_tokens is not None:  # it ran before
            self._preempted[seq.seq_id] = seq
        self._changes.append(_change(seq, "resumed", perf_counter(), seq.num_computed_tokens))

    def preempted(self, seq: Sequence) -> None:
        self._preempted[seq.seq_id] = seq
        self._changes.append(_change(seq, "preempted", perf_counter(), seq.num_tokens))

    def launching(self, batch: ScheduledBatch, started: float) -> None:
        """Note what was scheduled. It is called right before the step's work is given to the device."""
        scheduler, manager = self._scheduler, self._scheduler.block_manager
        starts = {chunk.seq.seq_id: chunk.start for chunk in batch.prefill}
        admitted = {seq.seq_id: starts[seq.seq_id] for seq in batch.admitted}
        for seq in batch.admitted:
            self._preempted.pop(seq.seq_id, None)
        changes = [_change(seq, "admitted", started, admitted[seq.seq_id]) for seq in batch.admitted]
        changes += [_change(chunk.seq, "chunk", started, chunk.length) for chunk in batch.prefill]
        facts = {
            "index": self._num_steps,
            "started": started,
            "num_prefill_tokens": batch.num_prefill_tokens,
            "num_decode_tokens": len(batch.decode),
            "num_draft_tokens": sum(map(len, batch.proposals)),
            "num_running": len(scheduler.running),
            "num_waiting": scheduler.num_waiting,
            "num_preempted": sum(seq.status is SequenceStatus.WAITING for seq in self._preempted.values()),
            "num_paused": len(scheduler.paused),
            "num_used_blocks": manager.num_used_blocks,
            "num_cached_blocks": manager.num_cached_blocks,
            "num_free_blocks": manager.num_free_blocks,
        }
        self._num_steps += 1
        lengths = [len(seq.token_ids) for seq in batch.decode] if batch.num_tokens > 1 else []
        start = self._timer.mark() if self._timer else None
        self._launched.append(OpenStep(batch, facts, changes, lengths, start))

    def launched(self, batch: ScheduledBatch) -> None:
        for step in self._launched:
            if step.batch is batch:
                step.end = self._timer.mark() if self._timer else None
                step.facts["launched"] = perf_counter()

    def collected(self, batch: ScheduledBatch, arrived: float) -> None:
        for step in [step for step in self._launched if step.batch is batch]:
            self._launched.remove(step)
            grown = [len(seq.token_ids) - length for seq, length in zip(batch.decode, step.lengths, strict=False)]
            step.facts |= {"arrived": arrived, "ended": perf_counter()}
            step.facts["num_accepted_tokens"] = sum(num_new - 1 for num_new in grown if num_new > 0)
            self._collected.append(step)

    def failed(self) -> None:
        self._launched.clear()

    def finished(self, seq: Sequence) -> None:
        self._preempted.pop(seq.seq_id, None)
        num_generated = len(seq.token_ids) - seq.num_prompt_tokens
        self._changes.append(_change(seq, "finished", perf_counter(), num_generated, seq.finish_reason))

    def stepped(self) -> Iterator[StepEvent]:
        """Make the events of the steps that were collected."""
        if self._collected:
            self._collected[-1].facts["ended"] = perf_counter()
        return self._make_events(self._timer)

    def take(self) -> Iterator[StepEvent]:
        """Make the events of collected steps that have none yet, for example because requests were dropped at once.

        They have no gpu_seconds: this may be called at the end of the script, or after the GPU has failed.
        """
        return self._make_events(timer=None)

    def take_rest(self) -> tuple[list[RequestChange], float]:
        """Return the changes that are in no event yet, with those of steps in flight, and when these were launched."""
        in_flight = [step for step in self._launched if "launched" in step.facts]
        changes = self._changes + [change for step in in_flight for change in step.changes]
        self._changes = []
        self._launched.clear()
        return sorted(changes, key=_time_of), max((step.facts["launched"] for step in in_flight), default=0.0)

    def _make_events(self, timer: GpuTimer | None) -> Iterator[StepEvent]:
        while self._collected:
            step = self._collected.popleft()
            gpu_seconds = None
            if timer and step.start is not None and step.end is not None:
                gpu_seconds = timer.seconds(step.start, step.end)
            changes = sorted(self._changes + step.changes, key=_time_of)
            self._changes = []
            yield StepEvent(gpu_seconds=gpu_seconds, changes=tuple(changes), **step.facts)


def _change(seq: Sequence, what: str, now: float, num_tokens: int, reason: str | None = None) -> RequestChange:
    return RequestChange(seq.request_id, seq.sample, what, now, num_tokens, reason)


def _time_of(change: RequestChange) -> float:
    return change.time
