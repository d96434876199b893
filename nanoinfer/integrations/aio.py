"""asyncio: the calls of many tasks share the engine's batches, and one thread runs its steps while there are any.

A task hands its call to the driver, and waits. The driver's thread prepares and queues the requests, runs steps, and
wakes the tasks for which there is something new. It is started by the first call and ends with the last, so an LLM that
is not used from asyncio has no thread.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from nanoinfer.llm import LLM, OnFinish, Params
from nanoinfer.outputs import RequestOutput, RequestOutputs, StreamChunk
from nanoinfer.progress import Progress
from nanoinfer.text.prompts import (
    PreparedRequest,
    Prompts,
    as_list_of_prompts,
    check_on_finish,
    check_streamable,
    one_for_each,
)
from nanoinfer.text.refusals import OnError

Prepare = Callable[[], list[PreparedRequest]]
_creation = threading.Lock()  # held while an LLM gets its driver


async def agenerate(
    llm: LLM,
    prompts: Prompts,
    sampling_params: Params = None,
    use_tqdm: bool = False,
    *,
    priority: Sequence[int] | None = None,
    on_finish: OnFinish | None = None,
    on_error: OnError = "raise",
    tokenization_kwargs: Mapping[str, Any] | None = None,
) -> list[RequestOutput]:
    """Complete one prompt or many, as `LLM.generate` does. on_finish is called in the thread of the event loop."""
    check_on_finish(on_finish)
    prompts = as_list_of_prompts(prompts)

    def prepare() -> list[PreparedRequest]:
        return llm._prepare(prompts, sampling_params, priority, True, tokenization_kwargs, False, on_error)

    call = Call(await _with_grammars(prepare, sampling_params, len(prompts)))
    num_reported, is_done = 0, False
    with _driven(llm, call), Progress(llm.get_metrics, len(prompts), use_tqdm) as progress:
        while not is_done:
            is_done = await call.news()
            progress.show(len(call.inbox))
            while on_finish is not None and num_reported < len(call.inbox):
                num_reported += 1
                on_finish(call.inbox[num_reported - 1])
    return RequestOutputs(sorted(call.inbox, key=lambda output: output.request_id))


def astream(llm: LLM, prompts: Prompts, sampling_params: Params = None) -> AsyncGenerator[StreamChunk, None]:
    """Complete one prompt or many, and yield what is new of each, as `LLM.stream` does."""
    scope = ExitStack()
    return ChunkStream(_chunks(llm, prompts, sampling_params, scope), scope)


class ChunkStream(AsyncGenerator[StreamChunk, None]):
    """An async generator that aborts what is unfinished as soon as it is forgotten, such as by a loop that is left.

    One of Python's own would be closed in a later turn of the event loop. scope: what is closed then.
    """

    def __init__(self, chunks: AsyncGenerator[StreamChunk, None], scope: ExitStack) -> None:
        self._chunks, self._scope = chunks, scope

    async def asend(self, value: None) -> StreamChunk:
        return await self._chunks.asend(value)

    async def athrow(self, *error: Any) -> StreamChunk:
        return await self._chunks.athrow(*error)

    async def aclose(self) -> None:
        await self._chunks.aclose()

    def __del__(self) -> None:
        self._scope.close()


async def _chunks(
    llm: LLM, prompts: Prompts, sampling_params: Params, scope: ExitStack
) -> AsyncGenerator[StreamChunk, None]:
    prompts = as_list_of_prompts(prompts)

    def prepare() -> list[PreparedRequest]:
        requests = llm._prepare(prompts, sampling_params)
        check_streamable([request.sampling_params for request in requests])
        return requests

    chunks: deque[StreamChunk] = deque()
    call = Call(await _with_grammars(prepare, sampling_params, len(prompts)), chunks)
    is_done = False
    with scope:
        scope.enter_context(_driven(llm, call))
        while not is_done:
            is_done = await call.news()
            while chunks:
                yield chunks.popleft()


async def _with_grammars(prepare: Prepare, sampling_params: Params, num_prompts: int) -> Prepare:
    """Return what prepares a call without compiling grammars, which can take seconds: no step is to wait for that.

    A thread of the event loop's own pool compiles them.
    """
    if all(params.structured_outputs is None for params in one_for_each(sampling_params, num_prompts)):
        return prepare
    requests = await asyncio.to_thread(prepare)
    return lambda: requests


class Call:
    """A call of one task. It is made in the task's event loop; the driver's thread fills it.

    prepare: checks the requests and returns them. chunks: where a stream finds what is new.
    inbox: the outputs of the requests that have finished. is_abandoned: whether the task waits no more.
    """

    def __init__(self, prepare: Prepare, chunks: deque[StreamChunk] | None = None) -> None:
        self.prepare = prepare
        self.chunks = chunks
        self.loop = asyncio.get_running_loop()
        self.request_ids: list[int] = []
        self.inbox: list[RequestOutput] = []
        self.error: BaseException | None = None
        self.is_done = False
        self.is_abandoned = False
        self.num_seen = 0  # outputs in the inbox when the task was last woken
        self.event = asyncio.Event()

    async def news(self) -> bool:
        """Wait until there is something new; return whether all has come. Raises the error that ended the call."""
        await self.event.wait()
        self.event.clear()
        if self.error is not None:
            raise self.error
        return self.is_done

    def unfinished_ids(self) -> set[int]:
        return {*self.request_ids} - {output.request_id for output in self.inbox}


@contextmanager
def _driven(llm: LLM, call: Call) -> Iterator[None]:
    """Have the driver serve a call in this scope; what is unfinished at the end of it is aborted.

    It counts as unfinished no longer then: a call that needs an idle engine hands it over itself.
    """
    llm.engine.guard.check()  # a step would wait for the driver, and the driver for that step
    with _creation:
        llm.async_driver = llm.async_driver or Driver()
    llm.async_driver.submit(llm, call)
    try:
        yield
    finally:
        call.is_abandoned = True  # first: `_begin` looks at it after it has queued
        llm.abort(call.unfinished_ids())


class Driver:
    """Runs the steps of one LLM while there are calls. It does not hold the LLM, or neither could be forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below
        self._new: list[Call] = []
        self._is_running = False

    def submit(self, llm: LLM, call: Call) -> None:
        """Serve a call from the next step on. Any thread may call this."""
        with self._lock:
            if not self._is_running:
                threading.Thread(target=self._run, args=(llm,), name="nanoinfer asyncio", daemon=True).start()
                self._is_running = True
            self._new.append(call)

    def _run(self, llm: LLM) -> None:
        calls: list[Call] = []
        while True:
            with self._lock:
                new, self._new = self._new, []
                self._is_running = bool(calls or new)
                if not self._is_running:
                    return
            for call in new:
                _begin(llm, call)
            calls += new
            abandoned = [call for call in calls if call.is_abandoned]
            calls = [call for call in calls if call not in abandoned]
            try:
                _abort(llm, abandoned)
                if calls:
                    llm._step()
            except BaseException as error:  # of the engine, which all calls are in
                for call in calls:
                    call.error = call.error or error
                with suppress(Exception):  # the same error once more
                    _abort(llm, calls)
            _wake(calls)
            calls = [call for call in calls if not call.is_done]


def _begin(llm: LLM, call: Call) -> None:
    """Prepare and queue the requests of a call; what is wrong with them is the call's error alone."""
    try:
        requests = [] if call.is_abandoned else call.prepare()
        with llm._lock:
            for index, request in enumerate(requests):
                call.request_ids.append(llm.engine.add_request(request, call.inbox, call.chunks, index))
            if call.is_abandoned:  # while they were prepared; no other thread has seen them yet
                llm.abort(call.unfinished_ids())
    except BaseException as error:
        call.error = error
        with suppress(Exception):  # of an engine that is broken
            _abort(llm, [call])


def _abort(llm: LLM, calls: list[Call]) -> None:
    if ids := {request_id for call in calls for request_id in call.unfinished_ids()}:
        with llm._lock:
            llm.engine.abort(ids)


def _wake(calls: list[Call]) -> None:
    """Note which calls are done, and wake the tasks that have something new: those of one loop at once."""
    news: dict[asyncio.AbstractEventLoop, list[Call]] = {}
    for call in calls:
        num_finished = len(call.inbox)
        call.is_done = call.error is not None or num_finished == len(call.request_ids)
        if call.is_done or call.chunks or num_finished > call.num_seen:
            call.num_seen = num_finished
            news.setdefault(call.loop, []).append(call)
    for loop, woken in news.items():
        try:
            loop.call_soon_threadsafe(_set_events, woken)
        except RuntimeError:  # the loop is closed
            for call in woken:
                call.is_abandoned = True


def _set_events(calls: list[Call]) -> None:
    for call in calls:
        call.event.set()
