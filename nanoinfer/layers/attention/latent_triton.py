"""Latent attention by Triton kernels: the default on CUDA."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.layers.attention.latent import Expand, LatentAttentionSpec, LatentBackend
from nanoinfer.layers.attention.metadata import DecodeMetadata, Metadata, MetadataT, PrefillMetadata
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


class LatentPrefillPlan(NamedTuple):
    """Lists the tiles of queries, which are absorbed where a chunk attends to tokens of earlier steps."""

    tiles: Tensor


class TritonLatentBackend(LatentBackend):
    """Reads vectors through block tables in decode, and in prefill if a chunk attends to tokens of earlier steps.

    Whole prompts are expanded: that takes fewer operations, and a chunk whose context is in the cache would expand it
    once more. Decode reads a shared prefix once.
    """

    name = "triton"
    needs_host = False
    max_row_tokens = SMALL_TILE  # with as many parts of the heads as that takes

    def __init__(self, spec: LatentAttentionSpec, device: torch.device) -> None:
        self.spec = spec
        self.max_prefix_sharers = max_latent_sharers(spec.num_heads, 1, device)

    def reads_latents(self, metadata: Metadata) -> bool:
        return not isinstance(metadata, PrefillMetadata) or metadata.reads_cache

    def plan(self, metadata: MetadataT, cache: LayerCache) -> MetadataT:
        plan: LatentPrefillPlan | DecodePlan
        if isinstance(metadata, PrefillMetadata):
            device, lens = metadata.cu_query_lens.device, metadata.query_lens
            if metadata.reads_cache:
                num_heads = self.spec.heads_at_once(sum(lens))
                plan = LatentPrefillPlan(plan_absorbed_prefill(lens, metadata.context_lens, num_heads, device))
            else:
                plan = LatentPrefillPlan(plan_expanded_prefill(lens, device))
        else:
            plan = self._plan_decode(metadata, cache)
        return replace(metadata, plans={**metadata.plans, self.spec: plan})

    def attend_to_heads(
        self, q: Tensor, vectors: Tensor, expand: Expand, cache: LayerCache, metadata: PrefillMetadata
    ) -> Tensor:
        plan: LatentPrefillPlan = metadata.plans[self.spec]
        sizes = self.spec.sizes
        latents, rotated_keys = vectors.split([sizes.latent_size, sizes.rotary_size], dim=1)
        expanded = expand(latents)
        return expanded_prefill_attention(q, expanded, rotated_keys, plan.tiles, sizes.plain_size, self.spec.scale)

    def attend_to_latents(self, absorbed: Tensor, rotated: Tensor, cache: LayerCache, metadata: Metadata) -> Tensor:
        plan, scale = metadata.plans[self.spec], self.spec.scale
        if isinstance(metadata, PrefillMetadata):
            return absorbed_prefill_attention(absorbed, rotated, cache, plan.tiles, metadata.block_tables, scale)
        shared, prefix = metadata.shared_prefixes, None
        if plan.prefixes is not None and shared is not None:
            prefix = shared_latent_attention(absorbed, rotated, cache, plan.prefixes, shared.num_sharers, scale)
        return paged_latent_attention(absorbed, rotated, cache, plan.rows, scale, prefix)

    def _plan_decode(self, metadata: DecodeMetadata, cache: LayerCache) -> DecodePlan:
        lens, tables, shared = metadata.context_lens, metadata.block_tables, metadata.shared_prefixes
        block_size, vector_size = cache.block_size, self.spec.sizes.vector_size
        tile_size = tile_tokens(lens.device, block_size)
        first_tokens = prefixes = None
        if shared is not None and max_latent_sharers(self.spec.num_heads, metadata.num_tokens, lens.device) > 1:
            first_tokens = shared.num_shared_blocks * block_size
            prefix_lens = torch.where(shared.num_sharers > 0, first_tokens, 0)
            prefixes = plan_decode(prefix_lens, tables, block_size, vector_size, least_tiles=0, tile_size=tile_size)
        rows = plan_decode(
            lens,
            tables,
            block_size,
            vector_size,
            first_tokens,
            num_row_tokens=metadata.num_row_tokens,
            tile_size=tile_size,
        )
        return DecodePlan(rows, prefixes)
