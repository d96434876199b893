"""A file of requests in, a file of answers out: for jobs that take hours, and are killed and started again.

Lines are read as the engine has room for them, so files may be larger than memory, and each answer is written by the
step that finishes it. See `utils/job_files.py` for what a job started again knows.
"""

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from nanoinfer.errors import RequestError
from nanoinfer.llm import LLM, Progress
from nanoinfer.outputs import RequestOutput
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.chat import render_chats
from nanoinfer.utils.job_files import MAX_LINE_BYTES, BatchInput, BatchOutput, Line, record_id
from nanoinfer.utils.workers import postponed_interrupt

ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
IGNORED = {"model", "user", "metadata"}  # of a body
CHAT_OPTIONS = {"tools", "chat_template_kwargs"}
SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}
MAX_MESSAGE = 1000  # characters of an error that are written


class BatchRequest(NamedTuple):
    """What a line asks for."""

    content: Any  # the messages, or the prompt
    is_chat: bool
    chat_options: dict[str, Any]
    sampling: dict[str, Any]  # fields of SamplingParams


class Asked(NamedTuple):
    """A line that is in the engine."""

    line: Line
    custom_id: str
    is_chat: bool
    has_text: bool


@dataclass(slots=True)
class Summary:
    """What became of a job. Errors are those of all its runs, tokens and seconds those of this one."""

    num_lines: int = 0
    num_before: int = 0  # lines that were done already
    num_done: int = 0  # these included
    num_errors: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    seconds: float = 0.0
    end: Literal["finished", "interrupted", "too many errors"] = "finished"


def run_batch(
    load: Callable[[], LLM],
    lines: BatchInput,
    path: Path,
    *,
    overrides: dict[str, Any] | None = None,
    max_errors: int | None = None,
    use_tqdm: bool = True,
) -> Summary:
    """Answer each line of the input that the output does not have yet; a line that is no request gets an error record.

    load: makes the LLM, once it is clear that there is work. path: of the output. overrides: sampling parameters, in
    place of those that the model recommends, for lines that do not say. max_errors: stop at more error records than
    that. Ctrl-C stops after the step that runs. Raises JobError where input or output cannot be used, and what `load`
    raises.
    """
    SamplingParams(**(overrides or {}))  # raises before the model is loaded
    with closing(BatchOutput(path)) as output:
        summary = Summary(*output.check(lines), num_errors=output.num_errors)
        summary.num_done = summary.num_before
        if max_errors is not None and output.num_errors > max_errors:
            summary.end = "too many errors"
        elif summary.num_done < summary.num_lines:
            with load() as llm:
                started = time.monotonic()
                Job(llm, lines, output, summary, overrides or {}, max_errors).run(use_tqdm)
                summary.seconds = time.monotonic() - started
        return summary


class Job:
    """The lines that are left, and those that the engine has."""

    def __init__(
        self,
        llm: LLM,
        lines: BatchInput,
        output: BatchOutput,
        summary: Summary,
        overrides: dict[str, Any],
        max_errors: int | None,
    ) -> None:
        self._llm, self._output, self._summary = llm, output, summary
        self._pending = (line for line in lines if not output.has(line))
        self._base = replace(llm.default_sampling_params, **overrides)
        self._max_errors = max_errors
        self._asked: dict[int, Asked] = {}  # by request id
        # A full running set, and as many that wait: rows are refilled from them in one step.
        self._window = 2 * llm.engine.config.max_num_seqs

    def run(self, use_tqdm: bool) -> None:
        summary = self._summary
        with Progress(self._llm.engine.stats, summary.num_lines, use_tqdm, summary.num_before) as progress:
            try:
                while summary.end == "finished":
                    with postponed_interrupt():  # what has finished is written
                        is_left = self._step()
                    progress.show(summary.num_done)
                    if not is_left:
                        break
            except KeyboardInterrupt:
                summary.end = "interrupted"

    def _step(self) -> bool:
        """Fill the engine up, run a step, and write what it finished; False when nothing is left."""
        line = None
        for line in islice(self._pending, self._window - len(self._asked)):
            self._ask(line)
            if self._max_errors is not None and self._output.num_errors > self._max_errors:
                self._summary.end = "too many errors"
                break
        for output in self._llm.step() if self._asked else []:
            self._answer(self._asked.pop(output.request_id), output)
        self._output.flush()
        self._summary.num_errors = self._output.num_errors
        return line is not None or bool(self._asked)

    def _ask(self, line: Line) -> None:
        custom_id = f"line-{line.number}"
        try:
            fields = parse_json(line)
            custom_id = read_custom_id(fields, custom_id)
            request = parse_request(fields)
            # A seed for each line: what is drawn for it does not depend on where the job was interrupted.
            seed = xxhash.xxh64_intdigest(b"%d" % line.number, self._llm.engine.config.seed % 2**64) >> 1
            seeds = {"seed": seed} if "seed" in SAMPLING_FIELDS else {}
            params = replace(self._base, **(seeds | request.sampling))
            prompt = request.content
            if request.is_chat:
                tokenizer = self._llm.engine.require_tokenizer()
                texts = render_chats(tokenizer, [prompt], **request.chat_options)
                [prompt] = self._llm.engine.encode([*texts], add_special_tokens=False)
            request_id = self._llm.add_request(prompt, params)
        except (RequestError, RecursionError) as error:
            self._fail(line, custom_id, "invalid_request", str(error) or "it is nested too deeply")
            return
        has_text = self._llm.tokenizer is not None and params.detokenize
        self._asked[request_id] = Asked(line, custom_id, request.is_chat, has_text)

    def _answer(self, asked: Asked, output: RequestOutput) -> None:
        if any(choice.finish_reason == "error" for choice in output.outputs):
            message = f"its logits are NaN or infinite after {len(output.token_ids)} tokens"
            self._fail(asked.line, asked.custom_id, "model_error", message)
            return
        body = response_body(output, asked.is_chat, asked.has_text)
        body |= {"id": record_id(asked.line), "model": self._llm.engine.config.model}
        response = {"status_code": 200, "request_id": str(output.request_id), "body": body}
        self._write(asked.line, {"custom_id": asked.custom_id, "response": response, "error": None})
        self._summary.num_prompt_tokens += body["usage"]["prompt_tokens"]
        self._summary.num_generated_tokens += body["usage"]["completion_tokens"]

    def _fail(self, line: Line, custom_id: str, code: str, message: str) -> None:
        error = {"code": code, "message": message[:MAX_MESSAGE], "line": line.number}
        self._write(line, {"custom_id": custom_id, "response": None, "error": error})

    def _write(self, line: Line, record: dict[str, Any]) -> None:
        self._output.write(line, record)
        self._summary.num_done += 1


def parse_json(line: Line) -> dict[str, Any]:
    """The object in a line. Raises RequestError."""
    if line.content is None:
        raise RequestError(f"the line is longer than {MAX_LINE_BYTES} bytes; shorten it")
    try:
        parsed = json.loads(line.content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not valid JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise RequestError(f"the line holds a {type(parsed).__name__}, not an object")
    return parsed


def read_custom_id(fields: dict[str, Any], default: str) -> str:
    """Take the custom_id out of a line's fields. Raises RequestError where it is no string."""
    custom_id = fields.pop("custom_id", None)
    if not isinstance(custom_id, (str, type(None))):
        raise RequestError(f"custom_id={custom_id!r} is not a string")
    return default if custom_id is None else custom_id


def parse_request(fields: dict[str, Any]) -> BatchRequest:
    """What a line asks for, in OpenAI's batch format or plainly as a body alone. Raises RequestError."""
    body, needed = fields, None
    if "body" in fields:
        url, method = fields.get("url"), fields.get("method", "POST")
        if method != "POST" or not isinstance(url, str) or url not in ENDPOINTS:
            raise RequestError(f"method={method!r}, url={url!r}; served are POST and {', '.join(ENDPOINTS)}")
        body, needed = fields["body"], ENDPOINTS[url]
        if not isinstance(body, dict):
            raise RequestError(f"body is a {type(body).__name__}, not an object")
    # OpenAI's null means a field's default.
    rest = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    given = [name for name in ENDPOINTS.values() if name in rest]
    if len(given) != 1 or needed not in (None, given[0]):
        raise RequestError(f"there is {' and '.join(given) or 'neither'}; give {needed or 'either messages or prompt'}")
    content, is_chat = rest.pop(given[0]), given == ["messages"]
    if is_chat and not isinstance(content, list):
        raise RequestError(f"messages is a {type(content).__name__}; give a list of messages")
    chat_options = {name: rest.pop(name) for name in CHAT_OPTIONS if is_chat and name in rest}
    if rest.get("stream") is False:
        del rest["stream"]
    if isinstance(rest.get("logprobs"), bool):  # a chat's, which says the number apart
        number = rest.pop("top_logprobs", 0)
        rest |= {"logprobs": number} if rest.pop("logprobs") else {}
    if "max_completion_tokens" in rest:
        rest["max_tokens"] = rest.pop("max_completion_tokens")
    if unknown := sorted(set(rest) - SAMPLING_FIELDS):
        raise RequestError(f"unknown fields: {', '.join(unknown)}; known are {', '.join(sorted(SAMPLING_FIELDS))}")
    return BatchRequest(content, is_chat, chat_options, rest)


def response_body(output: RequestOutput, is_chat: bool, has_text: bool) -> dict[str, Any]:
    """The body of OpenAI's response; where there is no text, with token_ids."""
    choices = []
    for choice in output.outputs:
        text = {"message": {"role": "assistant", "content": choice.text}} if is_chat else {"text": choice.text}
        token_ids = {} if has_text else {"token_ids": choice.token_ids}
        logprobs = json.loads(json.dumps(getattr(choice, "logprobs", None), default=_as_dict))
        reasons = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        choices.append({"index": choice.index, **text, **token_ids, "logprobs": logprobs, **reasons})
    num_prompt = len(output.prompt_token_ids)
    num_generated = sum(len(choice.token_ids) for choice in output.outputs)
    return {
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        },
    }


def _as_dict(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
