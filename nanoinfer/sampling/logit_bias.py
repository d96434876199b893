"""Applies logit_bias: adds the user's numbers to the logits of some tokens."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from nanoinfer.device import to_device
from nanoinfer.engine.row_options import AdmittedRow
from nanoinfer.sampling.logits_processors import Lines, RowProcessor


class LogitBias(RowProcessor):
    """Adds biases to logits. by_row: token ids, int64, and their biases, float32."""

    reads: ClassVar = ("logit_bias",)

    def remember(self, row: AdmittedRow) -> None:
        token_ids, biases = np.array(row.options["logit_bias"]).reshape(2, -1)
        is_known = token_ids < self._vocab_size
        self.by_row[row.row] = token_ids[is_known].astype(np.int64), biases[is_known].astype(np.float32)

    def apply(self, logits: Tensor, lines: Lines, places: list[int]) -> Tensor:
        pairs = [self.by_row[lines.host_rows[place]] for place in places]
        indices = [place * self._vocab_size + ids for place, (ids, _) in zip(places, pairs, strict=True)]
        biases = [its_biases for _, its_biases in pairs]
        on_device = [to_device(torch.from_numpy(np.concatenate(one)), logits.device) for one in (indices, biases)]
        return logits.float().flatten().index_add(0, *on_device).view_as(logits)
