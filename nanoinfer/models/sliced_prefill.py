"""A large prefill step over several GPUs, in slices of its tokens, so that all-reduces overlap with computing.

A layer ends two products in an all-reduce. Waiting for these took 30% of a prefill step of Qwen3-8B on four GPUs. But
all of a layer except attention computes each token by itself: a slice goes on when its own sums are there, and those of
the others are on their way meanwhile. Only the decoders' `forward` knows of this file.
"""

from typing import Any

import torch
from torch import Tensor

from nanoinfer.distributed.tensor_parallel import SLICE_TOKENS
from nanoinfer.layers.attention.metadata import KVCache, Metadata
from nanoinfer.layers.linear import PartialSum


def suits_slices(decoder: Any, residual: Tensor) -> bool:
    """Return whether `sliced_prefill` computes this step of a decoder. residual: (num_tokens, hidden_size)."""
    return decoder.layers[0].self_attn.o_proj.tp.size > 1 and len(residual) >= 2 * SLICE_TOKENS


def sliced_prefill(
    decoder: Any,
    positions: Tensor,
    residual: Tensor,
    kv_cache: KVCache,
    metadata: Metadata,
    row_mask: Tensor | None = None,
) -> Tensor:
    """Do what the decoder's layers and its last norm do. residual: the embeddings, (num_tokens, hidden_size)."""
    count = len(residual) // SLICE_TOKENS
    residuals = list(residual.tensor_split(count))
    sums: list[PartialSum | None] = [None] * count  # what is to be added to each slice's residual stream
    masks = [None] * count if row_mask is None else row_mask.tensor_split(count)
    for index, layer in enumerate(decoder.layers):
        qkv: list[Any] = [None] * count
        for i in range(count):
            qkv[i], residuals[i] = layer.before_attention(sums[i], residuals[i])
        heads = layer.self_attn(torch.cat(qkv), positions, kv_cache.layer(index), metadata)
        sums = [layer.after_attention(rows) for rows in heads.tensor_split(count)]
        for i in range(count):
            sums[i], residuals[i] = layer.feed_forward(sums[i], residuals[i], masks[i])
    return torch.cat([decoder.norm(*slice_)[0] for slice_ in zip(sums, residuals, strict=True)])
