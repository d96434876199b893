"""Reads of the tables by which a decode step finds its tokens and blocks, and copies of tokens between blocks."""

import torch
from torch import Tensor

from nanoinfer.ops.dispatch import op


@op
def read_rows(
    rows: Tensor, token_ids: Tensor, context_lens: Tensor, block_tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the newest token of each row, its position and its slot, the row's context length and its block table.

    rows: (num_rows,) int32; -1 is the last row. The rest are the tables of `StepTables`, contiguous. The result:
    (num_rows,) int32, int64, int64 and int32, and (num_rows, max_blocks) int32. A row without tokens has position 0 and
    slot -1.
    """
    rows = rows.long()
    lens, blocks = context_lens[rows], block_tables[rows]
    positions = (lens - 1).clamp(min=0).long()
    slots = torch.where(lens > 0, slots_of(block_tables, rows, positions, block_size), -1)
    return token_ids[rows, positions], positions, slots, lens, blocks


def slots_of(block_tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return block_id * block_size + offset of each position, (num_tokens,) int64."""
    return block_tables[rows, positions // block_size].long() * block_size + positions % block_size


@op
def copy_tokens(cache: Tensor, copies: Tensor) -> None:
    """Copy the first tokens of blocks to other blocks, which are no sources.

    cache: (num_layers, num_blocks, num_heads, block_size) or with values of a token behind that, contiguous. copies:
    (num_copies, 3) int32: from which block, to which one, and how many tokens.
    """
    for source, target, num_tokens in copies.tolist():
        cache[:, target, :, :num_tokens] = cache[:, source, :, :num_tokens]
