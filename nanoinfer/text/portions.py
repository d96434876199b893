"""Prepares the requests of a call a portion at a time, so that steps begin before all its texts are tokenized."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from nanoinfer.text.arguments import Errors, OnError, report
from nanoinfer.text.prompts import PreparedRequest

PORTION_SIZE = 256  # requests: they take about as long to prepare as a step takes

Prepare = Callable[[Sequence[int], Errors], list[PreparedRequest]]


class Portions:
    """Holds the requests of one call. Entered with `with`, it prepares the next portion in a thread of its own.

    prepare: makes the requests of the prompts with these indices, and adds what is wrong with any to the errors. One
    thread calls it at a time. order: the indices of all prompts, in the order in which they are queued. size: the most
    requests in a portion; None puts all into one. The first portions have PORTION_SIZE at most, so that all replicas
    begin early. Later ones have half as many as all before them together, so that prompts that begin alike come
    together. on_error: as in `LLM.generate`; "raise" raises one error for all bad prompts.
    """

    def __init__(
        self,
        prepare: Prepare,
        order: Sequence[int],
        size: int | None = PORTION_SIZE,
        on_error: OnError = "raise",
    ) -> None:
        self.num_requests, self.order = len(order), order
        self._prepare, self._on_error = prepare, on_error
        self._errors: Errors = {}
        self._is_over = False
        self._left = deque([order] if size is None else cut_portions(order, size))
        self._ready = self._prepare_next()  # by the call itself, which raises what is wrong with a few prompts
        self._coming: Future[list[PreparedRequest]] | None = None
        self._thread: ThreadPoolExecutor | None = None

    @classmethod
    def of(cls, requests: list[PreparedRequest]) -> "Portions":
        """Return requests that are prepared as the one portion of their call."""
        return cls(lambda _, __: requests, range(len(requests)), size=None)

    @property
    def first(self) -> list[PreparedRequest]:
        """The requests that are ready, at the beginning."""
        return self._ready

    def take(self, wait: bool = False) -> list[PreparedRequest]:
        """Return the next portion; none where it is not ready, unless told to wait, or where none is left.

        Raises RequestError where a prompt of it cannot be served.
        """
        ready, self._ready = self._ready, []
        if not ready and self._coming is not None and (wait or self._coming.done()):
            coming, self._coming = self._coming, None
            ready = coming.result()
        if self._thread is not None and self._coming is None and self._left:
            self._coming = self._thread.submit(self._prepare_next)
        return ready

    def __enter__(self) -> "Portions":
        if self._left:
            self._thread = ThreadPoolExecutor(1, "nanoinfer prompts")
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True  # what the thread prepares is wanted no more
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _prepare_next(self) -> list[PreparedRequest]:
        indices = self._left.popleft()
        requests = self._prepare(indices, self._errors)
        raises = self._on_error != "return"
        while self._errors and raises and self._left and not self._is_over:  # so that the error names them all
            self._prepare(self._left.popleft(), self._errors)
        if not self._is_over and (raises or not self._left):
            report(self._errors, self.num_requests, self._on_error)
        for index, request in zip(indices, requests, strict=True):
            request.error = request.error or self._errors.get(index)
        return requests


def cut_portions(order: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield the portions of a call, at least one; see Portions."""
    start = 0
    while start < max(len(order), 1):
        num_next = min(max(start // 2, PORTION_SIZE), size)
        yield order[start : start + num_next]
        start += num_next
