"""Computes attention on a CPU by PyTorch, in few calls a layer, and plans once a step what all layers share."""

from dataclasses import replace
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.layers.attention.backend import TorchBackend
from nanoinfer.layers.attention.metadata import DecodeMetadata, Metadata, MetadataT, PrefillMetadata
from nanoinfer.layers.rotary_embedding import RotaryTable
from nanoinfer.ops.decode_attention.cpu import NOTHING_READ, DecodePlan, plan_decode, planned_decode_attention
from nanoinfer.ops.kv_cache.cpu import StorePlan, plan_store, planned_norm_rope_store, planned_store
from nanoinfer.ops.kv_cache.spec import LayerCache


class CpuPlan(NamedTuple):
    """Holds what the layers of one CpuBackend share in a step."""

    writes: StorePlan
    reads: DecodePlan  # of a decode step; nothing of prefill


class CpuBackend(TorchBackend):
    """Computes what TorchBackend does, in fewer operators."""

    def plan(self, metadata: MetadataT, cache: LayerCache) -> MetadataT:
        reads = NOTHING_READ
        if isinstance(metadata, DecodeMetadata):
            step = metadata.with_a_row_for_each_token()
            reads = plan_decode(cache, step.block_tables, step.context_lens, self.spec.window)
        plan = CpuPlan(plan_store(cache, metadata.slot_mapping), reads)
        return replace(metadata, plans={**metadata.plans, self: plan})

    def rotate_and_store(
        self,
        qkv: Tensor,
        norm_weights: tuple[Tensor, Tensor] | None,
        eps: float,
        positions: Tensor,
        rotary_emb: RotaryTable,
        cache: LayerCache,
        metadata: Metadata,
    ) -> tuple[Tensor, Tensor, Tensor]:
        table, plan = rotary_emb.cos_sin_cache, self._plan(metadata).writes
        interleaved = rotary_emb.is_interleaved
        return planned_norm_rope_store(qkv, norm_weights, eps, positions, table, cache, plan, interleaved)

    def store(self, k: Tensor, v: Tensor, cache: LayerCache, metadata: Metadata) -> None:
        planned_store(k, v, cache, self._plan(metadata).writes)

    def prefill(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        metadata: PrefillMetadata,
        sinks: Tensor | None = None,
    ) -> Tensor:
        spec, query_len = self.spec, metadata.query_lens[0]
        is_plain = spec.causal and sinks is None and spec.soft_cap is None and (spec.window or query_len) >= query_len
        reads_cache = metadata.reads_cache or cache.in_8_bits
        has_equal_lens = set(metadata.query_lens) == {query_len}
        if k is None or v is None or not is_plain or reads_cache or not has_equal_lens:
            return super().prefill(q, k, v, cache, metadata, sinks)
        # Whole prompts of equal lengths are a batch.
        q, k, v = (x.unflatten(0, (-1, query_len)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata, sinks: Tensor | None = None) -> Tensor:
        return planned_decode_attention(
            q, cache, self._plan(metadata).reads, self.spec.scale, sinks, self.spec.soft_cap
        )

    def _plan(self, metadata: Metadata) -> CpuPlan:
        plan: CpuPlan = metadata.plans[self]
        return plan
