"""logit_bias: adds what the user wants to the logits of some tokens."""

from typing import ClassVar

import torch
from torch import Tensor

from nanoinfer.device import numbers_to_device, to_device
from nanoinfer.engine.row_options import AskingRow
from nanoinfer.sampling.logits_processors import Lines, RowProcessor


class LogitBias(RowProcessor):
    """Adds biases to logits. by_row: pairs of a token id and its bias."""

    reads: ClassVar = ("logit_bias",)

    def remember(self, row: AskingRow) -> None:
        self.by_row[row.row] = [pair for pair in row.asked["logit_bias"] if pair[0] < self._vocab_size]

    def apply(self, logits: Tensor, lines: Lines, places: list[int]) -> Tensor:
        pairs = [(place, *pair) for place in places for pair in self.by_row[lines.host_rows[place]]]
        indices = numbers_to_device(
            [place * self._vocab_size + token_id for place, token_id, _ in pairs], logits.device
        )
        biases = torch.tensor([bias for *_, bias in pairs], dtype=torch.float32, device="cpu")
        return logits.float().flatten().index_add(0, indices, to_device(biases, logits.device)).view_as(logits)
