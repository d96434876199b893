"""The gated activations of the MLP (GLU variants, Shazeer 2020)."""

import torch.nn.functional as F
from torch import Tensor

from nanoinfer import kernels
from nanoinfer.kernels.triton_twins import triton_on_cuda
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.ops.fp8.spec import quantize_rows


@triton_on_cuda(lambda: kernels.gated_activation.silu_and_mul)
def silu_and_mul(gate_up: Tensor, out_format: RowFormat | None = None) -> Activations:
    """Return silu(gate) * up, SwiGLU: (num_tokens, size). gate_up: (num_tokens, 2 * size), gate before up.

    out_format: how the result is rounded to 8 bits, in groups or by a static scale; None: it is not.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return _in_format(F.silu(gate) * up, out_format)


@triton_on_cuda(lambda: kernels.gated_activation.gelu_tanh_and_mul)
def gelu_tanh_and_mul(gate_up: Tensor, out_format: RowFormat | None = None) -> Activations:
    """Return gelu(gate) * up, GeGLU, by the tanh approximation of GELU. The rest is as for silu_and_mul."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _in_format(F.gelu(gate, approximate="tanh") * up, out_format)


@triton_on_cuda(lambda: kernels.gated_activation.gelu_and_mul)
def gelu_and_mul(gate_up: Tensor, out_format: RowFormat | None = None) -> Activations:
    """Return gelu(gate) * up, GeGLU, by the error function. The rest is as for silu_and_mul."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _in_format(F.gelu(gate) * up, out_format)


def _in_format(gated: Tensor, out_format: RowFormat | None) -> Activations:
    return gated if out_format is None else quantize_rows(gated, out_format)
