"""The log-probabilities of drawn tokens, as `logprobs_mode` of the engine and each request's own options want them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.device import numbers_to_device
from nanoinfer.engine.packet import PacketSections
from nanoinfer.engine.row_options import SamplingRecord, slices_of
from nanoinfer.sampling.logprobs import LogprobsTensors, compute_logprobs


class SampleLogprobs(NamedTuple):
    """Log-probabilities of sampled tokens; `batch_indices` says which of the step's tokens."""

    batch_indices: list[int]
    logprobs: LogprobsTensors


class SampleLogprobsReader:
    """Remembers which rows want log-probabilities, and reads them off the logits.

    mode: the engine's `logprobs_mode`. "processed" ones are of the distribution that the token was drawn from, "raw"
    ones of the model's own logits; `normalises` is False where logits are wanted in their place.
    """

    def __init__(self, mode: str, device: torch.device) -> None:
        self.normalises = mode.endswith("logprobs")
        self._reads_processed = mode.startswith("processed")
        self._device = device
        self._num_best: dict[int, int] = {}  # by row
        self._token_ids: dict[int, list[int]] = {}  # by row: the tokens that it names, in place of the likeliest

    def admit(self, records: Sequence[SamplingRecord], on_host: PacketSections) -> None:
        """Remember what the newly admitted rows of a packet ask for; `records` are its sampling records."""
        token_ids = on_host.logprob_ids[:, 0].tolist()
        for record, its_token_ids in slices_of(token_ids, records, "num_logprob_ids"):
            if record.logprobs >= 0:
                self._num_best[record.row] = record.logprobs
            if its_token_ids:
                self._token_ids[record.row] = its_token_ids

    def release(self, row: int) -> None:
        self._num_best.pop(row, None)
        self._token_ids.pop(row, None)

    def wants(self, row: int) -> bool:
        return row in self._num_best

    def wants_raw(self, row: int) -> bool:
        """Return whether the row's logits are read as the model has them, with no token forbidden."""
        return row in self._num_best and not self._reads_processed

    def read(
        self,
        batch_indices: list[int],
        host_rows: list[int],
        drawn: Tensor,
        raw: Tensor,
        processed: Tensor,
        lowest: Tensor | None,
        temperatures: Tensor,
    ) -> list[SampleLogprobs]:
        """Return log-probabilities of some tokens of a step, if any row wants them; apart for rows that name token ids.

        host_rows: the rows of these tokens. drawn: (num_rows,) int, the tokens. raw, processed: (num_rows, vocab_size),
        the logits before and after processors. lowest: (num_rows,), the lowest that may be drawn, or None.
        """
        if not any(map(self.wants, host_rows)):
            return []
        logits, drawn = raw, drawn.clamp(min=0)
        if self._reads_processed:
            logits = drawn_from(processed, lowest, temperatures, self.normalises)
        naming = [place for place, row in enumerate(host_rows) if row in self._token_ids]
        if not naming:
            num_best = max(self._num_best.get(row, -1) for row in host_rows)
            return [SampleLogprobs(batch_indices, self._compute(logits, drawn, num_best))]
        found = []
        if others := [place for place, row in enumerate(host_rows) if row not in self._token_ids and self.wants(row)]:
            places = numbers_to_device(others, self._device)
            num_best = max(self._num_best[host_rows[place]] for place in others)
            logprobs = self._compute(logits[places], drawn[places], num_best)
            found.append(SampleLogprobs([batch_indices[place] for place in others], logprobs))
        ids = [self._token_ids[host_rows[place]] for place in naming]
        width = max(map(len, ids))
        padded = [[*its_ids, *its_ids[:1] * (width - len(its_ids))] for its_ids in ids]
        places, named = numbers_to_device(naming, self._device), numbers_to_device(padded, self._device)
        logprobs = self._compute(logits[places], drawn[places], 0, named)
        return [*found, SampleLogprobs([batch_indices[place] for place in naming], logprobs)]

    def _compute(self, logits: Tensor, drawn: Tensor, num_best: int, named: Tensor | None = None) -> LogprobsTensors:
        return compute_logprobs(logits, drawn, num_best, named=named, normalises=self.normalises).to_host()


def drawn_from(logits: Tensor, lowest: Tensor | None, temperatures: Tensor, normalises: bool) -> Tensor:
    """Return the logits, float32, of the distribution that tokens are drawn from; greedy rows count a temperature of 1.

    logits: (num_rows, vocab_size), processed. lowest: (num_rows,), the lowest that may be drawn, or None. temperatures:
    (num_rows,); 0 is greedy. normalises: whether only their softmax counts; they are shifted then, so that a low
    temperature makes none infinite.
    """
    logits = logits.float()
    if lowest is not None:
        logits = torch.where(logits < lowest.unsqueeze(1), -torch.inf, logits)
    if normalises:
        logits = logits - logits.amax(dim=1, keepdim=True)
    return logits / torch.where(temperatures > 0, temperatures, 1.0).unsqueeze(1)
