"""Answers as messages: {"role", "content", "reasoning", "tool_calls"}, as OpenAI's clients read them.

Families of models are read by tables and a splitter of our own, which work with every version of transformers and lose
nothing of a text that is broken or cut. A response template, which some checkpoints have, is read by transformers' own
parser, which came with version 5.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nanoinfer.errors import RequestError
from nanoinfer.responses.call_formats import Call
from nanoinfer.responses.families import Family, family_named, family_of
from nanoinfer.responses.splitter import HarmonySplitter, Part, Splitter, TagSplitter
from nanoinfer.responses.typed_arguments import arguments_text, dump

Message = dict[str, Any]
Template = Family | dict[str, Any]
ID_LENGTH = 9  # characters: Mistral's templates want just so many
# What vLLM, most templates and that of gpt-oss call a thought.
REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")


def parse_response(
    response: str | Sequence[int],
    response_template: str | Mapping[str, Any] | None = None,
    *,
    prompt: str | Sequence[int] | None = None,
    tools: Sequence[Any] | None = None,
    tokenizer: Any = None,
) -> Message:
    """Return what a model has answered as a message: {"role", "content", "reasoning", "tool_calls"}.

    response: the text, with its special tokens, or token ids. response_template: the name of a family of models, such
    as "qwen3", or a response template of transformers; if not given, the tokenizer's own, else the family that its chat
    template is written for. prompt: the text or the ids before the response, whose end may have begun a thought. tools:
    as in `LLM.chat`; arguments get the types of their schemas. tokenizer: of transformers; needed for ids.

    reasoning and tool_calls are None where there are none; content is None beside tool calls alone. tool_calls are as
    in OpenAI's answers: [{"id", "type", "function": {"name", "arguments"}}], with the arguments as JSON text and ids
    that follow from prompt and response. What cannot be parsed stays content; without a template, that is the whole
    text. Raises RequestError for an unknown template, for ids without a tokenizer, and for wrong tools.
    """
    text, before = as_text(response, tokenizer, "response"), as_text(prompt, tokenizer, "prompt")
    template = find_template(response_template, tokenizer)
    return message_of(text or "", template, before, schemas_of(tools))


def as_text(given: str | Sequence[int] | None, tokenizer: Any, what: str) -> str | None:
    """Return a text, or token ids as a text with special tokens. Raises RequestError for ids without a tokenizer."""
    if given is None or isinstance(given, str):
        return given
    if tokenizer is None:
        raise RequestError(f"the {what} is given as token ids, which need a tokenizer; pass tokenizer=llm.tokenizer")
    return str(tokenizer.decode([*given], skip_special_tokens=False, clean_up_tokenization_spaces=False))


def find_template(given: str | Mapping[str, Any] | None, tokenizer: Any) -> Template | None:
    """Return the template of this name, the given one, or the tokenizer's own; None where there is none."""
    if given is not None and given != "auto":
        return family_named(given) if isinstance(given, str) else dict(given)
    if isinstance(own := getattr(tokenizer, "response_template", None), dict):
        return own
    return family_of(getattr(tokenizer, "chat_template", None))


def as_tools(tools: Any) -> list[Any] | None:
    """Return the tools of a chat as a list; None stays None. Raises RequestError for what is no list.

    What each of them is to be, the chat template checks.
    """
    if tools is None:
        return None
    if tools and (isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Iterable)):
        raise RequestError(f"tools={tools!r:.200} is no list; give a list of functions, or of their JSON schemas")
    return list(tools or ())


def schemas_of(tools: Sequence[Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schemas of the tools' parameters, by the tools' names.

    Raises RequestError for what is no list, and for a function that transformers can make no schema of.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for tool in as_tools(tools) or ():
        if callable(tool):
            from transformers.utils import get_json_schema

            try:
                tool = get_json_schema(tool)
            except Exception as error:  # of several kinds: it has no docstring, no types, or others than JSON has
                raise RequestError(f"the tool {tool!r} is a function without a schema ({error}); mend it") from error
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            found[name] = parameters if isinstance(parameters, Mapping) else {}
    return found


def message_of(
    text: str,
    template: Template | None,
    before: str | None = None,
    schemas: Mapping[str, Mapping[str, Any]] | None = None,
) -> Message:
    """Return an answer as a message. before: the prompt; None if it is not known. schemas: of `schemas_of`."""
    if template is None:
        return as_message([text], [], [])
    found = _by_family(template, text, before) if isinstance(template, Family) else by_template(template, text, before)
    contents, reasonings, calls = found
    seed = hashlib.blake2b(f"{before or ''}\0{text}".encode(errors="surrogatepass"))
    return as_message(contents, reasonings, [_to_openai(call, seed, n, schemas or {}) for n, call in enumerate(calls)])


def as_message(contents: list[str], reasonings: list[str], tool_calls: list[Message]) -> Message:
    """Return a message of these parts; several pieces of one part stand below one another."""
    content = "\n".join(filter(None, contents))
    return {
        "role": "assistant",
        "content": content if content or not tool_calls else None,
        "reasoning": "\n".join(filter(None, reasonings)) or None,
        "tool_calls": tool_calls or None,
    }


# -------- Families ----------------------------------------------------------------------------------------------------


def begin(family: Family, before: str | None) -> Splitter:
    """Return a splitter for the answer that follows a prompt. It has read the part of the answer in the prompt."""
    if family.calls is None:
        splitter: Splitter = HarmonySplitter(family)
    else:
        splitter = TagSplitter(family, family.calls, is_open=before is None and family.opens_reasoning)
    if before is not None:
        starts = ((before.rfind(mark), len(mark)) for mark in family.turn_starts)
        start, length = max(starts)
        # A prompt of another kind tells only by its end whether a thought is open.
        opens = before.rstrip().endswith(family.reasoning_start)
        splitter.feed(before[start + length :] if start >= 0 else family.reasoning_start if opens else "")
    return splitter


def _by_family(family: Family, text: str, before: str | None) -> tuple[list[str], list[str], list[Call]]:
    """Return the pieces of the content and of the thought, and the tool calls."""
    splitter = begin(family, before)
    start = len(splitter.text)
    splitter.feed(text)
    splitter.close()
    pieces: dict[Part, list[str]] = {"content": [], "reasoning": []}
    calls: list[Call] = []
    spans = splitter.spans
    for before_it, span, after in zip([None, *spans], spans, [*spans[1:], None], strict=False):
        if span.end <= start or span.part is None:
            continue
        calls += span.calls
        if not span.calls:
            piece = splitter.text[max(span.start, start) : span.end]
            if family.calls is not None:  # chat templates put line breaks beside the marks
                piece = piece.lstrip("\n") if before_it and span.start >= start else piece
                piece = piece.rstrip("\n") if after and after.start < splitter.end else piece
            pieces[span.part].append(piece)
    return pieces["content"], pieces["reasoning"], calls


def _to_openai(call: Call, seed: Any, number: int, schemas: Mapping[str, Mapping[str, Any]]) -> Message:
    """Return the `number`-th tool call of an answer in OpenAI's format. seed: a hash of prompt and answer."""
    unique = seed.copy()
    unique.update(b"%d" % number)
    function = {"name": call.name, "arguments": arguments_text(call.arguments, schemas.get(call.name, {}))}
    return {"id": unique.hexdigest()[:ID_LENGTH], "type": "function", "function": function}


# -------- Response templates of transformers --------------------------------------------------------------------------


def by_template(template: Mapping[str, Any], text: str, before: str | None) -> tuple[list[str], list[str], list[Call]]:
    """Do as `_by_family`, by transformers' parser. Where that fails, the whole text is content."""
    parser = new_parser(template, before)
    try:
        events = [*parser.feed(text), *parser.finalize()[1]]
    except ValueError:  # of what a field holds
        return [text], [], []
    contents: list[str] = []
    reasonings: list[str] = []
    calls: list[Call] = []
    piece = ""
    for event in events:
        if event["type"] == "region_open":
            piece = ""
        elif event["type"] == "region_chunk":
            piece += event["text"]
        else:
            name, value = event["field"], event["value"]
            found = calls_of(value) if name == "tool_calls" else None
            if found:
                calls += found
            else:
                (reasonings if name in REASONING_FIELDS else contents).append(piece.strip())
            piece = ""
    return contents, reasonings, calls


def new_parser(template: Mapping[str, Any], before: str | None) -> Any:
    """Return transformers' parser of an answer. Raises RequestError where it has none, and for a wrong template."""
    try:
        from transformers.utils.chat_parsing import ResponseParser
    except ImportError:
        from transformers import __version__

        raise RequestError(
            f"transformers {__version__} does not read response templates; install a newer one, or name a family of "
            f"models as response_template"
        ) from None
    try:
        return ResponseParser(dict(template), prefix=before or "")
    except ValueError as error:
        raise RequestError(f"the response_template is wrong ({error}); mend it") from error


def calls_of(value: Any) -> list[Call]:
    """Return the tool calls that a field's value says; none if it says something else."""
    calls = []
    for item in value if isinstance(value, list) else [value]:
        function = item.get("function", item) if isinstance(item, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return []
        arguments = function.get("arguments")
        calls.append(Call(function["name"], arguments if isinstance(arguments, str) else dump(arguments or {})))
    return calls
