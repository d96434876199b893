"""Holds what all engines have in common: the LLMEngine of this process, and the ReplicatedEngine of several.

Calls reserve ids and add requests. Users abort, pause and resume these at any moment. Functions of `LLM.on_step` are
called with the event of each step. Subclasses compute the steps.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from nanoinfer.config import EngineConfig
from nanoinfer.engine.interfaces import SILENT
from nanoinfer.engine.interrupts import StepGuard
from nanoinfer.errors import RequestError
from nanoinfer.metrics import EngineMetrics, RequestChange, StepEvent
from nanoinfer.outputs import StreamChunk
from nanoinfer.text.prompts import PreparedRequest

StepCallback = Callable[[StepEvent], object]


class Action(Enum):
    """Names what users can ask of a request at any moment. The next step does it, as `Scheduler` says."""

    ABORT = auto()
    PAUSE = auto()
    RESUME = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Recipient:
    """Says where steps put the outputs and the stream chunks of requests that were added together."""

    outputs: list[Any]
    chunks: deque[StreamChunk] | None = None  # None if they are not streamed
    first_id: int = 0  # of the requests: the `index` of a chunk counts from it
    arrival_time: float = field(default_factory=time.perf_counter)


class ReservedIds:
    """Gives requests their ids: a call reserves them when it begins, and queues requests as prompts are prepared.

    Requests that are not queued yet count as unfinished. Actions on them, such as an abort, are remembered until they
    are queued.
    """

    def __init__(self) -> None:
        self._next = 0
        self._deferred: dict[int, list[Action]] = {}  # by reserved id

    def __len__(self) -> int:
        return len(self._deferred)

    def reserve(self, count: int) -> range:
        """Return so many new ids, which follow each other."""
        first, self._next = self._next, self._next + count
        ids = range(first, self._next)
        for request_id in ids:
            self._deferred[request_id] = []
        return ids

    def release(self, ids: Iterable[int]) -> None:
        """Forget the ids whose requests were never queued."""
        for request_id in ids:
            self._deferred.pop(request_id, None)

    def take(self, request_id: int) -> list[Action]:
        """Take out the id of a request that is queued or has ended; return the actions on it that were deferred."""
        return self._deferred.pop(request_id, [])

    def defer(self, action: Action, request_id: int) -> bool:
        """Remember an action on a request that is yet to be queued; False for any other. Safe at any moment."""
        deferred = self._deferred.get(request_id)
        if deferred is None:
            return False
        deferred.append(action)
        return request_id in self._deferred  # another thread may have queued it just now


class EventSource(Protocol):
    """Makes the events of steps, and of changes to requests between them: a StepEventListener, or ReplicaEvents."""

    def stepped(self) -> Iterable[StepEvent]:
        """Return the events that are complete now that the engine has run a step."""

    def take(self) -> Iterable[StepEvent]:
        """Return the events that `stepped` has not returned."""

    def take_rest(self) -> tuple[list[RequestChange], float]:
        """Return the changes that are in no event yet, and when the last step in flight was launched; 0.0: unknown."""


class Steps(Protocol):
    """Takes requests and runs them in steps: an Engine, or PoolingSteps, which use its runner."""

    def add_request(self, request_id: int, prepared: PreparedRequest, recipient: Recipient) -> None: ...

    def step(self) -> None: ...

    def abort(self, request_ids: Collection[int]) -> None: ...


class Engine(ABC):
    """Takes requests and runs them in steps.

    config: the user's options. guard: entered for each step. reserved_ids: of requests that are to be added.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.guard = StepGuard()
        self.reserved_ids = ReservedIds()
        self._requests: dict[int, Any] = {}  # by id, until they are handed over
        self._pending_actions: deque[tuple[Action, int]] = deque()  # of the next step, with request ids
        self.events: Any = SILENT  # an EventSource while there are callbacks
        self._callbacks: list[StepCallback] = []
        self._registration = threading.RLock()  # held while a callback comes or goes; a finalizer may end one meanwhile

    # -------- Requests ------------------------------------------------------------------------------------------------

    def add_request(self, request_id: int, prepared: PreparedRequest, recipient: Recipient) -> None:
        """Queue a request under a reserved id, which seeds its draws; a request with an error ends at once."""
        if prepared.error is None:
            self._requests[request_id] = self._queue(request_id, prepared, recipient)
        else:
            self._refuse(request_id, prepared, recipient)
        for action in self.reserved_ids.take(request_id):
            self._pending_actions.append((action, request_id))

    @abstractmethod
    def _queue(self, request_id: int, prepared: PreparedRequest, recipient: Recipient) -> Any:
        """Queue a request, and return what the engine keeps of it until it is handed over."""

    def _refuse(
        self, request_id: int, prepared: PreparedRequest, recipient: Recipient, ended_samples: Collection[int] = ()
    ) -> None:
        """End a request and its stream with its error. ended_samples: samples whose last chunk has been sent."""
        if recipient.chunks is not None:
            for sample in range(prepared.sampling_params.n):
                if sample not in ended_samples:
                    chunk = StreamChunk(request_id - recipient.first_id, "", [], "error", sample, request_id=request_id)
                    recipient.chunks.append(chunk)
        # The output comes last: a stream whose outputs are there has all its chunks.
        recipient.outputs.append(prepared.refusal(request_id))

    def act_later(self, action: Action, request_ids: Iterable[int]) -> None:
        """Have the next step begin with this action on what is unfinished of these requests.

        Safe at any moment, as in a callback, or where the garbage collector closes a stream.
        """
        for request_id in request_ids:
            if not self.reserved_ids.defer(action, request_id) and request_id in self._requests:
                self._pending_actions.append((action, request_id))

    def _take_actions(self) -> Iterator[tuple[Action, int]]:
        """Yield the actions of `act_later` on requests that are still unfinished, in order."""
        while self._pending_actions:
            action, request_id = self._pending_actions.popleft()
            if request_id in self._requests:
                yield action, request_id

    def is_finished(self) -> bool:
        """Return whether every request has finished and was handed over."""
        return not (self.reserved_ids or self._requests)  # in this order: while a request is queued, it is in both

    def num_unfinished(self) -> int:
        """Return how many requests have not been handed over, including reserved ones."""
        return len(self._requests) + len(self.reserved_ids)

    @abstractmethod
    def num_only_paused(self) -> int:
        """Return how many requests are paused if only paused ones are left; else 0."""

    @abstractmethod
    def abort(self, request_ids: Collection[int]) -> None:
        """Drop these requests and what they hold; finished ones are ignored."""

    # -------- Steps ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Compute, hand over what has finished, and call the functions of `on_step`, which may call the engine."""
        self._run(self._step)

    @abstractmethod
    def _step(self) -> None:
        """Compute, and hand over what has finished."""

    def settle(self) -> int:
        """Collect the steps in flight and apply actions, but launch none; return how many requests are unfinished."""
        self._run(self._settle)
        return self.num_unfinished()

    @abstractmethod
    def _settle(self) -> None:
        """Collect the steps in flight, apply actions, and hand over what has finished."""

    def _run(self, method: Callable[[], None]) -> None:
        """Call a method within the guard, and the functions of `on_step` after it."""
        with self.guard:
            method()
        for event in self.events.stepped():
            for callback in [*self._callbacks]:
                callback(event)

    def on_step(self, callback: StepCallback) -> Callable[[], None]:
        """Call a function with the StepEvent of each step, from now on; return a function that ends this.

        Raises RequestError if it cannot be called.
        """
        if not callable(callback):
            raise RequestError(f"callback={callback!r} cannot be called; give a function of a StepEvent")

        def call(event: StepEvent) -> None:  # an object of its own, so that `end` ends this registration and no other
            callback(event)

        def end() -> None:
            with self._registration:
                if call in self._callbacks:
                    self._callbacks.remove(call)
                    self._listen()

        with self._registration:
            self._callbacks.append(call)
            self._listen()  # perhaps in the middle of another thread's step
        return end

    def _listen(self) -> None:  # noqa: B027 (an engine may look at the callbacks itself)
        """Start making events with the first callback, and stop after the last one."""

    # -------- The whole engine ----------------------------------------------------------------------------------------

    @abstractmethod
    def metrics(self) -> EngineMetrics:
        """Return the work done so far, and what is held now."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""

    @abstractmethod
    def close(self) -> None:
        """Free the model and the cache. Closing twice is fine; other calls then raise EngineClosedError."""

    @abstractmethod
    def check_open(self, is_for_steps: bool = True) -> object:
        """Raise the error that closed the engine, or EngineClosedError; EngineStateError if it cannot run steps."""
