"""Hidden states and pooled vectors on their way to the parent: bytes with a dtype, since NumPy has no bfloat16."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanoinfer.engine.extras.hidden_states_request import HiddenStatesRequest
from nanoinfer.outputs import RequestOutput

# By layer, or None for what pooling made: the values of each part of the prompt, and their dtype.
PackedStates = dict[int | None, list[tuple[torch.dtype, Any]]]


def keep_states(output: RequestOutput, states: HiddenStatesRequest) -> RequestOutput:
    """Return the output of a request with all that it wants of hidden states, for a message: `to_output` in a replica.

    The parts are not joined, which would copy them.
    """
    found: Any = {layer: [*map(_pack, states.parts(layer))] for layer in states.found}
    return replace(output, hidden_states=found)


def unpack_states(packed: PackedStates) -> dict[int | None, dict[int, Tensor]]:
    """Return the states of a message as `HiddenStatesRequest.found`; the parts are numbered."""
    return {
        layer: {index: torch.from_numpy(values).view(dtype) for index, (dtype, values) in enumerate(parts)}
        for layer, parts in packed.items()
    }


def _pack(values: Tensor) -> tuple[torch.dtype, Any]:
    return values.dtype, values.view(torch.uint8).numpy()
