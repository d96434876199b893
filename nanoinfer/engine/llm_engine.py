"""The engine's loop: requests in, finished outputs out, one step at a time."""

import logging
import struct
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

import xxhash

from nanoinfer.checkpoint.hub import read_json, resolve_model_folder
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.config import EngineConfig
from nanoinfer.engine.batch import ScheduledBatch, pack
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.request import Completion, Request
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.errors import EngineClosedError, RequestError
from nanoinfer.executor.parallel_runner import ParallelRunner
from nanoinfer.models import REGISTRY
from nanoinfer.outputs import EngineMetrics, Logprob, RequestOutput, StreamChunk, TokenLogprobs
from nanoinfer.runner.model_runner import ModelRunner, StepHandle
from nanoinfer.sampling_params import SamplingParams, check_against_model
from nanoinfer.text.detokenizer import CompletionText, Detokenizer, WindowDetokenizer
from nanoinfer.text.prompts import Prompt, check_texts, check_token_ids
from nanoinfer.text.tokenizer import Tokenizer, load_tokenizer, read_stop_token_ids

logger = logging.getLogger("nanoinfer")


class Prepared(NamedTuple):
    """A prompt, checked and ready to be queued."""

    prompt: Prompt
    token_ids: list[int]  # of the prompt, as `encode` makes them
    sampling_params: SamplingParams
    priority: int = 0  # higher runs first
    score_from: int = 1  # the first token that prompt_logprobs are wanted of, if they are


class Step(NamedTuple):
    """A launched step: what was scheduled, where its tokens will be, and when it was launched (perf_counter)."""

    batch: ScheduledBatch
    handle: StepHandle
    started: float


class LLMEngine:
    """Holds the requests and drives scheduler and runner. Most users want `LLM`, which wraps it."""

    def __init__(self, config: EngineConfig) -> None:
        folder = resolve_model_folder(config.model, with_weights=config.load_format != "dummy")
        self.config = config
        self.model_config = ModelConfig.from_folder(folder, supported=REGISTRY)
        # Random weights fit any tokenizer as well as another.
        self.tokenizer = load_tokenizer(folder, None if config.load_format == "dummy" else self.model_config.vocab_size)
        stop_token_ids = read_stop_token_ids(folder, self.tokenizer)
        self.generation_config = read_json(folder / "generation_config.json")
        runner_class = ModelRunner if config.tensor_parallel_size == 1 else ParallelRunner
        self.runner: ModelRunner | ParallelRunner | None = runner_class(config, self.model_config, folder)
        if isinstance(self.runner, ParallelRunner):
            weakref.finalize(self, self.runner.close)  # when it is forgotten, and when the script ends
        self.max_model_len = self.runner.max_model_len
        self.block_manager = BlockManager(
            self.runner.num_blocks, config.kvcache_block_size, config.enable_prefix_caching
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            stop_token_ids=stop_token_ids,
        )
        self.stats = EngineMetrics()
        self._in_flight: deque[Step] = deque()  # launched and not collected, the oldest first
        self._finished: deque[Sequence] = deque()  # what their users get is still to be made
        self._last_collected = 0.0  # perf_counter
        self._num_requests = 0
        self._num_sequences = 0
        self._requests: dict[int, Request] = {}  # those that were not returned
        self._watched: dict[int, Completion] = {}  # by seq_id: begun, and to be looked at when a token has come
        self._marked: deque[int] = deque()  # to be aborted by the next step

    def encode(self, prompts: list[Prompt], add_special_tokens: bool = True, what: str = "prompt") -> list[list[int]]:
        """Token ids of each prompt, texts in one batch. Raises RequestError for one that cannot be served."""
        self._check_open()
        limits = self.model_config.vocab_size, self.max_model_len
        all_ids = self.tokenize(prompts, add_special_tokens)
        return [check_token_ids(ids, f"{what} {index}", *limits) for index, ids in enumerate(all_ids)]

    def tokenize(self, prompts: list[Prompt], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of the prompts that are texts; the others as they are."""
        texts = {index: prompt for index, prompt in enumerate(prompts) if isinstance(prompt, str)}
        if texts:
            check_texts(texts, self.max_model_len * self.require_tokenizer().longest_token)
        encoded = iter(self.require_tokenizer().encode([*texts.values()], add_special_tokens) if texts else [])
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer; RequestError where the model has none."""
        if self.tokenizer is None:
            raise RequestError(f"{self.config.model} has no tokenizer; give the prompt as a list of token ids")
        return self.tokenizer

    def check_params(self, sampling_params: SamplingParams) -> None:
        """Raise RequestError for what this model cannot serve."""
        if sampling_params.stop and self.tokenizer is None:
            raise RequestError(
                f"stop={sampling_params.stop!r} is found in text, and {self.config.model} has no tokenizer; "
                "use stop_token_ids"
            )
        check_against_model(sampling_params, self.model_config.vocab_size, self.scheduler.stop_token_ids)

    def add_request(
        self,
        prepared: Prepared,
        inbox: list[RequestOutput],
        chunks: deque[StreamChunk] | None = None,
        index: int = 0,
    ) -> int:
        """Queue a request and return its id.

        inbox: where a step puts its output. chunks: where a stream finds what is new of it, under this `index`.
        """
        prompt, token_ids, params, priority, score_from = prepared
        request_id = self._num_requests
        self._num_requests += 1
        request = Request(request_id, prompt if isinstance(prompt, str) else None, [], inbox)
        for sample in range(params.n):
            seed = self._seed(params, request_id, sample)
            seq = Sequence(self._num_sequences, token_ids, params, seed, priority, request_id, sample)
            self._num_sequences += 1
            request.completions.append(Completion(seq, self._completion_text(params), chunks, index))
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(token_ids)
            if score_from < len(token_ids):
                request.completions[0].seq.score_from = score_from
        self._requests[request_id] = request
        for completion in request.completions:
            self.scheduler.add(completion.seq)
        return request_id

    def step(self) -> None:
        """Launch the next step, collect the one before it, and hand over the requests that finished.

        If a step fails, the requests that were in it are queued again and the error is raised.
        """
        if self._marked:
            self._abort_marked()
        launched = self._launch()
        self._collect_until(max_in_flight=1 if launched and self.config.overlap else 0)
        if self.scheduler.is_finished():
            self._collect_until(max_in_flight=0)  # it was launched before a stop was known, and nobody waits for it
        while self._finished:  # one at a time, so that an error in one loses no other
            output = self._output(self._finished[0])
            if output is not None:
                self._requests.pop(output.request_id).inbox.append(output)
            self._finished.popleft()

    def abort(self, request_ids: Collection[int]) -> None:
        """Drop these requests and what they hold; those that are finished are passed over."""
        self.abort_later(request_ids)
        self._abort_marked()
        dropped = set(request_ids)
        self._watched = {key: one for key, one in self._watched.items() if one.seq.request_id not in dropped}
        self._finished = deque(seq for seq in self._finished if seq.request_id not in dropped)
        for request_id in dropped:
            self._requests.pop(request_id, None)

    def abort_later(self, request_ids: Iterable[int]) -> None:
        """Have the next step finish these requests as they are, with "abort"; those that are finished are passed over.

        Safe at any moment, as in a callback, or where the garbage collector closes a stream.
        """
        self._marked.extend(request_id for request_id in request_ids if request_id in self._requests)

    def is_finished(self) -> bool:
        """Whether every request has finished and was handed over."""
        return self.scheduler.is_finished() and not self._finished

    def metrics(self) -> EngineMetrics:
        """The work done so far, and what is held now."""
        return replace(
            self.stats,
            num_preemptions=self.scheduler.num_preemptions,
            num_used_blocks=self.block_manager.num_used_blocks,
            num_blocks=self.block_manager.num_blocks,
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._check_open()
        self.block_manager.reset_prefix_cache()

    def close(self) -> None:
        """Free the model and the cache. Closing twice is fine; other calls then raise EngineClosedError."""
        if self.runner is not None:
            self._in_flight.clear()
            self.runner.close()
            self.runner = None

    def _launch(self) -> bool:
        """Schedule a step and start it; False when there is nothing to do before the one in flight is collected."""
        runner = self._check_open()
        started = time.perf_counter()
        batch = self.scheduler.schedule(in_flight=bool(self._in_flight))
        if not batch:
            return False
        try:
            self._note_admissions(batch, started)
            self._in_flight.append(Step(batch, runner.launch(pack(batch)), started))
        except BaseException:
            self._discard(batch)
            raise
        return True

    def _collect(self) -> None:
        """Wait for the oldest step in flight and keep the sequences that it finished."""
        runner, step = self._check_open(), self._in_flight[0]
        try:
            token_ids = runner.wait(step.handle)
        except BaseException:
            self._discard()
            raise
        self._in_flight.popleft()
        wanted = [seq.status is SequenceStatus.RUNNING for seq in step.batch.sampled]
        self._finished += self.scheduler.update(step.batch, token_ids)
        if step.handle.logprobs or step.handle.prompt_logprobs:
            self._note_logprobs(step, wanted)
        # Steps overlap: each counts from its launch, or from the end of the one before it.
        now = time.perf_counter()
        self._count(step.batch, sum(wanted), now - max(step.started, self._last_collected))
        self._last_collected = now
        if self._watched:
            self._watch(step.batch, now)

    def _collect_until(self, max_in_flight: int) -> None:
        while len(self._in_flight) > max_in_flight:
            self._collect()

    def _count(self, batch: ScheduledBatch, num_generated: int, seconds: float) -> None:
        """Count a collected step, in which `num_generated` sequences got a token that was wanted."""
        stats = self.stats
        stats.num_generated_tokens += num_generated
        if batch.prefill:
            stats.num_prefill_steps += 1
            stats.prefill_tokens += batch.num_prefill_tokens
            stats.prefill_seconds += seconds
        else:
            stats.num_decode_steps += 1
            stats.decode_tokens += num_generated
            stats.decode_seconds += seconds

    def _note_admissions(self, batch: ScheduledBatch, now: float) -> None:
        for seq in batch.admitted:
            completion = self._completion(seq)
            if completion.begun is None:
                completion.begun = now
                self._watched[seq.seq_id] = completion
                self.stats.num_prompt_tokens += seq.num_prompt_tokens
                self.stats.cached_tokens += seq.num_cached_tokens or 0

    def _watch(self, batch: ScheduledBatch, now: float) -> None:
        """Note first tokens and extend followed texts; a sequence ends with its stop string as with a stop token."""
        stopped = []
        for seq in batch.sampled:
            completion = self._watched.get(seq.seq_id)
            if completion is None:
                continue
            if completion.first_token is None and len(seq.token_ids) > seq.num_prompt_tokens:
                completion.first_token = now
            if not completion.is_followed:
                del self._watched[seq.seq_id]
            elif seq.status is SequenceStatus.RUNNING and completion.advance():
                stopped.append((seq, "stop"))
        self._finished += self.scheduler.finish(stopped)

    def _note_logprobs(self, step: Step, wanted: list[bool]) -> None:
        """Keep the log-probabilities of the tokens that a step has yielded, and of the prompts' tokens in it."""
        sampled = step.batch.sampled
        for part in step.handle.logprobs:
            for line, best in zip(part.lines, part.best.tolist(), strict=True):
                seq = sampled[line]
                num_best = seq.sampling_params.logprobs
                if wanted[line] and seq.finish_reason != "error" and num_best is not None:
                    self._completion(seq).logprobs.append(self._logprobs(seq, num_best, *best))
        for scored in step.handle.prompt_logprobs:
            seq = step.batch.prefill[scored.chunk].seq
            request, num_best = self._requests.get(seq.request_id), seq.sampling_params.prompt_logprobs
            if request is None or request.prompt_logprobs is None or num_best is None:  # it was dropped
                continue
            for position, best in enumerate(scored.best.tolist(), scored.start):
                request.prompt_logprobs[position] = self._logprobs(seq, num_best, *best)
                if position == seq.num_prompt_tokens - 1:
                    seq.score_from = None  # if it is computed again, then without

    def _logprobs(
        self, seq: Sequence, num_best: int, rank: int, token_ids: list[int], logprobs: list[float]
    ) -> TokenLogprobs:
        """Of a token of this rank, the first in the lists, and of the `num_best` likeliest, which come after it."""
        (token_id, logprob), *likeliest = zip(token_ids, logprobs, strict=True)
        likeliest = sorted(likeliest, key=lambda pair: (-pair[1], pair[0]))[:num_best]
        found = {token_id: (logprob, rank)}
        for its_rank, (its_id, its_logprob) in enumerate(likeliest, 1):
            found.setdefault(its_id, (its_logprob, its_rank))
        text_of = self.tokenizer.text_of_token if self.tokenizer and seq.sampling_params.detokenize else lambda _: None
        return {token_id: Logprob(*numbers, text_of(token_id)) for token_id, numbers in found.items()}

    def _completion(self, seq: Sequence) -> Completion:
        return self._requests[seq.request_id].completions[seq.sample]

    def _abort_marked(self) -> None:
        self._collect_until(max_in_flight=0)  # a step that fails must find its sequences as it left them
        marked = sorted({self._marked.popleft() for _ in range(len(self._marked))})
        requests = [self._requests[request_id] for request_id in marked if request_id in self._requests]
        seqs = [completion.seq for request in requests for completion in request.completions]
        unfinished = [seq for seq in seqs if seq.status is not SequenceStatus.FINISHED]
        self.scheduler.abort({seq.seq_id for seq in unfinished})
        self._finished += unfinished

    def _seed(self, params: SamplingParams, request_id: int, sample: int) -> int:
        """Of a sample's own random stream, so that equal prompts differ and batches do not matter."""
        source = (params.seed,) if params.seed is not None else (self.config.seed, request_id)
        return xxhash.xxh64_intdigest(struct.pack(f"<{len(source) + 1}q", *source, sample)) >> 1

    def _completion_text(self, params: SamplingParams) -> CompletionText:
        detokenizer: Detokenizer = WindowDetokenizer(lambda _: "")
        if self.tokenizer and params.detokenize:
            detokenizer = self.tokenizer.detokenizer(params.skip_special_tokens)
        return CompletionText(detokenizer, params.stop or (), params.include_stop_str_in_output)

    def _discard(self, *batches: ScheduledBatch) -> None:
        """Queue the sequences of all steps in flight, and of these batches, again."""
        in_flight = [step.batch for step in self._in_flight]
        self._in_flight.clear()
        self.scheduler.discard([*in_flight, *batches])

    def _check_open(self) -> ModelRunner | ParallelRunner:
        if self.runner is None or self.runner.closed:
            raise EngineClosedError("this engine was closed; make a new LLM")
        return self.runner

    def _output(self, seq: Sequence) -> RequestOutput | None:
        """Finish a sample; the output of its request, if it is the last."""
        if seq.finish_reason == "error":
            logger.warning("request %d ends in an error: its logits are NaN or infinite", seq.request_id)
        self._watched.pop(seq.seq_id, None)
        self._completion(seq).finish()
        return self._requests[seq.request_id].output()
