"""Calls the functions of `LLM.on_step` with the StepEvents of all replicas, in the thread that runs `LLM.step`."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from nanoinfer.control.step_events import StepCallback, register
from nanoinfer.outputs import RequestChange, StepEvent


class ReplicaCallbacks:
    """Holds the callbacks, and the events that they have yet to get. Without callbacks, replicas send no events."""

    def __init__(self) -> None:
        self._arrived: deque[StepEvent] = deque()
        self._changes: dict[int, list[RequestChange]] = {}  # by replica: those of no event so far
        self._callbacks: list[StepCallback] = []

    @property
    def are_wanted(self) -> bool:
        return bool(self._callbacks)

    def add(self, callback: StepCallback) -> Callable[[], None]:
        """Call a function with the StepEvent of each step, from now on; return a function that ends this."""
        return register(self._callbacks, callback)

    def arrive(self, replica: int, event: StepEvent) -> None:
        """Keep an event of a replica until the functions are called."""
        changes = (*self._changes.pop(replica, ()), *event.changes)
        self._arrived.append(replace(event, replica=replica, changes=changes))

    def add_changes(self, replica: int, changes: list[RequestChange]) -> None:
        """Keep what happened to requests of a replica after its last event, for the next one."""
        self._changes.setdefault(replica, []).extend(changes)

    def call(self) -> None:
        """Call the functions with the events that have come."""
        for event in self.take():
            for callback in [*self._callbacks]:
                callback(event)

    def events(self) -> "ReplicaCallbacks":
        """Return what a trace asks for what it has not been called with."""
        return self

    def take(self) -> Iterator[StepEvent]:
        while self._arrived:
            yield self._arrived.popleft()

    def take_rest(self) -> tuple[list[RequestChange], float]:
        """Return the changes that are in no event yet, and 0.0: when the last steps were launched is not known."""
        changes = [change for each in self._changes.values() for change in each]
        self._changes.clear()
        return sorted(changes, key=lambda change: change.time), 0.0
