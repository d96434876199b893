"""What a forward pass is given besides its tokens: the KV cache, and where its keys and values lie.

These travel as arguments from the runner down to attention; nothing is read from a global.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class LayerCache(NamedTuple):
    """One layer's keys and values, head-major: (num_blocks, num_kv_heads, block_size, head_dim) each."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """All layers' keys and values: (num_layers, num_blocks, num_kv_heads, block_size, head_dim) each."""

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
    """A step that computes chunks of prompts, laid end to end.

    Chunk i computes `query_lens[i]` tokens, which attend to `context_lens[i]` tokens: those before them in the cache
    and their own. The host's tuples and the device's tensors say the same; a backend reads what suits it.
    """

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    cu_query_lens: Tensor  # (num_chunks + 1,) int32: where each chunk's tokens begin and end
    cu_context_lens: Tensor  # (num_chunks + 1,) int32
    slot_mapping: Tensor  # (num_tokens,) int64: block_id * block_size + offset of each token; -1 skips the write
    block_tables: Tensor  # (num_chunks, max_blocks) int32

    @property
    def reads_cache(self) -> bool:
        """Whether a chunk attends to tokens computed before it; if not, the step's own keys and values suffice."""
        return self.query_lens != self.context_lens


class DecodePlan(NamedTuple):
    """The contexts of a decode step, cut into tiles laid end to end: see `kernels/paged_attention.py`."""

    tiles: Tensor  # (max_tiles, 4) int32
    row_starts: Tensor  # (num_rows + 1,) int32


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """A step that computes one token for each row. Padding rows have a context of 0 tokens."""

    slot_mapping: Tensor  # (num_rows,) int64: where this step's key and value go; -1 skips the write
    context_lens: Tensor  # (num_rows,) int32: tokens each query attends to, its own included
    block_tables: Tensor  # (num_rows, max_blocks) int32
    plan: DecodePlan | None = None  # what a backend works out once for all layers


Metadata = PrefillMetadata | DecodeMetadata


def ragged_indices(cu_lens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For segments laid end to end, each element's segment and its offset within it: (total,) int64 each.

    cu_lens: (num_segments + 1,) where each begins and ends. total: its last element, known to the host, so that a
    GPU is not waited for.
    """
    segments = torch.arange(len(cu_lens) - 1, device=cu_lens.device)
    segments = segments.repeat_interleave(cu_lens.diff(), output_size=total)
    return segments, torch.arange(total, device=cu_lens.device) - cu_lens[segments]
