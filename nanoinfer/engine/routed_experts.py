"""Reads which experts computed the tokens of finished sequences, for `enable_return_routed_experts`."""

from collections.abc import Mapping

from nanoinfer.engine.interfaces import Runner
from nanoinfer.engine.request import Request
from nanoinfer.engine.sequence import Sequence


class RoutedExperts:
    """Copies from the device which experts computed finished sequences, before others take their blocks."""

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
