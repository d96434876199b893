"""Calls the functions of `LLM.on_step` with the StepEvents of all replicas, in the thread that runs `LLM.step`."""

from collections import deque
from collections.abc import Callable

from nanoinfer.errors import RequestError
from nanoinfer.outputs import StepEvent

StepCallback = Callable[[StepEvent], object]


class ReplicaCallbacks:
    """Holds the functions, and the events that they are to get. While there are none, replicas send no events."""

    def __init__(self) -> None:
        self.events: deque[StepEvent] = deque()
        self._callbacks: list[StepCallback] = []

    @property
    def are_wanted(self) -> bool:
        return bool(self._callbacks)

    def add(self, callback: StepCallback) -> Callable[[], None]:
        """Call a function with the StepEvent of each step, from now on; return a function that ends this."""
        if not callable(callback):
            raise RequestError(f"callback={callback!r} cannot be called; give a function of a StepEvent")

        def call(event: StepEvent) -> None:  # an object of its own, so that `end` ends this registration and no other
            callback(event)

        self._callbacks.append(call)

        def end() -> None:
            if call in self._callbacks:
                self._callbacks.remove(call)

        return end

    def call(self) -> None:
        """Call the functions with the events that have come."""
        while self.events:
            event = self.events.popleft()
            for callback in [*self._callbacks]:
                callback(event)
