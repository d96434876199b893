"""A router that scores each expert by itself, and corrects the choice by a bias (DeepSeek-V3, GLM-4.5, MiniMax-M2)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.checkpoint.model_config import MoEConfig
from nanoinfer.layers.moe import Routing

EPS = 1e-20  # so that scores that are all 0 have a quotient


def route_by_sigmoid(logits: Tensor, bias: Tensor, moe: MoEConfig, row_mask: Tensor | None = None) -> Routing:
    """Choose the experts of each token whose sigmoid plus bias is largest; of equal ones, those of the lowest ids.

    logits: (num_tokens, num_experts) float32. Their weights are the sigmoids alone. Of several groups of experts only
    those count whose two best sum up to the most. row_mask: see `route`.
    """
    scores = logits.sigmoid()
    choice = scores + bias
    if moe.num_groups > 1:
        groups = choice.unflatten(1, (moe.num_groups, -1))
        of_groups = groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(-1)
        chosen = torch.sort(of_groups, dim=-1, descending=True, stable=True).indices[:, : moe.num_chosen_groups]
        is_chosen = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, chosen, True)
        choice = groups.masked_fill(~is_chosen.unsqueeze(-1), -torch.inf).flatten(1)
    expert_ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : moe.num_experts_per_tok]
    weights = scores.gather(1, expert_ids)
    if moe.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + EPS)
    weights, expert_ids = weights * moe.scaling_factor, expert_ids.int()
    if row_mask is not None:
        no_token = ~row_mask.unsqueeze(1)
        expert_ids, weights = expert_ids.masked_fill(no_token, logits.shape[1]), weights.masked_fill(no_token, 0.0)
    return Routing(expert_ids.contiguous(), weights.contiguous())


class SigmoidRouter(nn.Module):
    """Scores the experts for each token, in float32. All ranks hold all of it, and route alike."""

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size), requires_grad=False)
        bias = torch.empty(moe.num_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, hidden: Tensor, row_mask: Tensor | None) -> Routing:
        logits = F.linear(hidden.float(), self.weight.float())
        return route_by_sigmoid(logits, self.e_score_correction_bias, self.moe, row_mask)
