"""The gated activation of the MLP (SwiGLU, Shazeer 2020)."""

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.dispatch import triton_on_cuda


@triton_on_cuda("nanoinfer.kernels.silu_and_mul")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for gate and up side by side: (num_tokens, 2 * size) -> (num_tokens, size)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
