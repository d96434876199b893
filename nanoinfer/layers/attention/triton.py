"""The default on CUDA: our Triton kernels for decode, and for prefill flash-attn or else PyTorch's own attention."""

from dataclasses import replace

from torch import Tensor

from nanoinfer.kernels.paged_decode_attention import paged_decode_attention, plan_decode
from nanoinfer.layers.attention.backend import AttentionBackend, PrefillAttention
from nanoinfer.layers.attention.metadata import DecodeMetadata, DecodePlan, KVCache, LayerCache, PrefillMetadata


class TritonBackend(AttentionBackend):
    """Decode by `kernels/paged_attention.py`, which reads the cache faster than flash-attn 2 does.

    for_prefill: what computes prefill.
    """

    needs_host = False

    def __init__(self, for_prefill: PrefillAttention) -> None:
        self.for_prefill = for_prefill
        self.name = f"triton, {for_prefill.name} in prefill"

    def scratch_bytes(self, bytes_per_token: int, max_model_len: int) -> int:
        return self.for_prefill.scratch_bytes(bytes_per_token, max_model_len)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: PrefillMetadata) -> Tensor:
        return self.for_prefill.prefill(q, k, v, cache, metadata)

    def plan(self, metadata: DecodeMetadata, cache: KVCache) -> DecodeMetadata:
        block_size, head_dim = cache.k.shape[-2:]
        plan = plan_decode(metadata.context_lens, metadata.block_tables, block_size, head_dim)
        return replace(metadata, plan=DecodePlan(*plan))

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata) -> Tensor:
        assert metadata.plan is not None, "decode takes metadata that went through `plan`"
        return paged_decode_attention(q, cache.k, cache.v, *metadata.plan)
