"""Ray Data: a dataset in, the dataset with completions out, on as many GPUs and hosts as Ray has.

    processor = build_processor(model="Qwen/Qwen3-8B", concurrency=8, preprocess=..., postprocess=...)
    processor(ray.data.read_parquet("questions")).write_parquet("answers")

Names and columns are those of `ray.data.llm`. Each actor holds one engine, and each row is a call of `LLM.agenerate`.
So rows of several batches are in the engine at once: while the last rows of one batch finish, the next batch already
runs. Between the stages a row is one pickle, because Arrow would give all rows of a block the same keys and types.
"""

import asyncio
import inspect
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from nanoinfer import LLM, ConfigError, RequestError, SamplingParams, WorkerError
from nanoinfer.batch.openai_format import parse_sampling
from nanoinfer.config import EngineConfig
from nanoinfer.errors import EngineClosedError, check_names
from nanoinfer.outputs import RequestOutput, TokenLogprobs
from nanoinfer.sampling_params import is_whole_number
from nanoinfer.text.arguments import as_prompt
from nanoinfer.text.chat import render_chat
from nanoinfer.text.columns import as_list
from nanoinfer.vllm_names import LLM_NAMES

try:
    import ray.data
    from ray import cloudpickle
except ImportError as error:
    raise ImportError(
        f"Ray Data cannot be imported ({error}); in a clone of nanoinfer, pip install -e '.[ray]'"
    ) from error

logger = logging.getLogger("nanoinfer")
CLOSING_SECONDS = 1.0  # in which the rows that were in an engine get the error that closed it

Row = dict[str, Any]
DATA_COLUMN = "__data"  # holds a row, pickled, between the stages
ERROR_COLUMN = "__inference_error__"
INPUTS = ("messages", "tokenized_prompt", "prompt")  # the first of these that a row has is what the model reads
FOREIGN_NAMES = {"model_source": "model", "engine_kwargs": "options of LLM by their names", **LLM_NAMES}
NO_OUTPUT: Row = {
    "prompt_token_ids": None,
    "num_input_tokens": 0,
    "num_cached_tokens": 0,
    "generated_tokens": [],
    "generated_text": "",
    "num_generated_tokens": 0,
    "finish_reason": "error",
    "logprobs": None,
    "prompt_logprobs": None,
    "metrics": None,
}


def build_processor(
    model: str | Path,
    *,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 128,
    max_concurrent_batches: int = 8,
    num_gpus: float | None = None,
    sampling_params: SamplingParams | Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    preprocess: Callable[[Row], Row] | None = None,
    postprocess: Callable[[Row], Row] | None = None,
    should_continue_on_error: bool = True,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
    map_batches_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> "Processor":
    """Return a function that takes a dataset and returns it with completions.

    model, options: as for `LLM`, such as tensor_parallel_size. concurrency: how many actors, each with an engine of its
    own, or the least and the most of them. batch_size: rows that are handed over and answered together.
    max_concurrent_batches: batches that are in an actor's engine at the same time. num_gpus: for each actor, perhaps a
    fraction; if not given, tensor_parallel_size where the cluster has GPUs and `device` is not "cpu", else 0. With a
    fraction, gpu_memory_utilization is 0.9 of it, unless it is given. sampling_params: for rows without their own.
    chat_template_kwargs: as in `LLM.chat`. preprocess: makes the columns that the model needs, which are added to the
    row. postprocess: makes the final row. should_continue_on_error: a row that cannot be served gets the reason
    in the column "__inference_error__", which is "" for all others, and skips postprocess; if False, it ends the job.
    preprocess_map_kwargs, postprocess_map_kwargs: for `Dataset.map`. map_batches_kwargs: for the actors, such as
    num_cpus, accelerator_type and runtime_env.

    A row needs a column messages, prompt (a text) or tokenized_prompt, and may have tools and sampling_params (a dict,
    in which None is the default, or a SamplingParams). postprocess finds prompt, prompt_token_ids, num_input_tokens,
    num_cached_tokens, generated_text, generated_tokens, num_generated_tokens, finish_reason, logprobs,
    prompt_logprobs and metrics (seconds, as in RequestMetrics) beside the row's own columns.

    Raises TypeError for an unknown option, ConfigError or RequestError for a value out of range.
    """
    own = [name for name in inspect.signature(build_processor).parameters if name != "options"]
    options = check_names(
        "build_processor", options, [*own, *(item.name for item in fields(EngineConfig))], FOREIGN_NAMES
    )
    sizes = concurrency if isinstance(concurrency, tuple) else (concurrency, concurrency)
    if len(sizes) != 2 or not all(map(is_whole_number, sizes)) or not 1 <= sizes[0] <= sizes[1]:
        raise ConfigError(f"concurrency={concurrency!r}; give a number of actors from 1 on, or the least and the most")
    for name, value in {"batch_size": batch_size, "max_concurrent_batches": max_concurrent_batches}.items():
        if not is_whole_number(value) or value < 1:
            raise ConfigError(f"{name}={value!r} must be a whole number of at least 1; leave it out for the default")
    if num_gpus is not None and 0 < num_gpus < 1:
        options = {"gpu_memory_utilization": 0.9 * num_gpus, **options}
    config = EngineConfig.from_options(model, options)
    if config.data_parallel_size > 1:
        size = config.data_parallel_size
        raise ConfigError(f"data_parallel_size={size}: an actor has one engine here; use concurrency={size}")
    if num_gpus and config.tensor_parallel_size not in (1, num_gpus):
        size = config.tensor_parallel_size
        raise ConfigError(f"num_gpus={num_gpus} for tensor_parallel_size={size}; use num_gpus={size}, or leave it out")
    engine = {
        "model": str(model),
        "options": options,
        "sampling_params": merge_params(SamplingParams(), sampling_params),
        "chat_template_kwargs": chat_template_kwargs,
        "should_continue_on_error": should_continue_on_error,
    }
    actors = ray.data.ActorPoolStrategy(
        min_size=sizes[0],
        max_size=sizes[1],
        max_concurrent_calls_per_actor=max_concurrent_batches,
        max_tasks_in_flight_per_actor=max_concurrent_batches,  # more would keep rows from the other actors
    )
    placement = {"compute": actors, "batch_size": batch_size, **(map_batches_kwargs or {})}
    if num_gpus is not None or config.device == "cpu":
        placement["num_gpus"] = num_gpus or 0
    stages = preprocess, dict(preprocess_map_kwargs or {}), postprocess, dict(postprocess_map_kwargs or {})
    return Processor(engine, config.tensor_parallel_size, placement, *stages)


@dataclass(frozen=True, slots=True)
class Processor:
    """Takes a dataset and returns it with completions. Ray computes it when it is read or written."""

    engine: Row  # arguments of EngineActor
    tensor_parallel_size: int
    placement: Row  # arguments of map_batches
    preprocess: Callable[[Row], Row] | None
    preprocess_map_kwargs: Row
    postprocess: Callable[[Row], Row] | None
    postprocess_map_kwargs: Row

    def __call__(self, dataset: Any) -> Any:
        preprocess, postprocess = self.preprocess, self.postprocess
        has_errors = self.engine["should_continue_on_error"]

        def pack(row: Row) -> Row:
            return {DATA_COLUMN: cloudpickle.dumps({**row, **preprocess(row)} if preprocess else row)}

        def unpack(packed: Row) -> Row:
            row: Row = cloudpickle.loads(packed[DATA_COLUMN])
            if reason := row.pop(ERROR_COLUMN):
                return {**row, ERROR_COLUMN: reason}
            row = postprocess(row) if postprocess else row
            return {**row, ERROR_COLUMN: ""} if has_errors else row

        num_gpus = self.tensor_parallel_size if ray.cluster_resources().get("GPU") else 0
        dataset = dataset.map(pack, **self.preprocess_map_kwargs)
        dataset = dataset.map_batches(
            EngineActor,
            fn_constructor_kwargs=self.engine,
            batch_format="pyarrow",
            **{"num_gpus": num_gpus, **self.placement},
        )
        return dataset.map(unpack, **self.postprocess_map_kwargs)


class EngineActor:
    """Answers batches of rows in an actor of Ray Data, several at the same time.

    model, options: of its LLM. sampling_params: for rows without their own. The others are as in `build_processor`.
    """

    def __init__(
        self,
        model: str,
        options: Row,
        sampling_params: SamplingParams,
        chat_template_kwargs: Mapping[str, Any] | None,
        should_continue_on_error: bool,
    ) -> None:
        # Actors that draw from the same seed would give rows with equal prompts equal samples.
        self.llm = LLM(model, **{"seed": secrets.randbits(63), **options})
        self._base, self._chat_template_kwargs = sampling_params, chat_template_kwargs
        self._should_continue_on_error = should_continue_on_error
        self._room = asyncio.Semaphore(self.llm.queue.capacity)
        self._failure: Exception | None = None  # of the engine, which may have closed it

    async def __call__(self, batch: Any) -> dict[str, list[bytes]]:
        """Return the rows of a batch, an Arrow table of pickles, with the columns of their completions added."""
        rows: list[Row] = [cloudpickle.loads(item) for item in batch.column(DATA_COLUMN).to_pylist()]
        columns = await asyncio.gather(*map(self._answer, rows))
        return {DATA_COLUMN: [cloudpickle.dumps({**row, **its}) for row, its in zip(rows, columns, strict=True)]}

    async def _answer(self, row: Row) -> Row:
        """Return the columns of a row's completion, or those that say why it has none.

        Rows enter the engine in their order; one with a grammar does so when that is compiled.
        """
        async with self._room:
            try:
                [output] = await self.llm.agenerate(**self._request(row))
            except (RequestError, RecursionError) as error:  # the latter where values deep in one another are shown
                return self._refuse(error)
            except WorkerError:
                logger.exception("the actor ends, for Ray to start another one in its place")
                os._exit(1)  # Ray repeats the tasks of an actor that dies, and not those of one that raises
            except EngineClosedError as error:
                await asyncio.sleep(CLOSING_SECONDS)  # rows that were in the engine are told why it closed
                raise self._failure or error from None
            except Exception as error:
                self._failure = self._failure or error
                raise
        reason = output.outputs[0].error
        return output_columns(output) if reason is None else self._refuse(RuntimeError(reason))

    def _request(self, row: Row) -> Row:
        """Return the arguments of `LLM.agenerate` for a row."""
        name = next((name for name in INPUTS if row.get(name) is not None), None)
        if name is None:
            raise RequestError(f"the row has columns {', '.join(row)}, and needs one of {', '.join(INPUTS)}")
        params = merge_params(self._base, row.get("sampling_params"))
        if name != "messages":  # in a dict, a list is one prompt, whatever is in it
            return {"prompts": {"prompt": as_prompt(row[name])}, "sampling_params": params}
        tokenizer, tools = self.llm.preparer.prompt_processor.require_tokenizer(), plain(row.get("tools"))
        kwargs = self._chat_template_kwargs
        text = render_chat(tokenizer, plain(row[name]), tools=tools, chat_template_kwargs=kwargs)
        # The template has already written the special tokens.
        return {"prompts": text, "sampling_params": params, "tokenization_kwargs": {"add_special_tokens": False}}

    def _refuse(self, error: Exception) -> Row:
        """Return the columns of a row that ends in an error; raise that where the job is not to continue."""
        if not self._should_continue_on_error:
            raise error
        return {**NO_OUTPUT, ERROR_COLUMN: f"{type(error).__name__}: {error}"}


def output_columns(output: RequestOutput) -> Row:
    """Return what a row gets of its completion, by the names of `ray.data.llm`."""
    [completion] = output.outputs
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "num_input_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "generated_tokens": completion.token_ids,
        "generated_text": completion.text,
        "num_generated_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "logprobs": logprob_columns(completion.logprobs),
        "prompt_logprobs": logprob_columns(output.prompt_logprobs),
        "metrics": asdict(output.metrics),
        ERROR_COLUMN: "",
    }


def logprob_columns(logprobs: Sequence[TokenLogprobs | None] | None) -> list[dict[int, Row] | None] | None:
    """Return log-probabilities with a dict in place of each Logprob."""
    if logprobs is None:
        return None
    return [None if found is None else {key: asdict(entry) for key, entry in found.items()} for found in logprobs]


def merge_params(base: SamplingParams, given: Any) -> SamplingParams:
    """Return `base` with the fields of a mapping replaced; a SamplingParams replaces it whole, None changes nothing."""
    if isinstance(given, SamplingParams):
        params = given
    elif given is None or isinstance(given, Mapping):
        try:
            params = replace(base, **parse_sampling(plain(given or {})))
        except RequestError as error:
            raise RequestError(f"sampling_params: {error}") from None
    else:
        raise RequestError(f"sampling_params={given!r}; give a dict such as {{'max_tokens': 16}}, or a SamplingParams")
    if params.n > 1:
        raise RequestError(f"n={params.n}, and a row has one completion; use n=1, and repeat the row with flat_map")
    return params


def plain(value: Any) -> Any:
    """Return a value with lists in place of arrays, and without the keys that Arrow filled up with None."""
    value = as_list(value)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items() if item is not None}
    return [plain(item) for item in value] if isinstance(value, list) else value
