"""Runs the two halves of a model of transformers apart: its layers, and what its own head makes of hidden states."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nanoinfer.models.transformers.attention_interface import base_model


def run(model: PreTrainedModel, token_ids: Tensor, positions: Tensor | None, **options: Any) -> Tensor:
    """Return the hidden states (num_tokens, hidden_size) that a model's layers make of one step's tokens."""
    return run_whole(model, token_ids, positions, **options)[0][0]


def run_whole(model: PreTrainedModel, token_ids: Tensor, positions: Tensor | None, **options: Any) -> Any:
    """Return all that the model without its head returns. positions: None lets it count them itself."""
    positions = None if positions is None else positions[None]
    return base_model(model)(input_ids=token_ids[None].long(), position_ids=positions, use_cache=False, **options)


class GivenStates:
    """Stands for the output of a model without its head: hidden states that are there already."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden  # (1, num_rows, hidden_size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else () if isinstance(index, slice) else None


def compute_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """(num_rows, hidden_size) -> logits (num_rows, vocab_size), by the model's own forward.

    So scales, soft caps and biases come along. Its layers are left out: their forward returns `hidden`.
    """
    given = GivenStates(hidden[None])
    found = (base_model(model), model.get_decoder())
    parts = {id(part): part for part in found if isinstance(part, PreTrainedModel) and part is not model}
    for part in parts.values():
        part.forward = lambda *_, **__: given
    try:
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        output = model(input_ids=ids, position_ids=ids, use_cache=False)
    finally:
        for part in parts.values():
            del part.forward
    return (output[0] if isinstance(output, tuple) else output.logits)[0]
