"""CUDA graphs of small prefill steps that have adapters."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.prefill_graphs import DecoderPrefillGraphs


class AdaptedPrefillGraphs(DecoderPrefillGraphs):
    """Computes small prefill steps whose tokens have adapters, in the buffers of the graphs without adapters.

    Each token's device slot is copied to where the graphs read it; padding has `no_slot`. The first piece sorts the
    tokens. plain: the graphs of steps without adapters. no_slot: stands for a device slot where a token has no adapter.
    """

    def __init__(self, plain: DecoderPrefillGraphs, no_slot: int, device: torch.device) -> None:
        super().__init__(plain.decoder, plain.sizes, plain.always_served, plain.buffers)
        self._no_slot = no_slot
        self._slots = torch.full((plain.sizes[-1],), no_slot, dtype=torch.int32, device=device)
        self._rows: Any = None  # the LoRARows of the current step, which all products read

    def __call__(self, step: ForwardStep) -> Tensor:
        self._rows, num_tokens = step.adapters, len(step.token_ids)
        self._slots[:num_tokens].copy_(self._rows.slots)
        self._slots[num_tokens:].fill_(self._no_slot)
        return super().__call__(step)

    def _pieces(self, size: int) -> Iterator[None]:
        self._rows.slots, self._rows.plan = self._slots[:size], None
        return super()._pieces(size)
