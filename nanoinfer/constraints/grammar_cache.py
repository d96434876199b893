"""Compiles grammars in threads, each for a limited time, and keeps the most recently used ones."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import TypeVar

from nanoinfer.constraints.grammars import NUM_THREADS, Grammar, GrammarLibrary
from nanoinfer.errors import RequestError
from nanoinfer.integers import ceil_div
from nanoinfer.progress import progress_bar
from nanoinfer.structured_outputs import StructuredOutputsParams

MAX_CACHED = 256  # grammars
FORKS_A_TEMPLATE = 16  # forks of one template share a lock, so that several threads need several templates
STACK_SIZE = 2**28  # bytes; the library descends into schemas and rules, and crashes where a stack ends

Item = TypeVar("Item")
Result = TypeVar("Result")
Compiled = Grammar | RequestError


class GrammarCache:
    """Compiles what users ask for, and keeps what was asked for last, errors too.

    Several threads may use it at a time; what one of them compiles, the others wait for. seconds: the most that one
    grammar may take.
    """

    def __init__(self, make_library: Callable[[], GrammarLibrary], seconds: float) -> None:
        self._make_library, self._seconds = make_library, seconds
        self._library: GrammarLibrary | None = None
        self._grammars: OrderedDict[StructuredOutputsParams, Future[Compiled]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def library(self) -> GrammarLibrary:
        """Return the library, set up at its first use."""
        with self._lock:
            if self._library is None:
                self._library = self._make_library()
            return self._library

    def compile(
        self, wanted: Mapping[StructuredOutputsParams, int], use_tqdm: bool
    ) -> dict[StructuredOutputsParams, Compiled]:
        """Return the grammar of each that is wanted, or what is wrong with it.

        wanted: how many samples are to follow each. A bar shows what is compiled if that takes half a second.
        """
        library = self.library
        missing: dict[StructuredOutputsParams, Future[Compiled]] = {}
        try:
            with self._lock:
                missing |= {params: Future() for params in wanted if params not in self._grammars}
                self._grammars.update(missing)
                futures = {params: self._grammars[params] for params in wanted}
                for params in wanted:
                    self._grammars.move_to_end(params)
                while len(self._grammars) > MAX_CACHED:
                    self._grammars.popitem(last=False)
            with progress_bar("Compiling grammars", "grammar", len(missing), use_tqdm, delay=0.5) as bar:
                for params, task in _in_threads(library.compile, [*missing], self._seconds):
                    missing[params].set_result(self._outcome(params, task))
                    bar.update()
        finally:
            with self._lock:
                for params, future in missing.items():
                    if future.cancel() and self._grammars.get(params) is future:
                        del self._grammars[params]  # it was not compiled
        try:
            compiled = {params: future.result() for params, future in futures.items()}
        except CancelledError:  # in another thread, which has failed
            return self.compile(wanted, use_tqdm)
        self._add_templates(library, {one: wanted[key] for key, one in compiled.items() if isinstance(one, Grammar)})
        return compiled

    def _outcome(self, params: StructuredOutputsParams, task: "Future[Grammar]") -> Compiled:
        if not task.done():
            return RequestError(
                f"{params} takes over {self._seconds:g} s to compile; make it simpler, or raise grammar_timeout"
            )
        try:
            return task.result()
        except RequestError as error:
            return RequestError(str(error))  # without a traceback, which would be kept with it

    def _add_templates(self, library: GrammarLibrary, num_samples: Mapping[Grammar, int]) -> None:
        """Let as many threads follow each grammar as its samples make worthwhile."""
        more = []
        for grammar, number in num_samples.items():
            grammar.num_samples += number
            num_templates = min(NUM_THREADS, ceil_div(grammar.num_samples, FORKS_A_TEMPLATE))
            more += [grammar] * (num_templates - len(grammar.templates))
        for _, task in _in_threads(library.add_template, more, self._seconds):
            if task.done():
                task.result()


def _in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], seconds: float
) -> "Iterator[tuple[Item, Future[Result]]]":
    """Call a function with each item, and yield the item and its future once that is done, or takes too long.

    The threads are daemons: native code that takes too long cannot be stopped, and must not keep the program alive.
    """
    waiting, running = deque(items), dict[Future[Result], tuple[Item, float]]()
    while waiting or running:
        while waiting and len(running) < NUM_THREADS:
            item = waiting.popleft()
            running[_start(function, item)] = item, time.monotonic() + seconds
        first_deadline = min(deadline for _, deadline in running.values())
        wait(running, max(0.0, first_deadline - time.monotonic()), FIRST_COMPLETED)
        for task, (item, deadline) in [*running.items()]:
            if task.done() or time.monotonic() >= deadline:
                del running[task]
                yield item, task


_starting = threading.Lock()


def _start(function: Callable[[Item], Result], item: Item) -> "Future[Result]":
    """Call a function in a thread that has a large stack."""
    task: Future[Result] = Future()

    def run() -> None:
        try:
            task.set_result(function(item))
        except BaseException as error:
            task.set_exception(error)

    with _starting:  # the size of stacks is one setting for the whole process
        size_before = threading.stack_size(STACK_SIZE)
        try:
            threading.Thread(target=run, name="nanoinfer-grammar", daemon=True).start()
        finally:
            threading.stack_size(size_before)
    return task
