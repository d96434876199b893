"""One step as data: what the scheduler decided (ScheduledBatch), and the packet that tells the device of it.

The device remembers what it was told. A running sequence owns one row of the tables in `runner/step_tables.py`, and a
packet carries only what is new: rows given to sequences that were admitted, blocks that were allocated, the prompt
chunks to compute, the rows to decode. A packet is one flat int32 array, so that it reaches the device in one copy and
another process in one write.

Records of several fields are declared as NamedTuples. `record_dtype` makes a NumPy structured dtype of one, which
names the columns: on the host by viewing the packet, on the device by the byte offsets of the fields.
"""

from collections.abc import Sequence as Iterated
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engine.partial_hits import BlockCopy
from nanoinfer.engine.prompt_states import StatesRecord
from nanoinfer.engine.row_options import (
    SamplingRecord,
    TokenBias,
    biases_of,
    logprob_ids_of,
    sampling_record,
    stop_ids_of,
)
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.shared_prefixes import PrefixGroup
from nanoinfer.engine.state_snapshots import StateCopy

Packet = NDArray[np.int32]


class PrefillChunk(NamedTuple):
    """Tokens [start, start + length) of one sequence, to be computed in this step.

    samples: whether the chunk ends with the last known token, so that the step samples the next one. One that does not
    is of a sequence that pools, or is cut short where the step's token budget ends, or where a recurrent state is kept.
    """

    seq: Sequence
    start: int
    length: int
    samples: bool


class NewBlock(NamedTuple):
    """Says that entry `column` of the block table in `row` is `block_id` from this step on."""

    row: int
    column: int
    block_id: int


@dataclass(slots=True)
class ScheduledBatch:
    """One step: either prefill or decode.

    The length of each sequence after this step is known before any of its tokens: the scheduler advanced
    `num_computed_tokens` and `num_pending_tokens` when it scheduled the step.
    """

    admitted: list[Sequence] = field(default_factory=list)  # sequences that got a row in this step
    new_blocks: list[NewBlock] = field(default_factory=list)  # those of admitted sequences included
    block_copies: list[BlockCopy] = field(default_factory=list)  # made before anything is computed
    kept_states: list[StateCopy] = field(default_factory=list)  # likewise, of what earlier steps computed
    restored_states: list[StateCopy] = field(default_factory=list)  # likewise, after those that are kept
    prefill: list[PrefillChunk] = field(default_factory=list)  # those that sample come first
    decode: list[Sequence] = field(default_factory=list)  # each computes its last known token and samples the next
    prefix_groups: list[PrefixGroup] = field(default_factory=list)  # they come first in `decode`, without gaps

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.prefill)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token in this step, in the order of the step's token ids."""
        return [chunk.seq for chunk in self.prefill if chunk.samples] + self.decode

    @property
    def pooled(self) -> list[Sequence]:
        """The sequences that this step completes without a token."""
        whole = (chunk for chunk in self.prefill if chunk.start + chunk.length == chunk.seq.num_prompt_tokens)
        return [chunk.seq for chunk in whole if chunk.seq.stopping.ends_with_prompt]


class RowRecord(NamedTuple):
    """What every admitted sequence tells the device about its row."""

    row: int
    num_tokens: int  # known tokens; their ids follow in the packet
    temperature: float
    seed: np.int64


class Chunk(NamedTuple):
    """A prefill chunk as the packet carries it."""

    row: int
    start: int
    length: int


class DecodeRow(NamedTuple):
    """A row that computes one token, as the packet carries it."""

    row: int
    num_shared_blocks: int  # how many of its first blocks are read together with its prefix group; 0 outside of groups
    num_group_rows: int  # rows of the prefix group that begins with this one; 0 where none begins


class PacketSections(NamedTuple):
    """What follows the header, with the type of the records of each section.

    Holds a value for each section: its records, how many there are, or their dtype. Of a packet that was split, the
    records are views (num_records, num_columns) int32, of an array or of a tensor on the device; (0, 1) if it has none.
    """

    row_records: Annotated[Any, RowRecord]
    known_tokens: Annotated[Any, int]  # the ids of the admitted sequences, one sequence after another
    new_blocks: Annotated[Any, NewBlock]
    block_copies: Annotated[Any, BlockCopy]
    kept_states: Annotated[Any, StateCopy]
    restored_states: Annotated[Any, StateCopy]
    chunks: Annotated[Any, Chunk]  # the first num_prefill_samples of them sample a token
    decode_rows: Annotated[Any, DecodeRow]
    sampling_records: Annotated[Any, SamplingRecord]
    stop_ids: Annotated[Any, int]  # those of the sampling records, one record after another
    biases: Annotated[Any, TokenBias]  # likewise
    logprob_ids: Annotated[Any, int]  # likewise
    states_records: Annotated[Any, StatesRecord]
    wanted_layers: Annotated[Any, int]  # whose hidden states are wanted, one states record after another


class Header(NamedTuple):
    """The first numbers of a packet: what the host must know to launch."""

    num_prefill_tokens: int
    num_prefill_samples: int  # chunks that sample a token: the first ones
    num_prefill_blocks: int  # different blocks of the chunks' sequences
    awaits_masks: int  # 1 if the ranks must wait for token masks before they sample
    counts: PacketSections  # how many records each section has


FIRST_COUNT = len(Header._fields) - 1  # where the counts begin
HEADER_SIZE = FIRST_COUNT + len(PacketSections._fields)


def record_dtype(record: type) -> np.dtype[Any]:
    """Return the dtype of a record, structured if it has fields: int is int32 and float float32, so all are columns."""
    kinds = {int: np.int32, float: np.float32, np.int64: np.int64}
    if record in kinds:
        return np.dtype(kinds[record])
    return np.dtype([(name, kinds[kind]) for name, kind in get_type_hints(record).items()])


SECTION_DTYPES = PacketSections(
    *(record_dtype(hint.__metadata__[0]) for hint in get_type_hints(PacketSections, include_extras=True).values())
)
NUM_COLUMNS = PacketSections(*(dtype.itemsize // 4 for dtype in SECTION_DTYPES))


def pack(batch: ScheduledBatch, awaits_masks: bool = False) -> Packet:
    """Write `batch` as a packet: the header and its sections."""
    wanted = [(seq, seq.prompt_states) for seq in batch.admitted if seq.prompt_states is not None]
    records = [(seq, record) for seq in batch.admitted if (record := sampling_record(seq)) is not None]
    sections = PacketSections(
        row_records=[_row_record(seq) for seq in batch.admitted],
        known_tokens=_known_tokens(batch),
        new_blocks=batch.new_blocks,
        block_copies=batch.block_copies,
        kept_states=batch.kept_states,
        restored_states=batch.restored_states,
        chunks=[Chunk(_row(chunk.seq), chunk.start, chunk.length) for chunk in batch.prefill],
        decode_rows=_decode_rows(batch),
        sampling_records=[record for _, record in records],
        stop_ids=[token_id for seq, _ in records for token_id in stop_ids_of(seq)],
        biases=[bias for seq, _ in records for bias in biases_of(seq)],
        logprob_ids=[token_id for seq, _ in records for token_id in logprob_ids_of(seq)],
        states_records=[states.record(_row(seq), seq.num_prompt_tokens) for seq, states in wanted],
        wanted_layers=[layer for _, states in wanted for layer in states.layers],
    )
    num_samples = sum(chunk.samples for chunk in batch.prefill)
    assert all(chunk.samples for chunk in batch.prefill[:num_samples]), "the chunks that sample a token come first"
    num_blocks = len(set().union(*(chunk.seq.block_table for chunk in batch.prefill)))
    return assemble(sections, batch.num_prefill_tokens, num_samples, num_blocks, awaits_masks)


def assemble(
    sections: PacketSections, num_prefill_tokens: int, num_samples: int, num_blocks: int, awaits_masks: bool = False
) -> Packet:
    """Write the header of these sections, and the sections behind it. The numbers: see Header."""
    counts = PacketSections(*map(len, sections))
    header = Header(num_prefill_tokens, num_samples, num_blocks, int(awaits_masks), counts)
    parts = [np.array(records, dtype) for records, dtype in zip(sections, SECTION_DTYPES, strict=True) if len(records)]
    numbers = np.array([*header[:FIRST_COUNT], *counts], np.int32)
    return np.concatenate([numbers, *(part.view(np.int32) for part in parts)])


def read_header(packet: Packet) -> Header:
    numbers = packet[:HEADER_SIZE].tolist()
    return Header._make((*numbers[:FIRST_COUNT], PacketSections._make(numbers[FIRST_COUNT:])))


def split(packet: Any, header: Header) -> PacketSections:
    """Cut a packet (an array, or a tensor on the device) into views of its sections.

    Those without records are one and the same view: most are empty, and to make a view of a tensor takes time.
    """
    views, offset, empty = [], HEADER_SIZE, packet[:0].reshape(0, 1)
    for num_records, num_columns in zip(header.counts, NUM_COLUMNS, strict=True):
        end = offset + num_records * num_columns
        views.append(packet[offset:end].reshape(num_records, num_columns) if num_records else empty)
        offset = end
    assert offset == len(packet), f"a packet of {len(packet)} numbers has sections of {offset}"
    return PacketSections(*views)


def read_sampling_records(section: NDArray[np.int32]) -> Iterated[SamplingRecord]:
    """Return the records of a host packet's section."""
    records = np.ascontiguousarray(section).reshape(-1).view(SECTION_DTYPES.sampling_records)
    return [SamplingRecord._make(record) for record in records.tolist()]


def _row(seq: Sequence) -> int:
    assert seq.row is not None, f"sequence {seq.seq_id} is in a step and has no row"
    return seq.row


def _decode_rows(batch: ScheduledBatch) -> NDArray[Any]:
    """Return the DecodeRows, column by column: every decode step makes them, and a tuple for each would take longer."""
    records = np.zeros(len(batch.decode), SECTION_DTYPES.decode_rows)
    records["row"] = [seq.row for seq in batch.decode]
    for first_row, num_rows, num_blocks in batch.prefix_groups:
        records["num_shared_blocks"][first_row : first_row + num_rows] = num_blocks
        records["num_group_rows"][first_row] = num_rows
    return records


def _known_tokens(batch: ScheduledBatch) -> NDArray[np.int32]:
    known = [np.frombuffer(seq.token_ids, np.int32) for seq in batch.admitted]
    return np.concatenate(known) if known else np.zeros(0, np.int32)


def _row_record(seq: Sequence) -> RowRecord:
    return RowRecord(_row(seq), len(seq.token_ids), seq.sampling_params.temperature, np.int64(seq.seed))
