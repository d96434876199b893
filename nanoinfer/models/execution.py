"""Chooses how a step goes through a decoder: the common way, by other ones on a CPU or for few rows, slices, graphs.

The runner asks `PrefillGraphs.choose` before it asks the model. Where hidden states of layers are wanted, the pooler
takes the common way. Layers declare by which ways they can go; nothing here looks at the classes of their parts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard, cast

from torch import Tensor

from nanoinfer.device import compiling
from nanoinfer.distributed.tensor_parallel import SLICE_TOKENS, TensorParallel
from nanoinfer.layers.layernorm import ResidualStream
from nanoinfer.layers.linear import ShardedLinear
from nanoinfer.models.decoder import Decoder, DecoderLayer
from nanoinfer.models.few_calls_layer import few_calls_layer
from nanoinfer.models.few_rows_layer import few_rows_layer, few_rows_products
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.layer_stack import Layer, Way
from nanoinfer.models.prefill_graphs import DecoderPrefillGraphs, SmallPrefillGraphs, sizes_that_pay
from nanoinfer.models.sliced_prefill import SlicedPrefillGraphs, sliced_prefill
from nanoinfer.ops.few_rows.spec import few_rows_kernels_serve
from nanoinfer.quantization.linear_method import ProductKind


def forward(decoder: Decoder, step: ForwardStep) -> Tensor:
    """Return hidden states (num_tokens, hidden_size) of the step's tokens."""
    num_tokens = len(step.token_ids)
    if step.adapters is not None:  # only the common way adds their products
        return decoder(step)
    if step.attention.is_prefill and step.images is None and step.routed is None and suits_slices(decoder, num_tokens):
        return sliced_prefill(decoder, step)
    if _step_has_few_rows(decoder, num_tokens):
        return decoder(step, _few_rows_where_possible)
    if decoder.tp.size == 1 and decoder.embed_tokens.weight.is_cpu:
        return decoder(step, _few_calls_where_possible)
    return decoder(step)


def _step_has_few_rows(decoder: Decoder, num_rows: int) -> bool:
    return decoder.tp.size == 1 and few_rows_kernels_serve(num_rows, decoder.embed_tokens.weight)


def _few_rows_where_possible(layer: Layer, stream: ResidualStream, step: ForwardStep) -> None:
    if stream.added is None and _has_few_rows_way(layer):
        stream.residual = few_rows_layer(layer, stream.residual, step)
    else:
        layer(stream, step)


def _few_calls_where_possible(layer: Layer, stream: ResidualStream, step: ForwardStep) -> None:
    if stream.added is None and Way.FEW_CALLS in layer.ways:
        stream.residual = few_calls_layer(cast(DecoderLayer, layer), stream.residual, step)
    else:
        layer(stream, step)


def _has_few_rows_way(layer: Layer) -> TypeGuard[DecoderLayer]:
    return Way.FEW_ROWS in layer.ways


def compiling_few_rows(decoder: Decoder, sizes: list[int]) -> AbstractContextManager[None]:
    """Compile the products of steps of few rows while the block runs, in threads: most of what a first start compiles.

    sizes: how many rows the steps have.
    """
    products = [product for num_rows in sizes for product in _few_rows_products(decoder, num_rows)]
    # Of those that run in threads, the ones of the most rows come first, which take the longest.
    return compiling([*products[:1], *products[:0:-1]], decoder.embed_tokens.weight.device)


def _few_rows_products(decoder: Decoder, num_rows: int) -> list[Callable[[], Tensor]]:
    """Return the products of the first layer with a way for few rows, and one of each shape in the other layers.

    Parts of a layer add others by a method `compiled_ahead`. One part of each class is asked.
    """
    products: list[Callable[[], Tensor]] = []
    others = [layer for layer in decoder.layers if not _has_few_rows_way(layer)]
    if _step_has_few_rows(decoder, num_rows):
        first = next(filter(_has_few_rows_way, decoder.layers), None)
        products += [] if first is None else few_rows_products(first, num_rows)
    else:
        others = [*decoder.layers]
    parts: dict[type, Any] = {type(part): part for part in decoder.modules() if hasattr(part, "compiled_ahead")}
    products += [product for part in parts.values() for product in part.compiled_ahead(num_rows)]
    plain = [part for layer in others for part in layer.modules() if is_plain_product(part)]
    for proj in {(part.weight.shape, part.bias is None): part for part in plain}.values():
        if few_rows_kernels_serve(num_rows, proj.weight):
            x = proj.weight.new_zeros(num_rows, proj.weight.shape[1])
            products.append(partial(proj.quant_method.apply, proj, x, proj.bias))
    return products


def is_plain_product(part: Any) -> TypeGuard[ShardedLinear]:
    """Return whether decode steps multiply by the whole weight of a part, in the dtype of the model: not by experts."""
    if not isinstance(part, ShardedLinear) or part.weight.dim() != 2:
        return False
    return part.quant_method.kind is ProductKind.PLAIN and part.takes_adapters  # which kv_b_proj does not


def suits_slices(decoder: Decoder, num_tokens: int) -> bool:
    """Return whether to compute a prefill step in slices.

    It does not pay over NCCL, which slows the products down as much as slices would save.
    """
    tp, is_cpu = decoder.tp, decoder.embed_tokens.weight.device.type == "cpu"
    if num_tokens <= SLICE_TOKENS or tp.size == 1 or not (tp.copy_engines or is_cpu):
        return False
    if tp.symmetric_memory is not None and tp.symmetric_memory.max_tokens >= SLICE_TOKENS // 2:
        return False  # a slice might be so small that the kernel of its norm does the all-reduce
    return all(Way.SLICES in layer.ways for layer in decoder.layers)


def sizes_to_measure(max_step_tokens: int, tp: TensorParallel) -> list[int]:
    """Return the sizes, in tokens, of the prefill steps that may need the most memory.

    These are the largest step, the one with the largest slices, and the largest that is not sliced.
    """
    if tp.copy_engines is None or max_step_tokens <= SLICE_TOKENS:
        return [max_step_tokens]
    largest_slices = max_step_tokens // SLICE_TOKENS * SLICE_TOKENS
    return sorted({SLICE_TOKENS, largest_slices, max_step_tokens})


@dataclass(frozen=True, slots=True)
class PrefillGraphs:
    """Holds the CUDA graphs of prefill steps: of small ones, and of the largest if it has slices."""

    small: SmallPrefillGraphs | None = None
    largest: SlicedPrefillGraphs | None = None

    @classmethod
    def of(cls, decoder: Decoder, max_step_tokens: int, only_pools: bool, captures_largest: bool) -> "PrefillGraphs":
        """Return those that pay. Small ones are captured as they come.

        only_pools: whether the model generates nothing. captures_largest: whether to capture the largest step now, if
        it has slices.
        """
        has_slices = captures_largest and not only_pools and suits_slices(decoder, max_step_tokens)
        largest = SlicedPrefillGraphs(decoder, max_step_tokens) if has_slices else None
        return cls(small_prefill_graphs(decoder, max_step_tokens, only_pools), largest)

    def choose(self, num_tokens: int, num_chunks: int) -> Callable[[ForwardStep], Tensor] | None:
        """Return a function that computes a step of so many tokens by graphs; None if no graph serves it."""
        if self.small is not None and self.small.serves(num_tokens, num_chunks):
            return self.small
        return self.largest if self.largest is not None and num_tokens == self.largest.num_tokens else None


def small_prefill_graphs(decoder: Decoder, max_step_tokens: int, only_pools: bool) -> SmallPrefillGraphs | None:
    """Return what computes small prefill steps, where CUDA graphs pay for them, on one GPU."""
    if decoder.tp.size > 1 or not all(Way.GRAPHS in layer.ways for layer in decoder.layers):
        return None
    sizes, always_served = sizes_that_pay(decoder.layers, max_step_tokens, only_pools)
    return DecoderPrefillGraphs(decoder, sizes, always_served) if sizes else None
