"""Log-probabilities of drawn tokens and of prompts' tokens, read off the logits for the rows that want them."""

from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoinfer.device import numbers_to_device, to_device
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.row_options import AdmittedRow
from nanoinfer.engine.side_outputs import PromptSpan, SampleLogprobs, SideOutput, SpanLogprobs
from nanoinfer.models.interface import Model
from nanoinfer.ops.logits.spec import logit_statistics
from nanoinfer.sampling.logits_processors import NUM_COPIES, ROWS_AT_ONCE, Lines
from nanoinfer.sampling.row_state import RowState

MAX_SCANNED = 20  # the kernel reads all logits once for each of the likeliest; to find more than so many, sorting wins


class PositionLogprobs(NamedTuple):
    """Holds the log-probabilities of one position: of its token, and of the likeliest ones in about their order."""

    rank: int  # of its token; 1 is the likeliest
    token_ids: list[int]  # its token comes first
    logprobs: list[float]


class LogprobsTensors(NamedTuple):
    """Holds, for each of some positions, the log-probability of one chosen token and of the likeliest tokens."""

    ranks: Tensor  # (num_positions,): rank of the chosen token; 1 is the likeliest
    token_ids: Tensor  # (num_positions, 1 + num_best): the chosen token, then the likeliest, in order
    logprobs: Tensor  # (num_positions, 1 + num_best) float32

    def to_host(self) -> "LogprobsTensors":
        """Start a copy to pinned memory; it is complete when the device has come to it."""
        return LogprobsTensors(*(part.to("cpu", non_blocking=True) for part in self))

    def to_positions(self) -> list[PositionLogprobs]:
        """Return the numbers of each position, from a host copy that is complete."""
        return list(map(PositionLogprobs, *(part.tolist() for part in self)))


class SampleLogprobsReader(RowState):
    """Reads the log-probabilities of drawn tokens off the logits.

    mode: the engine's `logprobs_mode`. "processed" ones are of the distribution that the token was drawn from, "raw"
    ones of the model's own logits; `normalises` is False where logits are wanted in their place. by_row: how many of
    the likeliest a row wants, and the tokens that it names in their place.
    """

    reads: ClassVar = ("logprobs", "logprob_token_ids")

    def __init__(self, mode: str, temperatures: Tensor) -> None:
        super().__init__()
        self.normalises = mode.endswith("logprobs")
        self._reads_processed = mode.startswith("processed")
        self._temperatures = temperatures

    def remember(self, row: AdmittedRow) -> None:
        [num_best], named = row.options["logprobs"], row.options.get("logprob_token_ids", [])
        self.by_row[row.row] = int(num_best), [*map(int, named)]

    def wants_raw(self, row: int) -> bool:
        """Return whether the row's logits are read as the model has them, with no token forbidden."""
        return row in self.by_row and not self._reads_processed

    def read(
        self, lines: Lines, drawn: Tensor, raw: Tensor, processed: Tensor, lowest: Tensor | None
    ) -> list[SampleLogprobs]:
        """Return log-probabilities of lines' tokens, if any row wants them; apart for rows that name token ids.

        drawn: (num_lines,) int, the tokens. raw, processed: (num_lines, vocab_size), the logits before and after
        processors. lowest: (num_lines,), the lowest that may be drawn, or None.
        """
        wanted = [self.by_row.get(row, (-1, [])) for row in lines.host_rows]
        naming = [place for place, (_, named) in enumerate(wanted) if named]
        others = [place for place, (num_best, named) in enumerate(wanted) if num_best >= 0 and not named]
        if not (naming or others):
            return []
        logits, drawn, outputs = raw, drawn.clamp(min=0), []
        if self._reads_processed:
            logits = drawn_from(processed, lowest, self._temperatures[lines.rows], self.normalises)
        if others:
            num_best = max(wanted[place][0] for place in others)
            some = others if naming else [*range(len(wanted))]  # without a copy of the logits
            outputs.append(self._read(lines, logits, drawn, some, num_best))
        if naming:
            width = max(len(wanted[place][1]) for place in naming)
            padded = [[*ids, *ids[:1] * (width - len(ids))] for ids in (wanted[place][1] for place in naming)]
            outputs.append(self._read(lines, logits, drawn, naming, 0, numbers_to_device(padded, logits.device)))
        return outputs

    def _read(
        self,
        lines: Lines,
        logits: Tensor,
        drawn: Tensor,
        places: list[int],
        num_best: int,
        named: Tensor | None = None,
    ) -> SampleLogprobs:
        """Return the log-probabilities of the tokens of the lines at some places."""
        if len(places) < len(drawn):
            some = numbers_to_device(places, logits.device)
            logits, drawn = logits[some], drawn[some]
        logprobs = compute_logprobs(logits, drawn, num_best, named=named, normalises=self.normalises)
        return SampleLogprobs([lines.indices[place] for place in places], logprobs.to_host(), lines.num_tokens)


class PromptLogprobsReader(RowState):
    """Computes the log-probabilities of prompts' tokens.

    token_ids: (rows, max_tokens) int32, the tokens of all rows. normalises: as in SampleLogprobsReader. by_row: how
    many of the likeliest a row wants, the first token, and the end of its prompt.
    """

    reads: ClassVar = ("prompt_logprobs",)

    def __init__(self, token_ids: Tensor, vocab_size: int, tp: TensorParallel, normalises: bool) -> None:
        super().__init__()
        self._token_ids, self._vocab_size, self._tp, self._normalises = token_ids, vocab_size, tp, normalises
        self._most_scanned = min(MAX_SCANNED, vocab_size - (tp.size - 1) * tp.vocab_shard_size(vocab_size))

    def remember(self, row: AdmittedRow) -> None:
        self.by_row[row.row] = *map(int, row.options["prompt_logprobs"]), row.num_prompt_tokens

    def read(self, model: Model, hidden: Tensor, chunks: list[list[int]]) -> list[SideOutput]:
        """Return the log-probabilities of the prompt tokens that these chunks (row, start, length) predict.

        hidden: (num_tokens, hidden_size), of all chunks end to end.
        """
        outputs: list[SideOutput] = []
        scanned: list[tuple[PromptSpan, int, int]] = []
        offset = most_scanned = 0
        for index, (row, start, length) in enumerate(chunks):
            to_state = offset - start - 1  # the state before a token predicts it
            offset += length
            num_best, first, end = self.by_row.get(row, (0, 0, 0))
            first, end = max(first, start + 1), min(end, start + length + 1)
            if num_best > self._most_scanned:
                for begin in range(first, end, ROWS_AT_ONCE):  # each leaves the device before the next is made
                    span = PromptSpan(index, begin, min(ROWS_AT_ONCE, end - begin))
                    outputs.append(self._read(model, hidden, [(span, row, to_state)], num_best, sorts_all=True))
            elif first < end:
                scanned.append((PromptSpan(index, first, end - first), row, to_state))
                most_scanned = max(most_scanned, num_best)
        if scanned:
            outputs.append(self._read(model, hidden, scanned, most_scanned, sorts_all=False))
        return outputs

    def _read(
        self, model: Model, hidden: Tensor, spans: list[tuple[PromptSpan, int, int]], num_best: int, sorts_all: bool
    ) -> SpanLogprobs:
        """Return log-probabilities of spans, each with its row and the offset from a position to its hidden state."""
        places = []
        for span, row, to_state in spans:
            positions = np.arange(span.start, span.start + span.length)
            places.append(np.stack((positions + to_state, np.full_like(positions, row), positions)))
        states, rows, positions = to_device(torch.from_numpy(np.concatenate(places, axis=1)), hidden.device)
        token_ids = self._token_ids[rows, positions]
        # As many logits at once as float32 copies may take in sampling.
        rows_at_once = ROWS_AT_ONCE * NUM_COPIES * torch.float32.itemsize // model.logits_dtype.itemsize
        parts = []
        for some_states, ids in zip(states.split(rows_at_once), token_ids.split(rows_at_once), strict=True):
            logits, first_id, tp = model.compute_logits(hidden[some_states]), model.vocab.start, self._tp
            if sorts_all:
                logits, first_id, tp = tp.gather_vocab(logits, self._vocab_size), 0, TensorParallel()
            parts.append(compute_logprobs(logits, ids, num_best, first_id, tp, normalises=self._normalises))
            del logits  # before the next ones are made
        logprobs = LogprobsTensors(*map(torch.cat, zip(*parts, strict=True)))
        return SpanLogprobs([span for span, _, _ in spans], logprobs.to_host())


def compute_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    num_best: int,
    first_id: int = 0,
    tp: TensorParallel | None = None,
    named: Tensor | None = None,
    normalises: bool = True,
) -> LogprobsTensors:
    """Return the log-probabilities of these tokens and of the `num_best` likeliest, by softmax(logits) in float32.

    Of equally likely tokens the lower id comes first, as in greedy decoding.

    logits: (num_positions, vocab shard) of this rank, from id `first_id` on. token_ids: (num_positions,) int, the
    chosen tokens, of any rank. named: (num_positions, num_named) int64, tokens in place of the likeliest; `logits` must
    then be of the whole vocabulary. normalises: False returns logits in place of log-probabilities.
    """
    tp = tp or TensorParallel()
    columns = token_ids.long() - first_id
    is_here = (columns >= 0) & (columns < logits.shape[1])
    chosen = logits.gather(1, columns.clamp(0, logits.shape[1] - 1).unsqueeze(1))[:, 0].float()
    chosen = tp.all_gather(chosen.masked_fill(~is_here, -torch.inf)).amax(dim=0)
    statistics = logit_statistics if num_best <= MAX_SCANNED else logit_statistics.__wrapped__  # type: ignore[attr-defined]
    of_shard = statistics(logits, chosen, token_ids.int(), first_id, min(num_best, logits.shape[1]))
    largest, sums, num_better, best_ids, best_logits = (
        tp.all_gather(part) if part.numel() else part.unsqueeze(0) for part in of_shard
    )
    total_largest = largest.amax(dim=0)
    total = (sums * (largest - total_largest).exp()).sum(dim=0)
    # All ranks' likeliest side by side; a stable sort keeps equal ones in the order of their ids.
    best_ids, best_logits = (part.transpose(0, 1).flatten(1) for part in (best_ids, best_logits))
    best_logits, order = best_logits.sort(dim=1, descending=True, stable=True)
    other_ids, other_logits = best_ids.gather(1, order)[:, :num_best], best_logits[:, :num_best]
    if named is not None:
        other_ids, other_logits = named.int(), logits.gather(1, named).float()
    ids = torch.cat((token_ids.int().unsqueeze(1), other_ids), dim=1)
    logprobs = torch.cat((chosen.unsqueeze(1), other_logits), dim=1)
    if normalises:
        logprobs = logprobs - total_largest.unsqueeze(1) - total.log().unsqueeze(1)
    return LogprobsTensors(1 + num_better.sum(dim=0), ids, logprobs)


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
