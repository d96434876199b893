"""Runs a large prefill step on several GPUs in slices of its tokens, so that they exchange sums while they compute.

A layer ends two products in an all-reduce, then comes a norm. Here an all-reduce is split in two, as in sequence
parallelism (Korthikanti et al. 2022): after the reduce-scatter each rank adds and normalises its share of a slice's
rows, and the all-gather brings all of them to the next product. All of a layer except attention computes each token by
itself, so meanwhile the GPU computes other slices.

To launch all this takes the host about as long as four GPUs compute. So what lies between two attentions is a CUDA
graph in the largest steps, those of `max_step_tokens`; most large steps have as many. `execution.py` says which steps.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from nanoinfer.distributed.tensor_parallel import SLICE_TOKENS, TensorParallel
from nanoinfer.integers import ceil_div
from nanoinfer.layers.layernorm import ResidualStream, RMSNorm
from nanoinfer.layers.linear import PartialSum
from nanoinfer.models.decoder import Decoder, DecoderLayer
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.prefill_graphs import Buffers, PieceGraphs, run_pieces
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.ops.fp8.spec import quantize_rows
from nanoinfer.ops.norms.spec import add_rms_norm, rms_norm

if TYPE_CHECKING:
    from nanoinfer.distributed.copy_engines import CopyEngines


def sliced_prefill(decoder: Decoder, step: ForwardStep) -> Tensor:
    """Do what the decoder's `forward` does."""
    buffers = Buffers.of(decoder, len(step.token_ids))
    return run_pieces(_pieces(decoder, buffers), buffers, decoder, step)


class SlicedPrefillGraphs:
    """Does `sliced_prefill` for steps of `num_tokens` tokens, with CUDA graphs of what lies between two attentions."""

    def __init__(self, decoder: Decoder, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._decoder, self._buffers = decoder, Buffers.of(decoder, num_tokens)
        self._buffers.clear()
        for _ in _pieces(decoder, self._buffers):  # compiles and warms up outside the capture
            pass
        self._graphs = PieceGraphs(_joined(decoder, self._buffers), len(decoder.layers) + 1)

    def __call__(self, step: ForwardStep) -> Tensor:
        """Do what the decoder's `forward` does. The next call overwrites the result."""
        return run_pieces(self._graphs.replay(), self._buffers, self._decoder, step)


def _joined(decoder: Decoder, buffers: Buffers) -> Iterator[None]:
    """Compute the pieces. If one fails, join the streams, or the capture would fail at its end and hide the reason."""
    try:
        yield from _pieces(decoder, buffers)
    except Exception:
        decoder.tp.join()
        raise


def _pieces(decoder: Decoder, buffers: Buffers) -> Iterator[None]:
    """Compute what comes before each attention, and then what comes after the last.

    The all-reduce of the embeddings is the barrier that `CopyEngines` needs between two steps.
    """
    num_slices, tp = ceil_div(len(buffers.rows), SLICE_TOKENS), decoder.tp
    exchange = tp.copy_engines or PlainExchange(tp, buffers.rows)
    assert len(set(map(id, buffers.of_layers))) == 1, "in slices, all layers share their buffers"
    tensors = buffers.rows, *buffers.of_layers[0]
    parts = zip(*(tensor.tensor_split(num_slices) for tensor in tensors), strict=True)
    slices = [Slice(exchange, tp, index, *tensors) for index, tensors in enumerate(parts)]
    first, *others = decoder.layers
    _pipeline(slices, (0, first.normalise_input), (1, _projection(first)))
    yield
    for layer, following in zip(decoder.layers, others, strict=False):
        _from_attention(slices, layer, following.normalise_input, _projection(following))
        yield
    _from_attention(slices, decoder.layers[-1], lambda part: part.normalise(decoder.norm), Slice.write_result)
    yield


def _from_attention(
    slices: list["Slice"],
    layer: DecoderLayer,
    normalise_next: Callable[["Slice"], None],
    end: Callable[["Slice"], None],
) -> None:
    """Compute a layer from its attention on, the next norm, and what `end` does with that.

    The lags leave the ranks time to exchange what a stage needs. In each tick the norms come before the MLP, so that
    what they make is on its way while the MLP of another slice is computed.
    """
    _pipeline(
        slices,
        (0, lambda part: layer.add_attention(part, part.heads)),
        (1, layer.normalise_sum),
        (4, normalise_next),
        (2, layer.add_mlp),
        (5, end),
    )


def _projection(layer: DecoderLayer) -> Callable[["Slice"], None]:
    """Return a function that writes a slice's queries, keys and values to its buffer."""

    def project(part: "Slice") -> None:
        part.qkv.copy_(layer.project(part))

    return project


def _pipeline(slices: list["Slice"], *stages: tuple[int, Callable[["Slice"], None]]) -> None:
    """Take all slices through stages, each with a lag: how many slices it is behind."""
    for tick in range(len(slices) + max(lag for lag, _ in stages)):
        for lag, do in stages:
            if 0 <= tick - lag < len(slices):
                do(slices[tick - lag])


class Slice(ResidualStream):
    """Carries one slice of a step through the layers.

    Each rank keeps the residual of the rows that it owns. What is added, or normalised, is exchanged at once. index:
    the slice's number in exchanges. rows, qkv, heads: its part of the step's `Buffers`.
    """

    def __init__(
        self,
        exchange: "CopyEngines | PlainExchange",
        tp: TensorParallel,
        index: int,
        rows: Tensor,
        qkv: Tensor,
        heads: Tensor,
    ) -> None:
        self._exchange, self._tp, self._index = exchange, tp, index
        self._rows, self.qkv, self.heads = rows, qkv, heads
        self._out_format: RowFormat | None = None  # of the rows that the last norm made
        super().__init__(self._own(rows))

    def add(self, terms: PartialSum, norm_of_terms: RMSNorm | None) -> None:
        assert terms.other_terms is None, "several ranks have one sum"
        [sums] = terms.terms
        super().add(terms, norm_of_terms)
        self._exchange.start_reduce_scatter(self._index, sums)

    def normalise(self, norm: RMSNorm, out_format: RowFormat | None = None) -> None:
        self._out_format = out_format
        normed = self._exchange.own_rows(self._index, len(self._rows))
        if self.added is None:
            normed.copy_(rms_norm(self.residual, norm.weight, norm.eps))
        else:
            received = self._exchange.received(self._index, len(normed))
            terms, sum_weight = self._own(self.added.terms[0]), self.added.sum_weight
            _, self.residual = add_rms_norm(
                terms, self.residual, norm.weight, norm.eps, sum_weight, other_terms=received, out=normed
            )
            self.added = None
        self._exchange.start_all_gather(self._index, len(self._rows))

    def normed_rows(self) -> Activations:
        rows = self._exchange.gathered(self._index, len(self._rows))
        return rows if self._out_format is None else quantize_rows(rows, self._out_format)

    def write_result(self) -> None:
        """Write the output of the last norm to its place in the result of the step."""
        self._rows.copy_(self._exchange.gathered(self._index, len(self._rows)))

    def _own(self, x: Tensor) -> Tensor:
        return x.tensor_split(self._tp.size)[self._tp.rank]


class PlainExchange:
    """Does the work of `CopyEngines` on a CPU. After its all-reduce no terms of other ranks are left to add."""

    def __init__(self, tp: TensorParallel, rows: Tensor) -> None:
        self._tp, self._like = tp, rows
        self._gathered: dict[int, Tensor] = {}

    def start_reduce_scatter(self, _index: int, x: Tensor) -> None:
        self._tp.all_reduce(x)

    def received(self, _index: int, _num_rows: int) -> None:
        return None

    def own_rows(self, index: int, num_tokens: int) -> Tensor:
        self._gathered[index] = self._like.new_zeros(num_tokens, self._like.shape[1])
        return self._gathered[index].tensor_split(self._tp.size)[self._tp.rank]

    def start_all_gather(self, index: int, _num_tokens: int) -> None:
        self._tp.all_reduce(self._gathered[index])  # the rows of others are zero

    def gathered(self, index: int, _num_tokens: int) -> Tensor:
        return self._gathered[index]
