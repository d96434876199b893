"""A large prefill step over several GPUs, in slices of its tokens, so that all-reduces overlap with computing.

A layer ends two products in an all-reduce. Waiting for these took 30% of a prefill step of Qwen3-8B on four GPUs. But
all of a layer except attention computes each token by itself: a slice goes on when its own sums are there, and those of
the others are on their way meanwhile.

To launch all this takes the host 90 ms, as long as four GPUs compute. So what lies between two attentions is a CUDA
graph in the largest steps, those of max_num_batched_tokens; most large steps have as many.

Only the decoders' `forward`, which uses the slices, and the runner, which uses the graphs, know of this file.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoinfer.distributed.tensor_parallel import SLICE_TOKENS, TensorParallel
from nanoinfer.layers.attention.metadata import KVCache, Metadata, PrefillMetadata
from nanoinfer.quantization.fp8_linear import Fp8WeightOnlyMethod


def suits_slices(decoder: Any, num_tokens: int, metadata: Metadata) -> bool:
    """Return whether `sliced_prefill` computes a step of a decoder."""
    return isinstance(metadata, PrefillMetadata) and _suits_slices(decoder, num_tokens)


def _suits_slices(decoder: Any, num_tokens: int) -> bool:
    """Return whether a prefill step is to have slices.

    Not with weights that are widened for each product: each slice would widen them again.
    """
    if num_tokens <= SLICE_TOKENS or decoder.layers[0].self_attn.o_proj.tp.size == 1:
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
    """Do what the decoder's `forward` does."""
    buffers = Buffers.of(decoder, len(token_ids))
    return _attend_between(_pieces(decoder, buffers), buffers, decoder, token_ids, positions, kv_cache, metadata)


class PrefillGraphs:
    """`sliced_prefill` for steps of `num_tokens` tokens, with what lies between two attentions as CUDA graphs.

    They share one memory pool, and read the weights where these are now.
    """

    def __init__(self, decoder: Any, num_tokens: int) -> None:
        self._decoder, self._buffers = decoder, Buffers.of(decoder, num_tokens)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        for _ in _pieces(decoder, self._buffers):  # compiles and warms up outside the capture
            pass
        pieces = _pieces(decoder, self._buffers)
        for _ in range(len(decoder.layers) + 1):
            graph = torch.cuda.CUDAGraph()
            pool = self._graphs[0].pool() if self._graphs else None
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                next(pieces)
            self._graphs.append(graph)

    def __call__(self, token_ids: Tensor, positions: Tensor, kv_cache: KVCache, metadata: Metadata) -> Tensor:
        """Do what the decoder's `forward` does. The next call overwrites the result."""
        pieces = map(torch.cuda.CUDAGraph.replay, self._graphs)
        return _attend_between(pieces, self._buffers, self._decoder, token_ids, positions, kv_cache, metadata)


def capture_largest_prefill(decoder: Any, max_num_batched_tokens: int) -> dict[int, PrefillGraphs]:
    """Return the graphs of steps by their number of tokens: of the largest if it has slices and copy engines."""
    if decoder.layers[0].self_attn.o_proj.tp.copy_engines is None:
        return {}
    if not _suits_slices(decoder, max_num_batched_tokens):
        return {}
    return {max_num_batched_tokens: PrefillGraphs(decoder, max_num_batched_tokens)}


class Buffers(NamedTuple):
    """Where the pieces of a step find what they need, and leave what they compute; each (num_tokens, ...).

    rows: the embeddings, and at last the result. qkv: queries, keys and values of a layer. heads: what its attention
    returns.
    """

    rows: Tensor
    qkv: Tensor
    heads: Tensor

    @classmethod
    def of(cls, decoder: Any, num_tokens: int) -> "Buffers":
        embeddings, local_sizes = decoder.embed_tokens.weight, decoder.layers[0].self_attn.qkv_proj.local_sizes
        sizes = embeddings.shape[1], sum(local_sizes.values()), local_sizes["q"]
        return cls(*(embeddings.new_empty(num_tokens, size) for size in sizes))


def _attend_between(
    pieces: Iterator[None],
    buffers: Buffers,
    decoder: Any,
    token_ids: Tensor,
    positions: Tensor,
    kv_cache: KVCache,
    metadata: Metadata,
) -> Tensor:
    """Compute a step whose work before, between and after its attentions is done by `pieces`, one after the other."""
    buffers.rows.copy_(decoder.embed_tokens(token_ids))
    for index, layer in enumerate(decoder.layers):
        next(pieces)
        heads = layer.self_attn.attend(buffers.qkv, positions, kv_cache.layer(index), metadata)
        buffers.heads.copy_(heads)
        del heads
    next(pieces)
    return buffers.rows


def _pieces(decoder: Any, buffers: Buffers) -> Iterator[None]:
    """Compute, in slices, what comes before each attention, and then what comes after the last.

    A slice's tensors are dropped as soon as it does without them.
    """
    num_slices = -(-len(buffers.rows) // SLICE_TOKENS)
    residuals: list[Any] = [*buffers.rows.tensor_split(num_slices)]
    sums: list[Any] = [None] * num_slices  # what is to be added to each slice's residual stream
    for layer in decoder.layers:
        torch.cat([_qkv(layer, sums, residuals, i) for i in range(num_slices)], out=buffers.qkv)
        yield
        sums = [layer.self_attn.o_proj(rows).start() for rows in buffers.heads.tensor_split(num_slices)]
        for i in range(num_slices):
            sums[i], residuals[i] = layer.feed_forward(sums[i], residuals[i], None)  # a prefill step has no padding
            sums[i] = sums[i].start()
    for i, rows in enumerate(buffers.rows.tensor_split(num_slices)):
        normed, _ = decoder.norm(sums[i], residuals[i])
        sums[i] = residuals[i] = None
        rows.copy_(normed)
    yield


def _qkv(layer: Any, sums: list[Any], residuals: list[Any], i: int) -> Tensor:
    """Return queries, keys and values of slice `i`; its sum is added to its residual, and dropped."""
    normed, residuals[i] = layer.input_layernorm(sums[i], residuals[i], layer.self_attn.qkv_proj.input_format)
    sums[i] = None
    return layer.self_attn.qkv_proj(normed)
