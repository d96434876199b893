"""Requests and answers as OpenAI's batch API writes them.

The answers are valid under the types of the `openai` package. Beyond OpenAI's fields, a choice has its stop_reason, a
choice without text its token_ids, a message its thought as `reasoning` and, as older clients want, `reasoning_content`,
and a body prompt_logprobs if they are asked for. The first token of an echoed prompt has null as its log-probability,
as in OpenAI's answers, though not in its types.
"""

import base64
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any

from nanoinfer.batch.job_files import MAX_LINE_BYTES, Line
from nanoinfer.errors import NOT_SUPPORTED, RequestError, find_similar, says_what_is_so
from nanoinfer.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from nanoinfer.sampling_params import FOREIGN_NAMES, SamplingParams
from nanoinfer.structured_outputs import StructuredOutputsParams
from nanoinfer.text.arguments import as_list_of_prompts
from nanoinfer.vllm_names import LINE_NAMES

ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/embeddings": "input"}
EMBEDDING_FIELDS = ("input", "dimensions", "encoding_format")
# Of a body: who asks, and how a service is to keep, cache, hurry and bill. No answer depends on these.
IGNORED = {"model", "user", "metadata", "safety_identifier", "service_tier", "store", "stream_options", "prediction"}
IGNORED |= {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt"}
WITHOUT_TOOLS = {"tool_choice": "none", "parallel_tool_calls": False}  # change nothing where there are no tools
CHAT_OPTIONS = ("tools", "chat_template_kwargs", "mm_processor_kwargs")
TOOL_CHOICE = "tool_choice"  # of a line: a call that its answer has to make
FOREIGN_FIELDS = {**FOREIGN_NAMES, **LINE_NAMES}
SAMPLING_FIELDS = [field.name for field in fields(SamplingParams) if field.name != "logits_processors"]
LOWEST_LOGPROB = -9999.0  # OpenAI's for a token that is all but impossible; JSON has no minus infinity


def parse_line(line: Line) -> dict[str, Any]:
    """Return the object in a line. Raises RequestError."""
    if line.content is None:
        raise RequestError(f"the line is longer than {MAX_LINE_BYTES} bytes; shorten it")
    try:
        content = json.loads(line.content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise RequestError(f"the line holds a {type(content).__name__}, not an object")
    if not isinstance(content.get("custom_id"), (str, type(None))):
        raise RequestError(f"custom_id={content['custom_id']!r} is not a string")
    return content


def model_of(content: dict[str, Any]) -> str | None:
    """Return which model a line names, if any."""
    body = content.get("body", content)
    model = body.get("model", content.get("model")) if isinstance(body, dict) else None
    return None if model is None else str(model)


def parse_body(content: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a line, which is in OpenAI's batch format or nothing but a body. Raises RequestError.

    The result has messages, perhaps with CHAT_OPTIONS and TOOL_CHOICE, or a list of prompts as "prompt", perhaps with
    echo; and fields of SamplingParams. Or it has a list of texts to embed as "input", and EMBEDDING_FIELDS.
    """
    body, needed = content, ""
    if "body" in content:
        body, url, method = content["body"], content.get("url"), content.get("method", "POST")
        beside = {name for name, value in content.items() if value is not None} - {"body", "url", "method", *IGNORED}
        if beside:
            raise RequestError(f"unknown fields beside body: {', '.join(sorted(beside))}; they belong in it")
        if not isinstance(url, str) or url not in ENDPOINTS:
            raise RequestError(f"url={url!r} is not served; use {' or '.join(ENDPOINTS)}")
        if method != "POST":
            raise RequestError(f"method={method!r} is not served; use 'POST'")
        if not isinstance(body, dict):
            raise RequestError(f"body is a {type(body).__name__}, not an object")
        needed = ENDPOINTS[url]
    # OpenAI's null means a field's default.
    body = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    given = [name for name in ENDPOINTS.values() if name in body]
    if len(given) != 1 or needed not in ("", *given):
        found = " and ".join(given) or "neither messages nor prompt nor input"
        raise RequestError(f"there is {found}; give {needed or 'one of them'}")
    if "input" in body:
        return _embedding_body(body)
    if not isinstance(body.get("messages", []), list):
        raise RequestError(f"messages is a {type(body['messages']).__name__}; give a list of messages")
    if "prompt" in body:
        body["prompt"] = as_list_of_prompts(body["prompt"]) or [[]]  # an empty prompt, which is refused as one
        if not isinstance(body.get("echo", False), bool):
            raise RequestError(f"echo={body['echo']!r} is not a bool; use true or false")
    if not body.get("tools"):
        body = {name: value for name, value in body.items() if WITHOUT_TOOLS.get(name, ...) != value}
    if body.get("best_of", ...) == body.get("n", 1):
        del body["best_of"]
    others = ["prompt", "echo"] if "prompt" in body else ["messages", *CHAT_OPTIONS]
    if body.get(TOOL_CHOICE) == "none":  # as in vLLM, the prompt has the tools all the same
        del body[TOOL_CHOICE]
    elif body.get("tools") and body.get(TOOL_CHOICE) not in (None, "auto"):
        others.append(TOOL_CHOICE)
    return parse_sampling(body, others)


def parse_sampling(body: dict[str, Any], others: Collection[str] = ()) -> dict[str, Any]:
    """Return sampling fields, as OpenAI or vLLM names them, as those of SamplingParams. Raises RequestError.

    others: fields that are left as they are.
    """
    body = dict(body)
    if isinstance(body.get("logprobs"), bool):  # a chat's, which gives their number apart
        number = body.pop("top_logprobs", 0)
        body |= {"logprobs": number} if body.pop("logprobs") else {}
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise RequestError("there are max_tokens and max_completion_tokens; give one of them")
        body["max_tokens"] = body.pop("max_completion_tokens")
    form = _structured_outputs(body.pop("structured_outputs", None), body.pop("response_format", None))
    body |= {} if form is None else {"structured_outputs": form}
    return _served(body, sorted([*SAMPLING_FIELDS, *others]))


def _served(body: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the known fields, if all others ask for what happens in any case. Raises RequestError if one does not."""
    unknown, reasons, has_hints = [], [], True
    for name in sorted({*body}.difference(known), key=str):
        its = FOREIGN_FIELDS.get(name, "")
        if name in FOREIGN_FIELDS and says_what_is_so(its, body[name]):
            continue
        if isinstance(its, str):
            meant = its if its in known or " " in its else find_similar(str(name), known)
            unknown.append(f"{name} (did you mean {meant!r}?)" if meant else str(name))
            has_hints &= bool(meant)
            continue
        accepted, why = its or ((), NOT_SUPPORTED)
        use = "".join(f"use {json.dumps(value)}, or " for value in accepted[:1])
        reasons.append(f"{name}={json.dumps(body[name], default=repr):.100} is not served: {why}; {use}leave it out")
    if unknown:
        listed = sorted({*known, TOOL_CHOICE}) if "tools" in known else known
        rest = "" if has_hints else f"; known are {', '.join(listed)}"
        reasons.append(f"unknown fields: {', '.join(unknown)}{rest}")
    if reasons:
        raise RequestError(". ".join(reasons))
    return {name: value for name, value in body.items() if name in known}


def _embedding_body(body: dict[str, Any]) -> dict[str, Any]:
    body = _served(body, EMBEDDING_FIELDS)
    if (encoding := body.get("encoding_format", "float")) not in ("float", "base64"):
        raise RequestError(f"encoding_format={encoding!r} is not served; use 'float' or 'base64'")
    return {**body, "input": as_list_of_prompts(body["input"]) or [[]]}


def embeddings_body(outputs: Sequence[Any], body: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the body of an answer with embeddings, the PoolingRequestOutputs of a line. body: the line's own."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    in_base64 = body.get("encoding_format") == "base64"
    vectors = (output.embedding for output in outputs)
    shown = (base64.b64encode(vector.tobytes()).decode() if in_base64 else vector.tolist() for vector in vectors)
    return {
        "object": "list",
        "model": model,
        "data": [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(shown)],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _structured_outputs(given: Any, response_format: Any) -> StructuredOutputsParams | None:
    """Return the form of an answer, from vLLM's structured_outputs or from OpenAI's response_format."""
    match response_format:
        case None | {"type": "text"}:
            options = given
        case {"type": "json_object"}:
            options = {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            options = {"json": schema}
        case _:
            raise RequestError(
                f"response_format={response_format!r}; served are the types text, json_object, and json_schema with "
                '"json_schema": {"name": ..., "schema": {...}}'
            )
    if options is None:
        return None
    if options is not given and given is not None:
        raise RequestError("there are structured_outputs and response_format; give one of them")
    if not isinstance(options, dict):
        raise RequestError(f'structured_outputs={options!r} is not an object; give {{"regex": "[a-z]+"}}, say')
    try:
        return StructuredOutputsParams(**{name: value for name, value in options.items() if value is not None})
    except TypeError as error:
        raise RequestError(f"structured_outputs={options!r}: {error}") from None


def params_to_echo(params: SamplingParams) -> SamplingParams:
    """Return the parameters for an echoed prompt: it gets log-probabilities as the completion does."""
    return replace(params, prompt_logprobs=params.num_logprobs) if params.prompt_logprobs is None else params


def response_body(
    outputs: Sequence[RequestOutput],
    params: SamplingParams,
    is_chat: bool,
    echo: Callable[[list[int]], str] | None = None,
    is_split: bool = False,
    **entries: Any,
) -> dict[str, Any]:
    """Return the body of an answer, whose choices are those of each output in turn.

    outputs: of the prompts of a line. params: what the line asked for. echo: decodes token ids, where a choice is to
    begin with its prompt. is_split: whether the message of a chat has thought, content and tool calls apart. entries:
    what else is in it: id, model, created.
    """
    samples = [(output, sample) for output in outputs for sample in output.outputs]
    choices = [_with_prompt(output, sample, echo) if echo else sample for output, sample in samples]
    num_in = sum(len(output.prompt_token_ids) for output in outputs)
    num_out = sum(len(sample.token_ids) for _, sample in samples)
    num_best = math.inf if params.logprobs == -1 else params.num_logprobs or 0
    body = {
        **entries,
        "object": "chat.completion" if is_chat else "text_completion",
        "choices": [
            {"index": index, **_choice(choice, is_chat, num_best, is_split)} for index, choice in enumerate(choices)
        ],
        "usage": {"prompt_tokens": num_in, "completion_tokens": num_out, "total_tokens": num_in + num_out},
    }
    if params.prompt_logprobs is not None:
        found = [list(output.prompt_logprobs or ()) for output in outputs]
        body["prompt_logprobs"] = found if len(found) > 1 else found[0]
    return body


def _with_prompt(
    output: RequestOutput, sample: CompletionOutput, decode: Callable[[list[int]], str]
) -> CompletionOutput:
    """Put the prompt in front of a completion.

    Its first token follows nothing, so its log-probability is NaN; where none are known, so are the others.
    """
    token_ids, logprobs = output.prompt_token_ids, sample.logprobs
    text = decode(token_ids) if output.prompt is None else output.prompt
    if logprobs is not None:
        found = output.prompt_logprobs or [None] * len(token_ids)
        of_prompt = [
            entry or {token_id: Logprob(math.nan, 0, decode([token_id]) or None)}
            for token_id, entry in zip(token_ids, found, strict=True)
        ]
        logprobs = [*of_prompt, *logprobs]
    return replace(sample, text=text + sample.text, token_ids=token_ids + sample.token_ids, logprobs=logprobs)


def _choice(choice: CompletionOutput, is_chat: bool, num_best: float, is_split: bool) -> dict[str, Any]:
    message = _message(choice) if is_split else {"role": "assistant", "content": choice.text}
    text = {"message": message} if is_chat else {"text": choice.text}
    token_ids = {} if choice.text else {"token_ids": choice.token_ids}
    logprobs = None
    if choice.logprobs is not None and is_chat:
        logprobs = _chat_logprobs(choice.token_ids, choice.logprobs, num_best)
    elif choice.logprobs is not None:
        logprobs = _completion_logprobs(choice.text, choice.token_ids, choice.logprobs)
    calls = choice.finish_reason == "stop" and message.get("tool_calls")
    reasons = {"finish_reason": "tool_calls" if calls else choice.finish_reason, "stop_reason": choice.stop_reason}
    return {**text, **token_ids, "logprobs": logprobs, **reasons}


def _message(choice: CompletionOutput) -> dict[str, Any]:
    """Return the message of a choice, without what it does not have; its content may be null."""
    message = choice.message
    if message["reasoning"] is not None:
        message = {**message, "reasoning_content": message["reasoning"]}
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def _chat_logprobs(token_ids: list[int], logprobs: Sequence[TokenLogprobs], num_best: float) -> dict[str, Any]:
    """Give each token an entry, with the likeliest ones in it."""
    content = []
    for token_id, found in zip(token_ids, logprobs, strict=True):
        top_logprobs = [
            _chat_entry(its_id, entry) for its_id, entry in _by_rank(found) if (entry.rank or 0) <= num_best
        ]
        content.append({**_chat_entry(token_id, found[token_id]), "top_logprobs": top_logprobs})
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token
    # A part of a character has no text of its own, and its bytes are not known here.
    bytes_of = None if text is None or "\ufffd" in text else [*text.encode()]
    return {"token": _token_text(token_id, entry), "logprob": _number(entry), "bytes": bytes_of}


def _completion_logprobs(text: str, token_ids: list[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Give lists with an element for each token; text_offset counts the characters of the tokens before it.

    A special token that the tokenizer has put before the text counts as no characters, since the text lacks it.
    """
    entries = [found[token_id] for token_id, found in zip(token_ids, logprobs, strict=True)]
    lengths = [len(entry.decoded_token or "") for entry in entries]
    if entries and math.isnan(entries[0].logprob) and not text.startswith(entries[0].decoded_token or ""):
        lengths[0] = 0
    return {
        "tokens": [*map(_token_text, token_ids, entries)],
        "token_logprobs": [*map(_number, entries)],
        "top_logprobs": [
            None if math.isnan(entry.logprob) else _numbers_by_text(found)
            for entry, found in zip(entries, logprobs, strict=True)
        ],
        "text_offset": [0, *accumulate(lengths)][: len(lengths)],
    }


def _numbers_by_text(found: TokenLogprobs) -> dict[str, float | None]:
    """Return log-probabilities by text. If several tokens have one text, it names the first; ids name the others."""
    owners: dict[str, int] = {}
    for token_id, entry in found.items():
        owners.setdefault(_token_text(token_id, entry), token_id)
    texts = {token_id: text for text, token_id in owners.items()}
    return {texts.get(token_id, _name(token_id)): _number(entry) for token_id, entry in _by_rank(found)}


def _by_rank(found: TokenLogprobs) -> list[tuple[int, Logprob]]:
    """Return what was found, the likeliest first, after tokens without a rank: those that the request has named."""
    return sorted(found.items(), key=lambda pair: pair[1].rank or 0)


def _token_text(token_id: int, entry: Logprob) -> str:
    return _name(token_id) if entry.decoded_token is None else entry.decoded_token


def _name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _number(entry: Logprob) -> float | None:
    return None if math.isnan(entry.logprob) else max(entry.logprob, LOWEST_LOGPROB)
