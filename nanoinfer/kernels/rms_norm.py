"""RMSNorm of rows, alone or after the residual's addition. Twins: in `layers/layernorm.py`.

One program holds a whole row in registers, so that it is read once and written once.
"""

import triton
import triton.language as tl
from torch import Tensor

MAX_WARPS = 16


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,  # None: nothing is added
    weight_ptr,
    out_ptr,
    total_ptr,
    x_row_stride,
    residual_row_stride,
    eps,
    size: tl.constexpr,
    SIZE: tl.constexpr,  # rounded up to a power of two
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    mask = column < size
    weight = tl.load(weight_ptr + column, mask=mask)  # first: it waits for no other kernel's result
    x = tl.load(x_ptr + row * x_row_stride + column, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_row_stride + column, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * size + column, x, mask=mask)
    wide = x.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    out = wide.to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * size + column, out.to(x.dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32 inside; shape and dtype of `x`, which stays as it is.

    x: (..., size), the last dimension contiguous. weight: (size,) in the dtype of x.
    """
    out = x.new_empty(x.shape)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and x + residual itself, rounded to their dtype before it is normalised.

    x, residual: (..., size), the last dimension contiguous. weight: (size,). All have one dtype.
    """
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float) -> None:
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    residual_rows = None if residual is None else residual.reshape(-1, size)
    for name, tensor in (("x", rows), ("residual", residual_rows)):
        assert tensor is None or tensor.stride(1) == 1, f"{name} must be contiguous in its last dimension"
    if len(rows) == 0:
        return
    padded_size = triton.next_power_of_2(size)
    _rms_norm_kernel[(len(rows),)](
        rows,
        residual_rows,
        weight,
        out,
        total,
        rows.stride(0),
        0 if residual_rows is None else residual_rows.stride(0),
        eps,
        size=size,
        SIZE=padded_size,
        num_warps=min(MAX_WARPS, max(1, padded_size // 512)),  # 16 elements for each thread
    )
