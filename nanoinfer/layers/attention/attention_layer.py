"""Attention over a paged KV cache, as the model sees it: from the packed QKV product to the heads' outputs."""

import torch
from torch import Tensor, nn

from nanoinfer import kernels
from nanoinfer.kernels.triton_twins import triton_on_cuda
from nanoinfer.layers.attention.backend import AttentionBackend
from nanoinfer.layers.attention.kv_quantization import quantize_vectors
from nanoinfer.layers.attention.metadata import LayerCache, Metadata, PrefillMetadata
from nanoinfer.layers.rotary_embedding import RotaryEmbedding, rotate
from nanoinfer.ops.norms.spec import rms_norm


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
        q, k, v = norm_rope_store(
            qkv,
            norm_weights,
            self.norm_eps,
            positions,
            cos_sin_cache,
            cache.k,
            cache.v,
            slot_mapping,
            cache.k_scales,
            cache.v_scales,
            self.rotary_emb.is_interleaved,
        )
        if isinstance(metadata, PrefillMetadata):
            return self.backend.prefill(q, k, v, cache, metadata, sinks)
        return self.backend.decode(q, cache, metadata, sinks)


@triton_on_cuda(lambda: kernels.store_keys_values.store)
def store(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write each token's key and value (num_tokens, num_kv_heads, head_dim) to its slot; slot -1 writes nothing.

    k_scales, v_scales: those of a cache in 8 bits, which gets them rounded.
    """
    kept = slot_mapping >= 0
    slots, block_size = slot_mapping[kept], k_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    for x, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        if scales is None:
            cache[blocks, :, offsets] = x[kept]
        else:
            cache[blocks, :, offsets], scales[blocks, :, offsets] = quantize_vectors(x[kept], cache.dtype)


@triton_on_cuda(lambda: kernels.norm_rope_store.norm_rope_store)
def norm_rope_store(
    qkv: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise and rotate queries and keys, write keys and values to the cache, and return all three.

    qkv: (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim), which may be overwritten; or (num_splits, ...), the
    partial sums of a split-K product.
    norm_weights: (head_dim,) each, of queries and of keys; None for a model without norms.
    cos_sin_cache: (max_positions, rotary_dim) float32; the first rotary_dim dimensions of each head are rotated.
    k_cache, v_cache: (num_blocks, num_kv_heads, block_size, head_dim). slot_mapping: (num_tokens,) int64; -1 skips the
    write. k_scales, v_scales: (num_blocks, num_kv_heads, block_size) float32, for a cache in 8 bits, to which keys and
    values are rounded as by `quantize_vectors`. interleaved: see `rotate`.
    Returns q (num_tokens, num_heads, head_dim), k and v (num_tokens, num_kv_heads, head_dim), not rounded to 8 bits.
    """
    _, num_kv_heads, _, head_dim = k_cache.shape
    if qkv.dim() == 3:
        qkv = qkv.sum(0, dtype=torch.float32).to(qkv.dtype)
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if norm_weights is not None:
        q, k = (rms_norm(x, weight, eps) for x, weight in zip((q, k), norm_weights, strict=True))
    q, k = (rotate(x, positions, cos_sin_cache, interleaved) for x in (q, k))
    store(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales)
    return q, k, v
