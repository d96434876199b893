"""The backend on a CPU: PyTorch's attention in one call a layer, over keys and values that are gathered at once."""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.layers.attention.backend import TorchBackend
from nanoinfer.layers.attention.metadata import DecodeMetadata, MetadataT, PrefillMetadata
from nanoinfer.ops.decode_attention.cpu import plan_decode, planned_decode_attention
from nanoinfer.ops.kv_cache.spec import LayerCache


class CpuBackend(TorchBackend):
    """Computes what TorchBackend does, in fewer operators."""

    def plan(self, metadata: MetadataT, cache: LayerCache) -> MetadataT:
        if isinstance(metadata, PrefillMetadata):
            return metadata
        step = metadata.with_a_row_for_each_token()
        plan = plan_decode(cache, step.block_tables, step.context_lens, self.spec.window)
        return replace(metadata, plans={**metadata.plans, self.spec: plan})

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: PrefillMetadata, sinks: Tensor | None = None
    ) -> Tensor:
        spec, query_len = self.spec, metadata.query_lens[0]
        is_plain = spec.causal and sinks is None and spec.soft_cap is None and (spec.window or query_len) >= query_len
        reads_cache = metadata.reads_cache or cache.in_8_bits
        if not is_plain or reads_cache or set(metadata.query_lens) != {query_len}:
            return super().prefill(q, k, v, cache, metadata, sinks)
        # Whole prompts of equal lengths are a batch.
        q, k, v = (x.unflatten(0, (-1, query_len)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata, sinks: Tensor | None = None) -> Tensor:
        return planned_decode_attention(q, cache, metadata.plans[self.spec], self.spec.scale, sinks, self.spec.soft_cap)
