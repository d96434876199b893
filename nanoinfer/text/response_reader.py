"""Makes messages of the answers of an LLM, and parts of streams, only when they are asked for: others lose no time."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any, TypeVar

from nanoinfer.outputs import CompletionOutput, RequestOutput, StreamChunk, make_later
from nanoinfer.responses.families import Family
from nanoinfer.responses.parse import Message, Template, begin, find_template, message_of, schemas_of
from nanoinfer.responses.splitter import Part, Splitter
from nanoinfer.responses.tool_choice import chosen, constrain
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.arguments import OnFinish, Params, as_list
from nanoinfer.text.prompts import PreparedRequest, PromptProcessor
from nanoinfer.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

AnyParams = TypeVar("AnyParams", bound=Params)
Schemas = Callable[[], Mapping[str, Mapping[str, Any]]]  # of the tools of a chat, made when they are needed


class ResponseReader:
    """Reads the answers of an LLM.

    given: its option response_template. prompt_processor: has the tokenizer, and the stop tokens.
    """

    def __init__(self, given: str | Mapping[str, Any] | None, prompt_processor: PromptProcessor) -> None:
        self._given, self._processor = given, prompt_processor
        self._chats: dict[int, OnFinish] = {}  # single requests by their ids, until their outputs come

    @cached_property
    def template(self) -> Template | None:
        """Return how answers are read; None where nothing says it."""
        tokenizer = self._processor.tokenizer
        template = find_template(self._given, tokenizer.hf if tokenizer else None)
        if template is None and self._given == "auto":
            logger.warning(
                "The chat template does not tell how this model writes thoughts and tool calls, so the content of an "
                "answer is its whole text; name a family, such as qwen3, as response_template"
            )
        return template

    def with_tool_choice(self, params: AnyParams, tools: Sequence[Any] | None, tool_choice: Any) -> AnyParams:
        """Return the sampling parameters of a chat whose answers call tools as `tool_choice` says, or as they are.

        They come as they are given: for all prompts, or one for each.
        """
        if (schemas := chosen(tool_choice, tools)) is None:
            return params
        chat = getattr(self._processor.require_tokenizer().hf, "chat_template", None)
        is_for_all = params is None or isinstance(params, SamplingParams)
        given: Any = [params or SamplingParams()] if is_for_all else as_list(params)
        if not isinstance(given, (list, tuple)) or not all(isinstance(one, SamplingParams) for one in given):
            return params  # which is refused with all else that is wrong
        by_id = {id(one): one for one in given}
        limited = {
            key: constrain(one, schemas, tool_choice != "required", self.template, chat) for key, one in by_id.items()
        }
        found: Any = [limited[id(one)] for one in given]
        return found[0] if is_for_all else found

    def reading(self, tools: Sequence[Any] | None, on_finish: OnFinish | None = None) -> OnFinish:
        """Return what is to be called with each output of a chat: it can then make its messages.

        tools: of the chat. on_finish: what is called afterwards.
        """
        schemas = cache(lambda: schemas_of(tools))

        def finish(output: Any) -> Any:
            self._read(output, schemas)
            return None if on_finish is None else on_finish(output)

        return finish

    def expect(self, request_id: int, tools: Sequence[Any] | None) -> int:
        """Note that a request is a chat, and return its id."""
        self._chats[request_id] = self.reading(tools)
        return request_id

    def read_expected(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Return all outputs, and have those of chats make their messages."""
        for output in outputs:
            if output.request_id in self._chats:
                self._chats.pop(output.request_id)(output)
        return outputs

    def _read(self, output: RequestOutput, schemas: Schemas) -> None:
        for sample in output.outputs:
            make_later(sample, partial(self._message, output.prompt, output.prompt_token_ids, schemas))

    def telling_parts(self, requests: Sequence[PreparedRequest]) -> Callable[[StreamChunk], StreamChunk]:
        """Return a function that tells each chunk of a stream its part. requests: the streamed ones."""
        followed: dict[tuple[int, int], Followed] = {}

        def tell(chunk: StreamChunk) -> StreamChunk:
            key = chunk.index, chunk.sample
            one = followed.pop(key, None) or Followed(partial(self._begin, requests[chunk.index]))
            if chunk.finish_reason is None:
                followed[key] = one
            return one.add(chunk)

        return tell

    def _begin(self, request: PreparedRequest) -> tuple[Splitter, Any] | None:
        """Return a splitter and a detokenizer of a request's answer; None where no family is known."""
        tokenizer = self._processor.tokenizer
        if tokenizer is None or not isinstance(self.template, Family):
            return None
        prompt = request.token_ids
        text = tokenizer.decode(prompt, skip_special_tokens=False) if request.prompt is None else request.prompt
        return begin(self.template, text), tokenizer.detokenizer(skip_special_tokens=False, prompt=prompt)

    def _message(
        self, prompt: str | None, prompt_ids: list[int], schemas: Schemas, sample: CompletionOutput
    ) -> Message:
        tokenizer, template = self._processor.tokenizer, self.template
        if tokenizer is None or template is None:
            return message_of(sample.text, None)
        before = tokenizer.decode(prompt_ids, skip_special_tokens=False) if prompt is None else prompt
        return message_of(self._text(tokenizer, prompt_ids, sample), template, before, schemas())

    def _text(self, tokenizer: Tokenizer, prompt: list[int], sample: CompletionOutput) -> str:
        """Return the text of a completion with special tokens, without what stopped it."""

        def decode(token_ids: list[int]) -> str:
            return tokenizer.detokenizer(skip_special_tokens=False, prompt=prompt).decode(token_ids, final=True)

        token_ids, stop = sample.token_ids, sample.stop_reason
        text = decode(token_ids)
        if sample.finish_reason != "stop" or not token_ids:
            return text
        without_last = decode(token_ids[:-1])
        if isinstance(stop, str):  # the last token has completed it
            start = text.find(stop, max(0, len(without_last) - len(stop) + 1))
            return text[: start + len(stop) if sample.text.endswith(stop) else start] if start >= 0 else text
        is_stop = token_ids[-1] == stop or token_ids[-1] in self._processor.stop_token_ids
        is_shown = bool(sample.text) and sample.text.endswith(text[len(without_last) :] or "\0")
        return without_last if is_stop and not is_shown else text


class Followed:
    """Follows one completion of a stream, once a part of it is asked for. start: returns a splitter and detokenizer."""

    def __init__(self, start: Callable[[], tuple[Splitter, Any] | None]) -> None:
        self._start = start
        self._token_ids: list[int] = []
        self._started: tuple[Splitter, Any] | None = None
        self._ends: list[int] = []  # of the tokens that were read: where their text ends

    def add(self, chunk: StreamChunk) -> StreamChunk:
        start = len(self._token_ids)
        self._token_ids += chunk.token_ids
        make_later(chunk, lambda _: self._part(start, len(chunk.token_ids) + start))
        return chunk

    def _part(self, start: int, end: int) -> Part | None:
        """Return the part that the tokens from `start` to before `end` end in."""
        if self._started is None and not self._ends:
            self._started = self._start()
            self._ends = [len(self._started[0].text)] if self._started else [0]
        if self._started is None:
            return None
        splitter, detokenizer = self._started
        for token_id in self._token_ids[len(self._ends) - 1 : end]:
            splitter.feed(detokenizer.decode([token_id]))
            self._ends.append(len(splitter.text))
        return splitter.part_of(self._ends[start], self._ends[end])
