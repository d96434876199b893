"""The default backend on CUDA: a Triton kernel for decode, and flash-attn or PyTorch's attention for prefill."""

from dataclasses import replace

from torch import Tensor

from nanoinfer.kernels.paged_decode_attention import paged_decode_attention, plan_decode
from nanoinfer.layers.attention.backend import AttentionBackend, PrefillAttention
from nanoinfer.layers.attention.metadata import DecodeMetadata, DecodePlan, KVCache, LayerCache, PrefillMetadata


class TritonBackend(AttentionBackend):
    """Decodes with `kernels/paged_decode_attention.py`, which reads the cache faster than flash-attn 2.

    for_prefill: computes prefill steps.
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
        assert metadata.plan is not None, "`decode` needs metadata that `plan` has returned"
        return paged_decode_attention(q, cache.k, cache.v, *metadata.plan)
