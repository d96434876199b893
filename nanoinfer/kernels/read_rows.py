"""Reads the newest token of each row of a decode step, and where its key and value go, in one kernel.

It stands in for about 15 small kernels of PyTorch, which are 4% of a step with one row. Twin: `runner/step_tables.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.ops.common.device_properties import next_power_of_2


@triton.jit
def _read_rows_kernel(
    rows_ptr,
    token_ids_ptr,
    context_lens_ptr,
    block_tables_ptr,
    newest_ptr,
    positions_ptr,
    slots_ptr,
    lens_ptr,
    blocks_ptr,
    rows_stride,
    num_table_rows,
    max_tokens,
    max_blocks,
    block_size: tl.constexpr,
    CHUNK: tl.constexpr,
):
    line = tl.program_id(0)
    row = tl.load(rows_ptr + line * rows_stride).to(tl.int64)
    row = tl.where(row < 0, row + num_table_rows, row)
    context_len = tl.load(context_lens_ptr + row)
    position = tl.maximum(context_len - 1, 0)
    block_table_ptr = block_tables_ptr + row * max_blocks
    slot = tl.load(block_table_ptr + position // block_size).to(tl.int64) * block_size + position % block_size
    tl.store(newest_ptr + line, tl.load(token_ids_ptr + row * max_tokens + position))
    tl.store(positions_ptr + line, position.to(tl.int64))
    tl.store(slots_ptr + line, tl.where(context_len > 0, slot, -1))
    tl.store(lens_ptr + line, context_len)
    for first in range(0, max_blocks, CHUNK):
        column = first + tl.arange(0, CHUNK)
        block_ids = tl.load(block_table_ptr + column, mask=column < max_blocks)
        tl.store(blocks_ptr + line.to(tl.int64) * max_blocks + column, block_ids, mask=column < max_blocks)


def read_rows(
    rows: Tensor, token_ids: Tensor, context_lens: Tensor, block_tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the newest token of each row, its position and its slot, the row's context length and its block table.

    rows: (num_rows,) int32; -1 is the last row. The rest are the tables of `StepTables`, contiguous. The result:
    (num_rows,) int32, int64, int64 and int32, and (num_rows, max_blocks) int32. A row without tokens has position 0 and
    slot -1.
    """
    num_rows, max_blocks = len(rows), block_tables.shape[1]
    newest, lens = (torch.empty(num_rows, dtype=torch.int32, device=rows.device) for _ in range(2))
    positions, slots = (torch.empty(num_rows, dtype=torch.int64, device=rows.device) for _ in range(2))
    blocks = block_tables.new_empty(num_rows, max_blocks)
    if num_rows > 0:
        _read_rows_kernel[(num_rows,)](
            rows,
            token_ids,
            context_lens,
            block_tables,
            newest,
            positions,
            slots,
            lens,
            blocks,
            rows.stride(0),
            len(token_ids),
            token_ids.shape[1],
            max_blocks,
            block_size=block_size,
            CHUNK=min(1024, max(32, next_power_of_2(max_blocks))),
            num_warps=1,
        )
    return newest, positions, slots, lens, blocks
