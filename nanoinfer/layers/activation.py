"""The gated activation of the MLP (SwiGLU, Shazeer 2020)."""

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.dispatch import triton_on_cuda


@triton_on_cuda("nanoinfer.kernels.silu_and_mul")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (num_tokens, size). gate_up: (num_tokens, 2 * size), gate before up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
