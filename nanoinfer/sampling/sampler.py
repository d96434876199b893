"""From the logits of a step to its token ids: logits processors, a threshold for min-p, top-k and top-p, one draw.

Each token is drawn once. Most rows are drawn straight from the model's 16-bit logits, in which grammars have forbidden
tokens in place. Rows whose logits must be changed or read whole (biases, penalties, token sets, log-probabilities;
under tensor parallelism min-p, top-k and top-p too) are a second, disjoint set: they are copied, processed in float32
and drawn from the copy. The noise depends on seed, position and token id alone, so the two sets of a step do not
influence each other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.device import numbers_to_device, to_device
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.packet import SECTION_DTYPES, Header, PacketSections, column
from nanoinfer.engine.row_options import SamplingRecord
from nanoinfer.engine.token_masks import TokenMasks
from nanoinfer.models.interface import Model
from nanoinfer.ops.filter_threshold.spec import FILTERS, thresholds
from nanoinfer.ops.gumbel_max.spec import best_candidates, enter_tokens, sample_and_append
from nanoinfer.sampling.logits_processors import LogitsProcessor, read_field, read_options, row_processors
from nanoinfer.sampling.logprobs import MAX_SCANNED, LogprobsTensors, compute_logprobs
from nanoinfer.sampling.mask_processors import GrammarProcessor, MaskSender, TokenSetProcessor, UserFunctionProcessor
from nanoinfer.sampling.sample_logprobs import SampleLogprobs, SampleLogprobsReader

ROWS_AT_ONCE = 64  # rows whose logits are copied at the same time
NUM_COPIES = 12  # float32 copies of these logits that exist at the same time: penalties alone make eight
NUM_MASKS = 4  # for all rows: masks of grammars and of token sets, of two steps


class PromptSpan(NamedTuple):
    """Neighbouring positions of a prompt whose log-probabilities a step computes."""

    chunk: int  # which of the step's chunks
    start: int  # the first position
    length: int


class SpanLogprobs(NamedTuple):
    """Holds log-probabilities of prompts' tokens, all spans end to end."""

    spans: list[PromptSpan]
    logprobs: LogprobsTensors


class Sampled(NamedTuple):
    """The tokens that a step draws, and what else there is to say of them."""

    token_ids: Tensor  # (num_rows,) int32
    logprobs: list[SampleLogprobs]
    errors: dict[int, str]  # by batch_idx, which of these tokens: why users' functions failed


class Sampler:
    """Samples for the rows of the step tables, and remembers how each row is to be sampled.

    token_ids: (rows, max_tokens) int32 and context_lens: (rows,) int32: the tables, which sampling extends. The last
    row is padding. vocab_size: of the whole model; under tensor parallelism each rank has the logits of its shard.
    logprobs_mode: the engine's option.
    """

    def __init__(
        self,
        token_ids: Tensor,
        context_lens: Tensor,
        vocab_size: int,
        tp: TensorParallel,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        num_rows, self.device = len(context_lens), context_lens.device
        self.token_ids = token_ids
        self.context_lens = context_lens
        self.vocab_size = vocab_size
        self.tp = tp
        self._smallest_shard = vocab_size - (tp.size - 1) * tp.vocab_shard_size(vocab_size)
        self.temperatures = torch.zeros(num_rows, dtype=torch.float32, device=self.device)
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        # What `thresholds` reads.
        self.limits = torch.zeros(num_rows, 1 + len(FILTERS), dtype=torch.float32, device=self.device)
        self._tables = self.temperatures, self.seeds, token_ids, context_lens  # what a draw reads and extends
        self.processors = row_processors(token_ids, context_lens, vocab_size)
        self._mask_sender = MaskSender(vocab_size, self.device, tp)
        self._logprobs = SampleLogprobsReader(logprobs_mode, self.device)
        self._records: dict[int, SamplingRecord] = {}  # by row: what it asks for beyond temperature and seed
        self._filtered: set[int] = set()  # rows with top_k, top_p or min_p
        self._may_need_copy: set[int] = set()  # rows whose logits may need a copy: with min_tokens only for a while

    def admit(self, header: Header, on_host: PacketSections, on_device: PacketSections) -> None:
        """Enter how the newly admitted rows of a packet are sampled, in place of what was known of these rows."""
        if not header.counts["row_records"]:
            return
        rows = column(on_device, "row_records", "row").long()
        self.temperatures[rows] = read_field(on_device, "row_records", "temperature")
        self.seeds[rows] = read_field(on_device, "row_records", "seed")
        self.limits.index_fill_(0, rows, 0.0)  # no filter, whatever was before; `[rows] = 0.0` would wait for the GPU
        if self._records:
            for row in column(on_host, "row_records", "row").tolist():
                self._filtered.discard(row)
                self._may_need_copy.discard(row)
                if self._records.pop(row, None):
                    self._logprobs.release(row)
                    for processor in self.processors:
                        processor.release(row)
        if header.counts["sampling_records"]:
            self._admit_records(on_host, on_device)

    def _admit_records(self, on_host: PacketSections, on_device: PacketSections) -> None:
        records = read_sampling_records(on_host.sampling_records)
        self._records |= {record.row: record for record in records}
        self._filtered |= {record.row for record in records if record.asks_for(FILTERS)}
        rows = column(on_device, "sampling_records", "row").long()
        self.limits[rows] = torch.cat((self.temperatures[rows, None], read_options(on_device, FILTERS)), dim=1)
        self._logprobs.admit(records, on_host)
        for processor in self.processors:
            processor.admit(records, on_host, on_device)
        self._may_need_copy |= {record.row for record in records if self._needs_copy(record.row)}

    def sample(
        self, logits: Tensor, first_id: int, rows: Tensor, host_rows: list[int], masks: TokenMasks | None = None
    ) -> Sampled:
        """Draw the next token of each row, and enter it in the tables.

        logits: (num_rows, vocab shard) of this rank, from id `first_id` on; masks change them. rows: (num_rows,) int64;
        host_rows: the same on the host. A row whose logits are NaN or infinite yields -1.
        """
        processors: Sequence[LogitsProcessor] = self.processors
        masked: set[int] = set()  # rows that need a copy because of masks
        errors: dict[int, str] = {}
        if masks is not None:
            grammars = GrammarProcessor(masks.grammars, host_rows, self._mask_sender)
            grammars.forbid_in_place(logits, first_id, spared={*filter(self._logprobs.wants_raw, grammars.by_row)})
            functions = UserFunctionProcessor(masks, host_rows, self.tp)
            token_sets = TokenSetProcessor(masks.token_sets, host_rows, self._mask_sender)
            processors = sorted([*self.processors, grammars, functions, token_sets], key=lambda one: one.stage)
            masked, errors = functions.by_row.keys() | token_sets.by_row.keys(), functions.errors
        copied = []
        if self._may_need_copy or masked:
            copied = [
                batch_idx
                for batch_idx, row in enumerate(host_rows)
                if row in masked or (row in self._may_need_copy and self._needs_copy(row))
            ]
        if not copied:
            return Sampled(self._draw(logits, first_id, rows, host_rows), [], errors)
        indices = numbers_to_device(copied, self.device)
        token_ids = torch.empty(len(rows), dtype=torch.int32, device=self.device)
        if len(copied) < len(host_rows):
            others = rows.index_fill(0, indices, -1)  # the draw skips rows of -1
            token_ids = self._draw(logits, first_id, others, host_rows)
        logprobs = []
        for start in range(0, len(copied), ROWS_AT_ONCE):
            some = copied[start : start + ROWS_AT_ONCE]
            on_device, some_rows = indices[start : start + ROWS_AT_ONCE], [host_rows[batch_idx] for batch_idx in some]
            whole = self._gather(logits[on_device])
            which = rows[on_device]
            processed = self._process(whole, which, some_rows, processors)
            lowest = self._thresholds(processed, which, some_rows)
            token_ids[on_device] = drawn = sample_and_append(processed, lowest, which, *self._tables)
            temperatures = self.temperatures[which]
            logprobs += self._logprobs.read(some, some_rows, drawn, whole, processed, lowest, temperatures)
        return Sampled(token_ids, logprobs, errors)

    def prompt_logprobs(self, model: Model, hidden: Tensor, chunks: list[list[int]]) -> list[SpanLogprobs]:
        """Return the log-probabilities of the prompt tokens that these chunks (row, start, length) predict.

        hidden: (num_tokens, hidden_size), of all chunks end to end.
        """
        found, scanned, offset, most_scanned = [], [], 0, 0
        for index, (row, start, length) in enumerate(chunks):
            record, to_state = self._records.get(row), offset - start - 1  # the state before it predicts a token
            offset += length
            if record is None or record.prompt_logprobs_start < 0:
                continue
            num_best, first = record.prompt_logprobs, max(record.prompt_logprobs_start, start + 1)
            end = min(record.num_prompt_tokens, start + length + 1)
            if num_best <= min(MAX_SCANNED, self._smallest_shard):
                if first < end:
                    scanned.append((PromptSpan(index, first, end - first), row, to_state))
                    most_scanned = max(most_scanned, num_best)
                continue
            for begin in range(first, end, ROWS_AT_ONCE):  # each piece leaves the device before the next is made
                span = PromptSpan(index, begin, min(ROWS_AT_ONCE, end - begin))
                found.append(self._logprobs_of(model, hidden, [(span, row, to_state)], num_best, sorts_all=True))
        if scanned:
            found.append(self._logprobs_of(model, hidden, scanned, most_scanned, sorts_all=False))
        return found

    def _logprobs_of(
        self,
        model: Model,
        hidden: Tensor,
        spans: list[tuple[PromptSpan, int, int]],
        num_best: int,
        sorts_all: bool,
    ) -> SpanLogprobs:
        """Return log-probabilities of spans, each with its row and the offset from a position to its hidden state."""
        places = []
        for span, row, to_state in spans:
            positions = np.arange(span.start, span.start + span.length)
            places.append(np.stack((positions + to_state, np.full_like(positions, row), positions)))
        states, rows, positions = to_device(torch.from_numpy(np.concatenate(places, axis=1)), self.device)
        token_ids, vocab, dtype = self.token_ids[rows, positions], model.vocab, model.logits_dtype
        normalises = self._logprobs.normalises
        # As many logits at once as float32 copies may take in sampling.
        rows_at_once = ROWS_AT_ONCE * NUM_COPIES * torch.float32.itemsize // dtype.itemsize
        parts = []
        for some_states, ids in zip(states.split(rows_at_once), token_ids.split(rows_at_once), strict=True):
            logits = model.compute_logits(hidden[some_states])
            if sorts_all:
                parts.append(compute_logprobs(self._gather(logits), ids, num_best, normalises=normalises))
            else:
                parts.append(compute_logprobs(logits, ids, num_best, vocab.start, self.tp, normalises=normalises))
            del logits  # before the next ones are made
        logprobs = LogprobsTensors(*map(torch.cat, zip(*parts, strict=True)))
        return SpanLogprobs([span for span, _, _ in spans], logprobs.to_host())

    @property
    def scratch_bytes(self) -> int:
        """Return the memory that float32 copies of logits, and masks, take at most."""
        copies = NUM_COPIES * ROWS_AT_ONCE * self.vocab_size * torch.float32.itemsize
        return copies + NUM_MASKS * len(self.context_lens) * self._mask_sender.num_words * torch.int32.itemsize

    def _needs_copy(self, row: int) -> bool:
        """Return whether the row's logits are processed or read whole, because of what it asked for at admission."""
        return (
            self._logprobs.wants(row)
            or (self.tp.size > 1 and row in self._filtered)
            or any(processor.wants(row) for processor in self.processors)
        )

    def _draw(self, logits: Tensor, first_id: int, rows: Tensor, host_rows: list[int]) -> Tensor:
        """Draw from the model's own logits; -1 among the rows is skipped, and yields -1."""
        if self.tp.size > 1:
            return sample_and_append_across_ranks(logits, first_id, self.tp, rows, *self._tables)
        return sample_and_append(logits, self._thresholds(logits, rows, host_rows), rows, *self._tables)

    def _process(
        self, logits: Tensor, rows: Tensor, host_rows: list[int], processors: Sequence[LogitsProcessor]
    ) -> Tensor:
        """Return whole logits (num_rows, vocab_size) as the processors change them; the given tensor stays as it is."""
        for processor in processors:
            if any(map(processor.wants, host_rows)):
                logits = processor.apply(logits, rows, host_rows)
        return logits

    def _thresholds(self, logits: Tensor, rows: Tensor, host_rows: list[int]) -> Tensor | None:
        """Return the lowest logit that each row may draw; None where no row is filtered."""
        if self._filtered.isdisjoint(host_rows):
            return None
        return thresholds(logits, self.limits[rows])

    def _gather(self, logits: Tensor) -> Tensor:
        """Return all ranks' logits of these rows, (num_rows, vocab_size); each rank has its shard."""
        if self.tp.size == 1:
            return logits
        padding = self.tp.vocab_shard_size(self.vocab_size) - logits.shape[1]
        shards = self.tp.all_gather(F.pad(logits, (0, padding)))  # (num_ranks, num_rows, shard_size)
        return shards.transpose(0, 1).flatten(1)[:, : self.vocab_size]


def read_sampling_records(section: NDArray[np.int32]) -> list[SamplingRecord]:
    """Return the records of a host packet's section."""
    records = np.ascontiguousarray(section).reshape(-1).view(SECTION_DTYPES["sampling_records"])
    return [SamplingRecord._make(record) for record in records.tolist()]


def sample_and_append_across_ranks(
    logits: Tensor,
    first_id: int,
    tp: TensorParallel,
    rows: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    token_ids: Tensor,
    context_lens: Tensor,
) -> Tensor:
    """Do what `sample_and_append` does where each rank has the logits of its vocabulary shard, from `first_id` on.

    Each rank draws its best candidate, the ranks exchange these, and every rank enters the winner. The result does not
    depend on the number of ranks, except for rounding.
    """
    scores, ids = best_candidates(logits, first_id, rows, temperatures, seeds, context_lens)
    gathered = tp.all_gather(torch.stack((scores.view(torch.int32), ids)))  # (num_ranks, 2, num_rows)
    best, winner = gathered[:, 0].view(torch.float32).max(0)  # ties go to the lower rank, so to lower ids
    ids = gathered[:, 1].gather(0, winner.unsqueeze(0)).squeeze(0)
    ids = torch.where((rows >= 0) & best.isfinite(), ids, -1)
    enter_tokens(ids, rows, token_ids, context_lens)
    return ids
