"""The facade: prompts in, completions out."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

from tqdm.auto import tqdm

from nanoinfer.config import EngineConfig
from nanoinfer.engine.llm_engine import EngineStats, LLMEngine, Prompt
from nanoinfer.errors import RequestError
from nanoinfer.outputs import RequestOutput, StreamChunk
from nanoinfer.sampling_params import SamplingParams


class Request(NamedTuple):
    """A prompt, checked and ready to be queued."""

    prompt: Prompt
    token_ids: list[int]
    sampling_params: SamplingParams


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
        self._unclaimed: list[RequestOutput] = []  # of `add_request`, finished while `generate` or `stream` ran steps
        # The call that waits for a request, by request id: where its output is put, whichever call runs the step.
        self._inboxes: dict[int, list[RequestOutput] | deque[RequestOutput]] = {}

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
        return self._complete(self._prepare(prompts, sampling_params), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamChunk]:
        """Complete one prompt or many, and yield what is new of each as its tokens come.

        prompts, sampling_params: as in `generate`, and so are the errors, raised by this call. The requests are queued
        when the first chunk is asked for. Other calls may run between two chunks. Whoever leaves the loop early has
        what is unfinished aborted: the next step of any call frees it.
        """
        return self._stream(self._prepare(prompts, sampling_params))

    def abort(self, request_ids: int | Sequence[int]) -> None:
        """Have the next step finish these requests as they are, with finish_reason "abort".

        Ids that are not known, or finished, are passed over.
        """
        self.engine.abort_later([request_ids] if isinstance(request_ids, int) else request_ids)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a request for `step` to run and return its id. Raises RequestError for one that cannot be served."""
        return self.engine.add_request(prompt, *_one_for_each(sampling_params, 1))

    def step(self) -> list[RequestOutput]:
        """Run one step; return the requests of `add_request` that finished, in this step or during another call's."""
        self._step()
        finished, self._unclaimed = self._unclaimed, []
        return finished

    def is_finished(self) -> bool:
        """Whether `step` has nothing more to return."""
        return self.engine.is_finished() and not self._unclaimed

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, from transformers; None where the model's folder has none."""
        return self.engine.tokenizer.hf if self.engine.tokenizer else None

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, as `generate` makes them. Raises RequestError where there is no tokenizer."""
        return self.engine.encode([text])[0]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Raises RequestError where there is no tokenizer."""
        return self.engine.require_tokenizer().decode(list(token_ids), skip_special_tokens)

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

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Check everything that a user can get wrong, before anything is queued."""
        prompts = _as_list_of_prompts(prompts)
        params = _one_for_each(sampling_params, len(prompts))
        for item in params:
            self.engine.check_params(item)
        return [Request(*parts) for parts in zip(prompts, self.engine.encode(prompts), params, strict=True)]

    def _complete(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        """Run these requests to their end; if that fails, leave nothing of them behind."""
        request_ids: list[int] = []
        inbox: list[RequestOutput] = []
        try:
            for request in requests:
                request_ids.append(self.engine.add_encoded(*request))
                self._inboxes[request_ids[-1]] = inbox
            with Progress(self.engine.stats, len(requests), use_tqdm) as progress:
                while len(inbox) < len(requests):
                    self._step()
                    progress.show(len(inbox))
        finally:
            if len(inbox) < len(request_ids):
                unfinished = set(request_ids) - {output.request_id for output in inbox}
                for request_id in unfinished:
                    self._inboxes.pop(request_id, None)
                self.engine.abort(sorted(unfinished))
        return sorted(inbox, key=lambda output: output.request_id)

    def _stream(self, requests: list[Request]) -> Iterator[StreamChunk]:
        unfinished: dict[int, int] = {}  # index of the prompt -> request id
        chunks: deque[StreamChunk] = deque()
        try:
            for index, request in enumerate(requests):
                unfinished[index] = self.engine.add_encoded(*request, chunks=chunks, index=index)
                self._inboxes[unfinished[index]] = deque(maxlen=0)  # the chunks say it all
            while unfinished:
                if not chunks:
                    self._step()
                while chunks:
                    chunk = chunks.popleft()
                    if chunk.finish_reason is not None:
                        del unfinished[chunk.index]
                    yield chunk
        finally:
            self.engine.abort_later(unfinished.values())

    def _step(self) -> None:
        """Run one step and hand each output to the call that waits for it."""
        for output in self.engine.step():
            self._inboxes.pop(output.request_id, self._unclaimed).append(output)


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
