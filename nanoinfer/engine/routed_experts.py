"""Which experts computed a request's tokens, as `enable_return_routed_experts` asks for."""

from collections.abc import Iterable, Mapping

from nanoinfer.engine.interfaces import Runner
from nanoinfer.engine.request import Request
from nanoinfer.engine.sequence import Sequence


def read_routed_experts(runner: Runner, requests: Mapping[int, Request], finished: Iterable[Sequence]) -> None:
    """Have the runner copy the routing of sequences that have just finished, before another step has their blocks.

    The newest token was never computed, so it has none.
    """
    for seq in finished:
        start = min(seq.sampling_params.routed_experts_prompt_start, seq.num_prompt_tokens)
        end = min(seq.num_final_tokens, len(seq.token_ids) - 1)
        completion = requests[seq.request_id].completions[seq.sample]
        completion.routed_experts = runner.read_routed_experts(seq.final_blocks, start, end)
