"""A product for steps of few rows, fused with the norm before it and with what follows."""

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.activations.spec import silu_and_mul
from nanoinfer.ops.dispatch import op
from nanoinfer.ops.norms.spec import rms_norm


@op
def few_rows_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Return SwiGLU(RMSNorm(x) W^T + b) + residual, (num_rows, num_outputs); all except the product may be left out.

    x: (num_rows, size), rows contiguous. weight: (num_outputs, size), contiguous, or (2 * num_outputs, size) with the
    gate before up if it is `gated`. bias: as long as the weight. norm: the norm's weight, (size,) in the dtype of x,
    and its epsilon. residual: (num_rows, num_outputs), contiguous.
    """
    sums = F.linear(x if norm is None else rms_norm(x, *norm), weight, bias)
    out = silu_and_mul(sums) if gated else sums
    assert isinstance(out, Tensor), "SwiGLU rounds to 8 bits only if it is told to"
    return out if residual is None else out + residual
