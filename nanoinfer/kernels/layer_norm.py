"""Layer normalisation (Ba et al. 2016) of a sum, as encoders have it. Twin: `models/encoders/layers.py`.

One program holds a whole row in registers, so that each row is read once and written once.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.device_properties import next_power_of_2
from nanoinfer.kernels.rms_norm import num_warps


@triton.jit
def _add_layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,  # None: there is none
    out_ptr,
    total_ptr,  # None: the sum is not wanted
    eps,
    size: tl.constexpr,
    SIZE: tl.constexpr,  # size, rounded up to a power of two
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    mask = column < size
    offsets = row * size + column
    residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
    if total_ptr is not None:
        tl.store(total_ptr + offsets, total, mask=mask)
    wide = total.to(tl.float32)
    centred = tl.where(mask, wide - tl.sum(wide, axis=0) / size, 0.0)
    out = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / size + eps)
    out *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, out.to(residual.dtype), mask=mask)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, total: Tensor | None = None
) -> Tensor:
    """Return the norm of x + residual, which is rounded to its dtype before it is normalised, in float32.

    x, residual: (num_rows, size). weight, bias: (size,). All of one dtype, and contiguous. total: where the sum is
    written, (num_rows, size), which may be x; None: nowhere.
    """
    for name, tensor in (("x", x), ("residual", residual), ("total", x if total is None else total)):
        assert tensor.is_contiguous(), f"{name} must be contiguous"
    num_rows, size = x.shape
    out = residual.new_empty(residual.shape)
    if num_rows:
        padded_size = next_power_of_2(size)
        constants = {"size": size, "SIZE": padded_size, "num_warps": num_warps(padded_size)}
        _add_layer_norm_kernel[(num_rows,)](x, residual, weight, bias, out, total, eps, **constants)
    return out
