"""Rounds rows of activations to FP8, by itself and at the end of kernels. Twin: `quantization/fp8_numbers.py`.

A norm holds a whole row, so one scale for the row costs it one reduction. SwiGLU is cut into tiles of whole groups.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.device_properties import next_power_of_2
from nanoinfer.kernels.fp8_format import GROUP_SIZE, QuantizedRows, RowFormat
from nanoinfer.kernels.math import e4m3_scale, to_e4m3
from nanoinfer.kernels.programmatic_launch import overlap_options

MAX_TILE = 1024  # values for each program, where rows are cut


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
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_row_stride + column, mask=column < end, other=0.0).to(tl.float32)
    store_rounded(x, first, end, values_ptr + row * size, scales_ptr + row * num_groups, static_scale_ptr, GROUP, TILE)


def quantize_rows(x: Tensor, row_format: RowFormat) -> QuantizedRows:
    """Round rows to 8 bits. x: (num_rows, size), rows contiguous."""
    num_rows, size = x.shape
    assert x.stride(1) == 1, f"the rows of x must be contiguous, strides {x.stride()}"
    rows = row_format.empty_rows(x, size, wide=x)
    if num_rows == 0:
        return rows
    width, tile = tile_of_row(size, row_format)
    _quantize_rows_kernel[(num_rows, -(-size // width))](
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
