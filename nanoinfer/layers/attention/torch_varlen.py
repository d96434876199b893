"""Prefill by PyTorch's own variable-length attention, for GPUs without flash-attn."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn  # slow to import, so this file is imported only where it is wanted

from nanoinfer.layers.attention.backend import PrefillAttention
from nanoinfer.layers.attention.metadata import LayerCache, PrefillMetadata
from nanoinfer.layers.attention.torch_reference import gather_context

# PyTorch checks the head counts since it has this argument; before, grouped heads went through unasked.
GROUPED_HEADS: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

MAX_GATHER_TOKENS = 65536  # contexts copied out of the cache at a time


class VarlenAttention(PrefillAttention):
    """It cannot page with its default kernels, so cached prefixes are gathered for it."""

    name = "varlen_attn"

    def scratch_bytes(self, bytes_per_token: int, max_model_len: int) -> int:
        return bytes_per_token * max(MAX_GATHER_TOKENS, max_model_len)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: PrefillMetadata) -> Tensor:
        if not metadata.reads_cache:
            return _attend(q, k, v, metadata, slice(0, len(metadata.query_lens)))
        out, start = q.new_empty(q.shape), 0
        for chunks in _context_groups(metadata.context_lens):
            tokens = slice(start, start + sum(metadata.query_lens[chunks]))
            context_k, context_v = gather_context(cache, metadata, chunks)
            out[tokens] = _attend(q[tokens], context_k, context_v, metadata, chunks)
            del context_k, context_v  # before the next group is gathered
            start = tokens.stop
        return out


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
    ends = slice(chunks.start, chunks.stop + 1)
    cu_query_lens, cu_context_lens = metadata.cu_query_lens[ends], metadata.cu_context_lens[ends]
    cu_lens = cu_query_lens - cu_query_lens[0], cu_context_lens - cu_context_lens[0]
    longest = max(metadata.query_lens[chunks]), max(metadata.context_lens[chunks])
    causal = (-1, 0)
    out: Any = varlen_attn(q, k, v, *cu_lens, *longest, window_size=causal, **GROUPED_HEADS)
    return out
