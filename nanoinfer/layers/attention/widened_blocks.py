"""Prefill over a cache in 8 bits: the blocks that a step reads are widened once a layer, for kernels of 16 bits.

A prompt's queries read the same keys again and again, and chunks that begin alike read the same blocks. So what a step
reads is listed once, without repetitions, and block tables that point into the list stand for the cache's own.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.layers.attention.metadata import LayerCache, PrefillMetadata
from nanoinfer.ops.kv_cache.spec import widen_blocks

MAX_TOKENS = 2**15  # that are widened at a time: 134 MB of keys and values, for 8 KV heads of 128


class BlockList(NamedTuple):
    """Lists the blocks that a step reads."""

    block_ids: Tensor  # (num_blocks,) int32; beyond those that are read, 0
    block_tables: Tensor  # (num_chunks, max_blocks) int32: places in the list


def list_blocks(metadata: PrefillMetadata, num_cache_blocks: int, block_size: int) -> BlockList | None:
    """List the blocks that hold the contexts of a step; None if these are too many, or not counted.

    The host does not wait for the device: it knows how many blocks there are at most, and not which.
    """
    if not 0 < metadata.num_blocks * block_size <= MAX_TOKENS:
        return None
    tables, lens = metadata.block_tables, metadata.cu_context_lens.diff()
    columns = torch.arange(tables.shape[1], device=tables.device)
    # Table entries beyond a context mean nothing: replace them by `num_cache_blocks`, which is no block's id.
    blocks = torch.where(columns * block_size < lens[:, None], tables.long(), num_cache_blocks)
    used = torch.zeros(num_cache_blocks + 1, dtype=torch.int32, device=tables.device)
    used.index_fill_(0, blocks.flatten(), 1)
    places = used.cumsum(0) - 1
    # A block that is not read has another block's place, so its id goes to a spare entry after the list instead.
    targets = torch.where(used > 0, places, metadata.num_blocks).clamp(max=metadata.num_blocks)[:-1]
    block_ids = torch.zeros(metadata.num_blocks + 1, dtype=torch.int32, device=tables.device)
    block_ids.scatter_(0, targets, torch.arange(num_cache_blocks, dtype=torch.int32, device=tables.device))
    return BlockList(block_ids[:-1], places[blocks].clamp(0, metadata.num_blocks - 1).int())


def widened_cache(cache: LayerCache, blocks: BlockList, dtype: torch.dtype) -> LayerCache:
    """Return a cache in 16 bits that holds the listed blocks, in their order."""
    assert cache.k_scales is not None, "only a cache in 8 bits is widened"
    assert cache.v_scales is not None, "only a cache in 8 bits is widened"
    # Always as large, so that the largest step is no larger than the one that is measured at load.
    num_places = max(1, MAX_TOKENS // cache.k.shape[2])
    k, v = cache.k.new_empty((2, num_places, *cache.k.shape[1:]), dtype=dtype)
    widen_blocks(cache.k, cache.k_scales, blocks.block_ids, k)
    widen_blocks(cache.v, cache.v_scales, blocks.block_ids, v)
    return LayerCache(k, v)
