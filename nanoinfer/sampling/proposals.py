"""Draft tokens of speculative decoding, here proposals: a decode step draws at the places of all of them at once.

Each row of such a step has several lines. Line j draws as if the row's proposals 0 to j - 1 were right, with the noise
of its own position. So the drawn tokens up to the first wrong proposal, and the token drawn in place of that, are those
of single steps: they count, and `enter_counted` enters them.
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoinfer.device import to_device
from nanoinfer.engine.interfaces import FEW_ROWS
from nanoinfer.engine.packet import AllSections, UploadedSections
from nanoinfer.engine.token_masks import RowMasks, TokenMasks
from nanoinfer.layers.attention.metadata import DecodeBatch

PADDING_LINE = -1  # the host row of a line that is none of a row's own


class Proposals(NamedTuple):
    """Holds what is proposed to the rows of a decode step. It stands after their known tokens in the table, too.

    token_ids: (num_rows, num_tokens - 1) int32, contiguous: a row's own ones, then any others. num_row_tokens:
    (num_rows,) int32, how many lines are a row's own: one more than proposals. host_counts: the same on the host.
    own_lines: (num_own,) int64: lines are packed, which these are among num_tokens of each row; None if they are not.
    """

    token_ids: Tensor
    num_row_tokens: Tensor
    host_counts: list[int]
    own_lines: Tensor | None = None

    @classmethod
    def read(cls, on_host: AllSections, on_device: UploadedSections) -> "Proposals":
        """Read what a packet proposes."""
        num_rows = len(on_host.decode_rows)
        numbers, counts = on_device.proposals.view(num_rows, -1), on_host.proposals.reshape(num_rows, -1)[:, 0]
        return cls(numbers[:, 1:].contiguous(), numbers[:, 0].contiguous(), counts.tolist())

    @property
    def num_tokens(self) -> int:
        """How many lines of logits every row has; those that are not its own are padding."""
        return self.token_ids.shape[1] + 1

    @property
    def num_lines(self) -> int:
        """How many lines of logits there are."""
        return len(self.host_counts) * self.num_tokens if self.own_lines is None else len(self.own_lines)

    def packed(self) -> "Proposals":
        """Return the same with packed lines, where the step takes less time so."""
        device, num_rows = self.token_ids.device, len(self.host_counts)
        if sum(self.host_counts) == self.num_lines or (device.type != "cpu" and num_rows <= FEW_ROWS):
            return self
        are_own = np.arange(self.num_tokens) < np.array(self.host_counts)[:, None]
        return self._replace(own_lines=to_device(torch.from_numpy(np.flatnonzero(are_own)), device))

    def enter(self, rows: Tensor, token_ids: Tensor, context_lens: Tensor) -> None:
        """Enter proposals after the known tokens of rows, where the step finds them; they do not count as known.

        rows: (num_rows,) int64. token_ids and context_lens: the tables. What lies beyond them is none of a row's own.
        """
        places = torch.arange(self.token_ids.shape[1], device=rows.device)
        columns = (context_lens[rows].unsqueeze(1) + places).clamp(max=token_ids.shape[1] - 1)
        token_ids[rows.unsqueeze(1), columns] = self.token_ids

    def added_to(self, batch: DecodeBatch, has_graphs: bool, max_row_tokens: int) -> DecodeBatch:
        """Return a batch whose rows have these proposals.

        Packed lines stay the same with more padding in attention. So their CUDA graphs are all of max_row_tokens.
        """
        num_tokens, num_packed = self.num_tokens, 0
        if self.own_lines is not None:
            num_tokens, num_packed = max_row_tokens if has_graphs else num_tokens, len(self.own_lines)
        return batch._replace(num_tokens=num_tokens, num_row_tokens=self.num_row_tokens, num_packed=num_packed)

    def masks_of_lines(self, masks: TokenMasks) -> TokenMasks:
        """Return masks of tokens, each of which is row * num_tokens + its place in the row, as masks of their lines."""
        if self.own_lines is None:
            return masks
        starts = [0, *accumulate(self.host_counts)]

        def lines(indices: Iterable[int]) -> list[int]:
            return [starts[index // self.num_tokens] + index % self.num_tokens for index in indices]

        def packed(rows: RowMasks | None) -> RowMasks | None:
            return rows and rows._replace(batch_indices=lines(rows.batch_indices))

        functions = dict(zip(lines(masks.functions), masks.functions.values(), strict=True))
        return TokenMasks(packed(masks.grammars), packed(masks.token_sets), functions)

    def token_of(self, line: int) -> int:
        """Return which token of the step a line is: its row * num_tokens + its place in the row."""
        if self.own_lines is None:
            return line
        ends = [*accumulate(self.host_counts)]
        row = bisect_right(ends, line)
        return row * self.num_tokens + line - (ends[row] - self.host_counts[row])

    def rows_of_lines(self, host_rows: list[int]) -> list[int]:
        """Return the row of each line of a step, given those of the step."""
        num_tokens, rows = self.num_tokens, list[int]()
        for row, count in zip(host_rows, self.host_counts, strict=True):
            rows += [row] * count
            if self.own_lines is None:
                rows += [PADDING_LINE] * (num_tokens - count)
        return rows
