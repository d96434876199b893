"""Latent attention by Triton kernels: the default on CUDA."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.layers.attention.latent import Expand, LatentAttentionSpec, LatentBackend
from nanoinfer.layers.attention.metadata import DecodeMetadata, Metadata, MetadataT, PrefillMetadata, ragged_indices
from nanoinfer.layers.attention.triton import DecodePlan
from nanoinfer.ops.decode_attention.triton import SMALL_TILE, plan_decode
from nanoinfer.ops.kv_cache.spec import LayerCache
from nanoinfer.ops.latent_attention.triton import (
    absorbed_prefill_attention,
    expanded_prefill_attention,
    max_latent_sharers,
    paged_latent_attention,
    plan_absorbed_prefill,
    plan_expanded_prefill,
    shared_latent_attention,
    tile_tokens,
)

# The most numbers that a step expands of tokens of earlier steps. The step that is measured at load has none.
MAX_EXPANDED = 2**24


class LatentPrefillPlan(NamedTuple):
    """Lists the tiles of queries.

    slots: (num_context_tokens,) int64, where the contexts are in the cache that are expanded. None: whole prompts are
    expanded, or the queries are absorbed.
    """

    tiles: Tensor
    is_absorbed: bool
    slots: Tensor | None = None


class TritonLatentBackend(LatentBackend):
    """Reads vectors through block tables in decode, and in prefill if few tokens attend to many of earlier steps.

    Else prefill expands the contexts of its chunks, which takes fewer operations. Decode reads a shared prefix once.
    """

    name = "triton"
    needs_host = False
    max_row_tokens = SMALL_TILE  # with as many parts of the heads as that takes

    def __init__(self, spec: LatentAttentionSpec, device: torch.device) -> None:
        self.spec = spec
        self.max_prefix_sharers = max_latent_sharers(spec.num_heads, 1, device)

    def reads_latents(self, metadata: Metadata) -> bool:
        if not isinstance(metadata, PrefillMetadata):
            return True
        return metadata.reads_cache and bool(metadata.plans[self.spec].is_absorbed)

    def plan(self, metadata: MetadataT, cache: LayerCache) -> MetadataT:
        plan: LatentPrefillPlan | DecodePlan
        if isinstance(metadata, PrefillMetadata):
            plan = self._plan_prefill(metadata, cache)
        else:
            plan = self._plan_decode(metadata, cache)
        return replace(metadata, plans={**metadata.plans, self.spec: plan})

    def attend_to_heads(
        self, q: Tensor, vectors: Tensor, expand: Expand, cache: LayerCache, metadata: PrefillMetadata
    ) -> Tensor:
        plan: LatentPrefillPlan = metadata.plans[self.spec]
        sizes, lens = self.spec.sizes, metadata.cu_context_lens
        if plan.slots is not None:
            vectors = cache.k.view(-1, sizes.vector_size)[plan.slots]
        latents, rotated_keys = vectors.split([sizes.latent_size, sizes.rotary_size], dim=1)
        expanded = expand(latents)
        return expanded_prefill_attention(
            q, expanded, rotated_keys, plan.tiles, lens, sizes.plain_size, self.spec.scale
        )

    def attend_to_latents(self, absorbed: Tensor, rotated: Tensor, cache: LayerCache, metadata: Metadata) -> Tensor:
        plan, scale = metadata.plans[self.spec], self.spec.scale
        if isinstance(metadata, PrefillMetadata):
            return absorbed_prefill_attention(absorbed, rotated, cache, plan.tiles, metadata.block_tables, scale)
        shared, prefix = metadata.shared_prefixes, None
        if plan.prefixes is not None and shared is not None:
            prefix = shared_latent_attention(absorbed, rotated, cache, plan.prefixes, shared.num_sharers, scale)
        return paged_latent_attention(absorbed, rotated, cache, plan.rows, scale, prefix)

    def _plan_prefill(self, metadata: PrefillMetadata, cache: LayerCache) -> LatentPrefillPlan:
        device, lens, contexts = metadata.cu_query_lens.device, metadata.query_lens, metadata.context_lens
        if not metadata.reads_cache:
            return LatentPrefillPlan(plan_expanded_prefill(lens, lens, device), is_absorbed=False)
        if self._absorbing_pays(lens, contexts):
            num_heads = self.spec.heads_at_once(sum(lens))
            return LatentPrefillPlan(plan_absorbed_prefill(lens, contexts, num_heads, device), is_absorbed=True)
        chunk, offset = ragged_indices(metadata.cu_context_lens, sum(contexts))
        blocks = metadata.block_tables[chunk, offset // cache.block_size].long()
        slots = blocks * cache.block_size + offset % cache.block_size
        return LatentPrefillPlan(plan_expanded_prefill(lens, contexts, device), is_absorbed=False, slots=slots)

    def _absorbing_pays(self, query_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> bool:
        """Return whether to absorb: to expand what earlier steps computed takes more operations, or much memory."""
        sizes, num_earlier = self.spec.sizes, sum(context_lens) - sum(query_lens)
        expanded_size = sizes.plain_size + sizes.value_size
        if num_earlier * self.spec.num_heads * expanded_size > MAX_EXPANDED:
            return True
        num_pairs = sum(num * (context - num / 2) for num, context in zip(query_lens, context_lens, strict=True))
        return num_earlier * expanded_size * sizes.latent_size > num_pairs * (2 * sizes.latent_size - expanded_size)

    def _plan_decode(self, metadata: DecodeMetadata, cache: LayerCache) -> DecodePlan:
        lens, tables, shared = metadata.context_lens, metadata.block_tables, metadata.shared_prefixes
        block_size, vector_size = cache.block_size, self.spec.sizes.vector_size
        device, num_heads = lens.device, self.spec.num_heads
        first_tokens = prefixes = None
        if shared is not None and max_latent_sharers(num_heads, metadata.num_tokens, device) > 1:
            first_tokens = shared.num_shared_blocks * block_size
            prefix_lens = torch.where(shared.num_sharers > 0, first_tokens, 0)
            tile_size = tile_tokens(num_heads, metadata.num_tokens, cache, of_prefixes=True)
            prefixes = plan_decode(prefix_lens, tables, block_size, vector_size, least_tiles=0, tile_size=tile_size)
        rows = plan_decode(
            lens,
            tables,
            block_size,
            vector_size,
            first_tokens,
            num_row_tokens=metadata.num_row_tokens,
            tile_size=tile_tokens(num_heads, metadata.num_tokens, cache),
        )
        return DecodePlan(rows, prefixes)
