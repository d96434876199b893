"""asyncio: the calls of many tasks share the engine's batches, and one thread runs its steps while there are any.

A task hands its call to that thread, and waits. The thread prepares and queues the requests, runs steps, and wakes the
tasks for which there is something new. It is started by the first call and ends with the last, so an LLM that is not
used from asyncio has no thread.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from nanoinfer.engine.engine import Engine
from nanoinfer.engine.preparer import Preparer
from nanoinfer.engine.request_queue import Inbox, RequestQueue
from nanoinfer.lora.lora_request import LoRARequests
from nanoinfer.outputs import RequestOutputs, StreamChunk
from nanoinfer.progress import Progress
from nanoinfer.text.arguments import (
    OnError,
    OnFinish,
    Params,
    Priorities,
    Prompt,
    Prompts,
    as_list_of_prompts,
    check_on_finish,
    check_streamable,
    one_for_each,
)
from nanoinfer.text.image_parts import has_images
from nanoinfer.text.prompts import PreparedRequest
from nanoinfer.text.response_reader import ResponseReader

Prepare = Callable[[], list[PreparedRequest]]


class AsyncCall:
    """Holds a call of one task. It is made in the task's event loop; the thread that runs the steps fills it.

    prepare: checks the requests and returns them. inbox: what has come of them; it is abandoned when the task waits no
    more.
    """

    def __init__(self, prepare: Prepare, is_stream: bool = False) -> None:
        self.prepare = prepare
        self.inbox = Inbox(is_stream)
        self.loop = asyncio.get_running_loop()
        self.error: BaseException | None = None
        self.is_done = False
        self.num_seen = 0  # outputs in the inbox when the task was last woken
        self.event = asyncio.Event()

    async def news(self) -> bool:
        """Wait until there is something new; return whether all has come. Raises the error that ended the call."""
        await self.event.wait()
        self.event.clear()
        if self.error is not None:
            raise self.error
        return self.is_done


class AsyncCalls:
    """Serves the calls of tasks, and runs steps of a queue in a thread of its own while there are any."""

    def __init__(self, queue: RequestQueue, preparer: Preparer, response_reader: ResponseReader) -> None:
        self._queue, self._preparer, self._response_reader = queue, preparer, response_reader
        self._lock = threading.Lock()  # guards the two below
        self._new: list[AsyncCall] = []
        self._is_running = False

    async def complete(
        self, prepare: Prepare, show: Callable[[int], object] | None = None, on_finish: OnFinish | None = None
    ) -> list[Any]:
        """Run the requests that `prepare` returns to their end; return their outputs in the order of the requests.

        show: is told how many have finished. on_finish: is called with each output, in the thread of the event loop.
        """
        call = AsyncCall(prepare)
        outputs, num_reported, is_done = call.inbox.outputs, 0, False
        with self._served(call):
            while not is_done:
                is_done = await call.news()
                if show is not None:
                    show(len(outputs))
                while on_finish is not None and num_reported < len(outputs):
                    num_reported += 1
                    on_finish(outputs[num_reported - 1])
        return sorted(outputs, key=lambda output: output.request_id)

    def stream(
        self, prompts: Prompts, sampling_params: Params = None, lora_request: LoRARequests = None
    ) -> AsyncGenerator[StreamChunk, None]:
        """Complete one prompt or many, and yield what is new of each, as `LLM.stream` does."""
        scope = ExitStack()
        return ChunkStream(self._chunks(prompts, sampling_params, lora_request, scope), scope)

    async def _chunks(
        self, prompts: Prompts, sampling_params: Params, lora_request: LoRARequests, scope: ExitStack
    ) -> AsyncGenerator[StreamChunk, None]:
        prompts = as_list_of_prompts(prompts)
        prepared: list[PreparedRequest] = []
        with_part = self._response_reader.telling_parts(prepared)

        def prepare() -> list[PreparedRequest]:
            prepared.extend(self._preparer.prepare(prompts, sampling_params, lora_request=lora_request))
            check_streamable([request.sampling_params for request in prepared])
            return prepared

        call = AsyncCall(await _without_waiting(prepare, sampling_params, prompts), is_stream=True)
        is_done = False
        with scope:
            scope.enter_context(self._served(call))
            while not is_done:
                is_done = await call.news()
                while call.inbox.chunks:
                    yield with_part(call.inbox.chunks.popleft())

    @contextmanager
    def _served(self, call: AsyncCall) -> Iterator[None]:
        """Have the thread serve a call within the scope; unfinished requests are aborted at its end."""
        self._queue.engine.guard.check()  # a step would wait for the thread, and the thread for that step
        with self._lock:
            if not self._is_running:
                threading.Thread(target=self._run, name="nanoinfer asyncio", daemon=True).start()
                self._is_running = True
            self._new.append(call)
        try:
            yield
        finally:
            self._queue.abandon(call.inbox)

    def _run(self) -> None:
        """Run steps until no call is left."""
        calls: list[AsyncCall] = []
        while True:
            with self._lock:
                new, self._new = self._new, []
                self._is_running = bool(calls or new)
                if not self._is_running:
                    return
            for call in new:
                self._begin(call)
            _wake(new)  # what has failed, or has nothing to compute, waits for no step
            calls += [call for call in new if not call.is_done]
            abandoned = [call for call in calls if call.inbox.is_abandoned]
            calls = [call for call in calls if call not in abandoned]
            try:
                self._queue.drop(*(call.inbox for call in abandoned))
                if calls:
                    self._queue.step()
            except BaseException as error:  # of the engine, which all calls are in
                for call in calls:
                    call.error = call.error or error
                with suppress(Exception):  # the same error once more
                    self._queue.drop(*(call.inbox for call in calls))
            _wake(calls)
            calls = [call for call in calls if not call.is_done]

    def _begin(self, call: AsyncCall) -> None:
        """Prepare and queue the requests of a call; their errors are raised by this call alone."""
        try:
            if not call.inbox.is_abandoned:
                self._queue.add_requests(call.prepare(), call.inbox)
        except BaseException as error:
            call.error = error
            with suppress(Exception):  # of an engine that is broken
                self._queue.drop(call.inbox)


class AsyncMethods:
    """Gives `LLM`, which sets these fields, the methods that tasks await."""

    engine: Engine
    preparer: Preparer
    _async_calls: AsyncCalls

    async def agenerate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: bool = False,
        *,
        priority: Priorities = None,
        on_finish: OnFinish | None = None,
        on_error: OnError = "raise",
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequests = None,
    ) -> RequestOutputs:
        """Do as `generate`, with all its arguments except hidden states, while other tasks of the event loop run.

        Calls of all tasks and threads share batches. If the task is cancelled, its requests are aborted.
        """
        check_on_finish(on_finish)
        prompts = as_list_of_prompts(prompts)
        prepare: Prepare = partial(
            self.preparer.prepare,
            prompts,
            sampling_params,
            priority,
            on_error=on_error,
            tokenization_kwargs=tokenization_kwargs,
            lora_request=lora_request,
        )
        prepare = await _without_waiting(prepare, sampling_params, prompts)
        with Progress(self.engine.metrics, len(prompts), use_tqdm) as progress:
            return RequestOutputs(await self._async_calls.complete(prepare, progress.show, on_finish))

    def astream(
        self, prompts: Prompts, sampling_params: Params = None, *, lora_request: LoRARequests = None
    ) -> AsyncGenerator[StreamChunk, None]:
        """Do as `stream`, for `async for`; the errors are raised when the first chunk is asked for."""
        return self._async_calls.stream(prompts, sampling_params, lora_request)


class ChunkStream(AsyncGenerator[StreamChunk, None]):
    """Yields chunks, and aborts unfinished requests as soon as it is forgotten, such as by a loop that is left.

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


async def _without_waiting(prepare: Prepare, sampling_params: Params, prompts: Sequence[Prompt]) -> Prepare:
    """Return what prepares a call without compiling grammars or loading images: no step is to wait for that.

    A thread of the event loop's own pool does it, as it can take seconds.
    """
    all_params = one_for_each(sampling_params, len(prompts))
    if all(params.structured_outputs is None for params in all_params) and not any(map(has_images, prompts)):
        return prepare
    requests = await asyncio.to_thread(prepare)
    return lambda: requests


def _wake(calls: list[AsyncCall]) -> None:
    """Note which calls are done, and wake the tasks that have something new: those of one loop at once."""
    news: dict[asyncio.AbstractEventLoop, list[AsyncCall]] = {}
    for call in calls:
        inbox = call.inbox
        num_finished = len(inbox.outputs)
        call.is_done = call.error is not None or inbox.is_complete
        if call.is_done or inbox.chunks or num_finished > call.num_seen:
            call.num_seen = num_finished
            news.setdefault(call.loop, []).append(call)
    for loop, woken in news.items():
        try:
            loop.call_soon_threadsafe(_set_events, woken)
        except RuntimeError:  # the loop is closed
            for call in woken:
                call.inbox.is_abandoned = True


def _set_events(calls: list[AsyncCall]) -> None:
    for call in calls:
        call.event.set()
