"""Answers a file of requests in a file of answers, in jobs that take hours, and are killed and started again.

Lines are read as the engine has room for them, so files may be larger than memory, and each answer is written by the
step that finishes it. A few lines are read ahead, so that their grammars are compiled while steps run. See
`job_files.py` for what a job started again knows, and `openai_format.py` for the lines.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from nanoinfer.batch.job_files import BatchOutput, Line, Settings, read_lines
from nanoinfer.batch.openai_format import (
    CHAT_OPTIONS,
    SAMPLING_FIELDS,
    TOOL_CHOICE,
    embeddings_body,
    model_of,
    params_to_echo,
    parse_body,
    parse_line,
    response_body,
)
from nanoinfer.engine.interrupts import Terminated, postponed_interrupt
from nanoinfer.engine.request_queue import Inbox
from nanoinfer.errors import JobError, NanoinferError, RequestError
from nanoinfer.garbage import rare_collections
from nanoinfer.integers import ceil_div
from nanoinfer.lora.lora_request import LoRARequest
from nanoinfer.outputs import RequestOutput
from nanoinfer.pooling_params import PoolingParams
from nanoinfer.progress import Progress
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.image_parts import has_images
from nanoinfer.text.prompts import PreparedRequest
from nanoinfer.text.response_reader import ResponseReader

if TYPE_CHECKING:
    from nanoinfer.llm import LLM  # which imports PyTorch; a wrong input is noticed without

logger = logging.getLogger("nanoinfer")

MAX_MESSAGE = 1000  # characters of an error that are written
NUM_CHECKED = 100  # lines that are read before the model is loaded
MAX_CHOICES = 10_000  # of a line; as many as one prompt may have samples
MAX_AHEAD = 128  # lines that are read and wait; fewer than the grammars that are kept
# Counted up by a version that answers the same lines otherwise, since its prompts, grammars or defaults are others. So
# jobs of older versions do not go on; theirs have no such number.
ANSWERS_VERSION = 2


class Question(NamedTuple):
    """Holds a line that was read and waits for its grammar, for its images, or for room in the engine."""

    line: Line
    custom_id: str
    body: dict[str, Any]
    params: SamplingParams
    compiling: Future[Any]  # raises what is wrong with the grammar; of a line with images, returns its requests
    lora: LoRARequest | None = None  # the adapter that answers


@dataclass(slots=True)
class Asked:
    """Holds a line that is in the engine, and the outputs of its prompts as they come."""

    question: Question
    num_requests: int
    outputs: list[RequestOutput] = field(default_factory=list)


@dataclass(slots=True)
class Summary:
    """Says what became of a job. Numbers of lines count all its runs; tokens and seconds are those of this one."""

    num_lines: int
    num_before: int  # lines that were done already
    num_done: int = 0  # these included
    num_errors: int = 0
    num_cut: int = 0  # lines with an answer that its length limit ended
    num_duplicates: int = 0  # results whose custom_id an earlier one has
    commonest_error: str | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    seconds: float = 0.0
    end: str = "finished"  # or "interrupted", "terminated", "too many errors"

    def __str__(self) -> str:
        plural = "" if self.num_duplicates == 1 else "s"
        duplicates = f"{self.num_duplicates} duplicate custom_id{plural}, " if self.num_duplicates else ""
        return (
            f"{self.end}: {self.num_done} of {self.num_lines} lines are done ({self.num_before} before this run), "
            f"{self.num_errors} with errors, {duplicates}{self.num_cut} cut by max_tokens or max_model_len; "
            f"{self.num_prompt_tokens} tokens in and {self.num_generated_tokens} out in {self.seconds:.1f} s, "
            f"{self.num_generated_tokens / max(self.seconds, 1e-9):.0f} out a second"
        )


def run_batch(
    load: "Callable[[], LLM]",
    input_path: Path,
    output_path: Path,
    *,
    settings: Settings | None = None,
    loras: Mapping[str, str] | None = None,
    overrides: dict[str, Any] | None = None,
    system: str | None = None,
    max_errors: int | None = None,
    limit: int | None = None,
    retry_errors: bool = False,
    use_tqdm: bool = True,
) -> Summary:
    """Answer each line of the input that the output does not have yet; a line that is no request gets an error record.

    Where none of the first lines is a request, the input is refused before anything is loaded.

    load: makes the LLM, once it is clear that there is work.
    settings: what the answers depend on beside the other arguments; a job goes on with the same ones only.
    loras: folders of adapters by the names that lines may have as `model`; other names are errors then, but for that
        of the LLM itself. The LLM has enable_lora.
    overrides: sampling parameters, in place of those that the model recommends, for lines that do not say.
    system: the system message of chats that have none.
    max_errors: stop at more error records than that.
    limit: answer the first so many lines alone.
    retry_errors: ask lines again whose record is an error.

    Ctrl-C stops after the step that runs. Raises JobError where input or output cannot be used.
    """
    overrides = overrides or {}
    if output_path.suffix == ".gz":
        raise JobError(f"the output {output_path} would not be gzipped; choose {output_path.with_suffix('')}")
    if input_path.resolve() == output_path.resolve():
        raise JobError(f"input and output are the same file, {input_path}; choose another output")
    if max_errors is not None and max_errors < 0:
        raise JobError(f"max_errors={max_errors} must be at least 0; use 0 to stop at the first error")
    check_input(input_path, overrides, limit)
    settings = all_settings(settings or {}, overrides, system, loras)
    with BatchOutput(output_path, settings, retry_errors) as output:
        summary = Summary(*output.count(read_lines(input_path, settings), limit))
        if output.num_records == 0:
            check_first_lines(input_path)
        most_errors, num_records = math.inf if max_errors is None else max_errors, output.num_records
        if summary.num_before < summary.num_lines and output.num_errors <= most_errors:
            with load() as llm:
                started = time.monotonic()
                output.drop_errors()
                pending = (line for line in islice(read_lines(input_path, settings), limit) if not output.has(line))
                job = Job(llm, output, replace(llm.default_sampling_params, **overrides), most_errors, system, loras)
                for lora in job.loras.values():
                    llm.add_lora(lora)
                job.run(pending, summary, use_tqdm)
                summary.seconds = time.monotonic() - started
        summary.num_done = summary.num_before + output.num_records - num_records
        summary.num_errors, summary.num_cut = output.num_errors, output.num_cut
        summary.num_duplicates, summary.commonest_error = output.count_duplicates(), output.commonest_error()
        if summary.end == "finished" and output.num_errors > most_errors:
            summary.end = "too many errors"
        elif summary.end == "finished" and summary.num_done < summary.num_lines:
            raise JobError(
                f"the input had {summary.num_lines} lines when the job began, and {summary.num_done} are done: it "
                "was changed meanwhile; start the job again"
            )
        return summary


def all_settings(
    settings: Settings, overrides: dict[str, Any], system: str | None, loras: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings that the answers of a job depend on, by name; those that are not given are left out."""
    given = {name: "none" if value is None else value for name, value in overrides.items()}
    said = {} if system is None else {"system": system}
    adapters = {"lora": " ".join(f"{name}={folder}" for name, folder in sorted(loras.items()))} if loras else {}
    return {"answers_version": ANSWERS_VERSION, **settings, **given, **said, **adapters}


def check_input(path: Path, overrides: dict[str, Any], limit: int | None) -> None:
    """Raise JobError or RequestError for arguments of `run_batch` that are wrong, before the model is looked for."""
    SamplingParams(**overrides)
    if path.exists() and not path.is_file():
        raise JobError(f"the input {path} is no file, so it cannot be read twice; write it to one first")
    if limit is not None and limit < 1:
        raise JobError(f"limit={limit} must be at least 1; leave it out for all lines")


def check_first_lines(path: Path) -> None:
    """Raise JobError if none of the first lines is a request: the file is the wrong one, or all lines are wrong."""
    first_error = None
    for line in islice(read_lines(path, {}), NUM_CHECKED):
        try:
            content = parse_line(line)
            content.pop("custom_id", None)
            parse_body(content)
            return
        except (RequestError, RecursionError) as error:  # one bad line gets an error record
            first_error = first_error or JobError(f"line {line.number} of {path}: {error}")
        except Exception:  # a bug, which the job logs
            return
    if first_error is not None:
        raise first_error


class Job:
    """Feeds the lines that are left to the engine, and writes what becomes of them."""

    def __init__(
        self,
        llm: "LLM",
        output: BatchOutput,
        base: SamplingParams,
        max_errors: float,
        system: str | None = None,
        loras: Mapping[str, str] | None = None,
    ) -> None:
        self._llm, self._output, self._base, self._max_errors = llm, output, base, max_errors
        self.loras = {
            name: LoRARequest(name, number, folder) for number, (name, folder) in enumerate((loras or {}).items(), 1)
        }
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._queue, self._preparer, self._inbox = llm.queue, llm.preparer, Inbox()
        self._response_reader = ResponseReader(llm.config.response_template, llm.preparer.prompt_processor)
        self.asked: dict[int, Asked] = {}  # by request id
        self._logged = set[type[Exception]]()  # bugs whose traceback the log has
        # Lines whose adapter waits for a slot keep no row full, so with more adapters than slots more lines are queued.
        self._window = self._queue.capacity * max(1, ceil_div(len(self.loras), llm.config.max_loras))
        self._ahead: list[Question] = []
        self._background = ThreadPoolExecutor(1, thread_name_prefix="nanoinfer-grammars")
        self._compiled: Future[Any] = Future()  # of all that have no grammar
        self._compiled.set_result(None)
        self._image_reader = llm.preparer.prompt_processor.image_reader
        # They wait for the reader's own threads most of the time.
        num_threads = 1 if self._image_reader is None else 2 * self._image_reader.num_workers
        self._with_images = ThreadPoolExecutor(num_threads, thread_name_prefix="nanoinfer-images")

    @rare_collections()
    def run(self, pending: Iterator[Line], summary: Summary, use_tqdm: bool) -> None:
        """Fill the engine up, run a step and write what it finished, until nothing is left or too much is wrong."""
        pending = takewhile(lambda _: self._output.num_errors <= self._max_errors, pending)
        num_others = self._output.num_records - summary.num_before  # records of lines beyond the limit
        with Progress(self._llm.get_metrics, summary.num_lines, use_tqdm, summary.num_before) as progress:
            try:
                is_left = True
                while is_left and self._output.num_errors <= self._max_errors:
                    with postponed_interrupt():  # what has finished is written first
                        is_left = self._feed(pending)
                        self.serve(summary)
                    if not self.asked:
                        wait([question.compiling for question in self._ahead], return_when=FIRST_COMPLETED)
                    progress.show(self._output.num_records - num_others)
            except KeyboardInterrupt as error:
                summary.end = "terminated" if isinstance(error, Terminated) else "interrupted"
            finally:
                self._background.shutdown(cancel_futures=True)
                self._with_images.shutdown(wait=False, cancel_futures=True)

    def _feed(self, pending: Iterator[Line]) -> bool:
        """Read on, and queue what is ready while there is room; return whether anything was read or is left."""
        known, self._ahead, is_left = self._ahead, [], bool(self.asked)
        for question in chain(known, map(self.read, islice(pending, self._num_to_read(len(known))))):
            is_left = True
            if question is None:
                continue
            if len(self.asked) < self._window and question.compiling.done():
                self.ask(question)
            else:
                self._ahead.append(question)
                if len(self._ahead) == MAX_AHEAD:
                    break
        return is_left

    def _num_to_read(self, num_ahead: int) -> int:
        """Return how many lines may be read now: host memory holds a part of their images alone."""
        if self._image_reader is None:
            return self._window
        num_lines = max(4 * self._image_reader.num_workers - num_ahead, 0)
        while num_lines and not self._image_reader.has_room(num_ahead + num_lines):
            num_lines //= 2
        return num_lines or int(not (self.asked or num_ahead))  # one at least where nothing else would go on

    def read(self, line: Line) -> Question | None:
        """Return a line's question, whose grammar or images threads prepare; for a wrong line, write an error.

        Returns None then.
        """
        custom_id = f"line-{line.number}"
        try:
            content = parse_line(line)
            custom_id = content.pop("custom_id", None) or custom_id
            lora, body = self._lora_of(content), parse_body(content)
            params = replace(self._base, **{name: body[name] for name in SAMPLING_FIELDS if name in body})
            if TOOL_CHOICE in body:
                params = self._response_reader.with_tool_choice(params, body["tools"], body[TOOL_CHOICE])
            prompts = [body["messages"]] if "messages" in body else body.get("prompt") or body["input"]
            if len(prompts) * params.n > MAX_CHOICES:
                what = f"{len(prompts)} prompts with n={params.n}"
                raise RequestError(f"{what} make more than {MAX_CHOICES} choices; give fewer in a line")
            compiling = self._compiled
            if params.structured_outputs is not None:
                compiling = self._background.submit(self._preparer.compile_grammars, [params])
            question = Question(line, custom_id, body, params, compiling, lora)
            if self._image_reader is not None and any(map(has_images, prompts)):
                return question._replace(compiling=self._with_images.submit(self._prepare, question))
            return question
        except Exception as error:
            self._fail(line, custom_id, error)
            return None

    def _lora_of(self, content: dict[str, Any]) -> LoRARequest | None:
        """Return the adapter that a line names as its model. Raises RequestError for a name that is not known."""
        model = model_of(content) if self.loras else None
        if model in (None, self._llm.config.model):
            return None
        if model not in self.loras:
            known = ", ".join(self.loras)
            raise RequestError(
                f"model={model!r} is no adapter of this job, nor {self._llm.config.model!r}; known are {known}"
            )
        return self.loras[model]

    def ask(self, question: Question) -> None:
        """Queue the requests of a line, or write what is wrong with it."""
        if requests := self.prepare(question):
            asked = Asked(question, len(requests))
            self.asked |= dict.fromkeys(self._queue.add_requests(requests, self._inbox), asked)

    def prepare(self, question: Question) -> list[PreparedRequest]:
        """Return the requests of a line once its grammar is compiled; for a wrong one, write an error and return []."""
        try:
            requests = question.compiling.result()  # a grammar is kept, so that `_prepare` finds it
            return self._prepare(question) if requests is None else requests
        except Exception as error:
            self._fail(question.line, question.custom_id, error)
            return []

    def _prepare(self, question: Question) -> list[PreparedRequest]:
        """Return the requests of a line. Raises RequestError for what cannot be served."""
        body, lora = question.body, question.lora
        if "input" in body:
            params = PoolingParams(dimensions=body.get("dimensions"))
            from nanoinfer.pooling_calls.pooled_output import PooledEmbedding  # which imports PyTorch

            options: dict[str, Any] = {"at_once": True, "lora_request": lora}
            return self._llm.pooling_calls.prepare(PooledEmbedding, body["input"], params, **options).take()
        if "messages" in body:
            template_options = {name: body[name] for name in CHAT_OPTIONS if name in body}
            messages, chat_params = self._with_system(body["messages"]), self._params(question)
            return self._preparer.prepare_chat(messages, chat_params, template_options, lora_request=lora)
        self._preparer.prompt_processor.check_params(question.params)  # what is wrong is said once, not for each prompt
        all_params = [self._params(question, index) for index in range(len(body["prompt"]))]
        return self._preparer.prepare(body["prompt"], all_params, lora_request=lora)

    def _params(self, question: Question, index: int = 0) -> SamplingParams:
        """Return the sampling parameters of one prompt of a line."""
        params = params_to_echo(question.params) if question.body.get("echo") else question.params
        if params.seed is None:  # made from the line's number: samples do not depend on where the job was interrupted
            place = f"{question.line.number}.{index}" if index else f"{question.line.number}"
            seed = xxhash.xxh64_intdigest(place.encode(), self._llm.config.seed % 2**64) >> 1
            params = replace(params, seed=seed)
        return params

    def serve(self, summary: Summary) -> None:
        """Run a step if lines are in the engine, and write what has finished."""
        if self.asked:
            self._queue.step()
        for output in self._queue.collect(self._inbox):
            self._answer(output, summary)

    def _with_system(self, messages: list[Any]) -> list[Any]:
        """Begin a chat with the job's system message, unless it has one or has no message at all."""
        has_one = any(isinstance(message, dict) and message.get("role") == "system" for message in messages)
        return messages if has_one or not messages else [*self._system, *messages]

    def _answer(self, output: RequestOutput, summary: Summary) -> None:
        """Write what became of a line, once all its requests have finished."""
        asked = self.asked.pop(output.request_id)
        asked.outputs.append(output)
        if len(asked.outputs) < asked.num_requests:
            return
        line, custom_id = asked.question.line, asked.question.custom_id
        outputs: list[Any] = sorted(asked.outputs, key=lambda output: output.request_id)
        try:
            content = self._response_body(asked.question, outputs)
        except Exception as error:
            return self._fail(line, custom_id, error)
        response = {"status_code": 200, "request_id": str(outputs[0].request_id), "body": content}
        self._output.write(line, {"custom_id": custom_id, "response": response, "error": None})
        summary.num_prompt_tokens += content["usage"]["prompt_tokens"]
        summary.num_generated_tokens += content["usage"].get("completion_tokens", 0)

    def _response_body(self, question: Question, outputs: list[Any]) -> dict[str, Any]:
        """Return the body of the answer to a line. Raises RequestError where one of its outputs has failed."""
        body, model = question.body, question.lora.lora_name if question.lora else self._llm.config.model
        if "input" in body:
            if not all(math.isfinite(output.embedding.sum()) for output in outputs):
                raise RequestError("the embedding is NaN or infinite", "model_error")
            return embeddings_body(outputs, body, model)
        if failed := [choice for output in outputs for choice in output.outputs if choice.error is not None]:
            raise RequestError(str(failed[0].error), failed[0].error_kind or "model_error")
        entries = {"id": question.line.id, "model": model, "created": int(time.time())}
        echo = self._text if body.get("echo") else None
        # Without the option, answers stay as they were before there was one.
        is_split = "messages" in body and (self._llm.config.response_template is not None or TOOL_CHOICE in body)
        for output in outputs if is_split else ():
            self._response_reader.reading(body.get("tools"))(output)
        return response_body(outputs, question.params, "messages" in body, echo, is_split, **entries)

    def _text(self, token_ids: list[int]) -> str:
        """Return the text of a prompt that was given as token ids; "" where there is no tokenizer."""
        return "" if self._llm.tokenizer is None else self._llm.decode(token_ids, skip_special_tokens=False)

    def _fail(self, line: Line, custom_id: str, error: Exception) -> None:
        """Write the error record of a line. An error that is a bug is logged too, the first of each kind.

        Raises an error of the engine or of the output, which other lines would have as well.
        """
        # RecursionError: values that are deep in one another are shown, or compiled.
        if not isinstance(error, RequestError | RecursionError):
            if isinstance(error, NanoinferError):
                raise error
            if type(error) not in self._logged:
                self._logged.add(type(error))
                logger.error("line %d could not be served, which is a bug", line.number, exc_info=error)
            shown = f"{type(error).__name__}: {error}"
            error = RequestError(f"nanoinfer has a bug that this line meets ({shown}); report it", "internal_error")
        code, message = getattr(error, "kind", "invalid_request"), str(error)[:MAX_MESSAGE]
        record = {"code": code, "message": message, "line": line.number}
        self._output.write(line, {"custom_id": custom_id, "response": None, "error": record})
