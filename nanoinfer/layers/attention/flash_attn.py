"""Attention by flash-attn 2 (Dao 2023)."""

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from nanoinfer.layers.attention.backend import AttentionBackend
from nanoinfer.layers.attention.metadata import DecodeMetadata, LayerCache, PrefillMetadata


class FlashAttentionBackend(AttentionBackend):
    """flash-attn reads our head-major cache through a transposed view: it asks only for unit stride in head_dim."""

    name = "flash_attn"
    needs_host = False

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: PrefillMetadata) -> Tensor:
        block_tables = None
        if metadata.reads_cache:
            k, v = cache.k.transpose(1, 2), cache.v.transpose(1, 2)  # (num_blocks, block_size, num_kv_heads, head_dim)
            block_tables = metadata.block_tables
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=metadata.cu_query_lens,
            cu_seqlens_k=metadata.cu_context_lens,
            max_seqlen_q=max(metadata.query_lens),
            max_seqlen_k=max(metadata.context_lens),
            causal=True,
            block_table=block_tables,
        )

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata) -> Tensor:
        out = flash_attn_with_kvcache(
            q.unsqueeze(1),  # (num_rows, 1, num_heads, head_dim)
            cache.k.transpose(1, 2),
            cache.v.transpose(1, 2),
            cache_seqlens=metadata.context_lens,
            block_table=metadata.block_tables,
            causal=True,
        )
        return out.squeeze(1)
