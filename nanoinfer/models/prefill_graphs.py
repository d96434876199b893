"""Prefill steps whose work between two attentions is a CUDA graph.

Attention depends on how a step's tokens are spread over sequences, so it is launched as ever. All else depends only on
how many tokens there are. vLLM calls such graphs piecewise. Here a step is an iterator of pieces: each computes what
lies between two attentions, from a buffer to a buffer. The pieces can also run without graphs.

One GPU has them for small steps, whose kernels take the host longer to launch than a GPU to compute. Several have them
for the largest: see `sliced_prefill.py`.
"""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanoinfer.device import capturing
from nanoinfer.layers.experts import Experts
from nanoinfer.layers.layernorm import ResidualStream
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.quantization.linear_method import ParamSpec

logger = logging.getLogger("nanoinfer")

# Steps of up to so many tokens are padded to a multiple of this. Padding must cost less than launching does.
PADDING_BY_SIZE = {256: 64, 1024: 128, 2048: 256}
# An H200 computes this in half of the time in which the host launches a layer, 0.4 ms. A layer with experts takes the
# host longer, and the GPU too, which reads nearly all experts for few tokens.
MAX_FLOPS_PER_LAYER = 1.2e11
# Short texts to pool cost the host more than launches do: to tokenize them, and to make their outputs. So a GPU waits
# for the host in larger steps, too. docs/embeddings.md has the times.
PADDING_BY_SIZE_OF_TEXTS = PADDING_BY_SIZE | {4096: 512, 32768: 1024}
MAX_FLOPS_PER_LAYER_OF_TEXTS = 6e11
MAX_MEAN_TEXT = 128  # tokens; longer texts keep a GPU busy for longer than the host needs for them
# How many steps of a size run without graphs: to capture one takes as long as it saves in so many. A job of large steps
# has a last one that is small, whose size may never come again.
STEPS_BEFORE_CAPTURE = 3


class Buffers(NamedTuple):
    """Holds the inputs and outputs of the pieces of a step, each (num_tokens, ...).

    rows: the embeddings, and at last the result. of_layers: what each layer's attention reads (queries, keys and values
    in one tensor, or the two of linear attention) and, last, what it returns. Layers of the same sizes share theirs.
    """

    rows: Tensor
    of_layers: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, decoder: Decoder, num_tokens: int) -> "Buffers":
        embeddings = decoder.embed_tokens.weight

        @cache
        def shared(*sizes: int) -> tuple[Tensor, ...]:
            return tuple(embeddings.new_empty(num_tokens, size) for size in sizes)

        [rows] = shared(embeddings.shape[1])
        return cls(rows, tuple(shared(*layer.attention_sizes) for layer in decoder.layers))

    @property
    def tensors(self) -> list[Tensor]:
        return [self.rows, *chain(*dict.fromkeys(self.of_layers))]

    def first(self, num_tokens: int) -> "Buffers":
        @cache  # layers share them
        def first_of(buffers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(buffer[:num_tokens] for buffer in buffers)

        return Buffers(self.rows[:num_tokens], tuple(map(first_of, self.of_layers)))

    def clear(self) -> None:
        """Fill with zeros, so that padding rows hold numbers from the first step on."""
        for buffer in self.tensors:
            buffer.zero_()


def run_pieces(pieces: Iterator[None], buffers: Buffers, decoder: Decoder, step: ForwardStep) -> Tensor:
    """Compute a step whose work before, between and after its attentions is done by `pieces`, one after the other.

    buffers: of the step's own tokens; those of the pieces may go on with padding. The next step overwrites the result.
    """
    buffers.rows.copy_(decoder.embed(step))
    for layer, (*projected, heads) in zip(decoder.layers, buffers.of_layers, strict=True):
        next(pieces)
        heads.copy_(layer.attend(projected if len(projected) > 1 else projected[0], step))
    next(pieces)
    return buffers.rows


class PieceGraphs:
    """Captures the pieces of a step as CUDA graphs, which share one memory pool.

    They hold the addresses of the weights, so others are captured when an engine wakes up. pool: of other graphs, which
    never run between these; None for one of their own.
    """

    def __init__(self, pieces: Iterator[None], num_pieces: int, pool: Any = None) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        for _ in range(num_pieces):
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, pool):
                next(pieces)
            self._graphs.append(graph)
            pool = pool or graph.pool()
        self.pool = pool

    def replay(self) -> Iterator[None]:
        return map(torch.cuda.CUDAGraph.replay, self._graphs)


def plain_pieces(decoder: Decoder, buffers: Buffers, row_mask: Tensor | None = None) -> Iterator[None]:
    """Compute the piece before each attention, and the piece after the last one, as the model's `forward` does.

    row_mask: see `ForwardStep`; for layers with experts.
    """
    stream = ResidualStream(buffers.rows)
    for layer, (*projected, heads) in zip(decoder.layers, buffers.of_layers, strict=True):
        layer.normalise_input(stream)
        parts = layer.project(stream)
        for buffer, part in zip(projected, parts if isinstance(parts, tuple) else (parts,), strict=True):
            buffer.copy_(part if part.dim() == 2 else part.sum(0, dtype=torch.float32))
        yield
        layer.add_attention(stream, heads)
        layer.normalise_sum(stream)
        layer.add_mlp(stream, row_mask)
    buffers.rows.copy_(decoder.finish(stream))
    yield


def num_weights_of_a_token(layer: nn.Module) -> int:
    """Return how many weights of a layer a token is multiplied by: of experts, those of the ones that it goes to."""
    experts = [part for part in layer.modules() if isinstance(part, Experts)]
    of_experts = {id(weight) for part in experts for weight in part.parameters()}
    others = sum(_num_values(param) for param in layer.parameters() if id(param) not in of_experts)
    return others + sum(part.num_weights_of_a_token for part in experts)


def _num_values(param: Tensor) -> int:
    """Return how many values a parameter holds: an integer holds several in 4 bits."""
    is_packed = param.dtype == torch.int32
    return param.numel() * (ParamSpec.of(param).inputs_per_entry if is_packed else 1)


def padded_sizes(layers: Iterable[nn.Module], only_pools: bool) -> list[int]:
    """Return the sizes, in tokens, that steps are padded to: those that take a host longer to launch than a GPU to run.

    only_pools: whether the model generates nothing. Then larger sizes are included, for steps of many short texts.
    """
    num_weights = max(map(num_weights_of_a_token, layers))
    max_flops = MAX_FLOPS_PER_LAYER_OF_TEXTS if only_pools else MAX_FLOPS_PER_LAYER
    most, sizes, last = max_flops / (2 * num_weights), list[int](), 0
    for end, distance in (PADDING_BY_SIZE_OF_TEXTS if only_pools else PADDING_BY_SIZE).items():
        sizes += range(last + distance, end + 1, distance)
        last = end
    return [size for size in sizes if size <= most]


def sizes_that_pay(layers: Sequence[nn.Module], max_step_tokens: int, only_pools: bool) -> tuple[list[int], int]:
    """Return the sizes that small steps are padded to, and up to how many tokens graphs pay for any step."""
    sizes = sorted({min(size, max_step_tokens) for size in padded_sizes(layers, only_pools)})
    return sizes, min(max(padded_sizes(layers, only_pools=False), default=0), max_step_tokens)


class SmallPrefillGraphs(ABC):
    """Computes prefill steps of at most `sizes[-1]` tokens, each padded to one of `sizes`.

    The first steps of a size run without graphs; then the size is captured, but the largest size before all others.
    With or without graphs, a step runs the same kernels on the same number of rows, so equal steps have equal results.
    always_served: steps of up to so many tokens have graphs, larger ones only if their texts are short.
    """

    def __init__(self, sizes: list[int], always_served: int) -> None:
        self.sizes, self.always_served = sizes, always_served
        self._num_steps = Counter[int]()  # by size
        self._graphs: dict[int, Any] = {}  # by size: what `capture` returned
        self._has_failed = False

    @abstractmethod
    def capture(self, size: int, pool: Any) -> Any:
        """Return the graphs of steps of a size, with their memory pool as `pool`. pool: see `PieceGraphs`."""

    @abstractmethod
    def compute(self, step: ForwardStep, size: int, graphs: Any) -> Tensor:
        """Do what the model's `forward` does. graphs: what `capture` returned for this size; None: not captured yet."""

    def serves(self, num_tokens: int, num_chunks: int) -> bool:
        """Return whether graphs pay for a step: if it has few tokens, or many short texts."""
        if num_tokens <= self.always_served:
            return True
        return not self._has_failed and num_tokens <= min(self.sizes[-1], MAX_MEAN_TEXT * num_chunks)

    def __call__(self, step: ForwardStep) -> Tensor:
        """Do what the model's `forward` does. The next call overwrites the result."""
        num_tokens = len(step.token_ids)
        size = min(size for size in self.sizes if size >= num_tokens)
        self._num_steps[size] += 1
        if size not in self._graphs and self._num_steps[size] > STEPS_BEFORE_CAPTURE and not self._has_failed:
            self._capture(size)
        return self.compute(step, size, self._graphs.get(size))

    def graphs_of(self, sizes: Iterable[int], pool: Any = None) -> dict[int, Any]:
        """Capture sizes, the largest first, so that the others fit into its memory. pool: see `PieceGraphs`."""
        graphs: dict[int, Any] = {}
        for size in sizes:
            graphs[size] = self.capture(size, pool)
            pool = graphs[size].pool
        return graphs

    def _capture(self, size: int) -> None:
        """Capture a size, and before all others the largest."""
        largest = self.sizes[-1]
        sizes, pool = ([size], self._graphs[largest].pool) if self._graphs else (sorted({size, largest})[::-1], None)
        try:
            self._graphs |= self.graphs_of(sizes, pool)
        except RuntimeError as error:
            self._has_failed = True
            logger.warning("prefill steps go on without CUDA graphs: that of %d tokens failed: %s", size, error)


class DecoderPrefillGraphs(SmallPrefillGraphs):
    """Computes small prefill steps of our own decoders and encoders. buffers: of other graphs; None for its own."""

    def __init__(self, decoder: Decoder, sizes: list[int], always_served: int, buffers: Buffers | None = None) -> None:
        super().__init__(sizes, always_served)
        self.decoder, self.buffers = decoder, buffers or Buffers.of(decoder, sizes[-1])
        self.buffers.clear()
        # Which rows have tokens: padding goes to no expert. Without experts nobody asks.
        self.row_mask = self.buffers.rows.new_zeros(sizes[-1], dtype=torch.bool) if decoder.has_experts else None

    def __call__(self, step: ForwardStep) -> Tensor:
        if self.row_mask is not None:
            num_tokens = len(step.token_ids)
            torch.ge(step.attention.slot_mapping, 0, out=self.row_mask[:num_tokens])
            self.row_mask[num_tokens:] = False
        return super().__call__(step)

    def capture(self, size: int, pool: Any) -> PieceGraphs:
        for _ in self._pieces(size):  # compiles and warms up outside the capture
            pass
        return PieceGraphs(self._pieces(size), len(self.decoder.layers) + 1, pool)

    def compute(self, step: ForwardStep, size: int, graphs: PieceGraphs | None) -> Tensor:
        pieces = self._pieces(size) if graphs is None else graphs.replay()
        return run_pieces(pieces, self.buffers.first(len(step.token_ids)), self.decoder, step)

    def _pieces(self, size: int) -> Iterator[None]:
        row_mask = None if self.row_mask is None else self.row_mask[:size]
        return plain_pieces(self.decoder, self.buffers.first(size), row_mask)
