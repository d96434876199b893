"""What the device remembers of the running sequences, so that a decode step needs almost nothing from the host.

A running sequence owns one row of each table. New rows, tokens and blocks come in packets. Sampled tokens are entered
by the sampler on the device, before the host has seen them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.engine.batch import Header, PacketSections
from nanoinfer.layers.attention.metadata import (
    DecodeMetadata,
    PrefillMetadata,
    SharedPrefixes,
    cumulative_lens,
    ragged_indices,
)

PADDING_ROW = -1  # indexes the last row, a spare line whose context stays empty


class PrefillInputs(NamedTuple):
    """What the model runs on in a prefill step."""

    token_ids: Tensor  # (num_tokens,) int32
    positions: Tensor  # (num_tokens,) int64
    metadata: PrefillMetadata


class DecodeInputs(NamedTuple):
    """What the model runs on in a decode step."""

    token_ids: Tensor  # (num_rows,) int32
    positions: Tensor  # (num_rows,) int64
    metadata: DecodeMetadata


class StepTables:
    """The tables of `max_num_seqs` rows, and a spare row after them. Every rank has them all, with the same contents.

    token_ids: (rows, max_model_len + 1) int32.
    context_lens: (rows,) int32, known tokens: those whose keys and values are computed, and the newest.
    block_tables: (rows, max_blocks) int32.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        rows, max_blocks = max_num_seqs + 1, -(-max_model_len // block_size)
        self.block_size = block_size
        self.device = device
        self.token_ids = torch.zeros(rows, max_model_len + 1, dtype=torch.int32, device=device)
        self.context_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)

    def update(self, header: Header, sections: PacketSections) -> None:
        """Enter a packet's new rows and blocks; `sections` are tensors on the device."""
        if header.num_admitted:
            rows, lens = sections.row_records[:, 0].long(), sections.row_records[:, 1]
            self.context_lens[rows] = lens
            segments, columns = ragged_indices(cumulative_lens(lens), header.num_known_tokens)
            self.token_ids[rows[segments], columns] = sections.known_tokens[:, 0]
        if header.num_new_blocks:
            rows, columns, block_ids = sections.new_blocks.long().unbind(1)
            self.block_tables[rows, columns] = block_ids.int()

    def prefill_inputs(self, header: Header, chunks: Tensor, host_chunks: list[list[int]]) -> PrefillInputs:
        """Return the tokens of all chunks end to end.

        chunks: (num_chunks, 3) as in the packet (row, start, length); host_chunks: the same on the host.
        """
        rows, starts, lens = chunks.long().unbind(1)
        cu_query_lens = cumulative_lens(chunks[:, 2])
        segments, offsets = ragged_indices(cu_query_lens, header.num_prefill_tokens)
        positions = offsets + starts[segments]
        token_rows = rows[segments]
        metadata = PrefillMetadata(
            query_lens=tuple(length for _, _, length in host_chunks),
            context_lens=tuple(start + length for _, start, length in host_chunks),
            cu_query_lens=cu_query_lens,
            cu_context_lens=cumulative_lens((starts + lens).int()),
            slot_mapping=self._slots(self.block_tables, token_rows, positions),
            block_tables=self.block_tables[rows],
        )
        return PrefillInputs(self.token_ids[token_rows, positions], positions, metadata)

    def decode_inputs(self, rows: Tensor, shared_prefixes: SharedPrefixes | None = None) -> DecodeInputs:
        """Return the newest token of each row; `rows` (num_rows,) int64 may contain PADDING_ROW.

        shared_prefixes: which of these rows begin with the same blocks, if any do.
        """
        context_lens = self.context_lens[rows]
        positions = (context_lens - 1).clamp(min=0).long()
        block_tables = self.block_tables[rows]
        lines = torch.arange(len(rows), device=self.device)
        slots = self._slots(block_tables, lines, positions)
        metadata = DecodeMetadata(
            slot_mapping=torch.where(context_lens > 0, slots, -1),
            context_lens=context_lens,
            block_tables=block_tables,
            shared_prefixes=shared_prefixes,
        )
        return DecodeInputs(self.token_ids[rows, positions], positions, metadata)

    def _slots(self, block_tables: Tensor, lines: Tensor, positions: Tensor) -> Tensor:
        """Return block_id * block_size + offset of each position, (num_tokens,) int64."""
        block_ids = block_tables[lines, positions // self.block_size].long()
        return block_ids * self.block_size + positions % self.block_size
