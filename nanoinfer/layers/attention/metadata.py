"""The metadata by which a forward pass finds its keys and values in the KV cache.

Cache and metadata travel as arguments from the runner down to attention. Nothing is read from a global.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
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
    plans: Mapping[Hashable, Any] = field(default_factory=dict)  # by AttentionSpec; a backend makes it for itself

    @classmethod
    def of_whole_prompts(cls, lens: Sequence[int], block_tables: Tensor) -> "PrefillMetadata":
        """Return the step that computes whole prompts of these lengths, and stores none of their keys and values."""
        device, lens = block_tables.device, tuple(lens)
        assert len(lens) <= len(block_tables), f"{len(lens)} prompts, and block tables of {len(block_tables)} rows"
        cu_lens = cumulative_lens(torch.tensor(lens, dtype=torch.int32, device=device))
        nowhere = torch.full((sum(lens),), -1, dtype=torch.int64, device=device)
        return cls(lens, lens, cu_lens, cu_lens, nowhere, block_tables[: len(lens)], num_blocks=1)

    @property
    def reads_cache(self) -> bool:
        """Whether a chunk attends to tokens of earlier steps. If none does, the step's own keys and values suffice."""
        return self.query_lens != self.context_lens


class SharedPrefixes(NamedTuple):
    """Says which rows of a decode step begin with the same blocks. They lie side by side, as a group."""

    num_shared_blocks: Tensor  # (num_rows,) int32: blocks that a row shares with its group; 0 for one that is in none
    num_group_rows: Tensor  # (num_rows,) int32: rows of the group that begins with this row; 0 where none begins


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """Describes a decode step, which computes one token of each row. Padding rows have a context of 0 tokens."""

    is_prefill: ClassVar[bool] = False
    slot_mapping: Tensor  # (num_rows,) int64: where this step's key and value go; -1 skips the write
    context_lens: Tensor  # (num_rows,) int32: tokens each query attends to, its own included
    block_tables: Tensor  # (num_rows, max_blocks) int32
    shared_prefixes: SharedPrefixes | None = None  # a backend may ignore them
    plans: Mapping[Hashable, Any] = field(default_factory=dict)  # by AttentionSpec; a backend makes it for itself


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
