"""Postpones Ctrl-C while the engine is in a state that nobody could continue from, such as a half-launched step."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def postponed_interrupt() -> Iterator[None]:
    """Postpone Ctrl-C until the end of the scope, or of the outermost one of several. A second Ctrl-C is not postponed.

    Outside the main thread this does nothing, because Python handles signals in the main thread only.
    """
    previous = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    # `previous` is not callable if Ctrl-C is ignored, or handled by something other than Python.
    if not is_main or not callable(previous) or isinstance(previous, _PostponingHandler):
        yield
        return
    handler = _PostponingHandler(previous)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if handler.caught:
        previous(*handler.caught[0])


class _PostponingHandler:
    """Handles a signal by keeping the first one for later, and passing on those after it."""

    def __init__(self, handle: Callable[..., Any]) -> None:
        self.caught: list[tuple[Any, ...]] = []
        self._handle = handle

    def __call__(self, *args: Any) -> None:
        self.caught.append(args)
        if len(self.caught) > 1:
            self._handle(*args)
