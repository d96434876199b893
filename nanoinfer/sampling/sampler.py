"""Turns the logits of a step into token ids: logits processors, a threshold for min-p, top-k and top-p, one draw.

Each token is drawn once. Most lines are drawn straight from the model's 16-bit logits, in which grammars have forbidden
tokens in place. Lines whose logits must be changed or read whole (biases, penalties, token sets, log-probabilities;
under tensor parallelism min-p, top-k and top-p too) are a second, disjoint set: they are copied, processed in float32
and drawn from the copy. The noise depends on seed, position and token id alone, so the two sets of a step do not
influence each other.

A step has one line for each row, or several if tokens are proposed (`proposals.py`). With proposals, tokens enter the
tables only after all lines are drawn.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoinfer.device import numbers_to_device
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.packet import SECTION_DTYPES, UploadedSections, column
from nanoinfer.engine.side_outputs import SampleLogprobs, SideOutput
from nanoinfer.engine.token_masks import TokenMasks
from nanoinfer.models.interface import Model
from nanoinfer.sampling.draws import Draws
from nanoinfer.sampling.filters import Filters
from nanoinfer.sampling.logit_bias import LogitBias
from nanoinfer.sampling.logits_processors import NUM_COPIES, ROWS_AT_ONCE, Lines, LogitsProcessor, RowProcessor
from nanoinfer.sampling.logprobs import PromptLogprobsReader, SampleLogprobsReader
from nanoinfer.sampling.mask_processors import Grammars, MaskSender, TokenSets, UserFunctions
from nanoinfer.sampling.min_tokens import MinTokens
from nanoinfer.sampling.penalties import Penalties
from nanoinfer.sampling.proposals import PADDING_LINE, Proposals
from nanoinfer.sampling.row_state import RowState

NUM_MASKS = 4  # for all rows: masks of grammars and of token sets, of two steps
TORCH_DTYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.int64): torch.int64}
# What changes logits, in this order. Raw log-probabilities are read before these, and filters come after them.
ORDER: tuple[type[LogitsProcessor], ...] = (Grammars, LogitBias, UserFunctions, Penalties, MinTokens, TokenSets)


class Sampled(NamedTuple):
    """Holds the tokens that a step draws, their log-probabilities, and the errors of logits processors."""

    token_ids: Tensor  # (num_rows,) int32; with proposals (num_rows, num_tokens), as `enter_counted` returns them
    logprobs: list[SampleLogprobs]
    errors: dict[int, str]  # why a user's function failed, by batch_idx, the index of its token


class Sampler:
    """Samples for the rows of the step tables, and remembers how each row is to be sampled.

    token_ids: (rows, max_tokens) int32 and context_lens: (rows,) int32: the tables, which sampling extends. The last
    row is padding. vocab_size: of the whole model; under tensor parallelism each rank has the logits of its shard.
    logprobs_mode: the engine's option. states: the objects that remember options of rows; `admit_rows` tells them.
    num_counted: as in `Draws`. max_row_tokens: the most lines of a row.
    """

    def __init__(
        self,
        token_ids: Tensor,
        context_lens: Tensor,
        vocab_size: int,
        tp: TensorParallel,
        logprobs_mode: str = "raw_logprobs",
        num_counted: Tensor | None = None,
        max_row_tokens: int = 1,
    ) -> None:
        num_rows, self.device = len(context_lens), context_lens.device
        self.token_ids = token_ids
        self.context_lens = context_lens
        self.vocab_size = vocab_size
        self.tp = tp
        self.max_row_tokens = max_row_tokens
        self.temperatures = torch.zeros(num_rows, dtype=torch.float32, device=self.device)
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
        self._draws = Draws(
            temperatures=self.temperatures,
            seeds=self.seeds,
            token_ids=token_ids,
            context_lens=context_lens,
            num_counted=num_counted,
            tp=tp,
        )
        self._mask_sender = MaskSender(vocab_size, self.device, tp)
        self._of_rows = {kind: kind(token_ids, vocab_size) for kind in ORDER if issubclass(kind, RowProcessor)}
        self._filters = Filters(self.temperatures)
        self._logprobs = SampleLogprobsReader(logprobs_mode, self.temperatures)
        self._prompt_logprobs = PromptLogprobsReader(token_ids, vocab_size, tp, self._logprobs.normalises)
        self.states: list[RowState] = [*self._of_rows.values(), self._filters, self._logprobs, self._prompt_logprobs]
        # Logits of rows with these options are copied. With several ranks, a threshold needs the logits of all.
        copying = [*self._of_rows.values(), self._logprobs, *([self._filters] if tp.size > 1 else [])]
        self._copied_rows = [state.by_row for state in copying]

    def admit(self, on_device: UploadedSections) -> None:
        """Enter temperatures and seeds of the newly admitted rows of a packet; `admit_rows` tells `states` the rest."""
        rows = column(on_device, "row_records", "row").long()
        self.temperatures[rows] = read_field(on_device, "row_records", "temperature")
        self.seeds[rows] = read_field(on_device, "row_records", "seed")

    def sample(
        self,
        logits: Tensor,
        first_id: int,
        rows: Tensor,
        host_rows: list[int],
        masks: TokenMasks | None = None,
        proposals: Proposals | None = None,
    ) -> Sampled:
        """Draw the next token of each row, or the next ones up to the first wrong proposal; enter them in the tables.

        logits: (num_lines, vocab shard) of this rank, from id `first_id`; masks change them. A line is a row, or with
        proposals one token of a row. rows: (num_rows,) int64; host_rows: the same on the host. A line with logits that
        are NaN or infinite yields -1.
        """
        lines = Lines(range(len(host_rows)), host_rows, rows, self.context_lens)
        if proposals is not None:
            lines = self._draws.lines(rows, host_rows, proposals)
            host_rows = lines.host_rows
            masks = masks and proposals.masks_of_lines(masks)
        processors: list[LogitsProcessor] = [*self._of_rows.values()]
        masked: set[int] = set()  # lines that are copied because of masks
        errors: dict[int, str] = {}
        if masks is not None:
            grammars = Grammars(masks.grammars, self._mask_sender)
            raw = {index for index in grammars.by_line if self._logprobs.wants_raw(host_rows[index])}
            grammars.forbid_in_place(logits, first_id, spared=raw)
            functions, token_sets = UserFunctions(masks, self.tp), TokenSets(masks.token_sets, self._mask_sender)
            by_kind = self._of_rows | {Grammars: grammars, UserFunctions: functions, TokenSets: token_sets}
            processors = [by_kind[kind] for kind in ORDER]
            masked, errors = functions.by_line.keys() | token_sets.by_line.keys(), functions.errors
        copied_rows = set().union(*self._copied_rows)
        if not (copied_rows or masked):
            return Sampled(self._draws.enter(self._draw(logits, first_id, lines), rows, proposals), [], errors)
        copied = [index for index, row in enumerate(host_rows) if row in copied_rows or index in masked]
        indices = numbers_to_device(copied, self.device)
        token_ids = torch.empty(len(host_rows), dtype=torch.int32, device=self.device)
        if len(copied) + host_rows.count(PADDING_LINE) < len(host_rows):
            token_ids = self._draw(logits, first_id, lines.without(indices))
        logprobs = []
        for start in range(0, len(copied), ROWS_AT_ONCE):
            some, on_device = copied[start : start + ROWS_AT_ONCE], indices[start : start + ROWS_AT_ONCE]
            part = lines.some(some, on_device)
            processed = whole = self.tp.gather_vocab(logits[on_device], self.vocab_size)
            for processor in processors:
                if places := processor.places(part):
                    processed = processor.apply(processed, part, places)
            lowest = self._filters.thresholds(processed, part.rows, part.host_rows)
            token_ids[on_device] = drawn = self._draws.from_logits(processed, lowest, part)
            logprobs += self._logprobs.read(part, drawn, whole, processed, lowest)
        if proposals is not None:
            errors = {proposals.token_of(line): error for line, error in errors.items()}
        return Sampled(self._draws.enter(token_ids, rows, proposals), logprobs, errors)

    @property
    def reads_prompts(self) -> bool:
        """Whether a row wants log-probabilities of its prompt's tokens."""
        return bool(self._prompt_logprobs.by_row)

    def copies(self, host_rows: list[int]) -> bool:
        """Return whether the logits of any of these rows are copied for other reasons than masks."""
        return not set().union(*self._copied_rows).isdisjoint(host_rows)

    def read_prompts(self, model: Model, hidden: Tensor, chunks: list[list[int]]) -> list[SideOutput]:
        """Return the log-probabilities that rows want of these chunks' tokens; see `PromptLogprobsReader.read`."""
        return self._prompt_logprobs.read(model, hidden, chunks) if self._prompt_logprobs.by_row else []

    @property
    def scratch_bytes(self) -> int:
        """Return the memory that float32 copies of logits, and masks, take at most."""
        copies = NUM_COPIES * ROWS_AT_ONCE * self.vocab_size * torch.float32.itemsize
        num_masks = NUM_MASKS * len(self.context_lens) * self.max_row_tokens
        return copies + num_masks * self._mask_sender.num_words * torch.int32.itemsize

    def _draw(self, logits: Tensor, first_id: int, lines: Lines) -> Tensor:
        """Draw from the model's own logits. A row of -1 is skipped, and yields -1."""
        if self.tp.size > 1:
            return self._draws.from_shards(logits, first_id, lines)
        lowest = self._filters.thresholds(logits, lines.rows, lines.host_rows) if self._filters.by_row else None
        return self._draws.from_logits(logits, lowest, lines)


def read_field(sections: UploadedSections, section: str, name: str) -> Tensor:
    """Return one field of a section's records on the device, (num_records,), in its dtype; `column` is for int32."""
    kind, offset = SECTION_DTYPES[section].fields[name][:2]
    columns: Tensor = getattr(sections, section)[:, offset // 4 : (offset + kind.itemsize) // 4]
    columns = columns.clone(memory_format=torch.contiguous_format)
    return columns.view(TORCH_DTYPES[kind]).squeeze(1)
