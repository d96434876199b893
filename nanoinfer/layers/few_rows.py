"""Steps of few rows: when they have kernels of their own, and the products of a layer, fused with what is around them.

Such a step is bound by reading weights. A kernel takes a few microseconds to reach full bandwidth, so these steps use
seven kernels a layer instead of ten, and products fetch their first weights before the kernel before them is done.
With more rows the common kernels are faster, since they multiply by tensor cores.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer import kernels
from nanoinfer.device import import_error
from nanoinfer.kernels.triton_twins import triton_on_cuda
from nanoinfer.ops.activations.spec import silu_and_mul
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.norms.spec import rms_norm

MAX_FEW_ROWS = 4  # 0 turns these kernels off
MAX_FEW_WIDE_ROWS = 2  # of more than WIDE values: with more rows, multiplying takes longer than reading the weights
WIDE = 2048


def few_rows_kernels_serve(num_rows: int, embeddings: Tensor) -> bool:
    """Return whether a step of so many rows of these embeddings may run them: from Hopper on, in bfloat16.

    embeddings: (vocab_size, hidden_size). In float16 a row times the norm's weight may overflow, as it is not divided
    by its root mean square yet.
    """
    most = MAX_FEW_ROWS if embeddings.shape[1] <= WIDE else min(MAX_FEW_ROWS, MAX_FEW_WIDE_ROWS)
    if not 0 < num_rows <= most or embeddings.dtype != torch.bfloat16 or import_error("triton"):
        return False
    return bool(overlap_options(embeddings.device)["OVERLAP"])


@triton_on_cuda(lambda: kernels.few_rows_product.few_rows_product)
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
