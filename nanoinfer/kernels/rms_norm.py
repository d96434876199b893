"""RMSNorm of rows, alone, or after the residual's addition, or that of all ranks' sums. Twins: `layers/layernorm.py`.

One program holds a whole row in registers, so that it is read once and written once.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.launch import overlap_options
from nanoinfer.utils.symmetric_memory import RankSums

MAX_WARPS = 16


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,  # None: nothing is added
    weight_ptr,
    out_ptr,
    total_ptr,
    x_part_stride,
    x_row_stride,
    residual_row_stride,
    eps,
    num_parts: tl.constexpr,  # of x, to be added up
    size: tl.constexpr,
    SIZE: tl.constexpr,  # rounded up to a power of two
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    mask = column < size
    weight = tl.load(weight_ptr + column, mask=mask)  # first: it is no other kernel's result
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    x_ptrs = x_ptr + row * x_row_stride + column
    wide = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, num_parts):
        wide += tl.load(x_ptrs + part * x_part_stride, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_row_stride + column, mask=mask, other=0.0)
        total = (wide + residual.to(tl.float32)).to(residual.dtype)
        tl.store(total_ptr + row * size + column, total, mask=mask)
        wide = total.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    # Rounded after the division and after the weight, as PyTorch does it.
    out = wide.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * size + column, out.to(weight.dtype), mask=mask)


@triton.jit
def _sum_ranks_kernel(
    part_ptrs,  # tuples, with an item for each rank
    announced_ptrs,
    num_sums_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    residual_row_stride,
    eps,
    rank: tl.constexpr,
    turn: tl.constexpr,
    num_ranks: tl.constexpr,
    size: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The ranks wait for each other, read all ranks' parts of a row, and do as `_rms_norm_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    mask = column < size
    weight = tl.load(weight_ptr + column, mask=mask)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    num_sums = tl.load(num_sums_ptr + 1 - turn) + 1
    if row == 0:  # for all: this rank's product is complete
        tl.store(num_sums_ptr + turn, num_sums)
        for peer in tl.static_range(num_ranks):
            tl.atomic_xchg(announced_ptrs[peer] + rank, num_sums, sem="release", scope="sys")
    residual = tl.load(residual_ptr + row * residual_row_stride + column, mask=mask, other=0.0)
    for peer in tl.static_range(num_ranks):
        while tl.atomic_add(announced_ptrs[rank] + peer, 0, sem="acquire", scope="sys") < num_sums:
            pass
    wide = tl.zeros((SIZE,), tl.float32)
    for peer in tl.static_range(num_ranks):  # in the same order on all ranks, so that they have the same sum
        # Not by way of the L1 cache, which does not see what other GPUs write.
        x = tl.load(part_ptrs[peer] + row * size + column, mask=mask, other=0.0, cache_modifier=".cg")
        wide += x.to(tl.float32)
    total = (wide + residual.to(tl.float32)).to(residual.dtype)
    tl.store(total_ptr + row * size + column, total, mask=mask)
    wide = total.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    out = wide.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * size + column, out.to(weight.dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32 inside; shape and dtype of `x`, which stays as it is.

    x: (..., size), the last dimension contiguous. weight: (size,) in the dtype of x.
    """
    out = x.new_empty(x.shape)
    _launch(x.reshape(1, -1, x.shape[-1]), None, weight, out, None, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and x + residual itself, rounded to its dtype before it is normalised.

    x: (..., size) as residual, or (parts, ..., size), partial sums of any dtype. The last dimension is contiguous.
    residual: (..., size). weight: (size,) in the dtype of residual, as are the results.
    """
    size = x.shape[-1]
    out, total = residual.new_empty(residual.shape), residual.new_empty(residual.shape)
    parts = x.reshape(len(x) if x.dim() > residual.dim() else 1, -1, size)
    _launch(parts, residual.reshape(-1, size), weight, out, total, eps)
    return out, total


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float) -> None:
    """x: (parts, rows, size). residual: (rows, size)."""
    num_parts, num_rows, size = x.shape
    for name, tensor in (("x", x), ("residual", residual)):
        assert tensor is None or tensor.stride(-1) == 1, f"{name} must be contiguous in its last dimension"
    if num_rows == 0:
        return
    padded_size = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        total,
        x.stride(0),
        x.stride(1),
        0 if residual is None else residual.stride(0),
        eps,
        num_parts=num_parts,
        size=size,
        SIZE=padded_size,
        num_warps=min(MAX_WARPS, max(1, padded_size // 512)),  # 16 elements for each thread
        **overlap_options(x.device),
    )


def sum_ranks_add_rms_norm(residual: Tensor, sums: RankSums, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of the sum of all ranks' parts; every rank must call it, for as many tokens.

    residual: (num_tokens, size) as each of the parts. weight: (size,). All of one dtype, the parts contiguous.
    """
    num_rows, size = residual.shape
    out, total = residual.new_empty(residual.shape), residual.new_empty(residual.shape)
    padded_size = triton.next_power_of_2(size)
    _sum_ranks_kernel[(num_rows,)](
        sums.parts,
        sums.announced,
        sums.num_sums,
        residual,
        weight,
        out,
        total,
        residual.stride(0),
        eps,
        rank=sums.rank,
        turn=sums.turn,
        num_ranks=len(sums.parts),
        size=size,
        SIZE=padded_size,
        num_warps=min(MAX_WARPS, max(1, padded_size // 512)),
        **overlap_options(residual.device),
    )
    return out, total
