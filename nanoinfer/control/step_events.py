"""Makes the StepEvents of `LLM.on_step` out of what the engine tells its `Listener` while it works.

What the engine does not tell is read from the scheduler: counts as they are, and preempted and paused sequences when
the scheduler says that there are others than before.

A thread may begin to listen in the middle of another thread's step. Such a step has no event: whatever is told of a
step is passed over, unless its launch was told.
"""

import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nanoinfer.control.listener import Listener
from nanoinfer.engine.batch import ScheduledBatch
from nanoinfer.engine.request import Request
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.outputs import RequestChange, StepEvent

StepCallback = Callable[[StepEvent], object]


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
    """A step that was launched and has no event yet."""

    batch: ScheduledBatch
    facts: dict[str, Any]  # fields of its StepEvent, as they become known
    changes: list[RequestChange]  # what the step itself does to requests
    start: torch.cuda.Event | None = None  # on a GPU: right before and right after its work
    end: torch.cuda.Event | None = None


class StepEvents(Listener):
    """Calls `callbacks` with a StepEvent for each step."""

    def __init__(self, scheduler: Scheduler, timer: GpuTimer | None) -> None:
        self.callbacks: list[StepCallback] = []
        self._scheduler = scheduler
        self._timer = timer
        self._num_steps = 0
        self._launched: deque[OpenStep] = deque()  # the oldest first
        self._collected: deque[OpenStep] = deque()
        self._changes: list[RequestChange] = []  # since the last event
        self._running: dict[int, Sequence] = {seq.seq_id: seq for seq in [*scheduler.running]}
        self._preempted: dict[int, Sequence] = {}  # those that wait, or are paused
        self._paused = scheduler.paused
        self._num_preemptions = scheduler.num_preemptions

    def arrived(self, request: Request) -> None:
        for completion in request.completions:
            seq = completion.seq
            self._changes.append(_change(seq, "arrived", request.arrived, seq.num_prompt_tokens))

    def launching(self, batch: ScheduledBatch, started: float) -> None:
        """Note what was scheduled. It is called right before the step's work is given to the device."""
        scheduler, manager = self._scheduler, self._scheduler.block_manager
        found = {chunk.seq.seq_id: chunk.start for chunk in batch.prefill}
        admitted = {seq.seq_id: found[seq.seq_id] for seq in batch.admitted}
        self._note_pauses(started, admitted)
        self._note_preemptions(started)
        for seq in batch.admitted:
            self._running[seq.seq_id] = seq
            self._preempted.pop(seq.seq_id, None)
        changes = [_change(seq, "admitted", started, admitted[seq.seq_id]) for seq in batch.admitted]
        changes += [_change(chunk.seq, "chunk", started, chunk.length) for chunk in batch.prefill]
        facts = {
            "index": self._num_steps,
            "started": started,
            "num_prefill_tokens": batch.num_prefill_tokens,
            "num_decode_tokens": len(batch.decode),
            "num_running": len(scheduler.running),
            "num_waiting": scheduler.num_waiting,
            "num_preempted": sum(seq.status is SequenceStatus.WAITING for seq in self._preempted.values()),
            "num_paused": len(scheduler.paused),
            "num_used_blocks": manager.num_used_blocks,
            "num_cached_blocks": manager.num_cached_blocks,
            "num_free_blocks": manager.num_free_blocks,
        }
        self._num_steps += 1
        start = self._timer.mark() if self._timer else None
        self._launched.append(OpenStep(batch, facts, changes, start))

    def launched(self, batch: ScheduledBatch) -> None:
        for step in self._launched:
            if step.batch is batch:
                step.end = self._timer.mark() if self._timer else None
                step.facts["launched"] = time.perf_counter()

    def collected(self, batch: ScheduledBatch, arrived: float) -> None:
        for step in [step for step in self._launched if step.batch is batch]:
            self._launched.remove(step)
            step.facts |= {"arrived": arrived, "ended": time.perf_counter()}
            self._collected.append(step)

    def failed(self) -> None:
        self._launched.clear()

    def finished(self, seq: Sequence) -> None:
        self._running.pop(seq.seq_id, None)
        self._preempted.pop(seq.seq_id, None)
        num_generated = len(seq.token_ids) - seq.num_prompt_tokens
        self._changes.append(_change(seq, "finished", time.perf_counter(), num_generated, seq.finish_reason))

    def stepped(self) -> None:
        """Make the events of the steps that were collected, and call whoever wants them."""
        now = time.perf_counter()
        self._note_pauses(now)
        if self._collected:
            self._collected[-1].facts["ended"] = now
        for event in self._make_events(self._timer):
            for callback in [*self.callbacks]:
                callback(event)

    def take(self) -> Iterator[StepEvent]:
        """Make the events of steps that were collected and have none, as where requests were dropped at once.

        They have no gpu_seconds: this may be asked for at the very end, and when the GPU has failed.
        """
        return self._make_events(timer=None)

    def take_rest(self) -> tuple[list[RequestChange], float]:
        """Return the changes of no event so far, those by steps in flight too, and when these were launched."""
        self._note_pauses(time.perf_counter())
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

    def _note_pauses(self, now: float, admitted: Container[int] = ()) -> None:
        """Note who was paused or resumed since the last time. admitted: ids of those that the next step admits."""
        before, self._paused = self._paused, self._scheduler.paused
        if before is self._paused:
            return
        for seq in {*self._paused}.difference(before):
            self._running.pop(seq.seq_id, None)
            self._changes.append(_change(seq, "paused", now, seq.num_computed_tokens))
        for seq in {*before}.difference(self._paused):
            if seq.status is SequenceStatus.RUNNING:
                self._running[seq.seq_id] = seq
            elif seq.status is SequenceStatus.WAITING and seq.num_cached_tokens is not None:  # it ran before
                self._preempted[seq.seq_id] = seq
            if seq.status is not SequenceStatus.FINISHED:
                num_kept = 0 if seq.seq_id in admitted else seq.num_computed_tokens
                self._changes.append(_change(seq, "resumed", now, num_kept))

    def _note_preemptions(self, now: float) -> None:
        if self._num_preemptions == self._scheduler.num_preemptions:
            return
        self._num_preemptions = self._scheduler.num_preemptions
        for seq in [seq for seq in self._running.values() if seq.status is SequenceStatus.WAITING]:
            del self._running[seq.seq_id]
            self._preempted[seq.seq_id] = seq
            self._changes.append(_change(seq, "preempted", now, seq.num_tokens))


def _change(seq: Sequence, what: str, now: float, num_tokens: int, reason: str | None = None) -> RequestChange:
    return RequestChange(seq.request_id, seq.sample, what, now, num_tokens, reason)


def _time_of(change: RequestChange) -> float:
    return change.time
