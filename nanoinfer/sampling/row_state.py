"""Remembers what rows ask for beyond temperature and seed."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from nanoinfer.device import numbers_to_device, to_device
from nanoinfer.engine.packet import AllSections, column
from nanoinfer.engine.row_options import ROW_OPTIONS, AdmittedRow, read_admitted_rows


class RowState:
    """Serves some options of rows, each for as long as the sequence that asked is there.

    reads: the options, by their names in ROW_OPTIONS. by_row: what is remembered of each row that asks for any.
    """

    reads: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self.by_row: dict[int, Any] = {}

    def admit(self, rows: Sequence[AdmittedRow]) -> list[AdmittedRow]:
        """Remember what newly admitted rows ask for; return those that ask for an option that this reads."""
        asking = [row for row in rows if not row.options.keys().isdisjoint(self.reads)]
        for row in asking:
            self.remember(row)
        return asking

    def remember(self, row: AdmittedRow) -> None:
        """Remember what a row asks for by the options that this reads."""
        self.by_row[row.row] = row.options

    def release(self, rows: Collection[int]) -> None:
        """Forget what rows asked for; other sequences move in."""
        for row in rows:
            self.by_row.pop(row, None)


def admit_rows(states: Iterable[RowState], on_host: AllSections) -> None:
    """Have all states remember what newly admitted rows ask for, and forget what these rows asked for before."""
    asking = read_admitted_rows(on_host)
    admitted: list[int] = []
    for state in states:
        if state.by_row:
            admitted = admitted or column(on_host, "row_records", "row").tolist()
            state.release(admitted)
        if asking:
            state.admit(asking)


def values_to_device(rows: Sequence[AdmittedRow], names: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Start a copy to the device of the values of numeric options, for rows that ask for at least one of them.

    Returns the rows (num_rows,) int64, and the values (num_rows, num_names) float32.
    """
    values = [[row.options.get(name, [ROW_OPTIONS[name].neutral])[0] for name in names] for row in rows]
    on_host = torch.tensor(values, dtype=torch.float32, device="cpu")
    return numbers_to_device([row.row for row in rows], device), to_device(on_host, device)
