"""A large prefill step over several GPUs, in slices of its tokens, so that all-reduces overlap with computing.

A layer ends two products in an all-reduce. Waiting for these took 30% of a prefill step of Qwen3-8B on four GPUs. But
all of a layer except attention computes each token by itself: a slice goes on when its own sums are there, and those of
the others are on their way meanwhile. Only the decoders' `forward` and the runner's measuring know of this file.
"""

from typing import Any

import torch
from torch import Tensor

from nanoinfer.distributed.tensor_parallel import SLICE_TOKENS, TensorParallel
from nanoinfer.layers.attention.metadata import KVCache, LayerCache, Metadata, PrefillMetadata
from nanoinfer.layers.linear import PartialSum
from nanoinfer.quantization.fp8_linear import Fp8WeightOnlyMethod


def suits_slices(decoder: Any, residual: Tensor, metadata: Metadata) -> bool:
    """Return whether `sliced_prefill` computes this step of a decoder. residual: (num_tokens, hidden_size).

    Not with weights that are widened for each product: each slice would widen them again.
    """
    if len(residual) < 2 * SLICE_TOKENS or not isinstance(metadata, PrefillMetadata):
        return False
    products = [layer.self_attn.o_proj for layer in decoder.layers]
    widens = any(type(product.quant_method) is Fp8WeightOnlyMethod for product in products)
    return products[0].tp.size > 1 and not widens


def sizes_to_measure(max_num_batched_tokens: int, tp: TensorParallel) -> set[int]:
    """Return how many tokens the prefill steps have that may need the most memory: a step in slices needs less."""
    largest_whole = 2 * SLICE_TOKENS - 1 if tp.size > 1 else max_num_batched_tokens
    return {max_num_batched_tokens, min(max_num_batched_tokens, largest_whole)}


def sliced_prefill(decoder: Any, positions: Tensor, residual: Tensor, kv_cache: KVCache, metadata: Metadata) -> Tensor:
    """Do what the decoder's layers and its last norm do. residual: the embeddings, (num_tokens, hidden_size)."""
    residuals = list(residual.tensor_split(len(residual) // SLICE_TOKENS))
    sums: list[Any] = [None] * len(residuals)  # what is to be added to each slice's residual stream
    for index, layer in enumerate(decoder.layers):
        sums = _attend(layer, positions, sums, residuals, kv_cache.layer(index), metadata)
        for i, residual in enumerate(residuals):
            sums[i], residuals[i] = layer.feed_forward(sums[i], residual, None)  # a prefill step has no padding
    outputs = []
    for hidden, residual in zip(sums, residuals, strict=True):
        normed, _ = decoder.norm(hidden, residual)
        outputs.append(normed)
    return torch.cat(outputs)


def _attend(
    layer: Any,
    positions: Tensor,
    sums: list[Any],
    residuals: list[Tensor],
    cache: LayerCache,
    metadata: Metadata,
) -> list[PartialSum]:
    """Return what a layer's attention adds to each slice. `sums` are added to `residuals`, and dropped."""
    parts = []
    for i, residual in enumerate(residuals):
        part, residuals[i] = layer.before_attention(sums[i], residual)
        parts.append(part)
        sums[i] = None
    qkv = torch.cat(parts)
    parts.clear()
    heads = layer.self_attn(qkv, positions, cache, metadata)
    return [layer.after_attention(rows) for rows in heads.tensor_split(len(residuals))]
