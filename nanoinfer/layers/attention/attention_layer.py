"""Attention over a paged KV cache, as the model sees it: from the packed QKV product to the heads' outputs."""

from torch import Tensor, nn

from nanoinfer.layers.attention.backend import AttentionBackend
from nanoinfer.layers.attention.metadata import Metadata, PrefillMetadata
from nanoinfer.layers.rotary_embedding import RotaryEmbedding
from nanoinfer.ops.kv_cache.spec import LayerCache, norm_rope_store


class Attention(nn.Module):
    """Computes all between the QKV product and the output product: norms, RoPE, the write to the cache, attention."""

    def __init__(self, rotary_emb: RotaryEmbedding, norm_eps: float, backend: AttentionBackend) -> None:
        super().__init__()
        self.rotary_emb = rotary_emb
        self.norm_eps = norm_eps
        self.backend = backend

    def forward(
        self,
        qkv: Tensor,
        norm_weights: tuple[Tensor, Tensor] | None,
        positions: Tensor,
        cache: LayerCache,
        metadata: Metadata,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from all tokens of the step: (num_tokens, num_heads, head_dim). See `norm_rope_store` for shapes.

        sinks: (num_heads,), see `AttentionSpec`.
        """
        cos_sin_cache, slot_mapping = self.rotary_emb.cos_sin_cache, metadata.slot_mapping
        interleaved = self.rotary_emb.is_interleaved
        q, k, v = norm_rope_store(
            qkv, norm_weights, self.norm_eps, positions, cos_sin_cache, cache, slot_mapping, interleaved
        )
        if isinstance(metadata, PrefillMetadata):
            return self.backend.prefill(q, k, v, cache, metadata, sinks)
        return self.backend.decode(q, cache, metadata, sinks)
