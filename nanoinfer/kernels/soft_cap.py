"""The soft cap of logits, in one pass over memory. Twin: `layers/soft_cap.py`."""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.ops.common.math import soft_capped

TILE = 4096  # logits of a program


@triton.jit
def _cap_logits_kernel(logits_ptr, row_stride, size, CAP: tl.constexpr, TILE: tl.constexpr):
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    pointers = logits_ptr + tl.program_id(0).to(tl.int64) * row_stride + column
    x = tl.load(pointers, mask=column < size, other=0.0)
    tl.store(pointers, soft_capped(x.to(tl.float32), CAP).to(x.dtype), mask=column < size)


def cap_logits(logits: Tensor, soft_cap: float) -> Tensor:
    """Do as `cap_logits` in `layers/soft_cap.py`. The logits of a row must be contiguous."""
    assert logits.stride(1) == 1, f"the logits of a row must be contiguous, strides {logits.stride()}"
    num_rows, size = logits.shape
    if logits.numel() > 0:
        grid = num_rows, triton.cdiv(size, TILE)
        _cap_logits_kernel[grid](logits, logits.stride(0), size, CAP=soft_cap, TILE=TILE, num_warps=8)
    return logits
