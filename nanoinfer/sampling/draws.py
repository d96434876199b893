"""Draws the tokens of lines from their logits, on one rank or on all together, and enters them in the tables."""

import torch
from torch import Tensor

from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.ops.gumbel_max.spec import (
    LineTables,
    best_candidates,
    enter_counted,
    enter_tokens,
    line_tables,
    sample_and_append,
    sample_at,
)
from nanoinfer.sampling.logits_processors import Lines
from nanoinfer.sampling.proposals import Proposals


class Draws:
    """Draws for the rows of the step tables.

    temperatures, seeds, token_ids, context_lens: the tables of `sample_and_append`. num_counted: (rows,) int32, where a
    step with proposals leaves how many tokens of each row count, for layers with linear attention (`PendingTokens`);
    None where nothing reads it.
    """

    def __init__(
        self,
        temperatures: Tensor,
        seeds: Tensor,
        token_ids: Tensor,
        context_lens: Tensor,
        num_counted: Tensor | None,
        tp: TensorParallel,
    ) -> None:
        self._tables = temperatures, seeds, token_ids, context_lens
        self.num_counted, self._tp = num_counted, tp

    def lines(self, rows: Tensor, host_rows: list[int], proposals: Proposals) -> Lines:
        """Return the lines of a step with proposals. rows, host_rows: of the step, on the device and on the host."""
        temperatures, seeds, _, context_lens = self._tables
        num_tokens = proposals.num_tokens
        tables = line_tables(rows, proposals.num_row_tokens, num_tokens, temperatures, seeds, context_lens)
        host_rows, rows = proposals.rows_of_lines(host_rows), rows.repeat_interleave(num_tokens)
        if (own := proposals.own_lines) is not None:
            rows = rows[own]
            lines = torch.arange(len(own), device=rows.device)
            tables = LineTables(lines, tables.temperatures[own], tables.seeds[own], tables.positions[own])
        return Lines(range(len(host_rows)), host_rows, rows, context_lens, num_tokens, tables)

    def from_logits(self, logits: Tensor, lowest: Tensor | None, lines: Lines) -> Tensor:
        """Draw from logits of the whole vocabulary, but none below the lowest of its line: (num_lines,) int32."""
        if lines.tables is None:
            return sample_and_append(logits, lowest, lines.rows, *self._tables)
        return sample_at(logits, lowest, *lines.tables)

    def from_shards(self, logits: Tensor, first_id: int, lines: Lines) -> Tensor:
        """Draw together with the other ranks: each has the logits of its vocabulary shard, from `first_id` on.

        Each rank draws its best candidate, and the ranks exchange these: all find the same winner. It does not depend
        on the number of ranks, except for rounding.
        """
        temperatures, seeds, token_ids, context_lens = self._tables
        tables = lines.tables
        if tables is None:
            tables = LineTables(lines.rows, temperatures, seeds, context_lens)
        scores, ids = best_candidates(logits, first_id, *tables)
        gathered = self._tp.all_gather(torch.stack((scores.view(torch.int32), ids)))  # (num_ranks, 2, num_lines)
        best, winner = gathered[:, 0].view(torch.float32).max(0)  # ties go to the lower rank, so to lower ids
        ids = gathered[:, 1].gather(0, winner.unsqueeze(0)).squeeze(0)
        ids = torch.where((tables.rows >= 0) & best.isfinite(), ids, -1)
        if lines.tables is None:
            enter_tokens(ids, lines.rows, token_ids, context_lens)
        return ids

    def enter(self, token_ids: Tensor, rows: Tensor, proposals: Proposals | None) -> Tensor:
        """Enter the drawn tokens that count, and return all; without proposals the draw has entered them."""
        if proposals is None:
            return token_ids
        if proposals.own_lines is not None:
            drawn = token_ids.new_full((len(rows) * proposals.num_tokens,), -1)
            token_ids = drawn.index_copy_(0, proposals.own_lines, token_ids)
        drawn, tables = token_ids.view(len(rows), -1), (*self._tables[2:], self.num_counted)
        return enter_counted(drawn, proposals.token_ids, proposals.num_row_tokens, rows, *tables)
