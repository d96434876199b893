"""Finds the files of a model, and loads an engine of them: what every process does that holds one."""

import logging
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.checkpoint.hub import read_json, resolve_model_folder
from nanoinfer.config import EngineConfig
from nanoinfer.constraints.constraints import Constraints
from nanoinfer.constraints.thoughts import find_thoughts
from nanoinfer.control.run_trace import RunTrace
from nanoinfer.control.step_events import StepEventListener
from nanoinfer.control.weight_control import Control, WeightControl
from nanoinfer.device import host_array
from nanoinfer.engine.cache_groups.specs import FullAttentionSpec
from nanoinfer.engine.engine import Engine
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.preparer import Preparer
from nanoinfer.engine.request_queue import RequestQueue
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.errors import ConfigError, ModelError, RequestError
from nanoinfer.executor.external_runner import ExternalRunner
from nanoinfer.executor.parallel_runner import ParallelRunner
from nanoinfer.images.image_engine import ImageEngine, TextProposals
from nanoinfer.images.image_reader import ImageReader
from nanoinfer.images.processor import PROCESSOR_FILES, ImageProcessor
from nanoinfer.images.sources import check_pillow
from nanoinfer.lora.adapter_scheduler import AdapterScheduler
from nanoinfer.lora.registry import AdapterRegistry
from nanoinfer.models.implementations import read_model_config
from nanoinfer.pooling_calls.pooling_steps import PoolingSteps
from nanoinfer.runner.device_runner import DeviceRunner
from nanoinfer.runner.setup import RunnerInfo
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.speculation.speculator import make_speculator
from nanoinfer.text.prompts import PromptProcessor
from nanoinfer.text.tokenizer import Tokenizer, find_tokenizer, load_tokenizer, read_stop_token_ids

logger = logging.getLogger("nanoinfer")

AnyConstraints = TypeVar("AnyConstraints", bound=Constraints)


@dataclass(frozen=True)
class ModelFiles:
    """Holds what is known of a model before its weights are read.

    folder, tokenizer_folder: of files that are here. generation_config: the contents of generation_config.json.
    """

    config: EngineConfig
    folder: Path
    model_config: BaseModelConfig
    tokenizer_folder: Path
    generation_config: dict[str, Any]

    def list_files(self) -> list[tuple[str, int, int]]:
        """Return name, bytes and time of the model's files: what tells other weights in the same folder."""
        paths = filter(Path.exists, sorted(self.folder.iterdir()))  # without dangling links
        stats = ((path.name, path.stat()) for path in paths)
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]

    def load_tokenizer(self) -> Tokenizer | None:
        """Load the tokenizer; None where there is none. Slow, and safe to call while weights are loaded."""
        is_random = self.config.load_format == "dummy"  # random weights fit any tokenizer
        return load_tokenizer(self.tokenizer_folder, None if is_random else self.model_config.vocab_size)

    def default_sampling_params(self) -> SamplingParams:
        """Return what the model's own generation_config.json recommends. Raises ModelError where it is out of range."""
        try:
            return SamplingParams.from_generation_config(self.generation_config)
        except RequestError as error:
            raise ModelError(f"generation_config.json of {self.config.model}: {error}") from error

    def load_image_processor(self, tokenizer: Tokenizer | None) -> ImageProcessor | None:
        """Load what processes images; None where prompts have none. Slow, and safe to call while weights are loaded."""
        if not self.config.sees_images or tokenizer is None:
            return None
        return ImageProcessor(self.folder, tokenizer.hf, tokenizer.lock)

    def make_image_reader(
        self, tokenizer: Tokenizer | None, image_processor: ImageProcessor | None, dtype: Any = None
    ) -> ImageReader | None:
        """Return what reads the images of prompts; None where prompts have none. dtype: PyTorch's, of the model."""
        if tokenizer is None or image_processor is None:
            return None
        return ImageReader(image_processor, tokenizer, dtype, self.config)

    def make_prompt_processor(
        self, tokenizer: Tokenizer | None, max_model_len: int, image_reader: ImageReader | None = None
    ) -> PromptProcessor:
        """Return what checks and tokenizes prompts of at most so many tokens."""
        stop_token_ids = read_stop_token_ids(self.folder, tokenizer)
        return PromptProcessor(
            tokenizer,
            self.config.model,
            self.model_config.vocab_size,
            max_model_len,
            stop_token_ids,
            self.config.max_logprobs,
            refusal_reason=self.model_config.refusal_reason,
            image_reader=image_reader,
        )

    def make_constraints(
        self,
        constraints_class: Callable[..., AnyConstraints],
        tokenizer: Tokenizer | None,
        prompt_processor: PromptProcessor,
        **options: Any,
    ) -> AnyConstraints:
        """Return what compiles the constraints of requests as the options of the engine say."""
        config, vocab_size = self.config, self.model_config.vocab_size
        return constraints_class(
            tokenizer,
            vocab_size,
            prompt_processor.stop_token_ids,
            switches=config.structured_outputs_config or (),
            grammar_timeout=config.grammar_timeout,
            thoughts=find_thoughts(config, tokenizer, vocab_size),
            forms_follow_thoughts=(config.reasoning_config or config.response_template) is not None,
            **options,
        )


class LoadedEngine(NamedTuple):
    """Holds an engine that is ready, and what belongs to it."""

    engine: Engine
    queue: RequestQueue
    preparer: Preparer
    constraints: Constraints
    control: Control
    max_model_len: int  # tokens of a prompt and its completion together
    info: RunnerInfo
    seconds: dict[str, float]  # of each part of loading; for the tokenizer, how long the rest waited for it
    pooling_steps: PoolingSteps | None = None  # of an engine in this process
    adapters: AdapterRegistry | None = None  # with enable_lora

    def start_trace(self, path: str, title: str) -> Callable[[], object]:
        """Record the run of the engine from now on; return the function that writes the file, once."""
        trace = RunTrace(title)
        self.engine.on_step(trace)
        return trace.write_on_close(self.engine, self.engine.events, path)

    def log_start(self, name: str, imports: dict[str, float], total: float) -> None:
        """Log that an LLM is ready. imports: how long importing took, if it is not in the total; all in seconds."""
        parts = imports | self.seconds
        logger.info(
            "%s: %s; ready in %.1f s (%s)",
            name,  # no object: a handler that keeps the record must not keep the engine
            self.info.description,
            total + imports.get("imports", 0.0),
            ", ".join(f"{part} {seconds:.1f} s" for part, seconds in parts.items()),
        )


def reduce_llm(config: EngineConfig, weights: object) -> tuple[Any, ...]:
    """Return what the fingerprints of `datasets` are made of: the options of an LLM, and what names its weights.

    Raises TypeError where another pickler calls `LLM.__reduce__`: it would copy weights and cache to another process.
    """
    # A pickler does not say who it is. Those written in Python, as that of `datasets`, call from a method of their own.
    pickler = sys._getframe(2).f_locals.get("self")
    if type(pickler).__module__.partition(".")[0] == "datasets":
        return EngineConfig, (config, weights)
    raise TypeError(
        "an LLM cannot be pickled or copied, as its weights and its cache belong to this process; make it in the "
        "process that uses it. With datasets, leave num_proc out of map: one LLM answers all rows of a batch together"
    )


def find_model(config: EngineConfig) -> ModelFiles:
    """Read a model's config, having downloaded the model if it is not here. Raises ModelError."""
    is_random = config.load_format == "dummy"
    folder = resolve_model_folder(
        config.model, not is_random, revision=config.revision, download_dir=config.download_dir
    )
    if config.sees_images and any((folder / name).exists() for name in PROCESSOR_FILES[:2]):
        check_pillow()
    model_config = read_model_config(folder, config)
    if not model_config.finds_prefixes:
        config = replace(config, enable_prefix_caching=False)
    if config.enable_lora and config.distributed_executor_backend != "mp":
        raise ConfigError(
            f"enable_lora=True with distributed_executor_backend={config.distributed_executor_backend!r} is not "
            "supported; use 'mp'"
        )
    if config.enable_return_routed_experts and model_config.moe is None:
        raise ConfigError(f"enable_return_routed_experts=True, and {config.model} has no experts; leave it out")
    if config.speculative_config and model_config.refusal_reason is not None:
        raise ConfigError(
            f"{config.model} generates nothing ({model_config.refusal_reason}), and nothing can be proposed; leave "
            "speculative_config out"
        )
    generation_config = read_json(folder / "generation_config.json")
    return ModelFiles(config, folder, model_config, find_tokenizer(config, folder), generation_config)


def load_engine(files: ModelFiles) -> LoadedEngine:
    """Load the model into this process, and into one for each further rank. Raises what `LLM` raises."""
    config, model_config = files.config, files.model_config
    with ExitStack() as on_failure:
        # What the tokenizer imports takes as long as loading the weights, so both happen at the same time.
        with ThreadPoolExecutor(1) as background:
            loading = background.submit(files.load_tokenizer)
            processor = background.submit(lambda: files.load_image_processor(loading.result()))
            runner_class: type[DeviceRunner | ParallelRunner] = ParallelRunner
            if config.distributed_executor_backend == "external_launcher":
                runner_class = ExternalRunner
            elif config.tensor_parallel_size == 1:
                runner_class = DeviceRunner
            runner = runner_class(config, model_config, files.folder)
            on_failure.callback(runner.close)
            loaded = time.perf_counter()
            tokenizer, image_processor = loading.result(), processor.result()
        image_reader = files.make_image_reader(tokenizer, image_processor, runner.info.dtype)
        prompt_processor = files.make_prompt_processor(tokenizer, runner.limits.max_model_len, image_reader)
        new_bits = partial(host_array, device=runner.info.device)
        constraints = files.make_constraints(Constraints, tokenizer, prompt_processor, new_bits=new_bits)
        new_listener = partial(StepEventListener, device=runner.info.device)
        new_scheduler = partial(AdapterScheduler, num_slots=config.max_loras) if config.enable_lora else Scheduler
        new_engine = partial(ImageEngine, vocab_size=model_config.vocab_size) if config.sees_images else LLMEngine
        engine = new_engine(
            config, runner, tokenizer, prompt_processor.stop_token_ids, constraints, new_listener, new_scheduler
        )
        engine.proposer = make_speculator(config, runner.limits, engine.stats)
        if engine.proposer is not None and config.sees_images:
            engine.proposer = TextProposals(engine.proposer, model_config.vocab_size)
        if isinstance(runner, ParallelRunner):
            weakref.finalize(engine, runner.close)  # when the engine is forgotten, and when the script ends
        on_failure.pop_all()
    queue = RequestQueue(engine)
    preparer = Preparer(engine, prompt_processor, constraints)
    adapters = AdapterRegistry(engine, runner, queue.lock) if config.enable_lora else None
    preparer.adapters_of = adapters.adapters_of if adapters else None
    has_blocks_alone = runner.limits.cache_specs == (FullAttentionSpec(),)
    pooling_steps = PoolingSteps(engine, model_config.head is not None and has_blocks_alone)
    return LoadedEngine(
        engine=engine,
        queue=queue,
        preparer=preparer,
        constraints=constraints,
        control=WeightControl(engine, queue.lock),
        max_model_len=runner.limits.max_model_len,
        info=runner.info,
        seconds=runner.info.start_seconds | {"tokenizer": time.perf_counter() - loaded},
        pooling_steps=None if adapters else pooling_steps,  # it knows of no adapters
        adapters=adapters,
    )
