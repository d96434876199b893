"""A forward pass that also hands out the hidden states between its layers."""

from collections.abc import Set
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.forward_step import ForwardStep


def forward_with_hidden_states(
    decoder: Decoder, step: ForwardStep, layers: Set[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run a step the common way; return its hidden states, and those of some layers, (num_tokens, hidden_size) each.

    layers: counted as in transformers' output_hidden_states: 0 is the embedding, i is what layer i - 1 hands on, and
    the last is that after the final norm.
    """
    states: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for index in layers - {len(decoder.layers)}:
            layer = decoder.layers[index]

            def keep_input(_module: Any, inputs: tuple[Any, ...], index: int = index) -> None:
                states[index] = inputs[0]

            def keep_stream(_module: Any, _inputs: Any, outputs: tuple[Any, Tensor], index: int = index) -> None:
                # The residual stream, to which the layer before was added. One norm may serve twice in a layer.
                states.setdefault(index, outputs[1])

            if layer.traits.returns_stream:
                hook = layer.input_layernorm.register_forward_hook(keep_stream)
            else:
                hook = layer.register_forward_pre_hook(keep_input)
            stack.callback(hook.remove)
        if decoder.tp.symmetric_memory is not None:
            stack.enter_context(decoder.tp.symmetric_memory.left_out())
        hidden = decoder(step)
    if len(decoder.layers) in layers:
        states[len(decoder.layers)] = hidden
    return hidden, states
