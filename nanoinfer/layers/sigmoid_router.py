"""A router that scores each expert by itself, and corrects the choice by a bias (DeepSeek-V3, GLM-4.5, MiniMax-M2)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer import kernels
from nanoinfer.checkpoint.moe_config import MoEConfig
from nanoinfer.kernels.triton_twins import triton_on_cuda
from nanoinfer.layers.moe import Router, Routing

EPS = 1e-20  # so that scores that are all 0 have a quotient


@triton_on_cuda(lambda: kernels.moe_routing.route_by_sigmoid)
def route_by_sigmoid(
    terms: Tensor,
    bias: Tensor,
    num_experts_per_tok: int,
    norm_topk_prob: bool,
    scaling_factor: float,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token whose sigmoid plus bias is largest; of equal ones, those of the lowest ids.

    Their weights are the sigmoids alone, times the scaling factor. The terms and the rest: see `route`.
    """
    scores = terms.sum(0, dtype=torch.float32).sigmoid()
    return _best(scores, scores + bias, num_experts_per_tok, norm_topk_prob, scaling_factor, row_mask)


def route_in_groups(
    terms: Tensor, bias: Tensor, moe: MoEConfig, row_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Do as `route_by_sigmoid`, but only with the groups of experts whose two best scores have the largest sums."""
    scores = terms.sum(0, dtype=torch.float32).sigmoid()
    groups = (scores + bias).unflatten(1, (moe.num_groups, -1))
    of_groups = groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(-1)
    chosen = torch.sort(of_groups, dim=-1, descending=True, stable=True).indices[:, : moe.num_chosen_groups]
    is_chosen = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, chosen, True)
    order = groups.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).flatten(1)
    return _best(scores, order, moe.num_experts_per_tok, moe.norm_topk_prob, moe.scaling_factor, row_mask)


def _best(
    scores: Tensor,
    order: Tensor,
    num_experts_per_tok: int,
    norm_topk_prob: bool,
    scaling_factor: float,
    row_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the experts that are first in order, and their weights, as `route` does."""
    expert_ids = torch.sort(order, dim=-1, descending=True, stable=True).indices[:, :num_experts_per_tok]
    weights = scores.gather(1, expert_ids)
    if norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + EPS)
    weights, expert_ids = weights * scaling_factor, expert_ids.int()
    if row_mask is not None:
        no_token = ~row_mask.unsqueeze(1)
        expert_ids, weights = expert_ids.masked_fill(no_token, scores.shape[1]), weights.masked_fill(no_token, 0.0)
    return expert_ids.contiguous(), weights.contiguous()


class SigmoidRouter(Router):
    """Scores the experts in float32, as these models are trained."""

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__(hidden_size, moe)
        self.moe = moe
        bias = torch.empty(moe.num_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, hidden: Tensor, row_mask: Tensor | None) -> Routing:
        terms, bias, moe = self.terms(hidden), self.e_score_correction_bias, self.moe
        if moe.num_groups > 1:
            return Routing(*route_in_groups(terms, bias, moe, row_mask))
        choices = moe.num_experts_per_tok, moe.norm_topk_prob, moe.scaling_factor
        return Routing(*route_by_sigmoid(terms, bias, *choices, row_mask))

    def logits(self, hidden: Tensor) -> Tensor:
        if hidden.is_cuda and hidden.dtype != torch.float32:
            # Products of 16 bits are exact in float32, in which the tensor cores add them up.
            return torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        return F.linear(hidden.float(), self.weight.float())
