"""The default backend on CUDA: Triton kernels that read the paged cache, for prefill and decode."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.layers.attention.backend import AttentionBackend, AttentionSpec
from nanoinfer.layers.attention.metadata import DecodeMetadata, MetadataT, PrefillMetadata
from nanoinfer.ops.decode_attention.triton import (
    TileList,
    has_large_tiles,
    max_prefix_sharers,
    max_queries,
    paged_decode_attention,
    plan_decode,
    shared_prefix_attention,
)
from nanoinfer.ops.kv_cache.spec import LayerCache, widen_blocks
from nanoinfer.ops.prefill_attention.triton import paged_prefill_attention, plan_prefill

LONG_CONTEXT = 512  # Hopper's own kernel is faster where a tile of queries attends to so many tokens on average
MAX_WIDENED_TOKENS = 2**15  # that are widened at a time: 134 MB of keys and values, for 8 KV heads of 128


class BlockList(NamedTuple):
    """Lists the blocks of a cache in 8 bits that a prefill step reads. Each layer widens them once, to 16 bits.

    A prompt's queries read the same keys again and again, and chunks that begin alike read the same blocks. So blocks
    are listed without repetitions, and block tables that point into the list replace the cache's own.
    """

    block_ids: Tensor  # (num_blocks,) int32; beyond those that are read, 0
    block_tables: Tensor  # (num_chunks, max_blocks) int32: places in the list


class PrefillPlan(NamedTuple):
    """Lists the tiles of queries: see `plan_prefill`.

    counters: for Hopper's own kernel; None if it is not to run. blocks: what it reads of a cache in 8 bits.
    """

    tiles: Tensor
    counters: Tensor | None = None
    blocks: BlockList | None = None


class DecodePlan(NamedTuple):
    """Lists the tiles that each row reads for itself, and the tiles of shared prefixes, if there are any."""

    rows: TileList
    prefixes: TileList | None


class TritonBackend(AttentionBackend):
    """Reads keys and values through block tables, in 16 or 8 bits. Full attention reads a shared prefix once.

    for_prefill: computes prefill steps, where it is faster. has_hopper_kernel: whether Hopper's own prefill kernel
    serves this GPU and this spec.
    """

    needs_host = False

    def __init__(
        self, spec: AttentionSpec, for_prefill: AttentionBackend | None = None, has_hopper_kernel: bool = False
    ) -> None:
        self.spec = spec
        self.for_prefill = for_prefill
        self.has_hopper_kernel = has_hopper_kernel
        self.compiles_common_kernel = has_hopper_kernel  # with the first long prompt, for later short ones
        self.name = f"triton, {for_prefill.name} in prefill" if for_prefill else "triton"
        self.max_row_tokens = max_queries(spec.head_dim) // spec.group_size
        reads_prefixes_once = spec.window is None and spec.causal
        sharers = max_prefix_sharers(spec.group_size, head_dim=spec.head_dim)
        self.max_prefix_sharers = sharers if reads_prefixes_once else 0

    def plan(self, metadata: MetadataT, cache: LayerCache) -> MetadataT:
        plan: PrefillPlan | DecodePlan
        if isinstance(metadata, PrefillMetadata):
            plan = self._plan_prefill(metadata, cache)
        else:
            plan = self._plan_decode(metadata, cache)
        return replace(metadata, plans={**metadata.plans, self.spec: plan})

    def prefill(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        metadata: PrefillMetadata,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if self.for_prefill is not None and not cache.in_8_bits:
            return self.for_prefill.prefill(q, k, v, cache, metadata)
        plan: PrefillPlan = metadata.plans[self.spec]
        tables, spec = metadata.block_tables, self.spec
        if plan.counters is not None:
            from nanoinfer.ops.prefill_attention.hopper import hopper_prefill_attention

            if self.compiles_common_kernel:  # engines load with a long prompt, and users may come with short ones
                self.compiles_common_kernel = False
                paged_prefill_attention(q[:1], cache, plan.tiles[:0], tables, spec.scale)
            if plan.blocks is not None:
                cache, tables = widened_cache(cache, plan.blocks, q.dtype), plan.blocks.block_tables
            lens = metadata.cu_context_lens
            return hopper_prefill_attention(q, cache.k, cache.v, plan.tiles, plan.counters, tables, lens, spec.scale)
        cu_lens = None if spec.causal else metadata.cu_context_lens
        return paged_prefill_attention(
            q, cache, plan.tiles, tables, spec.scale, spec.window, sinks, cu_lens, spec.soft_cap
        )

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata, sinks: Tensor | None = None) -> Tensor:
        plan: DecodePlan = metadata.plans[self.spec]
        shared, spec = metadata.shared_prefixes, self.spec
        prefix = None
        if plan.prefixes is not None and shared is not None:
            prefix = shared_prefix_attention(q, cache, plan.prefixes, shared.num_sharers, spec.scale, spec.soft_cap)
        windowed = spec.window is not None
        return paged_decode_attention(q, cache, plan.rows, spec.scale, windowed, prefix, sinks, spec.soft_cap)

    def _plan_prefill(self, metadata: PrefillMetadata, cache: LayerCache) -> PrefillPlan:
        device, lens, contexts = metadata.cu_query_lens.device, metadata.query_lens, metadata.context_lens
        tiles = plan_prefill(lens, contexts, self.spec.group_size, device, self.spec.head_dim)
        seen = sum(num * (context - num / 2) for num, context in zip(lens, contexts, strict=True))
        if not self.has_hopper_kernel or seen < LONG_CONTEXT * sum(lens):
            return PrefillPlan(tiles)
        blocks = list_blocks(metadata, cache.num_blocks, cache.block_size) if cache.in_8_bits else None
        if cache.in_8_bits and blocks is None:
            return PrefillPlan(tiles)
        return PrefillPlan(tiles, torch.zeros(2, dtype=torch.int32, device=device), blocks)

    def _plan_decode(self, metadata: DecodeMetadata, cache: LayerCache) -> DecodePlan:
        lens, tables = metadata.context_lens, metadata.block_tables
        block_size, head_dim = cache.block_size, self.spec.head_dim
        shared, prefixes, num_tokens = metadata.shared_prefixes, None, metadata.num_tokens
        first_tokens = None
        if self.spec.window is not None:
            first_tokens = lens - self.spec.window
        elif shared is not None and max_prefix_sharers(self.spec.group_size, num_tokens, head_dim) > 1:
            first_tokens = shared.num_shared_blocks * block_size
            prefix_lens = torch.where(shared.num_sharers > 0, first_tokens, 0)
            prefixes = plan_decode(prefix_lens, tables, block_size, head_dim, least_tiles=0)
        large_tiles = has_large_tiles(cache.in_8_bits, self.spec.group_size * num_tokens)
        rows = plan_decode(
            lens,
            tables,
            block_size,
            head_dim,
            first_tokens,
            large_tiles=large_tiles,
            num_row_tokens=metadata.num_row_tokens,
        )
        return DecodePlan(rows, prefixes)


def list_blocks(metadata: PrefillMetadata, num_cache_blocks: int, block_size: int) -> BlockList | None:
    """List the blocks that hold the contexts of a step; None if there are too many, or nobody has counted them.

    The host does not wait for the device: it knows how many blocks there are at most, and not which.
    """
    if not 0 < metadata.num_blocks * block_size <= MAX_WIDENED_TOKENS:
        return None
    tables, lens = metadata.block_tables, metadata.cu_context_lens.diff()
    first_tokens = torch.arange(tables.shape[1], device=tables.device) * block_size
    # Table entries beyond a context mean nothing: replace them by `num_cache_blocks`, which is no block's id.
    blocks = torch.where(first_tokens < lens[:, None], tables.long(), num_cache_blocks)
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
    # Always allocates the most, so that no step takes more memory than the one that is measured at load.
    num_places = max(1, MAX_WIDENED_TOKENS // cache.k.shape[2])
    k, v = cache.k.new_empty((2, num_places, *cache.k.shape[1:]), dtype=dtype)
    widen_blocks(cache.k, cache.k_scales, blocks.block_ids, k)
    widen_blocks(cache.v, cache.v_scales, blocks.block_ids, v)
    return LayerCache(k, v)
