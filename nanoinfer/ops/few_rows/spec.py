"""A product for steps of few rows, fused with the norm before it and with what follows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.device import import_error
from nanoinfer.ops.activations.spec import silu_and_mul
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.dispatch import op
from nanoinfer.ops.norms.spec import rms_norm

MAX_FEW_ROWS = 4  # 0 turns these kernels off
MAX_FEW_WIDE_ROWS = 2  # of more than WIDE values: with more rows, multiplying takes longer than reading the weights
WIDE = 2048


def few_rows_kernels_serve(num_rows: int, weight: Tensor) -> bool:
    """Return whether a step of so many rows may run them: from Hopper on, in bfloat16.

    weight: (num_outputs, num_inputs), of the product, or (vocab_size, hidden_size), of a model's embeddings. In float16
    a row times the norm's weight may overflow, as it is not divided by its root mean square yet.
    """
    most = MAX_FEW_ROWS if min(weight.shape) <= WIDE else min(MAX_FEW_ROWS, MAX_FEW_WIDE_ROWS)
    if not 0 < num_rows <= most or weight.dtype != torch.bfloat16 or import_error("triton"):
        return False
    return bool(overlap_options(weight.device)["OVERLAP"])


@op
def few_rows_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return SwiGLU(RMSNorm(x) W^T + b) + residual, (num_rows, num_outputs); all except the product may be left out.

    x: (num_rows, size), rows contiguous. weight: (num_outputs, size), contiguous, or (2 * num_outputs, size) with the
    gate before up if it is `gated`. bias: as long as the weight. norm: the norm's weight, (size,) in the dtype of x,
    and its epsilon. residual: (num_rows, num_outputs), contiguous. out_dtype: of the result, which is rounded to it
    alone; None: that of x.
    """
    x = x if norm is None else rms_norm(x, *norm)
    sums = F.linear(x, weight, bias) if out_dtype is None else F.linear(x.to(out_dtype), weight.to(out_dtype), bias)
    out = silu_and_mul(sums) if gated else sums
    assert isinstance(out, Tensor), "SwiGLU rounds to 8 bits only if it is told to"
    return out if residual is None else out + residual
