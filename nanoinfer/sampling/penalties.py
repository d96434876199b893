"""Presence, frequency and repetition penalties for tokens that came before."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nanoinfer.device import numbers_to_device
from nanoinfer.engine.row_options import AdmittedRow
from nanoinfer.sampling.logits_processors import Lines, RowProcessor
from nanoinfer.sampling.row_state import values_to_device


class Penalties(RowProcessor):
    """Takes penalties off logits."""

    reads: ClassVar = ("presence_penalty", "frequency_penalty", "repetition_penalty")

    def __init__(self, token_ids: Tensor, vocab_size: int) -> None:
        super().__init__(token_ids, vocab_size)
        num_rows, device = len(token_ids), token_ids.device
        self._prompt_lens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._penalties = torch.zeros(num_rows, len(self.reads), dtype=torch.float32, device=device)

    def admit(self, rows: Sequence[AdmittedRow]) -> list[AdmittedRow]:
        if asking := super().admit(rows):
            which, values = values_to_device(asking, self.reads, self._penalties.device)
            self._penalties[which] = values
            self._prompt_lens[which] = numbers_to_device([row.num_prompt_tokens for row in asking], which.device)
        return asking

    def apply(self, logits: Tensor, lines: Lines, places: list[int]) -> Tensor:
        rows, positions = lines.rows, lines.positions
        if len(places) == len(rows):
            return self._penalised(logits.float(), rows, positions)
        # In the tables, a row without penalties may still have the penalties of its last sequence.
        some = numbers_to_device(places, logits.device)
        penalised = self._penalised(logits[some].float(), rows[some], positions[some])
        return logits.float().index_copy(0, some, penalised)

    def _penalised(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return penalise(logits, self._token_ids[rows], positions, self._prompt_lens[rows], self._penalties[rows])


def penalise(logits: Tensor, token_ids: Tensor, context_lens: Tensor, prompt_lens: Tensor, penalties: Tensor) -> Tensor:
    """Return logits (num_rows, vocab_size) less the penalties for the tokens that came before, in float32.

    The repetition penalty (Keskar et al. 2019) counts tokens of the prompt and the completion. The others count the
    completion: presence once, frequency once for each occurrence.

    token_ids: (num_rows, max_tokens) int, the first `context_lens` of each row are known, and the first `prompt_lens`
    are its prompt. penalties: (num_rows, 3) float32: presence, frequency and repetition penalty of each row.
    """
    presence, frequency, repetition = penalties.unsqueeze(2).unbind(1)
    num_rows, vocab_size = logits.shape
    places = torch.arange(token_ids.shape[1], device=logits.device)
    is_known = places < context_lens[:, None]
    is_generated = is_known & (places >= prompt_lens[:, None])
    # Tokens that are not counted go to a column of their own.
    counts = torch.zeros(num_rows, vocab_size + 1, dtype=torch.float32, device=logits.device)
    counts.scatter_add_(1, torch.where(is_generated, token_ids, vocab_size).long(), is_generated.float())
    seen = torch.zeros(num_rows, vocab_size + 1, dtype=torch.bool, device=logits.device)
    seen.scatter_(1, torch.where(is_known, token_ids, vocab_size).long(), True)
    counts, seen = counts[:, :vocab_size], seen[:, :vocab_size]
    repetition = torch.where(seen, repetition, 1.0)
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    return penalised - counts * frequency - (counts > 0) * presence
