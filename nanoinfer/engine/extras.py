"""What requests may want beside their text: log-probabilities, hidden states of their prompts, routed experts.

What a step finds of it comes as `Found` objects, which hand it to the requests themselves; here is what happens to a
request before and after its steps.
"""

from collections.abc import Mapping
from dataclasses import replace

from nanoinfer.config import EngineConfig
from nanoinfer.engine.interfaces import Runner
from nanoinfer.engine.prompt_logprobs import PromptLogprobs
from nanoinfer.engine.request import Completion, Request
from nanoinfer.engine.sequence import Sequence
from nanoinfer.flat_logprobs import FlatLogprobs
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
