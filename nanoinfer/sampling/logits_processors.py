"""Logits processors: what changes the logits of a line, in float32, before its token is drawn.

A line is the place of one token that a step draws. `Sampler` lists the processors in the order in which they act.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from nanoinfer.ops.gumbel_max.spec import LineTables
from nanoinfer.sampling.row_state import RowState

ROWS_AT_ONCE = 64  # lines whose logits are copied at the same time
NUM_COPIES = 12  # float32 copies of these logits that exist at the same time: penalties alone make eight


@dataclass(slots=True)
class Lines:
    """Holds some lines of a step.

    indices: which of the step's lines they are (batch_idx). host_rows: the row of each in the step tables. rows: the
    same on the device, (num_lines,) int64. context_lens: the table of known tokens, (table_rows,) int32. num_tokens:
    how many lines each row has in the step; some may be padding, with a host row of -1. tables: what draws read in a
    step with proposals, else None.
    """

    indices: Sequence[int]
    host_rows: list[int]
    rows: Tensor
    context_lens: Tensor
    num_tokens: int = 1
    tables: LineTables | None = None

    @property
    def positions(self) -> Tensor:
        """The place of each line's token in its sequence, (num_lines,) int32.

        In the table of tokens, those before it are known, or proposals that its draw assumes.
        """
        return self.context_lens[self.rows] if self.tables is None else self.tables.positions[self.tables.rows]

    def some(self, indices: list[int], on_device: Tensor) -> "Lines":
        """Return some of these lines, which are all of the step. on_device: the same indices, int64."""
        tables = None if self.tables is None else self.tables._replace(rows=self.tables.rows[on_device])
        host_rows = [self.host_rows[index] for index in indices]
        return Lines(indices, host_rows, self.rows[on_device], self.context_lens, self.num_tokens, tables)

    def without(self, on_device: Tensor) -> "Lines":
        """Return the same lines, but have the draw skip those at these indices."""
        if self.tables is None:
            return replace(self, rows=self.rows.index_fill(0, on_device, -1))
        return replace(self, tables=self.tables._replace(rows=self.tables.rows.index_fill(0, on_device, -1)))


class LogitsProcessor(ABC):
    """Changes the logits of some lines."""

    @abstractmethod
    def places(self, lines: Lines) -> list[int]:
        """Return the places of the lines among these whose logits it changes."""

    @abstractmethod
    def apply(self, logits: Tensor, lines: Lines, places: list[int]) -> Tensor:
        """Return changed logits (num_lines, vocab_size), of the lines at some places; the given ones stay as they are.

        Called once for each line that is drawn.
        """


class RowProcessor(RowState, LogitsProcessor):
    """Changes the logits of rows that ask for it. token_ids: (rows, max_tokens) int32, the tokens of all rows."""

    def __init__(self, token_ids: Tensor, vocab_size: int) -> None:
        super().__init__()
        self._token_ids, self._vocab_size = token_ids, vocab_size

    def places(self, lines: Lines) -> list[int]:
        return [place for place, row in enumerate(lines.host_rows) if row in self.by_row]
