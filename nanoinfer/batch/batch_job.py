"""A file of requests in, a file of answers out: for jobs that take hours, and are killed and started again.

Lines are read as the engine has room for them, so files may be larger than memory, and each answer is written by the
step that finishes it. See `utils/job_files.py` for what a job started again knows.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from nanoinfer.batch.job_files import MAX_LINE_BYTES, BatchOutput, Line, read_lines
from nanoinfer.errors import JobError, RequestError
from nanoinfer.executor.interrupts import postponed_interrupt
from nanoinfer.llm import LLM, Progress
from nanoinfer.outputs import RequestOutput
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.chat import render_chats

ENDPOINTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
IGNORED = {"model", "user", "metadata"}  # of a body
CHAT_OPTIONS = ("tools", "chat_template_kwargs")
SAMPLING_FIELDS = [field.name for field in fields(SamplingParams)]
MAX_MESSAGE = 1000  # characters of an error that are written


class Asked(NamedTuple):
    """A line that is in the engine."""

    line: Line
    custom_id: str
    is_chat: bool


@dataclass(slots=True)
class Summary:
    """What became of a job. Lines and errors are those of all its runs, tokens and seconds those of this one."""

    num_lines: int
    num_before: int  # lines that were done already
    num_done: int = 0  # these included
    num_errors: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    seconds: float = 0.0
    end: str = "finished"  # or "interrupted", "too many errors"

    def __str__(self) -> str:
        return (
            f"{self.end}: {self.num_done} of {self.num_lines} lines are done ({self.num_before} before this run), "
            f"{self.num_errors} with errors; {self.num_prompt_tokens} tokens in and {self.num_generated_tokens} out in "
            f"{self.seconds:.1f} s, {self.num_generated_tokens / max(self.seconds, 1e-9):.0f} out a second"
        )


def run_batch(
    load: Callable[[], LLM],
    input_path: Path,
    output_path: Path,
    *,
    settings: str = "",
    overrides: dict[str, Any] | None = None,
    max_errors: int | None = None,
    use_tqdm: bool = True,
) -> Summary:
    """Answer each line of the input that the output does not have yet; a line that is no request gets an error record.

    load: makes the LLM, once it is clear that there is work. settings: a job goes on with the same ones only.
    overrides: sampling parameters, in place of those that the model recommends, for lines that do not say. max_errors:
    stop at more error records than that. Ctrl-C stops after the step that runs. Raises JobError where input or output
    cannot be used.
    """
    overrides = overrides or {}
    SamplingParams(**overrides)  # raises before the model is loaded
    if output_path.suffix == ".gz":
        raise JobError(f"the output {output_path} would not be gzipped; choose {output_path.with_suffix('')}")
    if input_path.resolve() == output_path.resolve():
        raise JobError(f"input and output are the same file, {input_path}; choose another output")
    if input_path.exists() and not input_path.is_file():
        raise JobError(f"the input {input_path} is no file, so it cannot be read twice; write it to one first")
    if max_errors is not None and max_errors < 0:
        raise JobError(f"max_errors={max_errors} must be at least 0; use 0 to stop at the first error")
    settings = f"{settings} {overrides}"
    with closing(BatchOutput(output_path)) as output:
        summary = Summary(output.count(read_lines(input_path, settings)), output.num_records)
        limit = math.inf if max_errors is None else max_errors
        if output.num_records < summary.num_lines and output.num_errors <= limit:
            with load() as llm:
                started = time.monotonic()
                pending = (line for line in read_lines(input_path, settings) if not output.has(line))
                job = Job(llm, output, replace(llm.default_sampling_params, **overrides), limit)
                job.run(pending, summary, use_tqdm)
                summary.seconds = time.monotonic() - started
        summary.num_done, summary.num_errors = output.num_records, output.num_errors
        if summary.end == "finished" and output.num_errors > limit:
            summary.end = "too many errors"
        elif summary.end == "finished" and output.num_records < summary.num_lines:
            raise JobError(
                f"the input had {summary.num_lines} lines when the job began, and {output.num_records} are done: it "
                "was changed meanwhile; start the job again"
            )
        return summary


class Job:
    """The lines that are left, and those that the engine has."""

    def __init__(self, llm: LLM, output: BatchOutput, base: SamplingParams, max_errors: float) -> None:
        self._llm, self._output, self._base, self._max_errors = llm, output, base, max_errors
        self._asked: dict[int, Asked] = {}  # by request id
        # A full running set, and as many that wait: rows are refilled from them in one step.
        self._window = 2 * llm.engine.config.max_num_seqs

    def run(self, pending: Iterator[Line], summary: Summary, use_tqdm: bool) -> None:
        """Fill the engine up, run a step and write what it finished, until nothing is left or too much is wrong."""
        pending = takewhile(lambda _: self._output.num_errors <= self._max_errors, pending)
        with Progress(self._llm.engine.stats, summary.num_lines, use_tqdm, summary.num_before) as progress:
            try:
                is_left = True
                while is_left and self._output.num_errors <= self._max_errors:
                    with postponed_interrupt():  # what has finished is written first
                        is_left = bool(self._asked)
                        for line in islice(pending, self._window - len(self._asked)):
                            self._ask(line)
                            is_left = True
                        for output in self._llm.step() if self._asked else []:
                            self._answer(output, summary)
                    progress.show(self._output.num_records)
            except KeyboardInterrupt:
                summary.end = "interrupted"

    def _ask(self, line: Line) -> None:
        """Queue the request of a line, or write what is wrong with it."""
        custom_id = f"line-{line.number}"
        engine = self._llm.engine
        try:
            content = parse_line(line)
            custom_id = content.pop("custom_id", None) or custom_id
            body = parse_body(content)
            params = replace(self._base, **{name: body[name] for name in SAMPLING_FIELDS if name in body})
            if params.seed is None:  # one for each line: what is drawn does not depend on where the job was interrupted
                seed = xxhash.xxh64_intdigest(b"%d" % line.number, engine.config.seed % 2**64) >> 1
                params = replace(params, seed=seed)
            is_chat = "messages" in body
            if is_chat:
                options = {name: body[name] for name in CHAT_OPTIONS if name in body}
                texts = render_chats(self._llm._require_tokenizer(), [body["messages"]], **options)
                [body["prompt"]] = self._llm._encode([*texts], add_special_tokens=False)
            self._asked[self._llm.add_request(body["prompt"], params)] = Asked(line, custom_id, is_chat)
        except (RequestError, RecursionError) as error:  # the latter where values deep in one another are shown
            self._fail(line, custom_id, "invalid_request", str(error))

    def _answer(self, output: RequestOutput, summary: Summary) -> None:
        """Write what became of a request, in OpenAI's form; a choice without text has its token_ids."""
        line, custom_id, is_chat = self._asked.pop(output.request_id)
        if any(choice.finish_reason == "error" for choice in output.outputs):
            message = f"the logits are NaN or infinite after {len(output.token_ids)} tokens"
            return self._fail(line, custom_id, "model_error", message)
        choices = []
        for choice in output.outputs:
            text = {"message": {"role": "assistant", "content": choice.text}} if is_chat else {"text": choice.text}
            reasons = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            token_ids = {} if choice.text else {"token_ids": choice.token_ids}
            choices.append({"index": choice.index, **text, **token_ids, "logprobs": choice.logprobs, **reasons})
        num_in, num_out = len(output.prompt_token_ids), sum(len(choice.token_ids) for choice in output.outputs)
        body = {
            "id": line.id,
            "model": self._llm.engine.config.model,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "choices": choices,
            **({} if output.prompt_logprobs is None else {"prompt_logprobs": output.prompt_logprobs}),
            "usage": {"prompt_tokens": num_in, "completion_tokens": num_out, "total_tokens": num_in + num_out},
        }
        response = {"status_code": 200, "request_id": str(output.request_id), "body": body}
        self._output.write(line, {"custom_id": custom_id, "response": response, "error": None})
        summary.num_prompt_tokens += num_in
        summary.num_generated_tokens += num_out

    def _fail(self, line: Line, custom_id: str, code: str, message: str) -> None:
        error = {"code": code, "message": message[:MAX_MESSAGE], "line": line.number}
        self._output.write(line, {"custom_id": custom_id, "response": None, "error": error})


def parse_line(line: Line) -> dict[str, Any]:
    """The object in a line. Raises RequestError."""
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


def parse_body(content: dict[str, Any]) -> dict[str, Any]:
    """What a line asks for, in OpenAI's batch format or plainly as a body alone. Raises RequestError.

    It has messages or a prompt, for messages perhaps CHAT_OPTIONS, and fields of SamplingParams.
    """
    body, needed = content, ""
    if "body" in content:
        body, url, method = content["body"], content.get("url"), content.get("method", "POST")
        beside = {name for name, value in content.items() if value is not None} - {"body", "url", "method", *IGNORED}
        if beside:
            raise RequestError(f"unknown fields beside body: {', '.join(sorted(beside))}; they belong in it")
        if method != "POST" or not isinstance(url, str) or url not in ENDPOINTS:
            raise RequestError(f"method={method!r}, url={url!r}; served are POST and {', '.join(ENDPOINTS)}")
        if not isinstance(body, dict):
            raise RequestError(f"body is a {type(body).__name__}, not an object")
        needed = ENDPOINTS[url]
    # OpenAI's null means a field's default.
    body = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    given = [name for name in ENDPOINTS.values() if name in body]
    if len(given) != 1 or needed not in ("", *given):
        found = " and ".join(given) or "neither messages nor prompt"
        raise RequestError(f"there is {found}; give {needed or 'one of them'}")
    if not isinstance(body.get("messages", []), list):
        raise RequestError(f"messages is a {type(body['messages']).__name__}; give a list of messages")
    if body.get("stream") is False:
        del body["stream"]
    if isinstance(body.get("logprobs"), bool):  # a chat's, which gives their number apart
        number = body.pop("top_logprobs", 0)
        body |= {"logprobs": number} if body.pop("logprobs") else {}
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise RequestError("there are max_tokens and max_completion_tokens; give one of them")
        body["max_tokens"] = body.pop("max_completion_tokens")
    others = given if given == ["prompt"] else [*given, *CHAT_OPTIONS]
    if unknown := sorted(set(body) - {*SAMPLING_FIELDS, *others}):
        raise RequestError(f"unknown fields: {', '.join(unknown)}; known are {', '.join(sorted(SAMPLING_FIELDS))}")
    return body
