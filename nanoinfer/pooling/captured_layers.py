"""A forward pass that also hands out the hidden states between its layers."""

from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from nanoinfer.distributed.symmetric_memory import SymmetricMemory
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.encoders.encoder import EncoderLayer
from nanoinfer.models.forward_step import ForwardStep


def captured_layers(decoder: Decoder, step: ForwardStep, layers: Set[int]) -> tuple[Tensor, dict[int, Tensor]]:
    """Run a step the common way; return its hidden states, and those of some layers, (num_tokens, hidden_size) each.

    layers: counted as in transformers' output_hidden_states: 0 is the embedding, i is what layer i - 1 hands on, and
    the last is that after the final norm.
    """
    states: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for index, layer in enumerate(decoder.layers):
            if index in layers and isinstance(layer, EncoderLayer):

                def keep_input(_module: Any, inputs: tuple[Any, ...], index: int = index) -> None:
                    states[index] = inputs[0]

                stack.callback(layer.register_forward_pre_hook(keep_input).remove)
            elif index in layers:

                def keep(_module: Any, _inputs: Any, outputs: tuple[Any, Tensor], index: int = index) -> None:
                    # The residual stream, to which the layer before was added. One norm may serve twice in a layer.
                    states.setdefault(index, outputs[1])

                stack.callback(layer.input_layernorm.register_forward_hook(keep).remove)
        stack.enter_context(_whole_sums(decoder.tp.memory))
        hidden = decoder(step)
    if len(decoder.layers) in layers:
        states[len(decoder.layers)] = hidden
    return hidden, states


@contextmanager
def _whole_sums(memory: SymmetricMemory | None) -> Iterator[None]:
    """Have all ranks hold all rows of the residual stream: not those alone that the all-reduce of a norm leaves them.

    That reduces steps of few tokens alone, so for a while it is told that none is so small.
    """
    if memory is None:
        yield
        return
    before, memory.max_tokens = memory.max_tokens, 0
    try:
        yield
    finally:
        memory.max_tokens = before
