"""Holds the metadata by which a forward pass finds its keys and values in the KV cache.

Cache and metadata travel as arguments from the runner down to attention. Nothing is read from a global.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor


def cumulative_lens(lens: Tensor) -> Tensor:
    """Return where segments of these lengths begin and end: (num_segments,) -> (num_segments + 1,) int32."""
    cu_lens = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
    torch.cumsum(lens, dim=0, dtype=torch.int32, out=cu_lens[1:])
    return cu_lens


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """Describes a prefill step: chunks of prompts, laid end to end.

    Chunk i computes `query_lens[i]` tokens, which attend to `context_lens[i]` tokens: the chunk's own, and those before
    it in the cache. Tuples on the host and tensors on the device say the same; a backend reads what suits it.
    """

    is_prefill: ClassVar[bool] = True
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    cu_query_lens: Tensor  # (num_chunks + 1,) int32: where each chunk's tokens begin and end
    cu_context_lens: Tensor  # (num_chunks + 1,) int32
    slot_mapping: Tensor  # (num_tokens,) int64: block_id * block_size + offset of each token; -1 skips the write
    block_tables: Tensor  # (num_chunks, max_blocks) int32
    num_blocks: int = 0  # different blocks that hold the contexts, at most; 0: not counted
    plans: Mapping[Hashable, Any] = field(default_factory=dict)  # by backend, or by its spec: what it has prepared

    @classmethod
    def of_whole_prompts(cls, lens: Sequence[int], block_tables: Tensor) -> "PrefillMetadata":
        """Return the step that computes whole prompts of these lengths, and stores none of their keys and values."""
        device, lens = block_tables.device, tuple(lens)
        assert len(lens) <= len(block_tables), f"{len(lens)} prompts, and block tables of {len(block_tables)} rows"
        cu_lens = cumulative_lens(torch.tensor(lens, dtype=torch.int32, device=device))
        nowhere = torch.full((sum(lens),), -1, dtype=torch.int64, device=device)
        return cls(lens, lens, cu_lens, cu_lens, nowhere, block_tables[: len(lens)], num_blocks=1)

    def of_last_tokens(self) -> "PrefillMetadata":
        """Return the step of each chunk's last token alone, which is stored already. There are no plans."""
        lens = (1,) * len(self.query_lens)
        cu_lens = torch.arange(len(lens) + 1, dtype=torch.int32, device=self.cu_query_lens.device)
        nowhere = self.slot_mapping.new_full((len(lens),), -1)
        return replace(self, query_lens=lens, cu_query_lens=cu_lens, slot_mapping=nowhere, plans={})

    @property
    def reads_cache(self) -> bool:
        """Whether a chunk attends to tokens of earlier steps. If none does, the step's own keys and values suffice."""
        return self.query_lens != self.context_lens


class SharedPrefixes(NamedTuple):
    """Says which rows of a decode step begin with the same blocks. Such prefix sharers lie side by side."""

    num_shared_blocks: Tensor  # (num_rows,) int32: blocks that a row shares; 0 where it shares none
    num_sharers: Tensor  # (num_rows,) int32: at the first row of each run of sharers, how many they are; 0 elsewhere


class DecodeBatch(NamedTuple):
    """Says what a decode step computes: which rows of the tables, and how many tokens of each."""

    rows: Tensor  # (num_rows,) int32; -1 for padding
    shared_prefixes: SharedPrefixes | None = None  # None: no rows share a prefix
    num_tokens: int = 1  # of every row: see `DecodeMetadata`
    num_row_tokens: Tensor | None = None
    num_packed: int = 0  # lines that are computed if there is no padding between rows; 0: each row has num_tokens


class PackedLines(NamedTuple):
    """Says where the lines of rows are if there is no padding between rows, as products have them.

    Attention has num_tokens lines of every row: line i * num_tokens + j is token j of row i.
    """

    unpacked: Tensor  # (num_packed,) int64: which of these lines each packed one is
    packed: Tensor  # (num_rows * num_tokens,) int64: the packed line of each; for padding, the last one before it
    are_own: Tensor  # (num_packed,) bool: False for padding after the last row

    @classmethod
    def of(cls, batch: DecodeBatch) -> "PackedLines | None":
        """Pack the lines of a batch, if it asks for that. The host does not wait for the device."""
        _, _, num_tokens, num_row_tokens, num_packed = batch
        if num_row_tokens is None or num_packed == 0:
            return None
        starts, device = cumulative_lens(num_row_tokens), num_row_tokens.device
        line = torch.arange(num_packed, dtype=torch.int32, device=device)
        row = torch.searchsorted(starts[1:], line, right=True).clamp(max=len(num_row_tokens) - 1)
        unpacked = row * num_tokens + (line - starts[row]).clamp(max=num_tokens - 1)
        token = torch.arange(num_tokens, dtype=torch.int32, device=device)
        packed = starts[:-1, None] + torch.minimum(token, num_row_tokens[:, None] - 1)  # maybe -1 where all is padding
        return cls(unpacked, packed.flatten().long().clamp(min=0), line < starts[-1])

    def take(self, token_ids: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the token ids, positions and slots of the packed lines; padding has no slot.

        The arguments are those of all lines, (num_rows * num_tokens,) each.
        """
        slots = torch.where(self.are_own, slots[self.unpacked], -1)
        return token_ids[self.unpacked], positions[self.unpacked], slots


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """Describes a decode step, which computes `num_tokens` tokens of each row.

    The queries of a row lie one after the other: line i * num_tokens + j is token j of row i. Token j attends to
    `context_lens[i] + j` tokens. Where a row has fewer real tokens, the rest of its lines are padding: they attend to
    what the row's last token attends to, and their results are dropped. Padding rows have a context of 0 tokens.
    """

    is_prefill: ClassVar[bool] = False
    slot_mapping: Tensor  # (num_rows * num_tokens,) int64: where each line's key and value go; -1 skips the write
    context_lens: Tensor  # (num_rows,) int32: tokens that a row's first token attends to, its own included
    block_tables: Tensor  # (num_rows, max_blocks) int32
    shared_prefixes: SharedPrefixes | None = None  # a backend may ignore them
    num_tokens: int = 1  # lines of every row
    num_row_tokens: Tensor | None = None  # (num_rows,) int32: real tokens of each row; None if num_tokens is 1
    lines: PackedLines | None = None  # of the slots, and of what comes to attention and goes from it; None: as above
    plans: Mapping[Hashable, Any] = field(default_factory=dict)  # by backend, or by its spec: what it has prepared

    def with_a_row_for_each_token(self) -> "DecodeMetadata":
        """Return the same step with a row for each token. The rows of a row's tokens have its block table.

        This specifies what a row of several tokens means. Prefixes are not shared, and there are no plans.
        """
        if self.num_row_tokens is None:
            return self
        token = torch.arange(self.num_tokens, dtype=torch.int32, device=self.context_lens.device)
        lens = self.context_lens[:, None]
        lens = torch.where(lens > 0, lens + torch.minimum(token, self.num_row_tokens[:, None] - 1), 0)
        return DecodeMetadata(
            self.slot_mapping, lens.flatten(), self.block_tables.repeat_interleave(self.num_tokens, dim=0)
        )


Metadata = PrefillMetadata | DecodeMetadata
MetadataT = TypeVar("MetadataT", bound=Metadata)


def ragged_indices(cu_lens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the segment of each element, and the element's offset within it, for segments laid end to end.

    Both are (total,) int64. cu_lens: (num_segments + 1,), cumulated lengths from 0 on. total: its last element, passed
    from the host so that it need not wait for the device.
    """
    segments = torch.arange(len(cu_lens) - 1, device=cu_lens.device)
    segments = segments.repeat_interleave(cu_lens.diff(), output_size=total)
    return segments, torch.arange(total, device=cu_lens.device) - cu_lens[segments]
