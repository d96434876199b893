"""Specifies the MLPs of a mixture's experts: what each token's experts add to it, times their weights.

The router has chosen experts for each token (`ops/routing`): `expert_ids` and `weights` are (num_tokens,
num_experts_per_tok). Each chosen expert computes an MLP for the token, down(activation(gate, up)), and its result is
multiplied by the weight. The results stay apart, and the caller adds them up. An id of num_experts stands for no
expert, and yields zeros.

The kernels beside this file speak of

- pairs: a token and one of its experts, with the id token * num_experts_per_tok + choice.
- tiles: pairs of one expert, which a program multiplies together. A tile has room for 16 pairs or more, and the last
  one of an expert may be partly empty.
- lines: rows of an expert's weight. Each makes one column of the outputs.
- items: a tile and a block of columns, where programs take one after the other (`hopper.py`).

For example, token 0 has experts 0 and 2, and token 1 has experts 2 and 1: `expert_ids` is [[0, 2], [2, 1]]. Sorted by
expert, in tiles of only two pairs, these are

    tile 0    expert 0    pair 0, which is token 0
    tile 1    expert 1    pair 3, which is token 1
    tile 2    expert 2    pair 1, which is token 0; pair 2, which is token 1

so the weight of expert 2 is read once for both tokens. The result of pair 1 is row [1, 0] of the output, which has
choices before tokens.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.common.fp8_format import FP8, QuantizedRows, RowFormat
from nanoinfer.ops.dispatch import op
from nanoinfer.ops.fp8.spec import dequantize_rows, dequantize_weight, quantize_rows
from nanoinfer.ops.int4.spec import PackedWeight, dequantize


class ExpertWeights(NamedTuple):
    """Holds one weight matrix of each expert, in 32, 16, 8 or 4 bits. All tensors are contiguous.

    num_rows counts output features, and depth counts input features.
    values: (num_experts, num_rows, depth) in the model's dtype or e4m3; for 4 bits (num_experts, num_rows, depth / 8)
    int32. scales: None for the model's dtype; (num_experts, num_rows) if each row has one; else 3-D, with one for each
    block of 128 in e4m3, or for each group in 4 bits. See `ops/fp8/spec.py` and `ops/int4/spec.py`.
    """

    values: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None  # zero points for 4 bits, uint8, shaped as scales; None: all are 8
    bias: Tensor | None = None  # (num_experts, num_rows)
    is_e2m1: bool = False  # whether 4 bits are an e2m1 number; depth is then x's, padded to a multiple of 128

    @property
    def num_groups(self) -> int:
        """How many scales a row of 4 bits has; 0 for a weight without scales."""
        return 0 if self.scales is None else self.scales.shape[2] if self.scales.dim() == 3 else 1

    def of_expert(self, expert: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return an expert's weight in `dtype`, (num_rows, depth), and its bias."""
        scales, zeros, bias = (None if each is None else each[expert] for each in (self.scales, self.zeros, self.bias))
        values = self.values[expert]
        if scales is not None and values.dtype == FP8:
            values = dequantize_weight(values, scales).to(dtype)
        elif scales is not None:
            values = dequantize(PackedWeight(values, scales, zeros, is_e2m1=self.is_e2m1))[:, :depth].to(dtype)
        return values, bias


@op
def expert_mlp(
    hidden: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    expert_ids: Tensor,
    weights: Tensor,
    clamps: tuple[float, float] | None = None,
    is_geglu: bool = False,
) -> Tensor:
    """Return what each expert of a token adds to it, (num_experts_per_tok, num_tokens, hidden_size), weighted.

    A kernel may return parts for the caller to add up: (num_parts * num_experts_per_tok, num_tokens, hidden_size).
    hidden: (num_tokens, hidden_size), rows contiguous. gate_up: (num_experts, 2 * inner_size, hidden_size), gate before
    up. down: (num_experts, hidden_size, inner_size). clamps: limit and alpha of `clamped_swiglu`; None: plain SwiGLU.
    is_geglu: whether the activation is GeGLU, with the tanh approximation of GELU, instead of SwiGLU.
    The kernels' host does not wait for the device, so a CUDA graph can capture them.
    """
    terms = hidden.new_zeros(expert_ids.shape[1], *hidden.shape)
    for expert, token, choice in _pairs_of_experts(expert_ids, len(gate_up.values)):
        gate, up = F.linear(hidden[token], *gate_up.of_expert(expert, hidden.shape[1], hidden.dtype)).chunk(2, dim=1)
        gated = _glu(gate, up, is_geglu) if clamps is None else clamped_swiglu(gate, up, *clamps)
        result = F.linear(gated, *down.of_expert(expert, gated.shape[1], gated.dtype))
        terms[choice, token] = (result * weights[token, choice].unsqueeze(1)).to(terms.dtype)
    return terms


def _pairs_of_experts(expert_ids: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert that is used, the indices of its tokens, and which of each token's choices it is."""
    for expert in expert_ids[expert_ids < num_experts].unique().tolist():
        yield expert, *(expert_ids == expert).nonzero(as_tuple=True)


def _glu(gate: Tensor, up: Tensor, is_geglu: bool) -> Tensor:
    return (F.gelu(gate, approximate="tanh") if is_geglu else F.silu(gate)) * up


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """Return gate' sigmoid(alpha gate') (up' + 1), where gate' is at most `limit`, and up' between -limit and limit."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


@op
def fp8_expert_mlp(
    x: Tensor,
    x_scales: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    down_format: RowFormat,
    expert_ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    is_geglu: bool = False,
) -> Tensor:
    """Return what each expert of a token adds to it, (num_experts_per_tok, num_tokens, hidden_size), weighted.

    x, x_scales: QuantizedRows of hidden_size columns. gate_up, down, is_geglu: as in `expert_mlp`; weights in e4m3.
    down_format: how the activation's results are rounded, in groups or by one static scale. dtype: the result's dtype,
    to which gate, up and the activation's results are rounded, too.
    """
    wide = dequantize_rows(QuantizedRows(x, x_scales))
    terms = wide.new_zeros(expert_ids.shape[1], *wide.shape, dtype=dtype)
    for expert, token, choice in _pairs_of_experts(expert_ids, len(gate_up.values)):
        first, _ = gate_up.of_expert(expert, wide.shape[1], torch.float32)
        gate, up = (wide[token] @ first.t()).to(dtype).chunk(2, dim=1)
        gated = dequantize_rows(quantize_rows(_glu(gate, up, is_geglu), down_format))
        second, _ = down.of_expert(expert, gated.shape[1], torch.float32)
        result = gated @ second.t()
        terms[choice, token] = (result * weights[token, choice].unsqueeze(1)).to(dtype)
    return terms
