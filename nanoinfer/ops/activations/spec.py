"""The gated activations of the MLP (GLU variants, Shazeer 2020), and the gate of a shared expert."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.ops.dispatch import op
from nanoinfer.ops.fp8.spec import quantize_rows


@op
def silu_and_mul(gate_up: Tensor, out_format: RowFormat | None = None) -> Activations:
    """Return silu(gate) * up, SwiGLU: (num_tokens, size).

    gate_up: (num_tokens, 2 * size), gate before up; rows are contiguous. out_format: how the result is rounded to 8
    bits, in groups or by a static scale; None: it is not.
    """
    return _gated(gate_up, F.silu, out_format)


@op
def gelu_tanh_and_mul(gate_up: Tensor, out_format: RowFormat | None = None) -> Activations:
    """Return gelu(gate) * up, GeGLU, by the tanh approximation of GELU. The rest is as for silu_and_mul."""
    return _gated(gate_up, partial(F.gelu, approximate="tanh"), out_format)


@op
def gelu_and_mul(gate_up: Tensor, out_format: RowFormat | None = None) -> Activations:
    """Return gelu(gate) * up, GeGLU, by the error function. The rest is as for silu_and_mul."""
    return _gated(gate_up, F.gelu, out_format)


@op
def gelu_tanh_times(gate: Tensor, factors: Tensor) -> Tensor:
    """Return gelu(gate) * factors, by the tanh approximation of GELU: (num_tokens, size), as both are.

    Rows are contiguous, and those of the factors may lie among others.
    """
    return F.gelu(gate, approximate="tanh") * factors


@op
def linear_gelu_tanh(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return gelu(x @ weight.T + bias), (num_tokens, size), by the tanh approximation of GELU.

    x: (num_tokens, num_inputs). weight: (size, num_inputs). bias: (size,). All are contiguous.
    """
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def _gated(gate_up: Tensor, activation: Callable[[Tensor], Tensor], out_format: RowFormat | None) -> Activations:
    gate, up = gate_up.chunk(2, dim=-1)
    gated = activation(gate).mul_(up)
    return gated if out_format is None else quantize_rows(gated, out_format)


@op
def sigmoid_and_mul(x: Tensor, gates: Tensor) -> Tensor:
    """Return x * sigmoid(gates), (num_tokens, size), contiguous.

    x: (num_tokens, size). gates: the same, or terms to be added up, (num_terms, num_tokens, size). Rows are contiguous.
    """
    if gates.dim() == 3:
        gates = gates.sum(0, dtype=torch.float32).to(gates.dtype)
    return x * gates.sigmoid()


@op
def gated_sum(terms: Tensor, hidden: Tensor, gate_weight: Tensor) -> Tensor:
    """Return the sum of the terms times the sigmoid of each token's gate, computed in float32, (1, num_tokens, size).

    terms: (num_terms, num_tokens, size). hidden: (num_tokens, size). gate_weight: (1, size). Rows are contiguous. The
    gate of a token is the product of its hidden state and the weight (Qwen3-Next's shared expert).
    """
    gate = F.linear(hidden.float(), gate_weight.float()).sigmoid()
    return (terms.sum(0, keepdim=True, dtype=torch.float32) * gate).to(hidden.dtype)
