"""Rows that ask for more than a temperature: masks, penalties, min_tokens, log-probabilities.

The sampler draws for all rows alike, in the CUDA graph if there is one. What special rows ask for is done right after,
from the step's logits: their tokens are drawn again, and entered over the first ones. The noise depends on seed,
position and id alone, so that nothing is lost by it, and a step without special rows has nothing to do.
"""

from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.engine.batch import Header, PacketSections, SpecialRecord
from nanoinfer.models import CausalLM
from nanoinfer.runner.step_tables import DeviceState
from nanoinfer.sampling.gumbel_max import redraw
from nanoinfer.sampling.logits_processors import penalise
from nanoinfer.sampling.logprobs import BestTokens, best_tokens
from nanoinfer.sampling.top_k_top_p import thresholds

ROWS_AT_ONCE = 64  # of which copies of the logits are made
COPIES = 12  # of them at the same time: penalties alone have eight


class SampleLogprobs(NamedTuple):
    """Log-probabilities of sampled tokens. lines: which of the step's tokens."""

    lines: list[int]
    best: BestTokens


class PromptLogprobs(NamedTuple):
    """Log-probabilities of a prompt's tokens from position `start` on. chunk: which of the step's chunks."""

    chunk: int
    start: int
    best: BestTokens


@dataclass(slots=True)
class SpecialRow:
    """What a row asks for, as the host must know it."""

    record: SpecialRecord
    stop_ids: list[int]
    num_generated: int

    @property
    def awaits_min_tokens(self) -> bool:
        return self.num_generated < self.record.min_tokens and bool(self.stop_ids)

    @property
    def needs_copy(self) -> bool:
        """Whether a copy of its logits is needed, to change them or to look at all of them."""
        return bool(self.record.is_penalised) or self.awaits_min_tokens or self.record.num_logprobs >= 0


class SpecialRows:
    """The special ones among the rows of `state`; false if there are none. Every rank has them all.

    vocab_size: of the whole model, whose logits the ranks share.
    """

    def __init__(self, state: DeviceState, vocab_size: int) -> None:
        self.state = state
        self.vocab_size = vocab_size
        self.rows: dict[int, SpecialRow] = {}
        # float32, a line for each row: see `layers/logits.py`. Those of padding ask for nothing.
        self.limits, self.penalties = torch.zeros(2, len(state.seeds), 4, device=state.device)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def apply(self, header: Header, on_host: PacketSections, on_device: PacketSections) -> None:
        """Enter a packet's new rows, and forget those that were there before."""
        for row in on_host.row_records[:, 0].tolist():
            self.rows.pop(row, None)
        stop_ids = iter(on_host.stop_ids.tolist())
        for record in map(SpecialRecord._make, on_host.special_records.tolist()):
            its_stop_ids = [i for i in islice(stop_ids, record.num_stop_ids) if i < self.vocab_size]
            self.rows[record.row] = SpecialRow(record, its_stop_ids, record.num_generated)
        if header.num_special:
            records = on_device.special_records
            numbers = records[:, -8:].contiguous().view(torch.float32)
            self.limits[records[:, 0].long()], self.penalties[records[:, 0].long()] = numbers[:, :4], numbers[:, 4:]

    def redraw(self, logits: Tensor, rows: Tensor, host_rows: list[int], token_ids: Tensor) -> list[SampleLogprobs]:
        """Do what the special ones among a step's rows ask for, in the tables and in `token_ids`.

        logits: this rank's (num_rows, its ids). rows: (num_rows,) int64, and host_rows the same. token_ids: (num_rows,)
        int32, the tokens drawn from these logits.
        """
        masked, copied = [], []
        for line, special in enumerate(map(self.rows.get, host_rows)):
            if special is not None:
                if special.needs_copy or (special.record.is_masked and self.state.tp.size > 1):
                    copied.append(line)
                elif special.record.is_masked:
                    masked.append(line)
        if masked:  # straight from the logits
            some = rows
            if len(masked) < len(host_rows):
                lines = self._to_device(masked)
                some = torch.full_like(rows, -1).index_copy_(0, lines, rows[lines])
            token_ids.copy_(torch.where(some >= 0, self._draw(logits, some), token_ids))
        found = []
        for start in range(0, len(copied), ROWS_AT_ONCE):
            some_lines = copied[start : start + ROWS_AT_ONCE]
            specials = [self.rows[host_rows[line]] for line in some_lines]
            lines = self._to_device(some_lines)
            whole = self._gather(logits[lines])
            token_ids[lines] = drawn = self._draw(self._adjusted(whole, rows[lines], specials), rows[lines])
            num_best = max(special.record.num_logprobs for special in specials)
            if num_best >= 0:
                found.append(SampleLogprobs(some_lines, best_tokens(whole, drawn.clamp(min=0), num_best).to_host()))
        for special in [self.rows[row] for row in host_rows if row in self.rows]:
            special.num_generated += 1
        return found

    @property
    def scratch_bytes(self) -> int:
        """The memory that `redraw` and `score` work in, at most: float32 copies of some rows' logits."""
        return COPIES * ROWS_AT_ONCE * self.vocab_size * torch.float32.itemsize

    def score(self, model: CausalLM, hidden: Tensor, chunks: list[list[int]]) -> list[PromptLogprobs]:
        """Log-probabilities of the prompts' tokens that these chunks, (row, start, length), come before.

        hidden: (num_tokens, hidden_size), of all chunks end to end. A few tokens at a time have their logits computed.
        """
        found, offset = [], 0
        for index, (row, start, length) in enumerate(chunks):
            record = self.rows[row].record if row in self.rows else None
            if record is not None and record.score_from >= 0:
                first, end = max(record.score_from, start + 1), min(record.score_to, start + length + 1)
                if first < end:
                    before = hidden[offset + first - 1 - start : offset + end - 1 - start]
                    best = self._score(model, before, self.state.token_ids[row, first:end], record.num_prompt_logprobs)
                    found.append(PromptLogprobs(index, first, best.to_host()))
            offset += length
        return found

    def _score(self, model: CausalLM, hidden: Tensor, token_ids: Tensor, num_best: int) -> BestTokens:
        """Of the tokens (num_tokens,) that follow these hidden states."""
        pairs = zip(hidden.split(ROWS_AT_ONCE), token_ids.split(ROWS_AT_ONCE), strict=True)
        parts = [best_tokens(self._gather(model.compute_logits(states)), ids, num_best) for states, ids in pairs]
        return BestTokens(*map(torch.cat, zip(*parts, strict=True)))

    def _draw(self, logits: Tensor, rows: Tensor) -> Tensor:
        state, lowest = self.state, thresholds(logits, self.limits[rows])
        return redraw(logits, lowest, rows, state.temperatures, state.seeds, state.token_ids, state.context_lens)

    def _adjusted(self, logits: Tensor, rows: Tensor, specials: list[SpecialRow]) -> Tensor:
        """Logits, (num_rows, vocab_size), after penalties, and without the stop tokens that come too early."""
        if any(special.record.is_penalised for special in specials):
            known = self.state.context_lens[rows] - 1  # without the token drawn first
            logits = penalise(logits.float(), self.state.token_ids[rows], known, self.penalties[rows])
        early = [
            (i, stop) for i, special in enumerate(specials) if special.awaits_min_tokens for stop in special.stop_ids
        ]
        if early:
            logits = logits.index_put(self._to_device(early).unbind(1), logits.new_full((), -torch.inf))
        return logits

    def _gather(self, logits: Tensor) -> Tensor:
        """All ranks' logits of these rows, (num_rows, vocab_size), of which each has its shard."""
        tp = self.state.tp
        if tp.size == 1:
            return logits
        padding = tp.vocab_shard_size(self.vocab_size) - logits.shape[1]
        shards = tp.all_gather(F.pad(logits, (0, padding)))  # (num_ranks, num_rows, shard_size)
        return shards.transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def _to_device(self, numbers: list[int] | list[tuple[int, int]]) -> Tensor:
        on_host = torch.tensor(numbers, dtype=torch.int64)
        if self.state.device.type == "cpu":
            return on_host
        return on_host.pin_memory().to(self.state.device, non_blocking=True)
