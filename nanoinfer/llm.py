"""The facade: prompts in, completions out."""

import time
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from tqdm.auto import tqdm

from nanoinfer.config import EngineConfig
from nanoinfer.engine.llm_engine import EngineStats, LLMEngine, Prompt
from nanoinfer.errors import RequestError
from nanoinfer.outputs import RequestOutput
from nanoinfer.sampling_params import SamplingParams


class LLM:
    """A language model, loaded and ready.

        with LLM("Qwen/Qwen3-0.6B") as llm:
            outputs = llm.generate(["Hello", [1, 2, 3]], SamplingParams(temperature=0.6, max_tokens=256))

    model: a local folder, or the id of a model on the Hugging Face hub. options, each by name (see `EngineConfig`):
    dtype="auto", device="auto", tensor_parallel_size=1, max_model_len=None, max_num_seqs=512,
    max_num_batched_tokens=16384, gpu_memory_utilization=0.9, kvcache_block_size=256, num_kvcache_blocks=None,
    enable_prefix_caching=True, enforce_eager=False, attention_backend="auto", overlap=True, load_format="auto", seed=0.

    Raises TypeError for an unknown option, ConfigError for a value out of range, ModelError for a model that cannot
    be used. Any call raises WorkerError where a process of a tensor-parallel engine has ended; that closes the engine.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self.engine = LLMEngine(EngineConfig.from_options(model, options))
        self._unclaimed: list[RequestOutput] = []  # finished while `generate` waited for others

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; the outputs come in the order of the prompts.

        prompts: a string, a list of token ids, or a list of these. sampling_params: for all, or a list with one for
        each. use_tqdm: show finished requests and tokens a second. Raises RequestError for a prompt that cannot be
        served; nothing is queued then, and nothing is left behind if the call fails later.
        """
        prompts = _as_list_of_prompts(prompts)
        params = _one_for_each(sampling_params, len(prompts))
        encoded = self.engine.encode(prompts)
        request_ids: list[int] = []
        outputs: dict[int, RequestOutput] = {}
        try:
            for request in zip(prompts, encoded, params, strict=True):
                request_ids.append(self.engine.add_encoded(*request))
            wanted = set(request_ids)
            with Progress(self.engine.stats, len(prompts), use_tqdm) as progress:
                while len(outputs) < len(wanted):
                    for output in self.engine.step():
                        if output.request_id in wanted:
                            outputs[output.request_id] = output
                        else:
                            self._unclaimed.append(output)
                    progress.show(len(outputs))
        finally:
            if len(outputs) < len(request_ids):
                self.engine.abort([request_id for request_id in request_ids if request_id not in outputs])
        return [outputs[request_id] for request_id in request_ids]

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a request for `step` to run and return its id. Raises RequestError for one that cannot be served."""
        return self.engine.add_request(prompt, *_one_for_each(sampling_params, 1))

    def step(self) -> list[RequestOutput]:
        """Run one step; return the requests that finished, those that finished during a `generate` included."""
        finished = self.engine.step()
        finished, self._unclaimed = self._unclaimed + finished, []
        return finished

    def is_finished(self) -> bool:
        """Whether `step` has nothing more to return."""
        return self.engine.is_finished() and not self._unclaimed

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, from transformers; None where the model's folder has none."""
        return self.engine.tokenizer.hf if self.engine.tokenizer else None

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the model and the cache; closing twice is fine."""
        self.engine.close()

    exit = close  # nano-vllm's name

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Progress:
    """The progress bar of a `generate`: finished requests, and the tokens a second of its own steps so far."""

    def __init__(self, stats: EngineStats, num_requests: int, use_tqdm: bool) -> None:
        self._stats, self._before = stats, replace(stats)
        self._bar = tqdm(total=num_requests, desc="Generating", unit="req", disable=not use_tqdm)
        self._shown = 0.0  # monotonic time

    def show(self, num_finished: int) -> None:
        """Redraw, a few times a second at most, whether or not a request has finished."""
        self._bar.n = num_finished
        if time.monotonic() - self._shown > 0.2 or num_finished == self._bar.total:
            now, before = self._stats, self._before
            prefill = _rate(now.prefill_tokens - before.prefill_tokens, now.prefill_seconds - before.prefill_seconds)
            decode = _rate(now.decode_tokens - before.decode_tokens, now.decode_seconds - before.decode_seconds)
            self._bar.set_postfix_str(f"prefill {prefill} tok/s, decode {decode} tok/s")  # draws
            self._shown = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.0f}" if seconds > 0 else "0"


def _as_list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; give a string, a list of token ids, or a list of these"
        )
    is_token_ids = bool(prompts) and all(isinstance(item, Integral) for item in prompts)
    return cast("list[Prompt]", [list(prompts)] if is_token_ids else list(prompts))


def _one_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)) or not all(isinstance(item, SamplingParams) for item in params):
        raise RequestError(
            f"sampling_params={params!r}; give a SamplingParams for all prompts, or a list with one for each"
        )
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one for all, or one for each")
    return list(params)
