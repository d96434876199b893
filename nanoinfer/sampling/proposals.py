"""Tokens that somebody proposes to follow the newest ones: a decode step draws at the places of all of them at once.

Each row of such a step has several lines. Line j draws as if the row's proposals 0 to j - 1 were right, with the noise
of its own position. So the drawn tokens up to the first wrong proposal, and the token drawn in place of that, are those
of single steps: they count, and `enter_counted` enters them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.sampling.logits_processors import Lines

PADDING = -1  # the row of a line that is drawn for none


class Proposals(NamedTuple):
    """Holds what is proposed to the rows of a decode step. It stands after their known tokens in the table, too.

    token_ids: (num_rows, num_tokens - 1) int32, contiguous: a row's own ones, then any others. num_row_tokens:
    (num_rows,) int32, how many lines are a row's own: one more than proposals. host_counts: the same on the host.
    """

    token_ids: Tensor
    num_row_tokens: Tensor
    host_counts: list[int]

    @property
    def num_tokens(self) -> int:
        """How many lines of logits every row has; those that are not its own are padding."""
        return self.token_ids.shape[1] + 1

    def lines(self, rows: Tensor, host_rows: list[int], context_lens: Tensor) -> Lines:
        """Return all lines of the step. The arguments: as in `Sampler.sample`."""
        num_tokens = self.num_tokens
        offsets = torch.arange(num_tokens, dtype=torch.int32, device=rows.device)
        of_lines = torch.where(offsets < self.num_row_tokens.unsqueeze(1), rows.unsqueeze(1), PADDING).flatten()
        padded: list[int] = []
        for row, count in zip(host_rows, self.host_counts, strict=True):
            padded += [row] * count + [PADDING] * (num_tokens - count)
        return Lines(range(len(padded)), padded, of_lines, context_lens, num_tokens, offsets.repeat(len(rows)))
