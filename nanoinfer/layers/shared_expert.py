"""An expert that computes all tokens, beside those that a router chooses (Qwen3-Next, GLM-4.5)."""

import torch
from torch import Tensor, nn

from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.linear import MergedColumnParallelLinear, RowParallelLinear, wide_rows
from nanoinfer.ops.activations.spec import gated_sum, silu_and_mul
from nanoinfer.ops.common.fp8_format import Activations


class SharedExpert(nn.Module):
    """A SwiGLU MLP whose output is left in terms, for the next norm to add up with those of the chosen experts."""

    def __init__(self, hidden_size: int, intermediate_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, intermediate_size, bias=False, tp=tp)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=False, tp=tp)

    def forward(self, hidden: Activations) -> Tensor:
        """Return terms to be added up, (num_terms, num_tokens, hidden_size), of this rank."""
        hidden = hidden if self.gate_up_proj.input_format is not None else wide_rows(hidden)
        gated = silu_and_mul(self.gate_up_proj(hidden), self.down_proj.input_format)
        return self.down_proj.quant_method.apply_split(self.down_proj, gated, None)


class SharedExpertGate(nn.Module):
    """Says how much of a token's shared expert counts."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size), requires_grad=False)

    def forward(self, terms: Tensor, hidden: Tensor) -> Tensor:
        """Return the expert's terms times the gates, (1, num_tokens, hidden_size). hidden: the expert's inputs."""
        return gated_sum(terms, hidden, self.weight)
