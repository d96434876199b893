"""A large prefill step over several GPUs, in slices of its tokens, so that all-reduces overlap with computing.

A layer ends two products in an all-reduce. Waiting for these took 30% of a prefill step of Qwen3-8B on four GPUs. But
all of a layer except attention computes each token by itself: a slice goes on when its own sums are there, and those of
the others are on their way meanwhile. Only the decoders' `forward` and the runner's measuring know of this file.
"""

from typing import Any

import torch
from torch import Tensor

from nanoinfer.distributed.tensor_parallel import SLICE_TOKENS, TensorParallel
from nanoinfer.layers.attention.metadata import KVCache, Metadata, PrefillMetadata
from nanoinfer.quantization.fp8_linear import Fp8WeightOnlyMethod


def suits_slices(decoder: Any, num_tokens: int, metadata: Metadata) -> bool:
    """Return whether `sliced_prefill` computes a step of a decoder.

    Not with weights that are widened for each product: each slice would widen them again.
    """
    if num_tokens <= SLICE_TOKENS or not isinstance(metadata, PrefillMetadata):
        return False
    if decoder.layers[0].self_attn.o_proj.tp.size == 1:
        return False
    return not any(type(getattr(part, "quant_method", None)) is Fp8WeightOnlyMethod for part in decoder.modules())


def sizes_to_measure(max_num_batched_tokens: int, tp: TensorParallel) -> list[int]:
    """Return how many tokens the prefill steps have that may need the most memory.

    The largest step, that with the largest slices, and that in one piece.
    """
    if tp.size == 1 or max_num_batched_tokens <= SLICE_TOKENS:
        return [max_num_batched_tokens]
    largest_slices = max_num_batched_tokens // SLICE_TOKENS * SLICE_TOKENS
    return sorted({SLICE_TOKENS, largest_slices, max_num_batched_tokens})


def sliced_prefill(decoder: Any, token_ids: Tensor, positions: Tensor, kv_cache: KVCache, metadata: Metadata) -> Tensor:
    """Do what the decoder's `forward` does. A slice's tensors are dropped as soon as it does without them."""
    num_slices = -(-len(token_ids) // SLICE_TOKENS)
    residuals: list[Any] = [rows.clone() for rows in decoder.embed_tokens(token_ids).tensor_split(num_slices)]
    sums: list[Any] = [None] * num_slices  # what is to be added to each slice's residual stream
    for index, layer in enumerate(decoder.layers):
        qkv = torch.cat([_qkv(layer, sums, residuals, i) for i in range(num_slices)])
        heads = layer.self_attn.attend(qkv, positions, kv_cache.layer(index), metadata)
        del qkv
        sums = [layer.self_attn.o_proj(rows).start() for rows in heads.tensor_split(num_slices)]
        del heads
        for i in range(num_slices):
            sums[i], residuals[i] = layer.feed_forward(sums[i], residuals[i], None)  # a prefill step has no padding
            sums[i] = sums[i].start()
    outputs = []
    for i in range(num_slices):
        normed, _ = decoder.norm(sums[i], residuals[i])
        outputs.append(normed)
        sums[i] = residuals[i] = None
    return torch.cat(outputs)


def _qkv(layer: Any, sums: list[Any], residuals: list[Any], i: int) -> Tensor:
    """Return queries, keys and values of slice `i`; its sum is added to its residual, and dropped."""
    normed, residuals[i] = layer.input_layernorm(sums[i], residuals[i], layer.self_attn.qkv_proj.input_format)
    sums[i] = None
    return layer.self_attn.qkv_proj(normed)
