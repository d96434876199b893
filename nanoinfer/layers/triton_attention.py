"""The default on CUDA: our Triton kernel for decode, and for prefill flash-attn or else PyTorch's own attention."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from nanoinfer.kernels.paged_attention import paged_decode_attention, plan_decode
from nanoinfer.layers.attention import AttentionBackend, gather_context
from nanoinfer.utils.context import DecodeMetadata, DecodePlan, KVCache, LayerCache, PrefillMetadata

# PyTorch checks the head counts since it has this argument; before, grouped heads went through unasked.
GROUPED_HEADS: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

MAX_GATHER_TOKENS = 65536  # contexts copied out of the cache at a time


class TritonBackend(AttentionBackend):
    """Decode by `kernels/paged_attention.py`, which reads the cache faster than flash-attn 2 does.

    flash_attn: what computes prefill, or None for PyTorch's variable-length attention. That cannot page with its
    default kernels, so cached prefixes are gathered for it.
    """

    needs_host = False

    def __init__(self, flash_attn: AttentionBackend | None = None) -> None:
        self.flash_attn = flash_attn
        self.name = "triton, flash_attn in prefill" if flash_attn else "triton"

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: PrefillMetadata) -> Tensor:
        if self.flash_attn:
            return self.flash_attn.prefill(q, k, v, cache, metadata)
        if not metadata.reads_cache:
            return _attend(q, k, v, metadata, slice(0, len(metadata.query_lens)))
        out, start = [], 0
        for chunks in _context_groups(metadata.context_lens):
            num_tokens = sum(metadata.query_lens[chunks])
            context_k, context_v = gather_context(cache, metadata, chunks)
            out.append(_attend(q[start : start + num_tokens], context_k, context_v, metadata, chunks))
            start += num_tokens
        return torch.cat(out)

    def plan(self, metadata: DecodeMetadata, cache: KVCache) -> DecodeMetadata:
        block_size, head_dim = cache.k.shape[-2:]
        plan = plan_decode(metadata.context_lens, metadata.block_tables, block_size, head_dim)
        return replace(metadata, plan=DecodePlan(*plan))

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata) -> Tensor:
        assert metadata.plan is not None, "decode takes metadata that went through `plan`"
        return paged_decode_attention(q, cache.k, cache.v, *metadata.plan)


def _context_groups(context_lens: tuple[int, ...]) -> Iterator[slice]:
    """Cut the chunks into runs whose contexts are at most MAX_GATHER_TOKENS together, or a single chunk."""
    start = total = 0
    for index, length in enumerate(context_lens):
        if index > start and total + length > MAX_GATHER_TOKENS:
            yield slice(start, index)
            start, total = index, 0
        total += length
    yield slice(start, len(context_lens))


def _attend(q: Tensor, k: Tensor, v: Tensor, metadata: PrefillMetadata, chunks: slice) -> Tensor:
    cu_query_lens = metadata.cu_query_lens[chunks.start : chunks.stop + 1]
    cu_context_lens = metadata.cu_context_lens[chunks.start : chunks.stop + 1]
    out: Any = varlen_attn(
        q,
        k,
        v,
        cu_query_lens - cu_query_lens[0],
        cu_context_lens - cu_context_lens[0],
        max(metadata.query_lens[chunks]),
        max(metadata.context_lens[chunks]),
        window_size=(-1, 0),  # causal
        **GROUPED_HEADS,
    )
    return out
