"""Attention over a paged KV cache, as the model sees it: from the packed QKV product to the heads' outputs."""

from torch import Tensor, nn

from nanoinfer.layers.attention.backend import AttentionBackend
from nanoinfer.layers.attention.metadata import Metadata, PrefillMetadata
from nanoinfer.layers.rotary_embedding import RotaryEmbedding
from nanoinfer.ops.kv_cache.spec import LayerCache


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
        backend, rotary_emb = self.backend, self.rotary_emb
        q, k, v = backend.rotate_and_store(qkv, norm_weights, self.norm_eps, positions, rotary_emb, cache, metadata)
        if isinstance(metadata, PrefillMetadata):
            return backend.prefill(q, k, v, cache, metadata, sinks)
        if (lines := metadata.lines) is not None:
            return backend.decode(q[lines.packed], cache, metadata, sinks)[lines.unpacked]
        return backend.decode(q, cache, metadata, sinks)
