"""Products of few rows by a weight in 4 bits, and widening it for more. Twins: `quantization/int4/numbers.py`.

A product of few rows is bound by reading the weight, so its 4 bits are read, and widened in registers.

- Of a block of 128 inputs each word holds eight that lie 16 apart. So the i-th numbers of 16 words are a tile for the
  tensor cores, and nothing moves between threads.
- A number becomes 16 bits without a conversion: its bits, below those of a power of two, are that power plus the
  number (as in Marlin, Frantar et al. 2024). Less the zero point, it is exact.
- Each group is summed by itself and then multiplied by its scale, in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.device_properties import next_power_of_2
from nanoinfer.kernels.int4_format import COLUMNS

BLOCK = tl.constexpr(128)  # inputs that are packed together
WORDS = tl.constexpr(16)  # of a block
WIDE_COLUMNS = 32  # outputs that a program widens, of one block


@triton.jit
def _numbers(words, index: tl.constexpr, dtype: tl.constexpr):
    """Return the numbers at a place of words, plus the power of two that `_offset` returns."""
    bits = (words >> (4 * index)) & 15
    if dtype == tl.bfloat16:
        return (bits | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)  # 128 + number
    else:
        return (bits | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)  # 1024 + number


@triton.jit
def _offset(dtype: tl.constexpr):
    return 128.0 if dtype == tl.bfloat16 else 1024.0


@triton.jit
def _load_group(scales_ptr, zeros_ptr, column, is_column, group, num_groups, dtype: tl.constexpr):
    """Return the scales of a group, and what to subtract from its numbers, (COLUMNS,) each."""
    place = column.to(tl.int64) * num_groups + group
    scales = tl.load(scales_ptr + place, mask=is_column, other=0.0)
    if zeros_ptr is None:
        zeros = tl.full(column.shape, 8.0, tl.float32)
    else:
        zeros = tl.load(zeros_ptr + place, mask=is_column, other=0).to(tl.float32)
    return scales, (zeros + _offset(dtype)).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_product_int4_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,  # None: all are 8
    out_ptr,
    num_rows,
    x_stride,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    num_groups: tl.constexpr,
    num_blocks: tl.constexpr,  # that a program sums up
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    group_size: tl.constexpr = num_inputs // num_groups
    row, word = tl.arange(0, ROWS), tl.arange(0, WORDS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < num_outputs
    first = tl.program_id(1) * num_blocks
    words_ptrs = words_ptr + column.to(tl.int64)[None, :] * (num_inputs // 8) + word[:, None]
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + word[None, :]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in tl.range(first, tl.minimum(first + num_blocks, num_inputs // BLOCK), num_stages=STAGES):
        words = tl.load(words_ptrs + block * WORDS, mask=is_column[None, :], other=0)
        for index in tl.static_range(8):
            if index == 0 or index * WORDS % group_size == 0:
                group = (block * BLOCK + index * WORDS) // group_size
                scales, zeros = _load_group(scales_ptr, zeros_ptr, column, is_column, group, num_groups, dtype)
                part = tl.zeros((ROWS, COLUMNS), tl.float32)
            x = tl.load(x_ptrs + block * BLOCK + index * WORDS, mask=is_row[:, None], other=0.0)
            part = tl.dot(x, _numbers(words, index, dtype) - zeros[None, :], part)
            if index == 7 or (index + 1) * WORDS % group_size == 0:
                acc += part * scales[None, :]
    out_ptrs = out_ptr + (tl.program_id(1) * num_rows + row).to(tl.int64)[:, None] * num_outputs + column[None, :]
    tl.store(out_ptrs, acc.to(dtype), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _widen_kernel(
    words_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    num_outputs,
    num_inputs: tl.constexpr,
    num_groups: tl.constexpr,
    words_of_block: tl.constexpr,
    WORDS: tl.constexpr,  # words_of_block, padded
    COLUMNS: tl.constexpr,
):
    """Widen one block of a few outputs."""
    group_size: tl.constexpr = num_inputs // num_groups
    block = tl.program_id(1)
    column, word = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WORDS)
    line = column.to(tl.int64)
    mask = (column < num_outputs)[:, None] & (word < words_of_block)[None, :]
    words_ptrs = words_ptr + line[:, None] * (num_inputs // 8) + block * words_of_block + word[None, :]
    words = tl.load(words_ptrs, mask=mask, other=0)
    for index in tl.static_range(8):
        place = block * (8 * words_of_block) + index * words_of_block + word
        groups = line[:, None] * num_groups + (place // group_size)[None, :]
        scales = tl.load(scales_ptr + groups, mask=mask, other=0.0)
        numbers = ((words >> (4 * index)) & 15).to(tl.float32)
        if zeros_ptr is None:
            numbers -= 8.0
        else:
            numbers -= tl.load(zeros_ptr + groups, mask=mask, other=0).to(tl.float32)
        wide = (numbers * scales).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + line[:, None] * num_inputs + place[None, :], wide, mask=mask)


def few_rows_product(x: Tensor, numbers: Tensor, scales: Tensor, zeros: Tensor | None, num_splits: int) -> Tensor:
    """Return x W^T as partial sums, (num_splits, num_rows, num_outputs), each over a part of the blocks.

    x: (num_rows, num_inputs) in 16 bits, rows contiguous. The weight's groups are in order, and its blocks whole.
    """
    (num_rows, num_inputs), num_outputs = x.shape, len(numbers)
    assert num_inputs % BLOCK.value == 0, f"{num_inputs} inputs are not whole blocks of {BLOCK.value}"
    out = x.new_empty(num_splits, num_rows, num_outputs)
    if num_rows == 0:
        return out
    rows = max(16, next_power_of_2(num_rows))
    _few_rows_product_int4_kernel[(triton.cdiv(num_outputs, COLUMNS), num_splits)](
        x,
        numbers,
        scales,
        zeros,
        out,
        num_rows,
        x.stride(0),
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        num_groups=scales.shape[1] if scales.dim() == 2 else 1,
        num_blocks=triton.cdiv(num_inputs // BLOCK.value, num_splits),
        ROWS=rows,
        COLUMNS=COLUMNS,
        STAGES=4,
        num_warps=4,
    )
    return out


def widen(numbers: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a weight whose groups are in order in `dtype`, (num_outputs, num_inputs)."""
    num_outputs, num_inputs = numbers.shape[0], numbers.shape[1] * 8
    words_of_block = numbers.shape[1] & -numbers.shape[1] if numbers.shape[1] % WORDS.value else WORDS.value
    out = numbers.new_empty((num_outputs, num_inputs), dtype=dtype)
    _widen_kernel[(triton.cdiv(num_outputs, WIDE_COLUMNS), numbers.shape[1] // words_of_block)](
        numbers,
        scales,
        zeros,
        out,
        num_outputs,
        num_inputs=num_inputs,
        num_groups=scales.shape[1] if scales.dim() == 2 else 1,
        words_of_block=words_of_block,
        WORDS=words_of_block,
        COLUMNS=WIDE_COLUMNS,
        num_warps=4,
    )
    return out
