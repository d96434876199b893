"""RMSNorm, alone or fused with the residual addition and a split-K reduction; LayerNorm of a sum.

One program holds a whole row in registers, so that each row is read once and written once.
"""

import triton
import triton.language as tl

from nanoinfer.ops.common.device_properties import next_power_of_2
from nanoinfer.ops.common.fp8_format import GROUP_SIZE
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import wait_for_inputs
from nanoinfer.ops.fp8.triton import store_rounded

MAX_WARPS = 16
FEW_ROWS = 64  # which leave multiprocessors idle


def num_warps(padded_size: int, elements: int = 16) -> int:
    """Return the warps for a program that holds a row of this size: so many elements per thread."""
    return min(MAX_WARPS, max(1, padded_size // (32 * elements)))


@triton.jit
def normalised(x, weight, size: tl.constexpr, eps):
    """Normalise a row in float32, zero beyond `size`; return it in the weight's dtype."""
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    # Rounded after the division and after the weight, as PyTorch does it.
    return (x.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


@triton.jit
def _sum_of_terms(x_ptrs, split_stride, mask, num_splits: tl.constexpr):
    """Return the sum of the partial sums of a row, in float32, zero where they are masked."""
    wide = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, num_splits):
        wide += tl.load(x_ptrs + split * split_stride, mask=mask, other=0.0).to(tl.float32)
    return wide


@triton.jit
def _normed_sum(wide, weight, size: tl.constexpr, eps, dtype: tl.constexpr):
    """Return the norm of a sum in float32, rounded before and after as separate kernels would leave it."""
    return normalised(wide.to(dtype).to(tl.float32), weight, size, eps).to(dtype).to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    other_terms_ptr,  # terms to be added to x, contiguous; None for none
    residual_ptr,  # None for a norm without addition
    weight_ptr,
    sum_weight_ptr,  # None, unless x is normalised by itself before the addition
    out_ptr,  # None, if the norm is needed in FP8 alone
    total_ptr,
    values_ptr,  # of the norm in FP8; None, if it is not rounded
    scales_ptr,
    static_scale_ptr,
    x_split_stride,
    x_row_stride,
    other_terms_stride,
    residual_row_stride,
    out_row_stride,
    eps,
    num_splits: tl.constexpr,  # of split-K: partial sums of x to add up
    num_other_terms: tl.constexpr,
    size: tl.constexpr,
    num_groups: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,  # size, rounded up to a power of two
    CENTRES: tl.constexpr,  # whether the mean is subtracted
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    mask = column < size
    weight = tl.load(weight_ptr + column, mask=mask)  # before the wait: no kernel writes it
    if sum_weight_ptr is not None:
        sum_weight = tl.load(sum_weight_ptr + column, mask=mask, other=0.0)  # what it scales stays zero beyond `size`
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    wide = _sum_of_terms(x_ptr + row * x_row_stride + column, x_split_stride, mask, num_splits)
    for term in tl.static_range(num_other_terms):
        # Past the L1 cache, which does not see what other GPUs write.
        term_ptrs = other_terms_ptr + term * other_terms_stride + row * size + column
        wide += tl.load(term_ptrs, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_row_stride + column, mask=mask, other=0.0)
        if sum_weight_ptr is not None:
            wide = _normed_sum(wide, sum_weight, size, eps, residual.dtype)
        total = (wide + residual.to(tl.float32)).to(residual.dtype)
        tl.store(total_ptr + row * size + column, total, mask=mask)
        wide = total.to(tl.float32)
    if CENTRES:
        wide = tl.where(mask, wide - tl.sum(wide, axis=0) / size, 0.0)
    out = normalised(wide, weight, size, eps)
    if out_ptr is not None:
        tl.store(out_ptr + row * out_row_stride + column, out, mask=mask)
    if values_ptr is not None:
        row_scales = scales_ptr + row * num_groups
        out = out.to(total.dtype).to(tl.float32)
        store_rounded(out, 0, size, values_ptr + row * size, row_scales, static_scale_ptr, GROUP, SIZE)


def rms_norm(x, weight, eps, centres=False, out=None):
    assert out is None or (out.dim() == x.dim() == 2 and out.stride(1) == 1), "rows are written, each contiguous"
    out = x.new_empty(x.shape) if out is None else out
    _launch(x.reshape(1, -1, x.shape[-1]), None, weight, None, out, None, eps, centres=centres)
    return out


def add_rms_norm(x, residual, weight, eps, sum_weight=None, other_terms=None, out=None, centres=False):
    size = x.shape[-1]
    out = residual.new_empty(residual.shape) if out is None else out
    total = residual.new_empty(residual.shape)
    splits = x.reshape(len(x) if x.dim() > residual.dim() else 1, -1, size)
    rows = residual.reshape(-1, size)
    _launch(splits, rows, weight, sum_weight, out, total, eps, other_terms=other_terms, centres=centres)
    return out, total


def add_rms_norm_to_fp8(x, residual, weight, eps, sum_weight, out_format, other_terms=None):
    out, total = out_format.empty_rows(residual, residual.shape[1]), residual.new_empty(residual.shape)
    splits = x if x.dim() > residual.dim() else x.unsqueeze(0)
    _launch(splits, residual, weight, sum_weight, out.wide, total, eps, out, out_format, other_terms)
    return out, total


def _launch(
    x,
    residual,
    weight,
    sum_weight,
    out,
    total,
    eps,
    rows=None,
    row_format=None,
    other_terms=None,
    centres=False,
):
    """Launch the kernel. x: (num_splits, num_rows, size). rows, row_format: for a norm in 8 bits."""
    num_splits, num_rows, size = x.shape
    for name, tensor in (("x", x), ("residual", residual)):
        assert tensor is None or tensor.stride(-1) == 1, f"{name} must be contiguous in its last dimension"
    assert other_terms is None or other_terms[0].is_contiguous(), "each of the other terms must be contiguous"
    if num_rows == 0:
        return
    padded_size = next_power_of_2(size)
    if row_format is not None:
        padded_size = max(GROUP_SIZE, padded_size)
    _rms_norm_kernel[(num_rows,)](
        x,
        other_terms,
        residual,
        weight,
        sum_weight,
        out,
        total,
        None if rows is None else rows.values,
        None if rows is None else rows.scales,
        None if row_format is None else row_format.scale,
        x.stride(0),
        x.stride(1),
        0 if other_terms is None else other_terms.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0) if out is not None and out.dim() == 2 else size,
        eps,
        num_splits=num_splits,
        num_other_terms=0 if other_terms is None else len(other_terms),
        size=size,
        num_groups=1 if rows is None else rows.scales.shape[1],
        GROUP=None if row_format is None else row_format.group_size,
        SIZE=padded_size,
        CENTRES=centres,
        # A thread of few elements has all its loads on their way at once; with more, ptxas lets some wait for others.
        num_warps=num_warps(padded_size, 4 if num_rows <= FEW_ROWS else 16),
        **overlap_options(x.device),
    )


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


def add_layer_norm(x, residual, weight, bias, eps, total=None):
    for name, tensor in (("x", x), ("residual", residual), ("total", x if total is None else total)):
        assert tensor.is_contiguous(), f"{name} must be contiguous"
    num_rows, size = x.shape
    out = residual.new_empty(residual.shape)
    if num_rows:
        padded_size = next_power_of_2(size)
        constants = {"size": size, "SIZE": padded_size, "num_warps": num_warps(padded_size)}
        _add_layer_norm_kernel[(num_rows,)](x, residual, weight, bias, out, total, eps, **constants)
    return out


@triton.jit
def _scaled_norm_kernel(
    x_ptr,
    other_ptr,  # None, unless there are other terms, with a norm of their own as x has
    residual_ptr,
    weight_ptr,
    x_weight_ptr,  # None, like other_weight_ptr, without other terms
    other_weight_ptr,
    sum_weight_ptr,  # None, unless x is normalised by itself before the addition
    total_scale_ptr,  # None for 1
    out_ptr,
    total_ptr,
    x_split_stride,
    x_row_stride,
    other_split_stride,
    other_row_stride,
    residual_row_stride,
    eps,
    num_splits: tl.constexpr,  # of split-K: partial sums of x to add up
    num_other_terms: tl.constexpr,
    size: tl.constexpr,
    SIZE: tl.constexpr,  # size, rounded up to a power of two
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    mask = column < size
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=mask)  # before the wait, like the others: no kernel writes them
    if total_scale_ptr is not None:
        total_scale = tl.load(total_scale_ptr).to(dtype).to(tl.float32)
    if sum_weight_ptr is not None:
        sum_weight = tl.load(sum_weight_ptr + column, mask=mask, other=0.0)  # what it scales stays zero beyond `size`
    if other_ptr is not None:
        x_weight = tl.load(x_weight_ptr + column, mask=mask, other=0.0)
        other_weight = tl.load(other_weight_ptr + column, mask=mask, other=0.0)
    wait_for_inputs(OVERLAP)
    wide = _sum_of_terms(x_ptr + row * x_row_stride + column, x_split_stride, mask, num_splits)
    if other_ptr is not None:
        other_ptrs = other_ptr + row * other_row_stride + column
        other = _sum_of_terms(other_ptrs, other_split_stride, mask, num_other_terms)
        wide = _normed_sum(wide, x_weight, size, eps, dtype) + _normed_sum(other, other_weight, size, eps, dtype)
    residual = tl.load(residual_ptr + row * residual_row_stride + column, mask=mask, other=0.0)
    if sum_weight_ptr is not None:
        wide = _normed_sum(wide, sum_weight, size, eps, dtype)
    total = (wide + residual.to(tl.float32)).to(dtype)
    if total_scale_ptr is not None:
        total = (total.to(tl.float32) * total_scale).to(dtype)
    tl.store(total_ptr + row * size + column, total, mask=mask)
    out = normalised(total.to(tl.float32), weight, size, eps)
    tl.store(out_ptr + row * size + column, out.to(dtype), mask=mask)


def add_scaled_rms_norm(x, residual, weight, eps, sum_weight, total_scale, other_terms=None, part_weights=None):
    assert (other_terms is None) == (part_weights is None), "other terms come with the weights of both norms"
    for name, tensor in (("x", x), ("residual", residual), ("other_terms", x if other_terms is None else other_terms)):
        assert tensor.stride(-1) == 1, f"{name} must be contiguous in its last dimension"
    num_splits, num_rows, size = x.shape
    out, total = residual.new_empty(residual.shape), residual.new_empty(residual.shape)
    if num_rows:
        padded_size = next_power_of_2(size)
        _scaled_norm_kernel[(num_rows,)](
            x,
            other_terms,
            residual,
            weight,
            *(part_weights or (None, None)),
            sum_weight,
            total_scale,
            out,
            total,
            x.stride(0),
            x.stride(1),
            *((0, 0) if other_terms is None else other_terms.stride()[:2]),
            residual.stride(0),
            eps,
            num_splits=num_splits,
            num_other_terms=0 if other_terms is None else len(other_terms),
            size=size,
            SIZE=padded_size,
            num_warps=num_warps(padded_size),
            **overlap_options(x.device),
        )
    return out, total


@triton.jit
def _three_norms_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    second_weight_ptr,
    third_weight_ptr,
    sum_weight_ptr,
    out_ptr,  # (3, num_rows, size)
    total_ptr,
    x_split_stride,
    x_row_stride,
    residual_row_stride,
    out_stride,  # of norms
    eps,
    num_splits: tl.constexpr,  # of split-K: partial sums of x to add up
    size: tl.constexpr,
    SIZE: tl.constexpr,  # size, rounded up to a power of two
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    mask = column < size
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=mask)  # before the wait, like the others: no kernel writes them
    second_weight = tl.load(second_weight_ptr + column, mask=mask)
    third_weight = tl.load(third_weight_ptr + column, mask=mask)
    sum_weight = tl.load(sum_weight_ptr + column, mask=mask, other=0.0)  # what it scales stays zero beyond `size`
    wait_for_inputs(OVERLAP)
    wide = _sum_of_terms(x_ptr + row * x_row_stride + column, x_split_stride, mask, num_splits)
    residual = tl.load(residual_ptr + row * residual_row_stride + column, mask=mask, other=0.0)
    total = (_normed_sum(wide, sum_weight, size, eps, dtype) + residual.to(tl.float32)).to(dtype)
    tl.store(total_ptr + row * size + column, total, mask=mask)
    wide = total.to(tl.float32)
    out_ptrs = out_ptr + row * size + column
    tl.store(out_ptrs, normalised(wide, weight, size, eps).to(dtype), mask=mask)
    tl.store(out_ptrs + out_stride, normalised(wide, second_weight, size, eps).to(dtype), mask=mask)
    tl.store(out_ptrs + 2 * out_stride, normalised(wide, third_weight, size, eps).to(dtype), mask=mask)


def add_rms_norms(x, residual, weights, eps, sum_weight):
    for name, tensor in (("x", x), ("residual", residual)):
        assert tensor.stride(-1) == 1, f"{name} must be contiguous in its last dimension"
    num_splits, num_rows, size = x.shape
    out, total = residual.new_empty(3, num_rows, size), residual.new_empty(residual.shape)
    if num_rows:
        padded_size = next_power_of_2(size)
        _three_norms_kernel[(num_rows,)](
            x,
            residual,
            *weights,
            sum_weight,
            out,
            total,
            x.stride(0),
            x.stride(1),
            residual.stride(0),
            out.stride(0),
            eps,
            num_splits=num_splits,
            size=size,
            SIZE=padded_size,
            num_warps=num_warps(padded_size),
            **overlap_options(x.device),
        )
    return out.unbind(), total
