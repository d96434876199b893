"""Ray Data: a dataset in, the dataset with completions out, on as many GPUs and hosts as Ray has.

    processor = build_processor(model="Qwen/Qwen3-8B", concurrency=8, preprocess=..., postprocess=...)
    processor(ray.data.read_parquet("questions")).write_parquet("answers")

Names and columns are those of `ray.data.llm`. Each actor holds one engine, and each row is a call of `LLM.agenerate`.
So rows of several batches are in the engine at once: while the last rows of one batch finish, the next batch already
runs. Between the stages a row is one pickle, because Arrow would give all rows of a block the same keys and types. The
last stage makes columns of rows: `make_table`.
"""

import asyncio
import inspect
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer import LLM, ConfigError, LoRARequest, ModelError, RequestError, SamplingParams, WorkerError
from nanoinfer.batch.openai_format import parse_sampling
from nanoinfer.config import EngineConfig
from nanoinfer.errors import EngineClosedError, check_names
from nanoinfer.option_fields import is_whole_number
from nanoinfer.outputs import Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from nanoinfer.text.arguments import as_list, as_prompt
from nanoinfer.text.chat import render_chat
from nanoinfer.vllm_names import LLM_NAMES

try:
    import pyarrow as pa
    import ray.data
    from ray import cloudpickle
    from ray.data.extensions import ArrowPythonObjectArray, ArrowTensorArray
except ImportError as error:
    raise ImportError(
        f"Ray Data cannot be imported ({error}); in a clone of nanoinfer, pip install -e '.[ray]'"
    ) from error

logger = logging.getLogger("nanoinfer")
CLOSING_SECONDS = 1.0  # in which the rows that were in an engine get the error that closed it

Row = dict[str, Any]
DATA_COLUMN = "__data"  # holds a row, pickled, between the stages
DROPPED = "__dropped"  # in such a row: the names of FOR_ENGINE that it ends without
ERROR_COLUMN = "__inference_error__"
INPUTS = ("messages", "tokenized_prompt", "prompt")  # the first of these that a row has is what the model reads
# Columns for the engine alone: where `preprocess` has made them, they end with it, as rows may have different ones.
FOR_ENGINE = ("messages", "tokenized_prompt", "tools", "sampling_params")
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
# An output with something in every place, which tells the types of columns that are empty in a block.
EXAMPLE: Row = {
    "prompt": "",
    "prompt_token_ids": [0],
    "num_input_tokens": 1,
    "num_cached_tokens": 0,
    "generated_tokens": [0],
    "generated_text": "",
    "num_generated_tokens": 1,
    "finish_reason": "stop",
    "logprobs": [{0: asdict(Logprob(0.0, 1, ""))}],
    "prompt_logprobs": [None, {0: asdict(Logprob(0.0, 1, ""))}],
    "metrics": asdict(RequestMetrics(0.0, 0.0, 0.0)),
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
    dynamic_lora_loading_path: str | Path | None = None,
    preprocess: Callable[[Row], Row] | None = None,
    postprocess: Callable[[Row], Row] | None = None,
    should_continue_on_error: bool = True,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
    map_batches_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> "Processor":
    """Return a function that takes a dataset and returns it with completions.

    model, options: as for `LLM`, such as tensor_parallel_size.
    concurrency: how many actors, each with an engine of its own, or the least and the most of them.
    batch_size: rows that are handed over and answered together.
    max_concurrent_batches: batches that are in an actor's engine at the same time.
    num_gpus: for each actor, perhaps a fraction; if not given, tensor_parallel_size where the cluster has GPUs and
        `device` is not "cpu", else 0. With a fraction, gpu_memory_utilization is 0.9 of it, unless it is given.
    sampling_params: for rows without their own.
    chat_template_kwargs: as in `LLM.chat`.
    dynamic_lora_loading_path: a folder of LoRA adapters of peft, each in a folder of its name, which rows name in the
        column model; rows without, or with the model's own name, have none.
    preprocess: makes the columns that the model needs, which are added to the row.
    postprocess: makes the final row.
    should_continue_on_error: a row that cannot be served gets the reason in the column "__inference_error__", which is
        "" for all others; if False, it ends the job.
    preprocess_map_kwargs, postprocess_map_kwargs: for `Dataset.map` and `Dataset.map_batches`.
    map_batches_kwargs: for the actors, such as num_cpus, accelerator_type and runtime_env.

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
    if dynamic_lora_loading_path is not None:
        options = {"enable_lora": True, **options}
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
        "lora_folder": None if dynamic_lora_loading_path is None else str(dynamic_lora_loading_path),
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
        schema = dataset.schema(fetch_if_missing=False)
        own_types = dict(zip(schema.names, schema.types, strict=True)) if schema else {}

        def pack(row: Row) -> Row:
            added = preprocess(row) if preprocess else {}
            dropped = {*FOR_ENGINE} & {*added} - {*row}
            return {DATA_COLUMN: cloudpickle.dumps({**row, **added, DROPPED: dropped})}

        def unpack(packed: pa.Table) -> pa.Table:
            return make_table(load_rows(packed), postprocess, has_errors, own_types)

        num_gpus = self.tensor_parallel_size if ray.cluster_resources().get("GPU") else 0
        dataset = dataset.map(pack, **self.preprocess_map_kwargs)
        dataset = dataset.map_batches(
            EngineActor,
            fn_constructor_kwargs=self.engine,
            batch_format="pyarrow",
            **{"num_gpus": num_gpus, **self.placement},
        )
        return dataset.map_batches(unpack, batch_format="pyarrow", **self.postprocess_map_kwargs)


def load_rows(packed: pa.Table) -> list[Row]:
    """Return the rows that a table has as pickles."""
    return [cloudpickle.loads(item) for item in packed.column(DATA_COLUMN).to_pylist()]


def make_table(
    rows: Iterable[Row],
    postprocess: Callable[[Row], Row] | None,
    has_errors: bool,
    own_types: Mapping[str, pa.DataType],
) -> pa.Table:
    """Return the final rows of a block. Their columns and types do not depend on which rows are bad.

    postprocess, if any, gets a bad row too, with NO_OUTPUT; if it fails, the row has what it had before under the names
    of the others' columns. has_errors: whether there is a column of errors. own_types: of the dataset's columns, where
    they are known. Columns that are empty here get their type from these, or from what postprocess makes of EXAMPLE.
    """

    def finish(row: Row) -> Row:
        dropped = row.pop(DROPPED, ())
        if postprocess:
            return postprocess(row)
        return {**dict.fromkeys(own_types), **{name: value for name, value in row.items() if name not in dropped}}

    reasons: list[str] = []
    finished: list[tuple[Row, Row | None]] = []  # each row, and what became of it; None where postprocess failed
    for row in rows:
        reasons.append(row.pop(ERROR_COLUMN))
        finished.append((row, _try(finish, row) if reasons[-1] else finish(row)))
    names = dict.fromkeys(name for _, final in finished for name in final or ())
    example: Row = {}
    if finished and not names:
        example = _try(finish, {**finished[0][0], **EXAMPLE}) or finished[0][0]
        names = dict.fromkeys(example)
    finals = [{name: row.get(name) for name in names} if final is None else final for row, final in finished]
    columns = {name: [as_column(row.get(name)) for row in finals] for name in names}
    wanted = {} if postprocess else own_types  # postprocess may have another column of such a name
    arrays = {name: make_array(values, wanted.get(name)) for name, values in columns.items()}
    if unknown := [name for name, array in arrays.items() if _is_partly_unknown(array.type)]:
        example = example or _try(finish, {**finished[0][0], **EXAMPLE}) or {}
        for name in unknown:
            like = make_array([as_column(example.get(name))]).type
            arrays[name] = make_array(columns[name], own_types.get(name) if _is_partly_unknown(like) else like)
    return pa.table({**arrays, **({ERROR_COLUMN: pa.array(reasons, pa.string())} if has_errors else {})})


def make_array(values: list[Any], wanted: pa.DataType | None = None) -> pa.Array:
    """Return a column of the type that is wanted, or else as Arrow infers it, or as Ray keeps it: tensors, pickles."""
    try:
        if any(isinstance(value, np.ndarray) for value in values):
            return ArrowTensorArray.from_numpy(values)
        return pa.array(values, wanted)
    except Exception:  # there are as many kinds as there are values
        return ArrowPythonObjectArray.from_objects(values) if wanted is None else make_array(values)


def _is_partly_unknown(kind: pa.DataType) -> bool:
    """Return whether a type is that of empty values, or has such a part."""
    return pa.types.is_null(kind) or any(_is_partly_unknown(kind.field(i).type) for i in range(kind.num_fields))


def _try(finish: Callable[[Row], Row], row: Row) -> Row | None:
    """Return what becomes of a row that the user's function need not expect; None if it fails."""
    try:
        return finish(row)
    except Exception:  # of the user's code, which may raise anything
        return None


def as_column(value: Any) -> Any:
    """Return a value with lists in place of dicts by token id, whose keys would be other columns in each block."""
    if isinstance(value, dict) and value and all(map(is_whole_number, value)):
        return [{"token_id": key, **item} if isinstance(item, dict) else item for key, item in value.items()]
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value[:2]):
        return [as_column(item) for item in value]
    return value


class EngineActor:
    """Answers batches of rows in an actor of Ray Data, several at the same time.

    model, options: of its LLM. sampling_params: for rows without their own. lora_folder: of adapters, as
    dynamic_lora_loading_path in `build_processor`, where the others are.
    """

    def __init__(
        self,
        model: str,
        options: Row,
        sampling_params: SamplingParams,
        chat_template_kwargs: Mapping[str, Any] | None,
        should_continue_on_error: bool,
        lora_folder: str | None = None,
    ) -> None:
        # Actors that draw from the same seed would give rows with equal prompts equal samples.
        self.llm = LLM(model, **{"seed": secrets.randbits(63), **options})
        self._base, self._chat_template_kwargs = sampling_params, chat_template_kwargs
        self._should_continue_on_error = should_continue_on_error
        self._lora_folder, self._loras = lora_folder, dict[str, LoRARequest]()
        self._room = asyncio.Semaphore(self.llm.queue.capacity)
        self._failure: Exception | None = None  # of the engine, which may have closed it

    async def __call__(self, batch: Any) -> dict[str, list[bytes]]:
        """Return the rows of a batch, an Arrow table of pickles, with the columns of their completions added."""
        rows = load_rows(batch)
        columns = await asyncio.gather(*map(self._answer, rows))
        return {DATA_COLUMN: [cloudpickle.dumps({**row, **its}) for row, its in zip(rows, columns, strict=True)]}

    async def _answer(self, row: Row) -> Row:
        """Return the columns of a row's completion, or those that say why it has none.

        Rows enter the engine in their order; one with a grammar does so when that is compiled.
        """
        async with self._room:
            try:
                [output] = await self.llm.agenerate(**self._request(row))
            except (RequestError, ModelError, RecursionError) as error:  # of the row, its adapter, or values too deep
                return self._refuse(row, error)
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
        return output_columns(output) if reason is None else self._refuse(row, RuntimeError(reason))

    def _request(self, row: Row) -> Row:
        """Return the arguments of `LLM.agenerate` for a row."""
        name = next((name for name in INPUTS if row.get(name) is not None), None)
        if name is None:
            columns = ", ".join(name for name in row if name != DROPPED)
            raise RequestError(f"the row has columns {columns}, and needs one of {', '.join(INPUTS)}")
        params = merge_params(self._base, row.get("sampling_params"))
        common = {"sampling_params": params, "lora_request": self._lora_of(row)}
        if name != "messages":  # in a dict, a list is one prompt, whatever is in it
            return {"prompts": {"prompt": as_prompt(row[name])}, **common}
        tokenizer, tools = self.llm.preparer.prompt_processor.require_tokenizer(), plain(row.get("tools"))
        kwargs = self._chat_template_kwargs
        text = render_chat(tokenizer, plain(row[name]), tools=tools, chat_template_kwargs=kwargs)
        # The template has already written the special tokens.
        return {"prompts": text, "tokenization_kwargs": {"add_special_tokens": False}, **common}

    def _lora_of(self, row: Row) -> LoRARequest | None:
        """Return the adapter that a row names as its model. Raises RequestError for a name that is not there."""
        name = row.get("model")
        if self._lora_folder is None or name in (None, "", self.llm.config.model):
            return None
        if name not in self._loras:
            folder = Path(self._lora_folder, str(name))
            if folder.name != name or not folder.is_dir():
                raise RequestError(f"model={name!r} is no folder in dynamic_lora_loading_path={self._lora_folder!r}")
            self._loras[name] = LoRARequest(name, len(self._loras) + 1, str(folder))
        return self._loras[name]

    def _refuse(self, row: Row, error: Exception) -> Row:
        """Return the columns of a row that ends in an error; raise that where the job is not to continue."""
        if not self._should_continue_on_error:
            raise error
        prompt = row.get("prompt")
        return {
            "prompt": prompt if isinstance(prompt, str) else None,
            **NO_OUTPUT,
            ERROR_COLUMN: f"{type(error).__name__}: {error}",
        }


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
    return [None if place is None else {key: asdict(entry) for key, entry in place.items()} for place in logprobs]


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
