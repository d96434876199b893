"""Logits processors: what changes the logits of a row, in float32, before its token is drawn.

A processor remembers what each row asks for. It learns of that when a sequence is admitted, and works on the rows of
one step at a time. To add one, write a class with the methods of `RowProcessor`, give it a `Stage`, and list it in
`row_processors`. What holds for one step only is in `sampling/mask_processors.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nanoinfer.device import numbers_to_device, to_device
from nanoinfer.engine.packet import SECTION_DTYPES, PacketSections, column
from nanoinfer.engine.row_options import SamplingRecord, slices_of

TORCH_DTYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.int64): torch.int64}


def read_field(sections: PacketSections, section: str, name: str) -> Tensor:
    """Return one field of a section's records on the device, (num_records,), in its dtype; `column` is for int32."""
    kind, offset = SECTION_DTYPES[section].fields[name][:2]
    columns: Tensor = getattr(sections, section)[:, offset // 4 : (offset + kind.itemsize) // 4]
    columns = columns.clone(memory_format=torch.contiguous_format)
    return columns.view(TORCH_DTYPES.get(kind, torch.int32)).squeeze(1)


def read_options(sections: PacketSections, names: tuple[str, ...]) -> Tensor:
    """Return these options of a packet's sampling records on the device, (num_records, num_names) float32."""
    return torch.stack([read_field(sections, "sampling_records", name).float() for name in names], dim=1)


class Stage(IntEnum):
    """Orders the processors. Raw log-probabilities are taken before all of them."""

    GRAMMARS = auto()
    BIASES = auto()
    USER_FUNCTIONS = auto()
    PENALTIES = auto()
    MIN_TOKENS = auto()
    TOKEN_SETS = auto()


class LogitsProcessor(ABC):
    """Changes the logits of the rows that ask for it. by_row: what each of these asks for."""

    stage: ClassVar[Stage]

    def __init__(self) -> None:
        self.by_row: dict[int, Any] = {}

    def wants(self, row: int) -> bool:
        """Return whether the logits of this row's next token are to be changed."""
        return row in self.by_row

    def places(self, host_rows: list[int]) -> list[int]:
        """Return which of these rows want it."""
        return [place for place, row in enumerate(host_rows) if row in self.by_row]

    @abstractmethod
    def apply(self, logits: Tensor, rows: Tensor, host_rows: list[int]) -> Tensor:
        """Return changed logits (num_rows, vocab_size); some of the rows want it. Called once for each token."""


class RowProcessor(LogitsProcessor):
    """Changes the logits of a row for as long as the sequence that asked for it is there.

    reads: the options of SamplingRecord that it looks at.
    """

    reads: ClassVar[tuple[str, ...]]

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    @abstractmethod
    def admit(self, records: Sequence[SamplingRecord], on_host: PacketSections, on_device: PacketSections) -> None:
        """Remember what the newly admitted rows of a packet ask for; `records` are its sampling records."""

    def release(self, row: int) -> None:
        """Forget what a row asked for; another sequence moves in."""
        self.by_row.pop(row, None)


class LogitBias(RowProcessor):
    """Adds what the user wants to the logits of some tokens. by_row: records of TokenBias."""

    stage: ClassVar = Stage.BIASES
    reads: ClassVar[tuple[str, ...]] = ()  # logit_bias is ragged

    def admit(self, records: Sequence[SamplingRecord], on_host: PacketSections, on_device: PacketSections) -> None:
        biases = np.ascontiguousarray(on_host.biases).reshape(-1).view(SECTION_DTYPES["biases"])
        for record, its_biases in slices_of(biases, records, "num_biases"):
            if len(its_biases):
                self.by_row[record.row] = its_biases[its_biases["token_id"] < self._vocab_size]

    def apply(self, logits: Tensor, rows: Tensor, host_rows: list[int]) -> Tensor:
        found = {place: self.by_row[host_rows[place]] for place in self.places(host_rows)}
        places = [place * self._vocab_size + biases["token_id"].astype(np.int64) for place, biases in found.items()]
        values = [biases["bias"] for biases in found.values()]
        on_device = [to_device(torch.from_numpy(np.concatenate(parts)), logits.device) for parts in (places, values)]
        return logits.float().flatten().index_add(0, *on_device).view_as(logits)


class Penalties(RowProcessor):
    """Presence, frequency and repetition penalties. by_row: the row's record."""

    stage: ClassVar = Stage.PENALTIES
    reads: ClassVar[tuple[str, ...]] = ("presence_penalty", "frequency_penalty", "repetition_penalty")

    def __init__(self, vocab_size: int, token_ids: Tensor, context_lens: Tensor) -> None:
        super().__init__(vocab_size)
        num_rows, device = len(context_lens), context_lens.device
        self._token_ids = token_ids
        self._context_lens = context_lens
        self._prompt_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._penalties = torch.zeros(num_rows, len(self.reads), dtype=torch.float32, device=device)

    def admit(self, records: Sequence[SamplingRecord], on_host: PacketSections, on_device: PacketSections) -> None:
        self.by_row |= {record.row: record for record in records if record.asks_for(self.reads)}
        rows = column(on_device, "sampling_records", "row").long()
        self._prompt_lens[rows] = column(on_device, "sampling_records", "num_prompt_tokens")
        self._penalties[rows] = read_options(on_device, self.reads)

    def apply(self, logits: Tensor, rows: Tensor, host_rows: list[int]) -> Tensor:
        tables = (self._token_ids, self._context_lens, self._prompt_lens, self._penalties)
        places = self.places(host_rows)
        if len(places) == len(host_rows):
            return penalise(logits.float(), *(table[rows] for table in tables))
        # In the tables, a row without penalties may still have the penalties of its last sequence.
        some = numbers_to_device(places, logits.device)
        penalised = penalise(logits[some].float(), *(table[rows[some]] for table in tables))
        return logits.float().index_copy(0, some, penalised)


class MinTokens(RowProcessor):
    """Forbids stop tokens until a sequence has generated its min_tokens.

    by_row: how many tokens are to come before a stop token is allowed, and the stop tokens.
    """

    stage: ClassVar = Stage.MIN_TOKENS
    reads: ClassVar[tuple[str, ...]] = ("min_tokens",)

    def admit(self, records: Sequence[SamplingRecord], on_host: PacketSections, on_device: PacketSections) -> None:
        stop_ids = on_host.stop_ids[:, 0].tolist()
        for record, its_stop_ids in slices_of(stop_ids, records, "num_stop_ids"):
            num_left = record.min_tokens - record.num_generated
            if num_left > 0 and its_stop_ids:
                known = [token_id for token_id in its_stop_ids if token_id < self._vocab_size]
                self.by_row[record.row] = num_left, known

    def apply(self, logits: Tensor, rows: Tensor, host_rows: list[int]) -> Tensor:
        forbidden = []  # (index of the row, token id)
        for place in self.places(host_rows):
            row = host_rows[place]
            num_left, stop_ids = self.by_row[row]
            forbidden += [(place, token_id) for token_id in stop_ids]
            if num_left > 1:
                self.by_row[row] = num_left - 1, stop_ids
            else:
                self.release(row)
        if not forbidden:
            return logits
        places = numbers_to_device(forbidden, logits.device)
        return logits.index_put(places.unbind(1), logits.new_full((), -torch.inf))


def row_processors(token_ids: Tensor, context_lens: Tensor, vocab_size: int) -> list[RowProcessor]:
    """Return all processors, in the order in which they act; the tensors are the tables of `Sampler`."""
    processors = LogitBias(vocab_size), Penalties(vocab_size, token_ids, context_lens), MinTokens(vocab_size)
    return sorted(processors, key=lambda processor: processor.stage)


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
