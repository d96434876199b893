"""What a program does to a run that is under way: abort, pause and resume requests, and watch the steps."""

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from nanoinfer.control.step_events import GpuTimer, StepCallback, StepEvents
from nanoinfer.engine.interfaces import SILENT
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.errors import RequestError
from nanoinfer.outputs import EngineMetrics, StepEvent
from nanoinfer.text.prompts import as_request_ids

logger = logging.getLogger("nanoinfer")

PATIENCE_SECONDS = 1.0  # after so long without anything to run, the log says why
_registration = threading.RLock()  # held while a callback comes or goes; a finalizer may end one meanwhile


class RunControl:
    """The part of `LLM` that controls and watches a run. All of it may be called by any thread, and by callbacks."""

    engine: LLMEngine
    _runner_info: Any
    _idle_since: float | None = None  # perf_counter; 0.0 once the log says so

    def abort(self, request_ids: int | Collection[int]) -> None:
        """Have the next step finish these requests as they are, with finish_reason "abort".

        Ids that are not known, or finished, are passed over. Raises RequestError for what is no id.
        """
        self.engine.act_later(Scheduler.abort, as_request_ids(request_ids))

    def pause(self, request_ids: int | Collection[int]) -> None:
        """Have these requests compute nothing from the next step on, until they are resumed. Ids as in `abort`.

        A paused request keeps its blocks of the KV cache while nobody needs them, and gives them up before any other
        does; then they are computed again. Its tokens are those that it would have got. A token that is being computed
        still comes. While all that is left is paused, `generate` and its like wait, and `step` waits 10 ms at most.
        """
        self.engine.act_later(Scheduler.pause, as_request_ids(request_ids))

    def resume(self, request_ids: int | Collection[int]) -> None:
        """Have paused requests go on with the next step. Ids as in `abort`; those that are not paused stay as they are.

        One that has given its blocks up waits for its turn, which is that of its priority and arrival.
        """
        self.engine.act_later(Scheduler.resume, as_request_ids(request_ids))

    def get_metrics(self) -> EngineMetrics:
        """Return the work done since this LLM was made, and what it holds now."""
        return self.engine.metrics()

    def on_step(self, callback: StepCallback) -> Callable[[], None]:
        """Call `callback` with a StepEvent after each step, from now on; return a function that ends this.

        It is called once the step's outputs are made, in the thread that runs the step, and delays the next one. What
        it raises ends the call that ran the step. Raises RequestError for what cannot be called.
        """
        if not callable(callback):
            raise RequestError(f"callback={callback!r} cannot be called; give a function of a StepEvent")

        def call(event: StepEvent) -> None:  # an object of its own, so that `end` ends this registration and no other
            callback(event)

        with _registration:
            events = self._events()
            events.callbacks.append(call)
            self.engine.listener = events  # perhaps in the middle of another thread's step

        def end() -> None:
            with _registration:
                if call in events.callbacks:
                    events.callbacks.remove(call)
                if not events.callbacks and self.engine.listener is events:
                    self.engine.listener = SILENT

        return end

    def _events(self) -> StepEvents:
        """Return what makes the events: new, where nobody listens."""
        if isinstance(self.engine.listener, StepEvents):
            return self.engine.listener
        device = self._runner_info.device
        return StepEvents(self.engine.scheduler, GpuTimer(device) if device.type == "cuda" else None)

    def _start_trace(self, path: str | None) -> Callable[[], object]:
        """Record the run from now on, if a path is given; return the function that writes the file, once."""
        if path is None:
            return lambda: None
        from nanoinfer.control.run_trace import RunTrace

        trace = RunTrace(repr(self))
        self.on_step(trace)
        return trace.write_on_close(self.engine, self._events(), path)

    def _wait_while_all_are_paused(self, seconds: float) -> None:
        """Wait so long if only paused requests are left; say so, once, if that goes on."""
        scheduler = self.engine.scheduler
        if not scheduler.paused or not scheduler.is_finished():
            self._idle_since = None
            return
        time.sleep(seconds)
        now = time.perf_counter()
        if self._idle_since is None:
            self._idle_since = now
        elif self._idle_since and now - self._idle_since > PATIENCE_SECONDS:
            self._idle_since = 0.0
            num_paused = len({seq.request_id for seq in scheduler.paused})
            logger.warning("only paused requests are left (%d); resume or abort them", num_paused)
