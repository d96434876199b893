"""The gated activations of the MLP (GLU variants, Shazeer 2020)."""

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.dispatch import triton_on_cuda


@triton_on_cuda("nanoinfer.kernels.gated_activation")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, SwiGLU: (num_tokens, size). gate_up: (num_tokens, 2 * size), gate before up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@triton_on_cuda("nanoinfer.kernels.gated_activation")
def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, GeGLU, by the tanh approximation of GELU. Shapes: as for silu_and_mul."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
