"""The products of a layer in steps of few tokens, fused with what is around them: see the kernel of the same name."""

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.dispatch import triton_on_cuda
from nanoinfer.layers.activation import silu_and_mul
from nanoinfer.layers.layernorm import rms_norm


@triton_on_cuda("nanoinfer.kernels.few_rows_product")
def few_rows_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Return SwiGLU(RMSNorm(x) W^T + b) + residual, (num_rows, num_outputs); all except the product may be left out.

    x: (num_rows, size). weight: (num_outputs, size), or (2 * num_outputs, size) with the gate before up if it is
    `gated`. bias: as long as the weight. norm: the norm's weight, (size,), and its epsilon. residual: (num_rows,
    num_outputs).
    """
    sums = F.linear(x if norm is None else rms_norm(x, *norm), weight, bias)
    out = silu_and_mul(sums) if gated else sums
    assert isinstance(out, Tensor), "SwiGLU rounds to 8 bits only if it is told to"
    return out if residual is None else out + residual
