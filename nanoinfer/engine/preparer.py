"""Makes requests of what a user gives: prompts and conversations are checked and tokenized, grammars are compiled.

The requests of a call are prepared a portion at a time, so that steps begin before all its texts are tokenized. Nothing
is queued here: see `request_queue.py`.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from nanoinfer.engine.engine import Engine
from nanoinfer.engine.interfaces import ConstraintManager
from nanoinfer.errors import RequestError
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.arguments import (
    Errors,
    OnError,
    Params,
    Priorities,
    Prompt,
    as_priorities,
    check_on_error,
    one_for_each,
    report,
)
from nanoinfer.text.chat import Conversation, Conversations, as_conversations, render_chats
from nanoinfer.text.image_parts import has_images
from nanoinfer.text.prompts import ImageReader, PreparedRequest, PromptProcessor

PORTION_SIZE = 256  # requests: they take about as long to prepare as a step takes

Prepare = Callable[[Sequence[int], Errors], list[PreparedRequest]]
AdaptersOf = Callable[[Any, int], Sequence[Any]]  # from the lora_request of a call, and its number of prompts


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

    def take_all(self) -> list[PreparedRequest]:
        """Return all requests of a call that is prepared at once."""
        return self.take()

    def __enter__(self) -> "Portions":
        if self._left:
            self._thread = ThreadPoolExecutor(1, "nanoinfer prompts")
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True  # nobody wants what the thread still prepares
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


def add_adapters(requests: Mapping[int, PreparedRequest], adapters: Sequence[Any] | None) -> None:
    """Give requests, by the index of their prompts, the adapters of a call; None for a call without any."""
    if adapters is not None:
        for index, request in requests.items():
            request.adapter = adapters[index]


class ImagePortions(Portions):
    """Holds the requests of one call with images. Threads prepare them ahead of need, in order.

    As many are prepared ahead as host memory may hold, but always one that the engine waits for. A portion is what is
    ready. prepare: is called with one index at a time, by several threads. reader: processes the images.
    """

    def __init__(
        self, prepare: Prepare, order: Sequence[int], reader: ImageReader, on_error: OnError = "raise"
    ) -> None:
        self.num_requests, self.order = len(order), order
        self._prepare, self._reader, self._on_error = prepare, reader, on_error
        self._errors: Errors = {}
        self._waiting = deque(order)
        self._ahead: deque[Future[PreparedRequest]] = deque()
        self._num_taken = self._num_images = 0
        self._threads: ThreadPoolExecutor | None = None

    @property
    def first(self) -> list[PreparedRequest]:
        """None are ready at the beginning."""
        return []

    def take(self, wait: bool = False) -> list[PreparedRequest]:
        ready: list[PreparedRequest] = []
        self._submit(at_least=int(wait))
        while self._ahead and (self._ahead[0].done() or (wait and not ready)):
            request = self._ahead.popleft().result()
            ready.append(request)
            self._num_taken += 1
            self._num_images += len(request.images)
            self._submit()
        if ready and self._num_taken == self.num_requests:
            report(self._errors, self.num_requests, self._on_error)
        return ready

    def take_all(self) -> list[PreparedRequest]:
        requests: list[PreparedRequest] = []
        with self:
            while len(requests) < self.num_requests:
                requests += self.take(wait=True)
        return requests

    def __enter__(self) -> "Portions":
        # They wait for the reader's threads most of the time.
        self._threads = ThreadPoolExecutor(2 * self._reader.num_workers, "nanoinfer prompts with images")
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)  # a picture may be on its way through a network

    def _submit(self, at_least: int = 0) -> None:
        """Have threads prepare the next requests, as many as there is room for; `at_least` so many are under way."""
        assert self._threads is not None, "requests are taken within `with`"
        most = 4 * self._reader.num_workers
        while self._waiting and len(self._ahead) < most:
            per_request = max(self._num_images / max(self._num_taken, 1), 1)
            has_room = self._reader.has_room(math.ceil(per_request * (len(self._ahead) + 1)))
            if not has_room and len(self._ahead) >= at_least:
                return
            self._ahead.append(self._threads.submit(self._prepare_one, self._waiting.popleft()))

    def _prepare_one(self, index: int) -> PreparedRequest:
        """Prepare one request. Raises RequestError if it cannot be served, unless errors are to be returned."""
        errors: Errors = {}
        [request] = self._prepare([index], errors)
        if self._on_error != "return":
            report(errors, self.num_requests)
        self._errors |= errors
        request.error = request.error or errors.get(index)
        return request


class Preparer:
    """Prepares the requests of calls (vLLM: InputProcessor). Any thread may call any method.

    engine: must be open, and awake. prompt_processor: checks and tokenizes prompts. constraints: compiles what limits
    their tokens.
    """

    def __init__(self, engine: Engine, prompt_processor: PromptProcessor, constraints: ConstraintManager) -> None:
        self._engine, self._constraints = engine, constraints
        self.prompt_processor = prompt_processor
        self.adapters_of: AdaptersOf | None = None  # returns the adapter for each prompt of a call; None: has none
        self.portion_size: int | None = PORTION_SIZE * engine.config.data_parallel_size  # of Portions
        if engine.config.distributed_executor_backend == "external_launcher":
            self.portion_size = None  # or ranks would schedule different steps, as their threads get on

    def prepare(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Params = None,
        priority: Priorities = None,
        **options: Any,
    ) -> list[PreparedRequest]:
        """Check everything that a user can get wrong, before anything is queued. options: of `prepare_portions`."""
        return self.prepare_portions(prompts, sampling_params, priority, at_once=True, **options).take_all()

    def prepare_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None,
        template_options: Mapping[str, Any],
        **options: Any,
    ) -> list[PreparedRequest]:
        """Do as `prepare` with one conversation. template_options: of `render_chats`."""
        return self.prepare_chats([messages], sampling_params, template_options, at_once=True, **options).take_all()

    def prepare_chats(
        self,
        messages: Conversations,
        sampling_params: Params,
        template_options: Mapping[str, Any],
        **options: Any,
    ) -> Portions:
        """Do as `prepare_portions` with conversations. template_options: of `render_chats`. options: the others."""
        reader = self.prompt_processor.image_reader
        image_texts = None if reader is None else reader.image_texts
        tokenizer = self.prompt_processor.require_tokenizer()
        render = partial(render_chats, tokenizer, image_texts=image_texts, **template_options)
        # The template writes the special tokens.
        options |= {"add_special_tokens": False, "render": render}
        return self.prepare_portions(as_conversations(messages), sampling_params, **options)

    def prepare_portions(
        self,
        prompts: Sequence[Any],
        sampling_params: Params = None,
        priority: Priorities = None,
        *,
        add_special_tokens: bool = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
        on_error: OnError = "raise",
        lora_request: Any = None,
        render: Callable[[Mapping[int, Any], Errors], dict[int, Prompt]] | None = None,
        at_once: bool = False,
    ) -> Portions:
        """Check what a user can get wrong, and prepare the requests of a call: the first portion, or all at once.

        render: makes prompts of what was given. at_once: whether all are checked before any is queued; calls with
        priorities always are, and so are calls with grammars and the like, which are compiled in parallel. Calls with
        images never are, since memory holds a part of them alone. The other arguments, and the errors, are those of
        `LLM.generate`.
        """
        check_on_error(on_error)
        self._engine.check_open()
        all_params = one_for_each(sampling_params, len(prompts))
        are_shared = len({*map(id, all_params)}) == 1
        are_constrained = self._constraints.is_asked(all_params)
        priorities = as_priorities(priority, len(prompts))
        adapters = self.find_adapters(lora_request, len(prompts))

        def prepare(indices: Sequence[int], errors: Errors) -> list[PreparedRequest]:
            given = {index: prompts[index] for index in indices}
            given = given if render is None else render(given, errors)
            requests = self.prompt_processor.prepare(
                given, all_params, priorities, errors, add_special_tokens, tokenization_kwargs, are_shared
            )
            if are_constrained and (not errors or on_error == "return"):
                self._constraints.add_constraints(requests, errors, use_tqdm)
            add_adapters(requests, adapters)
            return [*requests.values()]

        at_once |= priority is not None or (are_constrained and self._constraints.takes_time(all_params))
        return self.portions(prepare, range(len(prompts)), prompts, on_error, at_once)

    def portions(
        self, prepare: Prepare, order: Sequence[int], prompts: Sequence[Any], on_error: OnError, at_once: bool = False
    ) -> Portions:
        """Return the requests of a call as they are prepared. With images, threads do so ahead of need.

        prompts: of the call, in their own order. The others: see `Portions`, and `prepare_portions`.
        """
        reader = self.prompt_processor.image_reader
        if reader is not None and self.portion_size is not None and any(map(has_images, prompts)):
            return ImagePortions(prepare, order, reader, on_error)
        return Portions(prepare, order, None if at_once else self.portion_size, on_error)

    def find_adapters(self, lora_request: Any, count: int) -> Sequence[Any] | None:
        """Return the adapter for each of `count` prompts of a call, loaded; None for a call without any.

        Raises RequestError for what is no adapter, and where the engine has none; ModelError for a bad folder.
        """
        if lora_request is None:
            return None
        if self.adapters_of is None:
            raise RequestError(
                f"lora_request={lora_request!r:.200}, and this LLM was made without enable_lora=True; give that"
            )
        return self.adapters_of(lora_request, count)

    def close(self) -> None:
        """Free what images take: threads, and memory of the host."""
        if self.prompt_processor.image_reader is not None:
            self.prompt_processor.image_reader.close()

    def compile_grammars(self, params: Sequence[SamplingParams]) -> None:
        """Compile the grammars of these, for `prepare` to find. Raises RequestError if one cannot be compiled."""
        self._constraints.compile(params)
