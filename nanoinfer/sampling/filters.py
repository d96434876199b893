"""Applies top_k, top_p and min_p: a threshold for the logits of each row that asks for one."""

from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nanoinfer.device import numbers_to_device
from nanoinfer.engine.row_options import AdmittedRow
from nanoinfer.ops.filter_threshold.spec import FILTERS, thresholds
from nanoinfer.sampling.row_state import RowState, values_to_device


class Filters(RowState):
    """Remembers the limits of rows. temperatures: (rows,) float32, of all rows."""

    reads: ClassVar = FILTERS

    def __init__(self, temperatures: Tensor) -> None:
        super().__init__()
        self._temperatures = temperatures
        # What `thresholds` reads; all zeros filter nothing.
        self._limits = torch.zeros(len(temperatures), 1 + len(FILTERS), dtype=torch.float32, device=temperatures.device)

    def admit(self, rows: Sequence[AdmittedRow]) -> list[AdmittedRow]:
        if asking := super().admit(rows):
            which, values = values_to_device(asking, self.reads, self._limits.device)
            self._limits[which] = torch.cat((self._temperatures[which, None], values), dim=1)
        return asking

    def release(self, rows: Collection[int]) -> None:
        if gone := self.by_row.keys() & rows:
            self._limits.index_fill_(0, numbers_to_device([*gone], self._limits.device), 0.0)
        super().release(rows)

    def thresholds(self, logits: Tensor, rows: Tensor, host_rows: list[int]) -> Tensor | None:
        """Return the lowest logit that each row may draw; None where no row is filtered."""
        if self.by_row.keys().isdisjoint(host_rows):
            return None
        return thresholds(logits, self._limits[rows])
