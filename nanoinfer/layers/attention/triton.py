"""The default backend on CUDA: Triton kernels that read the paged cache, for prefill and decode."""

from dataclasses import replace

import torch
from torch import Tensor

from nanoinfer.kernels.paged_decode_attention import (
    has_large_tiles,
    max_group_rows,
    paged_decode_attention,
    plan_decode,
    shared_prefix_attention,
)
from nanoinfer.kernels.paged_prefill_attention import paged_prefill_attention, plan_prefill
from nanoinfer.layers.attention.backend import AttentionBackend, AttentionSpec
from nanoinfer.layers.attention.metadata import (
    DecodeMetadata,
    DecodePlan,
    KVCache,
    LayerCache,
    MetadataT,
    PrefillMetadata,
    TileList,
)


class TritonBackend(AttentionBackend):
    """Reads keys and values through block tables, in 16 or 8 bits. Full attention reads a shared prefix once.

    for_prefill: computes prefill steps, where it is faster.
    """

    needs_host = False

    def __init__(self, spec: AttentionSpec, for_prefill: AttentionBackend | None = None) -> None:
        self.spec = spec
        self.for_prefill = for_prefill
        self.name = f"triton, {for_prefill.name} in prefill" if for_prefill else "triton"
        self.max_group_rows = max_group_rows(spec.group_size) if spec.window is None else 0

    def plan(self, metadata: MetadataT, cache: KVCache) -> MetadataT:
        if isinstance(metadata, PrefillMetadata):
            device = metadata.cu_query_lens.device
            tiles = plan_prefill(metadata.query_lens, metadata.context_lens, self.spec.group_size, device)
            return replace(metadata, plans={**metadata.plans, self.spec: tiles})
        plan = self._plan_decode(metadata, cache.block_size, cache.k_scales is not None)
        return replace(metadata, plans={**metadata.plans, self.spec: plan})

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: PrefillMetadata) -> Tensor:
        if self.for_prefill is not None and not cache.is_rounded:
            return self.for_prefill.prefill(q, k, v, cache, metadata)
        return paged_prefill_attention(
            q,
            cache.k,
            cache.v,
            cache.k_scales,
            cache.v_scales,
            metadata.plans[self.spec],
            metadata.block_tables,
            self.spec.scale,
            self.spec.window,
        )

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata) -> Tensor:
        plan, shared = metadata.plans[self.spec], metadata.shared_prefixes
        tensors = q, cache.k, cache.v, cache.k_scales, cache.v_scales
        prefix = None
        if plan.groups is not None and shared is not None:
            prefix = shared_prefix_attention(*tensors, *plan.groups, shared.num_group_rows, self.spec.scale)
        windowed = self.spec.window is not None
        return paged_decode_attention(*tensors, *plan.rows, self.spec.scale, windowed, prefix)

    def _plan_decode(self, metadata: DecodeMetadata, block_size: int, in_8_bits: bool) -> DecodePlan:
        lens, tables, head_dim = metadata.context_lens, metadata.block_tables, self.spec.head_dim
        shared, groups = metadata.shared_prefixes, None
        first_tokens = None
        if self.spec.window is not None:
            first_tokens = (lens - self.spec.window).clamp(min=0)
        elif shared is not None:
            first_tokens = shared.num_shared_blocks * block_size
            prefix_lens = torch.where(shared.num_group_rows > 0, first_tokens, 0)
            groups = TileList(*plan_decode(prefix_lens, tables, block_size, head_dim, least_tiles=0))
        large_tiles = has_large_tiles(in_8_bits, self.spec.group_size)
        rows = TileList(*plan_decode(lens, tables, block_size, head_dim, first_tokens, large_tiles=large_tiles))
        return DecodePlan(rows, groups)
