"""What requests may want beside their text: log-probabilities, hidden states of their prompts, routed experts."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import repeat
from typing import Any

from numpy.typing import NDArray

from nanoinfer.config import EngineConfig
from nanoinfer.engine.hidden_states_request import collect_states, hand_over_states
from nanoinfer.engine.interfaces import Runner, SampledStep
from nanoinfer.engine.prompt_logprobs import PromptLogprobs
from nanoinfer.engine.request import Completion, Request
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.sequence import Sequence
from nanoinfer.flat_logprobs import NO_RANK, FlatLogprobs, token_logprobs
from nanoinfer.text.prompts import PreparedRequest
from nanoinfer.text.tokenizer import Tokenizer, prompt_texts


class Extras:
    """Starts, collects and completes what was asked for. The loop calls the methods in their order here."""

    def __init__(self, config: EngineConfig, runner: Runner, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._routed_experts = RoutedExperts(runner) if config.enable_return_routed_experts else None
        # The scheduler calls this with a sequence that finishes, while the sequence still holds its blocks.
        self.on_finish = self._routed_experts.on_finish if self._routed_experts else None

    def start(self, request: Request, prepared: PreparedRequest) -> None:
        """Make room for what a request wants that is about to be queued."""
        token_ids, params, seq = prepared.token_ids, prepared.sampling_params, request.completions[0].seq
        if params.flat_logprobs:
            for completion in request.completions:
                completion.logprobs = FlatLogprobs()
        if params.prompt_logprobs is not None:
            new_texts = prompt_texts(self._tokenizer, params, prepared.prompt, token_ids)
            found = PromptLogprobs(len(token_ids), params.prompt_logprobs, new_texts, params.flat_logprobs)
            request.prompt_logprobs = found
            if prepared.prompt_logprobs_start < len(token_ids):
                seq.prompt_logprobs_start = prepared.prompt_logprobs_start
        request.hidden_states_request = seq.hidden_states_request = prepared.hidden_states_request

    def launched(self, batch: ScheduledBatch, handle: SampledStep) -> None:
        """Hand over what a step brings on the device."""
        if handle.hidden_states:
            hand_over_states(batch.prefill, handle.hidden_states)

    def collected(
        self, requests: Mapping[int, Request], batch: ScheduledBatch, handle: SampledStep, wanted: list[bool]
    ) -> None:
        """Keep what a step has brought. wanted: for each of its tokens, whether its sequence was still running."""
        for of_samples in handle.logprobs:
            for batch_idx, entry in zip(of_samples.batch_indices, of_samples.logprobs.to_positions(), strict=True):
                if wanted[batch_idx]:
                    seq = batch.sampled[batch_idx]
                    _add_logprobs(requests[seq.request_id].completions[seq.sample], *entry)
        for of_prompts in handle.prompt_logprobs:
            arrays, offset = [part.numpy() for part in of_prompts.logprobs], 0
            for chunk, start, length in of_prompts.spans:
                request = requests.get(batch.prefill[chunk].seq.request_id)
                if request is not None:  # None: it was dropped
                    _add_prompt_logprobs(request, start, [part[offset : offset + length] for part in arrays])
                offset += length
        if handle.hidden_states:
            collect_states(batch.prefill, handle.hidden_states)

    def finished(self, requests: Mapping[int, Request], seqs: list[Sequence]) -> None:
        """Start what is to be read of sequences that have just finished, before another step has their blocks."""
        if self._routed_experts is not None:
            self._routed_experts.read(requests, seqs)

    def complete(self, completion: Completion) -> None:
        """Complete what belongs to a sample, before its output is made.

        Its text may end with half a character. The last token's log-probability gets that half as its text.
        """
        logprobs = completion.logprobs
        texts = completion.text().of_tokens if logprobs else None
        if not texts:
            return
        if isinstance(logprobs, FlatLogprobs):
            place = logprobs.start_indices[-1]
            logprobs.decoded_tokens[place] = texts.end(logprobs.token_ids[place], logprobs.decoded_tokens[place] or "")
        else:
            token_id, entry = next(iter(logprobs[-1].items()))
            text = texts.end(token_id, entry.decoded_token or "")
            # A stream may have handed the old dict out.
            logprobs[-1] = {**logprobs[-1], token_id: replace(entry, decoded_token=text)}


class RoutedExperts:
    """Copies which experts computed the tokens of sequences that finish, before others take their blocks."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._final: dict[Sequence, tuple[list[int], int]] = {}  # blocks and computed tokens of finished ones

    def on_finish(self, seq: Sequence) -> None:
        """Note the blocks of a sequence that finishes, and how many tokens were computed."""
        self._final[seq] = seq.block_table.copy(), seq.num_computed_tokens

    def read(self, requests: Mapping[int, Request], finished: list[Sequence]) -> None:
        """Start the copies for sequences that have just finished. A sequence without blocks gets none."""
        for seq in finished:
            block_ids, num_computed_tokens = self._final.pop(seq, ([], 0))
            if self._runner.closed:  # it has forgotten them, and nothing more is handed over
                continue
            start = min(seq.sampling_params.routed_experts_prompt_start, seq.num_prompt_tokens)
            end = min(num_computed_tokens, len(seq.token_ids) - 1)  # the newest token was never computed
            completion = requests[seq.request_id].completions[seq.sample]
            completion.routed_experts = self._runner.read_routed_experts(block_ids, start, end)


def _add_logprobs(completion: Completion, rank: int, token_ids: list[int], logprobs: list[float]) -> None:
    """Keep the log-probabilities of a sample's newest token, which comes first, and of others; rank: its own."""
    params = completion.seq.sampling_params
    num_others = params.num_logprobs
    if num_others is not None and completion.seq.finish_reason != "error":
        token_ids, logprobs = token_ids[: 1 + num_others], logprobs[: 1 + num_others]
        ranks = [NO_RANK] * num_others if params.logprob_token_ids else range(1, 1 + num_others)
        texts = completion.text().of_tokens
        decoded = texts.add_first(token_ids) if texts else repeat(None, len(token_ids))
        entries = token_ids, logprobs, [rank, *ranks], decoded
        if isinstance(completion.logprobs, FlatLogprobs):
            completion.logprobs.append(*entries)
        else:
            completion.logprobs.append(token_logprobs(*entries))


def _add_prompt_logprobs(request: Request, start: int, arrays: list[NDArray[Any]]) -> None:
    """Keep the log-probabilities of neighbouring prompt tokens: their ranks, ids and log-probabilities."""
    seq, found = request.completions[0].seq, request.prompt_logprobs
    if found is not None:
        ranks, token_ids, logprobs = arrays
        found.fill(start, ranks, token_ids, logprobs)
        if start + len(ranks) == seq.num_prompt_tokens:
            seq.prompt_logprobs_start = None  # all have come: a recomputed prompt does not need them again
