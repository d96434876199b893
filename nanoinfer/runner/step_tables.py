"""Holds what the device remembers of running sequences, so that a decode step needs almost nothing from the host.

A running sequence owns one row of each table. New rows, tokens and blocks come in packets. Sampled tokens are entered
by the sampler on the device, before the host has seen them.
"""

import torch
from torch import Tensor

from nanoinfer.caches.kv_cache import KVCache
from nanoinfer.caches.recurrent_states import RecurrentStates
from nanoinfer.engine.packet import Header, UploadedSections, column
from nanoinfer.integers import ceil_div
from nanoinfer.layers.attention.metadata import (
    DecodeBatch,
    DecodeMetadata,
    PackedLines,
    PrefillMetadata,
    cumulative_lens,
    ragged_indices,
)
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.ops.block_tables.spec import read_rows, slots_of

PADDING_ROW = -1  # indexes the last row, a spare one whose context stays empty


class StepTables:
    """Holds tables of `max_num_seqs` rows, and a spare row after them. Every rank has them all, with equal contents.

    token_ids: (rows, max_model_len + 1) int32. After a row's known tokens there may be proposals.
    context_lens: (rows,) int32, known tokens: those whose keys and values are computed, and the newest one.
    block_tables: (num_tables * rows, max_blocks) int32, the ids of each row's blocks in `kv_cache`: the first table of
    every row, then the second table of every row, and so on.
    recurrent_states: what layers with linear attention remember of the rows; None without such layers.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        kv_cache: KVCache,
        recurrent_states: RecurrentStates | None = None,
    ) -> None:
        rows, max_blocks, device = max_num_seqs + 1, ceil_div(max_model_len, kv_cache.block_size), kv_cache.device
        self.kv_cache, self.recurrent_states = kv_cache, recurrent_states
        self.token_ids = torch.zeros(rows, max_model_len + 1, dtype=torch.int32, device=device)
        self.context_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        strides = kv_cache.id_strides
        self.block_tables = torch.zeros(len(strides) * rows, max_blocks, dtype=torch.int32, device=device)
        self.tables = self.block_tables.split(rows)  # (rows, max_blocks) each
        # The factor of the block ids in each line of block_tables; None if all factors are 1.
        self._id_strides = torch.tensor(strides, device=device).repeat_interleave(rows) if max(strides) > 1 else None

    def update(self, header: Header, sections: UploadedSections) -> None:
        """Enter a packet's new rows and blocks; `sections` are tensors on the device."""
        if header.counts["row_records"]:
            rows, lens = column(sections, "row_records", "row").long(), column(sections, "row_records", "num_tokens")
            self.context_lens[rows] = lens
            segments, positions = ragged_indices(cumulative_lens(lens), header.counts["known_tokens"])
            self.token_ids[rows[segments], positions] = sections.known_tokens[:, 0]
        if header.counts["new_blocks"]:
            rows, places, block_ids = sections.new_blocks.long().unbind(1)
            if self._id_strides is not None:
                block_ids = block_ids * self._id_strides[rows]
            self.block_tables[rows, places] = block_ids.int()

    def prefill_step(self, header: Header, chunks: Tensor, host_chunks: list[list[int]]) -> ForwardStep:
        """Return the step that computes the tokens of all chunks, end to end.

        chunks: (num_chunks, 3) as in the packet (row, start, length); host_chunks: the same on the host.
        """
        rows, starts, lens = chunks.long().unbind(1)
        cu_query_lens = cumulative_lens(chunks[:, 2])
        segments, offsets = ragged_indices(cu_query_lens, header.num_prefill_tokens)
        positions = offsets + starts[segments]
        token_rows = rows[segments]
        query_lens = tuple(length for _, _, length in host_chunks)
        context_lens = tuple(start + length for _, start, length in host_chunks)
        cu_context_lens = cumulative_lens((starts + lens).int())
        metadata = tuple(
            PrefillMetadata(
                query_lens=query_lens,
                context_lens=context_lens,
                cu_query_lens=cu_query_lens,
                cu_context_lens=cu_context_lens,
                slot_mapping=slots_of(table, token_rows, positions, self.kv_cache.block_size),
                block_tables=table[rows],
                num_blocks=0 if index else header.num_prefill_blocks,  # the packet counts blocks of the first table
            )
            for index, table in enumerate(self.tables)
        )
        # The chunks that sample a token are the first ones.
        last_tokens = cu_query_lens[1 : header.num_prefill_samples + 1].long() - 1
        return ForwardStep(
            token_ids=self.token_ids[token_rows, positions],
            positions=positions,
            kv_cache=self.kv_cache,
            metadata=metadata,
            outputs=last_tokens,
            recurrent_states=self.recurrent_states,
            rows=chunks[:, 0],
        )

    def decode_step(self, batch: DecodeBatch) -> ForwardStep:
        """Return the step that computes the newest token of each row, and the proposals after it, if there are any."""
        rows, shared_prefixes, num_tokens, num_row_tokens, _ = batch
        lines = PackedLines.of(batch)
        metadata: list[DecodeMetadata] = []
        for table in self.tables:
            token_ids, positions, slots, lens, blocks = read_rows(
                rows, self.token_ids, self.context_lens, table, self.kv_cache.block_size, num_tokens, num_row_tokens
            )
            if lines is not None:
                token_ids, positions, slots = lines.take(token_ids, positions, slots)
            metadata.append(DecodeMetadata(slots, lens, blocks, shared_prefixes, num_tokens, num_row_tokens, lines))
            shared_prefixes = None  # it names blocks of the first table
        return ForwardStep(
            token_ids=token_ids,
            positions=positions,
            kv_cache=self.kv_cache,
            metadata=tuple(metadata),
            recurrent_states=self.recurrent_states,
            rows=rows,
        )
