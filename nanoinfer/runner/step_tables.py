"""What the device remembers of the running sequences, so that a decode step needs almost nothing from the host.

A running sequence owns one row of each table. The tables learn of new rows, tokens and blocks from packets, and of
sampled tokens from the sampler, on the device, before the host has seen them.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.batch import Header, PacketSections
from nanoinfer.layers.attention.metadata import DecodeMetadata, PrefillMetadata, ragged_indices
from nanoinfer.sampling.gumbel_max import sample_and_append, sample_together

M = TypeVar("M", PrefillMetadata, DecodeMetadata)

PADDING_ROW = -1  # indexes the last row, a scratch line whose context stays empty, for padding to read


@dataclass(frozen=True, slots=True)
class StepInputs(Generic[M]):
    """What the model runs on: (num_tokens,) each, and where their keys and values go."""

    token_ids: Tensor
    positions: Tensor
    metadata: M


class DeviceState:
    """The tables of `max_num_seqs` rows, and a scratch row after them.

    token_ids: (rows, max_model_len + 1) int32.
    context_lens: (rows,) int32, known tokens: those whose keys and values are computed, and the newest.
    block_tables: (rows, max_blocks) int32. temperatures: (rows,) float32. seeds: (rows,) int64.
    Every rank has them all, and enters the same tokens.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        tp: TensorParallel | None = None,
    ) -> None:
        rows, max_blocks = max_num_seqs + 1, -(-max_model_len // block_size)
        self.block_size = block_size
        self.device = device
        self.tp = tp or TensorParallel()
        self.token_ids = torch.zeros(rows, max_model_len + 1, dtype=torch.int32, device=device)
        self.context_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(rows, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)

    def apply(self, header: Header, sections: PacketSections) -> None:
        """Enter a packet's new rows and blocks in the tables; `sections` are tensors on the device."""
        if header.num_admitted:
            records = sections.row_records
            rows, lens = records[:, 0].long(), records[:, 1]
            self.context_lens[rows] = lens
            self.temperatures[rows] = records[:, 2].contiguous().view(torch.float32)
            self.seeds[rows] = (records[:, 4].long() << 32) | (records[:, 3].long() & 0xFFFFFFFF)
            segments, columns = ragged_indices(cumulated(lens), header.num_known_tokens)
            self.token_ids[rows[segments], columns] = sections.known_tokens
        if header.num_new_blocks:
            rows, columns, block_ids = sections.new_blocks.long().unbind(1)
            self.block_tables[rows, columns] = block_ids.int()

    def prefill_inputs(
        self, chunks: Tensor, host_chunks: list[list[int]], header: Header
    ) -> StepInputs[PrefillMetadata]:
        """The tokens of all chunks end to end. chunks: (num_chunks, 3) as in the packet; host_chunks the same."""
        rows, starts, lens = chunks.long().unbind(1)
        cu_query_lens = cumulated(chunks[:, 2])
        segments, offsets = ragged_indices(cu_query_lens, header.num_prefill_tokens)
        positions = offsets + starts[segments]
        token_rows = rows[segments]
        metadata = PrefillMetadata(
            query_lens=tuple(length for _, _, length in host_chunks),
            context_lens=tuple(start + length for _, start, length in host_chunks),
            cu_query_lens=cu_query_lens,
            cu_context_lens=cumulated((starts + lens).int()),
            slot_mapping=self._slots(self.block_tables, token_rows, positions),
            block_tables=self.block_tables[rows],
        )
        return StepInputs(self.token_ids[token_rows, positions], positions, metadata)

    def decode_inputs(self, rows: Tensor) -> StepInputs[DecodeMetadata]:
        """The newest token of each row; `rows` (num_rows,) int64 may contain PADDING_ROW."""
        context_lens = self.context_lens[rows]
        positions = (context_lens - 1).clamp(min=0).long()
        block_tables = self.block_tables[rows]
        lines = torch.arange(len(rows), device=self.device)
        slots = self._slots(block_tables, lines, positions)
        metadata = DecodeMetadata(
            slot_mapping=torch.where(context_lens > 0, slots, -1),
            context_lens=context_lens,
            block_tables=block_tables,
        )
        return StepInputs(self.token_ids[rows, positions], positions, metadata)

    def sample(self, logits: Tensor, rows: Tensor, first_id: int = 0) -> Tensor:
        """Draw and enter the next token of each row (num_rows,) int64; logits: this rank's, from id `first_id` on."""
        tables = (self.temperatures, self.seeds, self.token_ids, self.context_lens)
        if self.tp.size == 1:
            return sample_and_append(logits, rows, *tables)
        return sample_together(logits, first_id, self.tp, rows, *tables)

    def _slots(self, block_tables: Tensor, lines: Tensor, positions: Tensor) -> Tensor:
        """block_id * block_size + offset of each position, (num_tokens,) int64."""
        block_ids = block_tables[lines, positions // self.block_size].long()
        return block_ids * self.block_size + positions % self.block_size


def cumulated(lens: Tensor) -> Tensor:
    """Where segments of these lengths begin and end: (num_segments,) -> (num_segments + 1,) int32."""
    cu_lens = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, dim=0, dtype=torch.int32, out=cu_lens[1:])
    return cu_lens
