"""The KV cache, and the metadata by which a forward pass finds its keys and values in it.

Both travel as arguments from the runner down to attention. Nothing is read from a global.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class LayerCache(NamedTuple):
    """Holds one layer's keys and values, each (num_blocks, num_kv_heads, block_size, head_dim)."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """Holds all layers' keys and values, each (num_layers, num_blocks, num_kv_heads, block_size, head_dim)."""

    k: Tensor
    v: Tensor

    @property
    def num_blocks(self) -> int:
        return self.k.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def layer(self, index: int) -> LayerCache:
        return LayerCache(self.k[index], self.v[index])


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """Describes a prefill step: chunks of prompts, laid end to end.

    Chunk i computes `query_lens[i]` tokens, which attend to `context_lens[i]` tokens: the chunk's own, and those before
    it in the cache. Tuples on the host and tensors on the device say the same; a backend reads what suits it.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    cu_query_lens: Tensor  # (num_chunks + 1,) int32: where each chunk's tokens begin and end
    cu_context_lens: Tensor  # (num_chunks + 1,) int32
    slot_mapping: Tensor  # (num_tokens,) int64: block_id * block_size + offset of each token; -1 skips the write
    block_tables: Tensor  # (num_chunks, max_blocks) int32

    @property
    def reads_cache(self) -> bool:
        """Whether a chunk attends to tokens of earlier steps. If none does, the step's own keys and values suffice."""
        return self.query_lens != self.context_lens


class DecodePlan(NamedTuple):
    """Lists the tiles of all contexts of a decode step: see `plan_decode` in `kernels/paged_decode_attention.py`."""

    tiles: Tensor  # (max_tiles, 4) int32
    row_starts: Tensor  # (num_rows + 1,) int32


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """Describes a decode step, which computes one token of each row. Padding rows have a context of 0 tokens."""

    slot_mapping: Tensor  # (num_rows,) int64: where this step's key and value go; -1 skips the write
    context_lens: Tensor  # (num_rows,) int32: tokens each query attends to, its own included
    block_tables: Tensor  # (num_rows, max_blocks) int32
    plan: DecodePlan | None = None  # set by backends whose kernels need one, once for all layers


Metadata = PrefillMetadata | DecodeMetadata


def ragged_indices(cu_lens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the segment of each element, and the element's offset within it, for segments laid end to end.

    Both are (total,) int64. cu_lens: (num_segments + 1,), cumulated lengths from 0 on. total: its last element, passed
    from the host so that it need not wait for the device.
    """
    segments = torch.arange(len(cu_lens) - 1, device=cu_lens.device)
    segments = segments.repeat_interleave(cu_lens.diff(), output_size=total)
    return segments, torch.arange(total, device=cu_lens.device) - cu_lens[segments]
