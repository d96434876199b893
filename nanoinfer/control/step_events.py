"""Calls the functions of `LLM.on_step` with StepEvents, made of what the engine tells its `Listener` while it works.

Counts are read from the scheduler when a step is launched.

A thread may begin to listen in the middle of another thread's step. That step gets no event: the listener ignores
what the engine tells it of a step whose launch it has not seen.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from nanoinfer.engine.interfaces import SILENT, Listener
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.errors import RequestError
from nanoinfer.metrics import RequestChange, StepEvent

StepCallback = Callable[[StepEvent], object]


class StepCallbacks:
    """Has functions called after each step of an engine. Without functions, the engine has no listener."""

    def __init__(self, engine: LLMEngine, device: torch.device) -> None:
        self._engine, self._device = engine, device
        self._registration = threading.RLock()  # held while a callback comes or goes; a finalizer may end one meanwhile

    def add(self, callback: StepCallback) -> Callable[[], None]:
        """Call a function with the StepEvent of each step, from now on; return a function that ends this."""
        with self._registration:
            events = self.events()
            remove = register(events.callbacks, callback)
            self._engine.scheduler.listener = events  # perhaps in the middle of another thread's step

        def end() -> None:
            with self._registration:
                remove()
                if not events.callbacks and self._engine.scheduler.listener is events:
                    self._engine.scheduler.listener = SILENT

        return end

    def events(self) -> "StepEventListener":
        """Return the listener that makes the events; a new one where the engine has none."""
        scheduler = self._engine.scheduler
        if isinstance(scheduler.listener, StepEventListener):
            return scheduler.listener
        return StepEventListener(scheduler, GpuTimer(self._device) if self._device.type == "cuda" else None)


def register(callbacks: list[StepCallback], callback: StepCallback) -> Callable[[], None]:
    """Add a function to a list; return a function that takes it out again. Raises RequestError for what is none."""
    if not callable(callback):
        raise RequestError(f"callback={callback!r} cannot be called; give a function of a StepEvent")

    def call(event: StepEvent) -> None:  # an object of its own, so that `remove` ends this registration and no other
        callback(event)

    def remove() -> None:
        if call in callbacks:
            callbacks.remove(call)

    callbacks.append(call)
    return remove


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


class StepEventListener(Listener):
    """Calls `callbacks` with a StepEvent for each step."""

    def __init__(self, scheduler: Scheduler, timer: GpuTimer | None) -> None:
        self.callbacks: list[StepCallback] = []
        self._scheduler = scheduler
        self._timer = timer
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
        found = {chunk.seq.seq_id: chunk.start for chunk in batch.prefill}
        admitted = {seq.seq_id: found[seq.seq_id] for seq in batch.admitted}
        for seq in batch.admitted:
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
                step.facts["launched"] = perf_counter()

    def collected(self, batch: ScheduledBatch, arrived: float) -> None:
        for step in [step for step in self._launched if step.batch is batch]:
            self._launched.remove(step)
            step.facts |= {"arrived": arrived, "ended": perf_counter()}
            self._collected.append(step)

    def failed(self) -> None:
        self._launched.clear()

    def finished(self, seq: Sequence) -> None:
        self._preempted.pop(seq.seq_id, None)
        num_generated = len(seq.token_ids) - seq.num_prompt_tokens
        self._changes.append(_change(seq, "finished", perf_counter(), num_generated, seq.finish_reason))

    def stepped(self) -> None:
        """Make the events of the steps that were collected, and call whoever wants them."""
        if self._collected:
            self._collected[-1].facts["ended"] = perf_counter()
        for event in self._make_events(self._timer):
            for callback in [*self.callbacks]:
                callback(event)

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
