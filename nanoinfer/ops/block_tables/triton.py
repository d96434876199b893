"""Reads a decode step's rows of the tables in one kernel, and copies tokens between blocks of the KV cache.

`read_rows` stands in for about 15 small kernels of PyTorch, which are 4% of a step with one row.
"""

import torch
import triton
import triton.language as tl

from nanoinfer.ops.common.device_properties import next_power_of_2

CHUNK = 4096  # values that a program of `copy_tokens` copies at once


@triton.jit
def _read_rows_kernel(
    rows_ptr,
    token_ids_ptr,
    context_lens_ptr,
    block_tables_ptr,
    num_row_tokens_ptr,  # None: each row has one token
    tokens_ptr,
    positions_ptr,
    slots_ptr,
    lens_ptr,
    blocks_ptr,
    rows_stride,
    num_table_rows,
    max_tokens,
    max_blocks,
    num_tokens: tl.constexpr,
    block_size: tl.constexpr,
    CHUNK: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index * rows_stride).to(tl.int64)
    row = tl.where(row < 0, row + num_table_rows, row)
    context_len = tl.load(context_lens_ptr + row)
    num_later = 0  # tokens after the first
    if num_row_tokens_ptr is not None:
        num_later = tl.where(context_len > 0, tl.load(num_row_tokens_ptr + index) - 1, 0)
    block_table_ptr = block_tables_ptr + row * max_blocks
    for token in tl.static_range(num_tokens):
        position = tl.maximum(context_len - 1, 0) + tl.minimum(token, num_later)
        slot = tl.load(block_table_ptr + position // block_size).to(tl.int64) * block_size + position % block_size
        line = index * num_tokens + token
        tl.store(tokens_ptr + line, tl.load(token_ids_ptr + row * max_tokens + position))
        tl.store(positions_ptr + line, position.to(tl.int64))
        tl.store(slots_ptr + line, tl.where((context_len > 0) & (token <= num_later), slot, -1))
    tl.store(lens_ptr + index, context_len)
    for first in range(0, max_blocks, CHUNK):
        column = first + tl.arange(0, CHUNK)
        block_ids = tl.load(block_table_ptr + column, mask=column < max_blocks)
        tl.store(blocks_ptr + index.to(tl.int64) * max_blocks + column, block_ids, mask=column < max_blocks)


def read_rows(rows, token_ids, context_lens, block_tables, block_size, num_tokens=1, num_row_tokens=None):
    num_rows, max_blocks = len(rows), block_tables.shape[1]
    num_lines = num_rows * num_tokens
    tokens, lens = (rows.new_empty(count, dtype=torch.int32) for count in (num_lines, num_rows))
    positions, slots = (rows.new_empty(num_lines, dtype=torch.int64) for _ in range(2))
    blocks = block_tables.new_empty(num_rows, max_blocks)
    if num_rows > 0:
        _read_rows_kernel[(num_rows,)](
            rows,
            token_ids,
            context_lens,
            block_tables,
            num_row_tokens,
            tokens,
            positions,
            slots,
            lens,
            blocks,
            rows.stride(0),
            len(token_ids),
            token_ids.shape[1],
            max_blocks,
            num_tokens=num_tokens,
            block_size=block_size,
            CHUNK=min(1024, max(32, next_power_of_2(max_blocks))),
            num_warps=1,
        )
    return tokens, positions, slots, lens, blocks


@triton.jit
def _copy_tokens_kernel(
    cache_ptr,
    copies_ptr,
    copies_stride,
    num_heads,
    layer_stride,
    block_stride,
    head_stride,
    SIZE: tl.constexpr,  # values of a token
    CHUNK: tl.constexpr,
):
    copy_ptr = copies_ptr + tl.program_id(0) * copies_stride
    source, target = tl.load(copy_ptr).to(tl.int64), tl.load(copy_ptr + 1).to(tl.int64)
    layer, head = (tl.program_id(1) // num_heads).to(tl.int64), tl.program_id(1) % num_heads
    head_ptr = cache_ptr + layer * layer_stride + head * head_stride
    index = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    is_copied = index < tl.load(copy_ptr + 2) * SIZE
    values = tl.load(head_ptr + source * block_stride + index, mask=is_copied)
    tl.store(head_ptr + target * block_stride + index, values, mask=is_copied)


def copy_tokens(cache, copies):
    num_layers, _, num_heads, block_size = cache.shape[:4]
    _copy_tokens_kernel[(len(copies), num_layers * num_heads, triton.cdiv(cache.stride(2), CHUNK))](
        cache,
        copies,
        copies.stride(0),
        num_heads,
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        SIZE=cache.stride(2) // block_size,
        CHUNK=CHUNK,
    )
