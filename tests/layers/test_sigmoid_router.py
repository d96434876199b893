"""The router of GLM-4.5 and MiniMax-M2 against its rule, row by row."""

import pytest
import torch
from torch import Tensor

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.layers.experts import Routing
from nanoinfer.layers.moe import SigmoidRouter

LOGITS = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
BIAS = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 0.3


def config(groups: int = 1, chosen: int = 1, norm: bool = False, scale: float = 1.0) -> MoEConfig:
    return MoEConfig(12, 3, 8, norm, (True,), None, groups, chosen, scale)


def route(logits: Tensor, bias: Tensor, moe: MoEConfig, row_mask: Tensor | None = None) -> Routing:
    """The routing of rows with these logits: the router's weight takes their inputs as they are."""
    router = SigmoidRouter(12, moe)
    router.weight.copy_(torch.eye(12))
    router.e_score_correction_bias.copy_(bias)
    return router(logits, row_mask)


def plain(logits: Tensor, moe: MoEConfig) -> dict[int, float]:
    """One row, as one would write it down: the weight of each chosen expert."""
    scores = [1 / (1 + float((-logit).exp())) for logit in logits]
    choice = {expert: score + float(BIAS[expert]) for expert, score in enumerate(scores)}
    size = len(scores) // moe.num_groups
    groups = [range(start, start + size) for start in range(0, len(scores), size)]
    groups.sort(key=lambda group: -sum(sorted(choice[expert] for expert in group)[-2:]))
    allowed = [expert for group in groups[: moe.num_chosen_groups] for expert in group]
    best = sorted(allowed, key=lambda expert: -choice[expert])[: moe.num_experts_per_tok]
    total = sum(scores[expert] for expert in best) if moe.norm_topk_prob else 1.0
    return {expert: scores[expert] / total * moe.scaling_factor for expert in best}


@pytest.mark.parametrize("moe", [config(), config(norm=True, scale=2.5), config(4, 2), config(6, 2, norm=True)])
def test_a_row_gets_the_experts_and_weights_of_the_rule(moe: MoEConfig) -> None:
    routing = route(LOGITS, BIAS, moe)
    for row, (expert_ids, weights) in enumerate(zip(routing.expert_ids.tolist(), routing.weights, strict=True)):
        expected = plain(LOGITS[row], moe)
        assert expert_ids == [*expected]
        torch.testing.assert_close(weights, torch.tensor([*expected.values()]))


def test_the_bias_decides_who_is_chosen_and_not_how_much_it_counts() -> None:
    bias = torch.zeros(12)
    bias[[3, 7, 11]] = 10.0
    routing = route(LOGITS, bias, config())
    assert all({*ids} == {3, 7, 11} for ids in routing.expert_ids.tolist())
    assert torch.equal(routing.weights, LOGITS.sigmoid().gather(1, routing.expert_ids.long()))


def test_rows_without_a_token_get_no_experts_and_nan_stays_in_its_row() -> None:
    logits = LOGITS.clone()
    logits[1, 5] = torch.nan  # and so all of the row's
    routing = route(logits, BIAS, config(norm=True), torch.arange(40) != 2)
    assert routing.expert_ids[2].tolist() == [12] * 3
    assert routing.weights[2].tolist() == [0.0] * 3
    assert routing.weights[1].isnan().any()
    assert {*routing.expert_ids[1].tolist()} < {*range(12)}
    others = torch.ones(40, dtype=torch.bool).index_fill(0, torch.tensor([1, 2]), False)
    assert routing.weights[others].isfinite().all()
