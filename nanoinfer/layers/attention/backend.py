"""Defines the interface of attention backends, and one in plain PyTorch. `backend_selection.py` chooses one."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanoinfer.layers.attention.metadata import DecodeMetadata, Metadata, MetadataT, PrefillMetadata
from nanoinfer.layers.rotary_embedding import RotaryTable
from nanoinfer.ops.decode_attention.spec import decode_attention
from nanoinfer.ops.kv_cache.spec import LayerCache, norm_rope_store, store_keys_values
from nanoinfer.ops.prefill_attention.spec import causal_attention, full_attention, gather_context


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Says what a layer's attention computes. Layers with equal specs share a backend.

    window: how many tokens each token attends to, itself included. None for all before it.
    has_sinks: whether each query head has a sink, a score without a value. exp(sink) is added to the sum that the
        softmax divides by (StreamingLLM, Xiao et al. 2023; learned as in gpt-oss).
    causal: whether a token attends only to itself and to the tokens before it. Otherwise it attends to all of its text,
        or to `window` tokens on each side, itself counted on both.
    soft_cap: scaled scores become soft_cap * tanh(score / soft_cap) before the softmax, so that none is larger (Gemma
        2). None leaves them as they are.
    chunk: a token attends only within its chunk of so many positions (Llama 4). None for no chunks.
    """

    num_heads: int  # query heads of this rank
    num_kv_heads: int  # of this rank
    head_dim: int
    scale: float  # the factor of the scores
    window: int | None = None
    has_sinks: bool = False
    causal: bool = True
    soft_cap: float | None = None
    chunk: int | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


class Backend(Protocol):
    """Declares what a step needs to know of a backend, whatever its layers compute and keep in the cache."""

    name: str
    needs_host: bool  # whether decode reads lengths on the host, so that a CUDA graph cannot capture it
    max_row_tokens: int | None = None  # the most tokens of a decode row; None for any number
    # The most decode rows of one token that read a shared prefix at once; 0: each reads it. With k tokens, 1/k of that.
    max_prefix_sharers: int = 0

    def plan(self, metadata: MetadataT, cache: LayerCache) -> MetadataT:
        """Return `metadata` with the plan that this backend makes once for all layers of the step; by default none."""
        return metadata


class AttentionBackend(Backend, Protocol):
    """Computes attention for the layers of one spec. Texts without causal attention come in prefill alone, and whole.

    Queries and results are (num_tokens, num_heads, head_dim). Keys and values of the step are in the cache already when
    a method is called.
    """

    spec: AttentionSpec

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
        """Do what `norm_rope_store` does, and return its results; it describes the arguments."""
        table, slots = rotary_emb.cos_sin_cache, metadata.slot_mapping
        return norm_rope_store(qkv, norm_weights, eps, positions, table, cache, slots, rotary_emb.is_interleaved)

    def store(self, k: Tensor, v: Tensor, cache: LayerCache, metadata: Metadata) -> None:
        """Write keys and values to the cache: see `store_keys_values`."""
        store_keys_values(k, v, cache, metadata.slot_mapping)

    def prefill(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        metadata: PrefillMetadata,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from the step's chunks to their contexts.

        k, v: (num_tokens, num_kv_heads, head_dim), the chunks' own keys and values; None: only the cache has them. They
        may be read instead of the cache if no chunk has a prefix there, and if the cache does not round them. sinks:
        (num_heads,), if the spec has sinks.
        """

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata, sinks: Tensor | None = None) -> Tensor:
        """Attend from all tokens of each row. The result of a row without context is undefined, but never an error."""


class TorchBackend(AttentionBackend):
    """Computes attention in plain PyTorch on any device; the other backends are tested against it."""

    name = "torch"
    needs_host = True

    def __init__(self, spec: AttentionSpec) -> None:
        has_neither = spec.soft_cap is None and not spec.has_sinks
        assert spec.causal or has_neither, "attention to both sides has no caps and no sinks here"
        self.spec = spec

    def prefill(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        metadata: PrefillMetadata,
        sinks: Tensor | None = None,
    ) -> Tensor:
        spec, out = self.spec, torch.empty_like(q)
        start = 0
        for index, (query_len, context_len) in enumerate(zip(metadata.query_lens, metadata.context_lens, strict=True)):
            chunk = slice(start, start + query_len)
            if k is None or v is None or query_len != context_len or cache.in_8_bits:
                table = metadata.block_tables[index]
                context_k, context_v = gather_context(cache, table, context_len, q.dtype)
            else:
                context_k, context_v = k[chunk], v[chunk]
            if spec.causal:
                out[chunk] = causal_attention(
                    q[chunk], context_k, context_v, spec.scale, spec.window, sinks, spec.soft_cap
                )
            else:
                out[chunk] = full_attention(q[chunk], context_k, context_v, spec.scale, spec.window)
            start += query_len
        return out

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata, sinks: Tensor | None = None) -> Tensor:
        spec, metadata = self.spec, metadata.with_a_row_for_each_token()
        tables, lens = metadata.block_tables, metadata.context_lens
        return decode_attention(q, cache, tables, lens, spec.scale, spec.window, sinks, spec.soft_cap)
