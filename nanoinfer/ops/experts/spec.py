"""The MLPs of a mixture's experts: each token is computed by the experts that it is routed to, and weighted.

In every one `expert_ids` and `weights` are (num_tokens, num_experts_per_tok), as `route` returns them. A token without
an expert, whose id is num_experts, gets zeros.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.common.fp8_format import QuantizedRows, RowFormat
from nanoinfer.ops.dispatch import op
from nanoinfer.ops.fp8.spec import dequantize_rows, dequantize_weight, quantize_rows


class ExpertWeights(NamedTuple):
    """One weight of all experts."""

    values: Tensor  # (num_experts, num_rows, depth), or (num_experts, num_rows, depth / 8) int32: in 4 bits
    scales: Tensor | None = None  # of these: (num_experts, num_rows, num_groups) float32, or one for each row
    zeros: Tensor | None = None  # uint8, of the same shape; None: 8
    bias: Tensor | None = None  # (num_experts, num_rows)
    is_e2m1: bool = False  # whether the 4 bits are values of e2m1; then depth may be that of x, up to a multiple of 128

    @property
    def num_groups(self) -> int:
        """How many scales a row has; 0: the weight is in 16 bits."""
        return 0 if self.scales is None else self.scales.shape[2] if self.scales.dim() == 3 else 1


@op
def expert_mlp(hidden: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """Return what each expert of a token adds to it, (num_experts_per_tok, num_tokens, hidden_size), weighted.

    hidden: (num_tokens, hidden_size), rows contiguous.
    gate_up: (num_experts, 2 * inner_size, hidden_size), gate before up. down: (num_experts, hidden_size, inner_size).
    Both contiguous. The kernels' host does not wait for the device, so a CUDA graph can capture this.
    """
    num_tokens, num_experts_per_tok = expert_ids.shape
    terms = hidden.new_zeros(num_experts_per_tok, num_tokens, hidden.shape[1])
    for expert in expert_ids[expert_ids < len(gate_up)].unique().tolist():
        token, choice = (expert_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden[token], gate_up[expert]).chunk(2, dim=1)
        result = F.linear(F.silu(gate) * up, down[expert])
        terms[choice, token] = (result * weights[token, choice].unsqueeze(1)).to(terms.dtype)
    return terms


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """Return gate' sigmoid(alpha gate') (up' + 1), where gate' is at most `limit`, and up' between -limit and limit."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


@op
def clamped_expert_mlp(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor,
    down_bias: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    clamps: tuple[float, float],
) -> Tensor:
    """Return what each expert of a token adds to it, as `expert_mlp` does.

    gate_up_bias: (num_experts, 2 * inner_size). down_bias: (num_experts, hidden_size). clamps: limit and
    alpha of `clamped_swiglu`.
    """
    num_tokens, num_experts_per_tok = expert_ids.shape
    terms = hidden.new_zeros(num_experts_per_tok, num_tokens, hidden.shape[1])
    for expert in expert_ids[expert_ids < len(gate_up)].unique().tolist():
        token, choice = (expert_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden[token], gate_up[expert], gate_up_bias[expert]).chunk(2, dim=1)
        result = F.linear(clamped_swiglu(gate, up, *clamps), down[expert], down_bias[expert])
        terms[choice, token] = (result * weights[token, choice].unsqueeze(1)).to(terms.dtype)
    return terms


@op
def fp8_expert_mlp(
    x: Tensor,
    x_scales: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    down_format: RowFormat,
    expert_ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return what each expert of a token adds to it, (num_experts_per_tok, num_tokens, hidden_size), weighted.

    x, x_scales: of QuantizedRows of hidden_size. gate_up, down: as in `expert_mlp`, in e4m3; their scales: of rows,
    (num_experts, rows), or of blocks of 128, 3-D. All contiguous. down_format: how SwiGLU's results are rounded, in
    groups or by one static scale. dtype: of the result, to which gate, up and SwiGLU are rounded, too.
    """
    num_tokens, num_experts_per_tok = expert_ids.shape
    wide = dequantize_rows(QuantizedRows(x, x_scales))
    terms = torch.zeros(num_experts_per_tok, num_tokens, x.shape[1], dtype=dtype, device=x.device)
    for expert in expert_ids[expert_ids < len(gate_up)].unique().tolist():
        token, choice = (expert_ids == expert).nonzero(as_tuple=True)
        sums = wide[token] @ dequantize_weight(gate_up[expert], gate_up_scales[expert]).t()
        gate, up = sums.to(dtype).chunk(2, dim=1)
        gated = dequantize_rows(quantize_rows(F.silu(gate) * up, down_format))
        result = gated @ dequantize_weight(down[expert], down_scales[expert]).t()
        terms[choice, token] = (result * weights[token, choice].unsqueeze(1)).to(dtype)
    return terms
