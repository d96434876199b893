"""A router that scores each expert by itself, and corrects the choice by a bias (DeepSeek-V3, GLM-4.5, MiniMax-M2)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.layers.moe import Router, Routing
from nanoinfer.ops.routing.spec import route_by_sigmoid, route_in_groups


class SigmoidRouter(Router):
    """Scores the experts in float32, as these models are trained."""

    def __init__(self, hidden_size: int, moe: MoEConfig) -> None:
        super().__init__(hidden_size, moe)
        self.moe = moe
        bias = torch.empty(moe.num_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, hidden: Tensor, row_mask: Tensor | None) -> Routing:
        terms, bias, moe = self.terms(hidden), self.e_score_correction_bias, self.moe
        choices = moe.num_experts_per_tok, moe.norm_topk_prob, moe.scaling_factor
        if moe.num_groups > 1:
            return Routing(*route_in_groups(terms, bias, *choices, moe.num_groups, moe.num_chosen_groups, row_mask))
        return Routing(*route_by_sigmoid(terms, bias, *choices, row_mask))

    def logits(self, hidden: Tensor) -> Tensor:
        if hidden.is_cuda and hidden.dtype != torch.float32:
            # Products of 16 bits are exact in float32, in which the tensor cores add them up.
            return torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        return F.linear(hidden.float(), self.weight.float())
