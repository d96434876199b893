"""Applies min_tokens: no stop token is drawn before a sequence has generated so many tokens."""

from typing import ClassVar

import torch
from torch import Tensor

from nanoinfer.device import numbers_to_device
from nanoinfer.engine.row_options import AdmittedRow
from nanoinfer.sampling.logits_processors import Lines, RowProcessor


class MinTokens(RowProcessor):
    """Forbids stop tokens at positions before the first that may have one.

    by_row: the steps after which the row has come there at the latest, since in each a token or more counts; that
    position; and the stop tokens.
    """

    reads: ClassVar = ("min_tokens",)

    def remember(self, row: AdmittedRow) -> None:
        min_tokens, *stop_ids = map(int, row.options["min_tokens"])
        first = row.num_prompt_tokens + min_tokens
        known = [token_id for token_id in stop_ids if token_id < self._vocab_size]
        if row.num_tokens < first and known:
            self.by_row[row.row] = first - row.num_tokens, first, known

    def apply(self, logits: Tensor, lines: Lines, places: list[int]) -> Tensor:
        forbidden = []  # (place, token id, the first position where it is allowed)
        for place in places:
            _, first, stop_ids = self.by_row[lines.host_rows[place]]
            forbidden += [(place, token_id, first) for token_id in stop_ids]
        for row in [lines.host_rows[place] for place in places if lines.indices[place] % lines.num_tokens == 0]:
            num_steps, *rest = self.by_row.pop(row)
            if num_steps > 1:
                self.by_row[row] = num_steps - 1, *rest
        which, token_ids, firsts = numbers_to_device(forbidden, logits.device).unbind(1)
        is_early = lines.positions[which] < firsts
        kept = torch.where(is_early, -torch.inf, logits[which, token_ids])
        return logits.index_put((which, token_ids), kept)
