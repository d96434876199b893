"""Rounds rows of activations to FP8, by itself and at the end of other kernels, and multiplies them by FP8 weights.

Rounding: a norm holds a whole row, so one scale for the row costs it one reduction. SwiGLU is cut into tiles of whole
groups.

The product:

- Few tokens are bound by reading the weight, with many loads in flight. The weight is then the left operand: x W^T is
  computed as (W x^T)^T. Hopper's tensor cores take 64 rows of the left operand at least, and as few as 8 columns of the
  right one, so that few tokens waste nothing. A product with few columns is split over K.
  A program asks for its first weights before the activations are there, while the kernel that makes them still runs.
- Many tokens are bound by reading them again for each tile of columns, so that tiles are large.
- The tensor cores add up FP8 products with about 14 bits. That makes sums of 4,096 random values wrong by 0.13%,
  and of 12,288 by 0.26%; rounding the factors costs 3.7%. So a sum stays in the tensor cores until its scale changes.
- GPUs without products in FP8 cannot convert it either, so a kernel puts the bits of a weight where float16 has them.
- Where rows have one scale each, PyTorch multiplies more than `MAX_SMALL_STEP` tokens, on GPUs where it can. It is
  faster then.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import has_large_shared_memory, has_rowwise_scaled_mm, next_power_of_2
from nanoinfer.ops.common.fp8_format import GROUP_SIZE, MAX_SMALL_STEP, RowFormat, group_size_of
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import e4m3_scale, to_e4m3, wait_for_inputs

MAX_TILE = 1024  # values for each program, where rows are cut
STEPS_AHEAD = 4  # along K, whose weights a program asks for while it waits for the activations; a power of two
WIDE_LINES = 32  # of a weight that is widened, for each program
TILES_IN_A_BAND = 8  # tiles of tokens that run at the same time, so that they share the weights in the cache


@triton.jit
def store_rounded(
    x,  # (SIZE,) float32, a row or a tile of one
    first,  # the column of its first value
    end,  # the column after its last value
    values_ptr,  # of the row
    scales_ptr,  # of the row
    static_scale_ptr,  # None for scales that are computed
    GROUP: tl.constexpr,  # values that share a scale; None: all of a row
    SIZE: tl.constexpr,  # a power of two
):
    column = first + tl.arange(0, SIZE)
    x = tl.where(column < end, x, 0.0)
    if static_scale_ptr is not None:
        values = to_e4m3(x, tl.load(static_scale_ptr))
    elif GROUP is None:
        scale = e4m3_scale(x, 0)
        tl.store(scales_ptr, scale)
        values = to_e4m3(x, scale)
    elif SIZE % GROUP != 0:  # one group, whose size is no power of two
        scale = e4m3_scale(x, 0)
        tl.store(scales_ptr + first // GROUP, scale)
        values = to_e4m3(x, scale)
    else:
        groups = tl.reshape(x, (SIZE // GROUP, GROUP))
        scales = e4m3_scale(groups, 1)
        group = first // GROUP + tl.arange(0, SIZE // GROUP)
        tl.store(scales_ptr + group, scales, mask=group * GROUP < end)
        values = tl.reshape(to_e4m3(groups, scales[:, None]), (SIZE,))
    tl.store(values_ptr + column, values, mask=column < end)


@triton.jit
def _quantize_rows_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    static_scale_ptr,
    x_row_stride,
    num_groups,
    size,
    width,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * width
    end = tl.minimum(first + width, size)
    column = first + tl.arange(0, TILE)
    wait_for_inputs(OVERLAP)
    x = tl.load(x_ptr + row * x_row_stride + column, mask=column < end, other=0.0).to(tl.float32)
    store_rounded(x, first, end, values_ptr + row * size, scales_ptr + row * num_groups, static_scale_ptr, GROUP, TILE)


def quantize_rows(x, row_format):
    num_rows, size = x.shape
    assert x.stride(1) == 1, f"the rows of x must be contiguous, strides {x.stride()}"
    rows = row_format.empty_rows(x, size, wide=x)
    if num_rows == 0:
        return rows
    width, tile = tile_of_row(size, row_format)
    _quantize_rows_kernel[(num_rows, ceil_div(size, width))](
        x,
        rows.values,
        rows.scales,
        row_format.scale,
        x.stride(0),
        rows.scales.shape[1],
        size,
        width,
        TILE=tile,
        GROUP=row_format.group_size,
        num_warps=min(16, max(1, tile // 512)),
        **overlap_options(x.device),
    )
    return rows


def tile_of_row(size: int, row_format: RowFormat) -> tuple[int, int]:
    """Return how many values of a row a program rounds, and the power of two that it computes with."""
    if row_format.group_size is None and row_format.scale is None:
        return size, max(GROUP_SIZE, next_power_of_2(size))  # to find the largest of them
    group_size = row_format.group_size or GROUP_SIZE
    tile = next_power_of_2(group_size)
    if tile != group_size:
        return group_size, tile
    tile = max(tile, min(MAX_TILE, next_power_of_2(size)))
    return tile, tile


@triton.jit
def _along(x, FIRST: tl.constexpr):
    """Return a vector as a column of a matrix, along its first dimension, or as a row."""
    if FIRST:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def _prefetch(ptrs):
    """Let the L2 cache fetch the lines at these addresses, and do not wait for it."""
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


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
    GROUP: tl.constexpr,  # how many values of a row of x share a scale, a multiple of DEPTH; None: all of them
    BLOCKS: tl.constexpr,  # whether each DEPTH x DEPTH values of the weight have a scale, and not all of a row
    TOKENS_FIRST: tl.constexpr,  # whether the result is x W^T, (ROWS, COLUMNS), or W x^T, (COLUMNS, ROWS)
    DEPTH: tl.constexpr,  # of a step along K
    STAGES: tl.constexpr,
):
    """Return a tile of the product in float32, with all scales applied."""
    k = first + tl.arange(0, DEPTH)
    x_ptrs = x_ptr + x_rows.to(tl.int64)[:, None] * x_row_stride + k[None, :]
    weight_ptrs = weight_ptr + weight_rows.to(tl.int64)[:, None] * row_size + k[None, :]
    x_scale_ptrs = x_scales_ptr + x_rows.to(tl.int64) * x_scale_stride
    weight_scale_ptrs = weight_scales_ptr + weight_rows
    if BLOCKS:
        weight_scale_ptrs = weight_scales_ptr + weight_rows // DEPTH * tl.cdiv(row_size, DEPTH)
    num_rows: tl.constexpr = x_rows.shape[0]
    num_columns: tl.constexpr = weight_rows.shape[0]
    if TOKENS_FIRST:
        sums = tl.zeros((num_rows, num_columns), tl.float32)
    else:
        sums = tl.zeros((num_columns, num_rows), tl.float32)
    # The steps whose sums have the same scales.
    has_parts: tl.constexpr = BLOCKS or GROUP is not None
    steps_in_a_part: tl.constexpr = 1 if BLOCKS or GROUP is None else GROUP // DEPTH
    acc = sums
    for step in tl.range(0, tl.cdiv(depth, DEPTH), num_stages=STAGES):
        start = step * DEPTH
        if depth % DEPTH == 0:
            x = tl.load(x_ptrs + start, mask=is_x_row[:, None], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_weight_row[:, None], other=0.0)
        else:
            is_inside = start + tl.arange(0, DEPTH) < depth
            x = tl.load(x_ptrs + start, mask=is_x_row[:, None] & is_inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_weight_row[:, None] & is_inside[None, :], other=0.0)
        sums = tl.dot(x, tl.trans(weight), sums) if TOKENS_FIRST else tl.dot(weight, tl.trans(x), sums)
        if has_parts:
            ends_part = True if steps_in_a_part == 1 else (step + 1) % steps_in_a_part == 0
            if ends_part:
                if GROUP is not None:
                    x_scales = tl.load(x_scale_ptrs + (first + start) // GROUP, mask=is_x_row, other=0.0)
                    sums *= _along(x_scales, TOKENS_FIRST)
                if BLOCKS:
                    weight_scales = tl.load(weight_scale_ptrs + first // DEPTH + step, mask=is_weight_row, other=0.0)
                    sums *= _along(weight_scales, not TOKENS_FIRST)
                acc += sums
                sums = tl.zeros_like(sums)
    if not has_parts:
        acc = sums
    if GROUP is None:
        acc *= _along(tl.load(x_scale_ptrs, mask=is_x_row, other=0.0), TOKENS_FIRST)
    if not BLOCKS:
        acc *= _along(tl.load(weight_scale_ptrs, mask=is_weight_row, other=0.0), not TOKENS_FIRST)
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
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    BAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
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
        # The weights are nobody's result, so their first lines, DEPTH bytes each, can come before the wait.
        weight_row = tl.minimum(column, num_outputs - 1)
        if not BLOCKS:
            _prefetch(weight_scales_ptr + weight_row)
        k = split * depth + tl.minimum(tl.arange(0, AHEAD) * DEPTH, depth - 1)
        _prefetch(weight_ptr + weight_row.to(tl.int64)[:, None] * row_size + k[None, :])
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
        GROUP,
        BLOCKS,
        TOKENS_FIRST,
        DEPTH,
        STAGES,
    )
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < num_outputs, other=0.0).to(tl.float32)
        acc += _along(bias, not TOKENS_FIRST)
    out_rows = split.to(tl.int64) * num_tokens + row
    out_ptrs = out_ptr + _along(out_rows, TOKENS_FIRST) * out_row_stride + _along(column, not TOKENS_FIRST)
    mask = _along(row < num_tokens, TOKENS_FIRST) & _along(column < num_outputs, not TOKENS_FIRST)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_lines"])
def _widen_fp8_kernel(
    weight_ptr,  # uint8
    scales_ptr,
    out_ptr,
    num_lines,  # rows of all experts
    num_rows: tl.constexpr,  # of one
    depth: tl.constexpr,
    BLOCKS: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,  # a block's
):
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    scale_place = line
    if BLOCKS:
        block_row = line // num_rows * tl.cdiv(num_rows, COLUMNS) + line % num_rows // COLUMNS
        scale_place = block_row * tl.cdiv(depth, COLUMNS) + tl.program_id(1)
    mask = (line < num_lines)[:, None] & (column < depth)[None, :]
    place = line[:, None] * depth + column[None, :]
    bits = tl.load(weight_ptr + place, mask=mask, other=0).to(tl.int16)
    scales = tl.load(scales_ptr + scale_place, mask=line < num_lines, other=0.0)
    # float16 has one more bit for the exponent, counted from 15 instead of 7: the same bits mean 2**-8 times as much.
    size = ((bits & 127) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    size = tl.where((bits & 127) == 127, float("nan"), size)
    wide = tl.where((bits & 128) != 0, -size, size) * scales[:, None]
    tl.store(out_ptr + place, wide.to(out_ptr.dtype.element_ty), mask=mask)


def widen_weight(weight, scales, dtype):
    assert weight.is_contiguous(), f"the weight must be contiguous, strides {weight.stride()}"
    assert scales.is_contiguous(), f"scales must be contiguous, strides {scales.stride()}"
    *experts, num_rows, depth = weight.shape
    num_lines = math.prod(experts) * num_rows
    out = torch.empty_like(weight, dtype=dtype)
    _widen_fp8_kernel[(ceil_div(num_lines, WIDE_LINES), ceil_div(depth, GROUP_SIZE))](
        weight.view(torch.uint8),
        scales,
        out,
        num_lines,
        num_rows=num_rows,
        depth=depth,
        BLOCKS=scales.dim() == weight.dim(),
        LINES=WIDE_LINES,
        COLUMNS=GROUP_SIZE,
    )
    return out


class Tiling(NamedTuple):
    """Says how a product is cut: the tile of a program, its operands' order, how much of them is read ahead."""

    rows: int  # tokens
    columns: int
    tokens_first: bool
    stages: int
    warps: int


def fp8_product(x, x_scales, weight, weight_scales, bias, dtype, num_splits=1):
    (num_tokens, row_size), num_outputs = x.shape, len(weight)
    assert weight.is_contiguous(), f"the weight must be contiguous, strides {weight.stride()}"
    assert weight_scales.is_contiguous(), f"weight_scales must be contiguous, strides {weight_scales.stride()}"
    assert x.stride(1) == 1, f"the rows of x must be contiguous, strides {x.stride()}"
    assert bias is None or num_splits == 1, "only one of the partial sums may have the bias"
    assert row_size % num_splits == 0, f"{row_size} values cannot be split in {num_splits}"
    depth = row_size // num_splits
    has_groups, blocks = x_scales.shape[1] > 1, weight_scales.dim() == 2
    group = group_size_of(row_size, x_scales.shape[1]) if has_groups else None
    assert num_splits == 1 or depth % (group or GROUP_SIZE) == 0, f"a split of {depth} values is not made of groups"
    if _suits_pytorch(num_tokens, weight, dtype, has_groups or blocks or num_splits > 1):
        scales = x_scales.contiguous(), weight_scales.unsqueeze(0)
        product = torch._scaled_mm(x, weight.t(), *scales, bias=bias, out_dtype=dtype, use_fast_accum=True)
        return product.unsqueeze(0)
    result = x.new_empty(num_splits, num_tokens, num_outputs, dtype=dtype)
    if num_tokens == 0:
        return result
    tiling = choose_tiling(num_tokens, x.device)
    num_tiles = ceil_div(num_tokens, tiling.rows) * ceil_div(num_outputs, tiling.columns)
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
        GROUP=group,
        BLOCKS=blocks,
        BAND=TILES_IN_A_BAND,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        TOKENS_FIRST=tiling.tokens_first,
        DEPTH=GROUP_SIZE,
        STAGES=tiling.stages,
        AHEAD=STEPS_AHEAD,
        num_warps=tiling.warps,
        **overlap_options(x.device),
    )
    return result


def _suits_pytorch(num_tokens: int, weight: Tensor, dtype: torch.dtype, has_parts: bool) -> bool:
    """Return whether torch._scaled_mm can compute a product, and there are enough tokens for it."""
    if num_tokens <= MAX_SMALL_STEP or has_parts or dtype != torch.bfloat16 or not weight.is_cuda:
        return False
    return has_rowwise_scaled_mm(weight.device) and all(size % 16 == 0 for size in weight.shape)


def choose_tiling(num_tokens: int, device: torch.device) -> Tiling:
    """Return how to cut a product of so many tokens. Few of them have one tile, so that the weight is read once."""
    if num_tokens > MAX_SMALL_STEP:
        return Tiling(128, 128, True, stages=4 if has_large_shared_memory(device) else 3, warps=8)
    rows = max(16, next_power_of_2(num_tokens))
    return Tiling(rows, 64, False, stages=6 if rows <= 64 else 4, warps=4)
