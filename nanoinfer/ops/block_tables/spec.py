"""Reads of the tables by which a decode step finds its tokens and blocks, and copies of tokens between blocks."""

import torch
from torch import Tensor

from nanoinfer.ops.dispatch import op


@op
def read_rows(
    rows: Tensor,
    token_ids: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    block_size: int,
    num_tokens: int = 1,
    num_row_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the newest token of each row, its position and its slot, the row's context length and its block table.

    rows: (num_rows,) int32; -1 is the last row.
    token_ids, context_lens, block_tables: the tables of `StepTables`, contiguous.
    num_tokens, num_row_tokens: see `DecodeMetadata`. Where a row has several tokens, those after the newest one are the
    next ones in `token_ids`. Padding has the row's last token and its position, and slot -1.
    The result: (num_rows * num_tokens,) int32, int64 and int64, (num_rows,) int32, and (num_rows, max_blocks) int32. A
    row without tokens has position 0 and slot -1.
    """
    rows = rows.long()
    lens, blocks = context_lens[rows], block_tables[rows]
    positions, has_slot = (lens - 1).clamp(min=0).long(), lens > 0
    if num_row_tokens is not None:
        tokens, counts = torch.arange(num_tokens, device=rows.device), torch.where(has_slot, num_row_tokens, 0)
        rows = rows.repeat_interleave(num_tokens)
        positions = (positions[:, None] + torch.minimum(tokens, (counts[:, None] - 1).clamp(min=0))).flatten()
        has_slot = (tokens < counts[:, None]).flatten()
    slots = torch.where(has_slot, slots_of(block_tables, rows, positions, block_size), -1)
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
