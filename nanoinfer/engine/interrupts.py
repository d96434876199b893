"""Keeps Ctrl-C, and calls by users' functions, out of a half-launched step, from which no engine could continue."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nanoinfer.errors import EngineStateError


class Terminated(KeyboardInterrupt):
    """Says that SIGTERM came, within `terminable`."""


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise Terminated while the scope runs, where Ctrl-C would raise KeyboardInterrupt, if not ignored."""
    on_interrupt, on_terminate = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def interrupt(signum: int, frame: Any) -> None:
        if signum == signal.SIGTERM:
            raise Terminated
        if callable(on_interrupt):
            on_interrupt(signum, frame)

    def terminate(signum: int, frame: Any) -> None:
        handle: Any = signal.getsignal(signal.SIGINT)  # `interrupt`, or what postpones it
        handle(signum, frame)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, on_terminate)
        signal.signal(signal.SIGINT, on_interrupt)


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
    """Keeps the first signal for later, and passes the following ones on."""

    def __init__(self, handle: Callable[..., Any]) -> None:
        self.caught: list[tuple[Any, ...]] = []
        self._handle = handle

    def __call__(self, *args: Any) -> None:
        signum, _frame = args
        self.caught.append((signum, None))  # the frame would keep its locals, such as views of arrays that are to grow
        if len(self.caught) > 1:
            self._handle(*args)


class StepGuard:
    """Refuses calls to an engine from within its own step; it is entered for the length of a step.

    Logits processors run within a step, and could make such calls. Calls from other threads wait for their turn.
    """

    def __init__(self) -> None:
        self._thread: int | None = None  # the thread that is within a step

    def __enter__(self) -> None:
        self.check()
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._thread = None

    def check(self) -> None:
        """Raise EngineStateError in the thread that is within a step."""
        if self._thread == threading.get_ident():
            raise EngineStateError(
                "the engine was called from within its own step, where logits processors run; call it between two "
                "steps, or use a second LLM"
            )
