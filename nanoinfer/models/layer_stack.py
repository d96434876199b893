"""Runs a model as a stack of layers, each in parts: norm and QKV product, attention, output product, norm, MLP.

Eager steps, CUDA graphs (`prefill_graphs.py`) and slices (`sliced_prefill.py`) run the same parts in other orders. Only
`few_rows_layer.py` computes layers in another way, with kernels that fuse across the borders of parts, and so does
`few_calls_layer.py`, which leaves out what a CPU does not need.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn

from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.layernorm import ResidualStream
from nanoinfer.models.forward_step import ForwardStep


class Way(Enum):
    """Lists the ways of a step through a layer, other than eagerly; `execution.py` chooses."""

    FEW_ROWS = auto()  # `few_rows_layer.py`
    FEW_CALLS = auto()  # `few_calls_layer.py`
    GRAPHS = auto()  # `prefill_graphs.py`
    SLICES = auto()  # `sliced_prefill.py`


class Layer(nn.Module, ABC):
    """Computes a layer in parts, each of which takes the residual stream. Only `attend` mixes tokens."""

    def forward(self, stream: ResidualStream, step: ForwardStep) -> None:
        self.normalise_input(stream)
        self.compute(stream, step)

    def compute(self, stream: ResidualStream, step: ForwardStep) -> None:
        """Run all parts but the first."""
        self.add_attention(stream, self.attend(self.project(stream), step))
        self.normalise_sum(stream)
        self.add_mlp(stream, step.row_mask, step.routed)

    @property
    @abstractmethod
    def ways(self) -> Set[Way]:
        """Which other ways compute this layer right and gain by it."""

    @abstractmethod
    def normalise_input(self, stream: ResidualStream) -> None:
        """Normalise the input of attention."""

    @abstractmethod
    def project(self, stream: ResidualStream) -> Any:
        """Return queries, keys and values, (num_tokens, size), or whatever `attend` takes."""

    @abstractmethod
    def attend(self, projected: Any, step: ForwardStep) -> Tensor:
        """Return the heads' outputs, (num_tokens, size)."""

    @abstractmethod
    def add_attention(self, stream: ResidualStream, heads: Tensor) -> None:
        """Add the output product of attention."""

    @abstractmethod
    def normalise_sum(self, stream: ResidualStream) -> None:
        """Normalise the input of the MLP."""

    @abstractmethod
    def add_mlp(
        self, stream: ResidualStream, row_mask: Tensor | None = None, routed: list[Tensor] | None = None
    ) -> None:
        """Add the output of the MLP. row_mask, routed: see `ForwardStep`."""


# Takes the residual stream through a layer: does what `Layer.forward` does, or the same in another way.
RunLayer = Callable[[Layer, ResidualStream, ForwardStep], None]


class LayerStack(nn.Module, ABC):
    """Holds embeddings, layers and the last norm: a decoder or an encoder."""

    layers: Sequence[Layer]
    tp: TensorParallel
    has_experts = False
    has_second_types = False  # of tokens: an encoder may have them

    @abstractmethod
    def embed(self, step: ForwardStep) -> Tensor:
        """Return the input of the first layer, (num_tokens, hidden_size)."""

    @abstractmethod
    def finish(self, stream: ResidualStream) -> Tensor:
        """Return the model's hidden states, (num_tokens, hidden_size), from the stream after the last layer."""

    def start(self, step: ForwardStep) -> ResidualStream:
        """Return the residual stream that the first layer reads."""
        return ResidualStream(self.embed(step))

    def forward(self, step: ForwardStep, run_layer: RunLayer = Layer.__call__) -> Tensor:
        """Return hidden states (num_tokens, hidden_size) of the step's tokens."""
        stream = self.start(step)
        if self.has_experts:
            step = replace(step, row_mask=step.attention.slot_mapping >= 0)
        for index, layer in enumerate(self.layers):
            run_layer(layer, stream, step)
            if step.images is not None and index < step.images.num_levels:
                stream.residual = step.images.add_level(index, stream.residual)
        return self.finish(stream)

    def forward_with_hidden_states(self, step: ForwardStep, layers: Set[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Run a step the common way; return its hidden states and some layers' own, (num_tokens, hidden_size) each.

        layers: counted as in transformers' output_hidden_states: 0 is the embedding, i is what layer i - 1 hands on,
        and the last is that after the final norm.
        """
        states: dict[int, Tensor] = {}
        indices = iter(range(len(self.layers)))

        def run_layer(layer: Layer, stream: ResidualStream, step: ForwardStep) -> None:
            layer.normalise_input(stream)  # which adds what the layer before left to add
            if (index := next(indices)) in layers:
                states[index] = stream.residual
            layer.compute(stream, step)

        with nullcontext() if self.tp.symmetric_memory is None else self.tp.symmetric_memory.left_out():
            hidden = self(step, run_layer)
        if len(self.layers) in layers:
            states[len(self.layers)] = hidden
        return hidden, states
