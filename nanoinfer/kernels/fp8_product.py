"""The product of FP8 activations and FP8 weights. Twin: `quantization/fp8.py`.

- The weight is the left operand: x W^T is computed as (W x^T)^T. Hopper's tensor cores take 64 rows of the left operand
  at least, and as few as 8 columns of the right one, so that few tokens waste nothing.
- The tensor cores add up FP8 products with fewer bits than float32 has. So their sums end after 128 values of K; they
  are scaled, if each 128 values have a scale, and added in float32.
- Few tokens are bound by reading the weight, with many loads in flight. A product with few columns is split over K.
- More tokens than `MAX_TOKENS` are multiplied by PyTorch, where rows have one scale each: it is faster then.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.device_properties import has_large_shared_memory
from nanoinfer.kernels.fp8_format import GROUP_SIZE
from nanoinfer.kernels.programmatic_launch import overlap_options

MAX_TOKENS = 256
TILES_IN_A_BAND = 8  # tiles of tokens that run at the same time, so that they share the weights in the cache
COLUMNS = 64  # rows of the weight in a tile


@triton.jit
def scaled_tile_product(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    x_rows,  # (ROWS,)
    is_x_row,
    weight_rows,  # (COLUMNS,)
    is_weight_row,
    x_row_stride,
    x_scale_stride,
    first,  # of the values along K; a multiple of DEPTH
    depth: tl.constexpr,  # how many values of K are summed
    row_size: tl.constexpr,  # how many there are in a row of the weight
    X_GROUPS: tl.constexpr,  # whether each DEPTH values of a row of x have a scale, and not all of the row
    BLOCKS: tl.constexpr,  # whether each DEPTH x DEPTH values of the weight have a scale, and not all of a row
    DEPTH: tl.constexpr,  # of a step along K
    STAGES: tl.constexpr,
):
    """Return W x^T in float32, (COLUMNS, ROWS), with all scales applied."""
    k = first + tl.arange(0, DEPTH)
    x_ptrs = x_ptr + x_rows.to(tl.int64)[:, None] * x_row_stride + k[None, :]
    weight_ptrs = weight_ptr + weight_rows.to(tl.int64)[:, None] * row_size + k[None, :]
    x_scale_ptrs = x_scales_ptr + x_rows.to(tl.int64) * x_scale_stride
    weight_scale_ptrs = weight_scales_ptr + weight_rows
    if BLOCKS:
        weight_scale_ptrs = weight_scales_ptr + weight_rows // DEPTH * tl.cdiv(row_size, DEPTH)
    acc = tl.zeros((weight_rows.shape[0], x_rows.shape[0]), tl.float32)
    for step in tl.range(0, tl.cdiv(depth, DEPTH), num_stages=STAGES):
        start = step * DEPTH
        if depth % DEPTH == 0:
            x = tl.load(x_ptrs + start, mask=is_x_row[:, None], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_weight_row[:, None], other=0.0)
        else:
            is_inside = start + tl.arange(0, DEPTH) < depth
            x = tl.load(x_ptrs + start, mask=is_x_row[:, None] & is_inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_weight_row[:, None] & is_inside[None, :], other=0.0)
        product = tl.dot(weight, tl.trans(x))
        if X_GROUPS:
            product *= tl.load(x_scale_ptrs + first // DEPTH + step, mask=is_x_row, other=0.0)[None, :]
        if BLOCKS:
            product *= tl.load(weight_scale_ptrs + first // DEPTH + step, mask=is_weight_row, other=0.0)[:, None]
        acc += product
    if not X_GROUPS:
        acc *= tl.load(x_scale_ptrs, mask=is_x_row, other=0.0)[None, :]
    if not BLOCKS:
        acc *= tl.load(weight_scale_ptrs, mask=is_weight_row, other=0.0)[:, None]
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_product_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    x_row_stride,
    x_scale_stride,
    out_row_stride,
    num_tokens,
    num_outputs: tl.constexpr,
    depth: tl.constexpr,
    row_size: tl.constexpr,
    X_GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Tiles of tokens run in bands, and all columns of a band before the next one.
    num_row_tiles, num_column_tiles = tl.cdiv(num_tokens, ROWS), tl.cdiv(num_outputs, COLUMNS)
    band = tl.program_id(0) // (BAND * num_column_tiles)
    band_size = tl.minimum(num_row_tiles - band * BAND, BAND)
    place = tl.program_id(0) % (BAND * num_column_tiles)
    row = (band * BAND + place % band_size) * ROWS + tl.arange(0, ROWS)
    column = place // band_size * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = scaled_tile_product(
        x_ptr,
        x_scales_ptr,
        weight_ptr,
        weight_scales_ptr,
        row,
        row < num_tokens,
        column,
        column < num_outputs,
        x_row_stride,
        x_scale_stride,
        split * depth,
        depth,
        row_size,
        X_GROUPS,
        BLOCKS,
        DEPTH,
        STAGES,
    )
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, mask=column < num_outputs, other=0.0).to(tl.float32)[:, None]
    out_rows = split.to(tl.int64) * num_tokens + row
    out_ptrs = out_ptr + out_rows[None, :] * out_row_stride + column[:, None]
    mask = (row < num_tokens)[None, :] & (column < num_outputs)[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


class Tiling(NamedTuple):
    """How a product is cut: the tile of a program, and how much of it is read ahead."""

    rows: int  # tokens
    stages: int
    warps: int


def fp8_product(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    num_splits: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Return x W^T + b as partial sums, (num_splits, num_tokens, num_outputs), rounded to `dtype`.

    x: (num_tokens, depth) e4m3. x_scales: (num_tokens, 1), or one for each 128 values. weight: (num_outputs, depth)
    e4m3, contiguous. weight_scales: of its rows, (num_outputs,), or of blocks of 128, 2-D. bias: (num_outputs,).
    out: where the result goes, if it is given, (num_tokens, num_outputs).
    """
    (num_tokens, row_size), num_outputs = x.shape, len(weight)
    assert weight.is_contiguous(), f"the weight must be contiguous, strides {weight.stride()}"
    assert weight_scales.is_contiguous(), f"weight_scales must be contiguous, strides {weight_scales.stride()}"
    assert x.stride(1) == 1, f"the rows of x must be contiguous, strides {x.stride()}"
    assert bias is None or num_splits == 1, "only one of the partial sums may have the bias"
    assert row_size % num_splits == 0, f"{row_size} values cannot be split in {num_splits}"
    depth = row_size // num_splits
    assert num_splits == 1 or depth % GROUP_SIZE == 0, f"a split of {depth} values is not made of groups"
    x_groups, blocks = x_scales.shape[1] > 1, weight_scales.dim() == 2
    if _suits_pytorch(num_tokens, weight, dtype, x_groups or blocks):
        scales = x_scales.contiguous(), weight_scales.unsqueeze(0)
        product = torch._scaled_mm(x, weight.t(), *scales, bias=bias, out_dtype=dtype, out=out)
        return product.unsqueeze(0)
    result = x.new_empty(num_splits, num_tokens, num_outputs, dtype=dtype) if out is None else out.unsqueeze(0)
    if num_tokens == 0:
        return result
    tiling = choose_tiling(num_tokens, x.device)
    num_tiles = triton.cdiv(num_tokens, tiling.rows) * triton.cdiv(num_outputs, COLUMNS)
    _fp8_product_kernel[(num_tiles, num_splits)](
        x,
        x_scales,
        weight,
        weight_scales,
        bias,
        result,
        x.stride(0),
        x_scales.stride(0),
        result.stride(1),
        num_tokens,
        num_outputs=num_outputs,
        depth=depth,
        row_size=row_size,
        X_GROUPS=x_groups,
        BLOCKS=blocks,
        BAND=TILES_IN_A_BAND,
        ROWS=tiling.rows,
        COLUMNS=COLUMNS,
        DEPTH=GROUP_SIZE,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **overlap_options(x.device),
    )
    return result


def _suits_pytorch(num_tokens: int, weight: Tensor, dtype: torch.dtype, has_blocks: bool) -> bool:
    """Return whether torch._scaled_mm can compute a product, and there are enough tokens for it."""
    is_even = all(size % 16 == 0 for size in weight.shape)
    return num_tokens > MAX_TOKENS and weight.is_cuda and dtype == torch.bfloat16 and is_even and not has_blocks


def choose_tiling(num_tokens: int, device: torch.device) -> Tiling:
    """Return how to cut a product of so many tokens: on Hopper up to 256 have one tile, and the weight is read once."""
    rows = min(256 if has_large_shared_memory(device) else 128, max(16, triton.next_power_of_2(num_tokens)))
    return {128: Tiling(128, 4, 8), 256: Tiling(256, 3, 8)}.get(rows, Tiling(rows, 6, 4))
