"""The engine's loop: requests in, finished outputs out, one step at a time."""

import struct
import time
from dataclasses import dataclass

import xxhash

from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.engine.batch import pack
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.model_runner import ModelRunner
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence
from nanoinfer.errors import EngineClosedError, RequestError
from nanoinfer.outputs import CompletionOutput, RequestOutput
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.hub import resolve_model_folder
from nanoinfer.utils.tokenizer import load_tokenizer, read_stop_token_ids

Prompt = str | list[int]


@dataclass(slots=True)
class EngineStats:
    """Work done so far: tokens, and seconds of the steps that did it."""

    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    prefill_tokens: int = 0  # prompt tokens computed; those found in the cache are not counted
    decode_tokens: int = 0  # tokens generated in decode steps; a request's first comes out of its prefill
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class LLMEngine:
    """Holds the requests and drives scheduler and runner. Most users want `LLM`, which wraps it."""

    def __init__(self, config: EngineConfig) -> None:
        folder = resolve_model_folder(config.model)
        self.config = config
        self.model_config = ModelConfig.from_folder(folder)
        self.tokenizer = load_tokenizer(folder)
        self.runner: ModelRunner | None = ModelRunner(config, self.model_config, folder)
        self.max_model_len = self.runner.max_model_len
        self.block_manager = BlockManager(
            self.runner.num_blocks, config.kvcache_block_size, config.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            stop_token_ids=read_stop_token_ids(folder, self.tokenizer),
        )
        self.stats = EngineStats()
        self._num_requests = 0
        self._prompts: dict[int, str] = {}  # of unfinished requests that were given as text

    def encode(self, prompts: list[Prompt]) -> list[list[int]]:
        """Token ids of each prompt, texts in one batch. Raises RequestError for one that cannot be served."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts and self.tokenizer is None:
            raise RequestError(f"{self.config.model} has no tokenizer; give the prompt as a list of token ids")
        encoded = iter(self.tokenizer.encode(texts) if self.tokenizer else [])
        all_ids = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
        return [self._validated(ids, index) for index, ids in enumerate(all_ids)]

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams) -> int:
        """Queue a request and return its id. Raises RequestError for a prompt that cannot be served."""
        self._check_open()
        return self.add_encoded(prompt, self.encode([prompt])[0], sampling_params)

    def add_encoded(self, prompt: Prompt, token_ids: list[int], sampling_params: SamplingParams) -> int:
        """Queue a prompt that `encode` has turned into `token_ids`, and return its id."""
        request_id = self._num_requests
        self._num_requests += 1
        # A stream of its own for each request, so that equal prompts differ and batches do not matter.
        seed = xxhash.xxh64_intdigest(struct.pack("<qq", self.config.seed, request_id)) >> 1
        self.scheduler.add(Sequence(request_id, token_ids, sampling_params, seed))
        if isinstance(prompt, str):
            self._prompts[request_id] = prompt
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step and return the requests that it finished. A step that fails leaves all requests queued."""
        runner = self._check_open()
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        if not batch:
            return []
        try:
            token_ids = runner.wait(runner.launch(pack(batch)))
        except BaseException:
            self.scheduler.discard(batch)
            raise
        finished = self.scheduler.update(batch, token_ids)
        seconds = time.perf_counter() - started
        if batch.prefill:
            self.stats.num_prefill_steps += 1
            self.stats.prefill_tokens += batch.num_prefill_tokens
            self.stats.prefill_seconds += seconds
        else:
            self.stats.num_decode_steps += 1
            self.stats.decode_tokens += len(batch.decode)
            self.stats.decode_seconds += seconds
        return [self._output(seq) for seq in finished]

    def abort(self, request_ids: list[int]) -> None:
        """Drop these requests and what they hold; those that are finished are passed over."""
        self.scheduler.abort(set(request_ids))
        for request_id in request_ids:
            self._prompts.pop(request_id, None)

    def is_finished(self) -> bool:
        """Whether every request has finished."""
        return self.scheduler.is_finished()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._check_open()
        self.block_manager.reset_prefix_cache()

    def close(self) -> None:
        """Free the model and the cache. Closing twice is fine; other calls then raise EngineClosedError."""
        if self.runner is not None:
            self.runner.close()
            self.runner = None

    def _check_open(self) -> ModelRunner:
        if self.runner is None:
            raise EngineClosedError("this engine was closed; make a new LLM")
        return self.runner

    def _validated(self, token_ids: list[int], index: int) -> list[int]:
        """The ids as a list of our own, if the engine can serve them."""
        which = f"prompt {index}"
        if not isinstance(token_ids, (list, tuple)):
            raise RequestError(f"{which} is a {type(token_ids).__name__}; give a string or a list of token ids")
        if not token_ids:
            raise RequestError(f"{which} is empty; give at least one token")
        if not all(type(token_id) is int for token_id in token_ids):
            wrong = next(token_id for token_id in token_ids if type(token_id) is not int)
            raise RequestError(f"{which} has {wrong!r} among its token ids; they must be ints")
        vocab_size = self.model_config.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise RequestError(f"{which} has token id {wrong}, outside the vocabulary; ids are 0 to {vocab_size - 1}")
        if len(token_ids) >= self.max_model_len:
            raise RequestError(
                f"{which} has {len(token_ids)} tokens, and with one more exceeds max_model_len={self.max_model_len}; "
                f"shorten it to {self.max_model_len - 1}, or raise max_model_len if model and KV cache allow"
            )
        return list(token_ids)

    def _output(self, seq: Sequence) -> RequestOutput:
        token_ids = seq.completion_token_ids
        assert seq.finish_reason is not None, f"sequence {seq.seq_id} is returned before it finished"
        shown = token_ids[:-1] if seq.finish_reason == "stop" else token_ids
        text = self.tokenizer.decode(shown) if self.tokenizer else ""
        return RequestOutput(
            request_id=seq.seq_id,
            prompt=self._prompts.pop(seq.seq_id, None),
            prompt_token_ids=seq.prompt_token_ids,
            num_cached_tokens=seq.num_cached_tokens or 0,
            outputs=[CompletionOutput(0, text, token_ids, seq.finish_reason)],
        )
