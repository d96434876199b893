"""Packs a step into one flat int32 array, written once, for the device and for other processes.

It is the wire form of a ScheduledBatch, which vLLM calls SchedulerOutput. It has a header and two parts of several
sections: what is uploaded to the device, and what only the hosts of all ranks read. The device remembers what it was
told. A running sequence owns one row of the tables in `runner/step_tables.py`, and a packet carries only what is new:
rows given to admitted sequences, blocks that were allocated, the prompt chunks to compute, the rows to decode.

With blocks of 4 tokens, a greedy request with the prompt 11 to 15 and seed 42 takes these packets, one section a line:

    5 1 2 0 20  1 5 2 0 1 0 0 0 0 0 0   header: 5 tokens, 1 sample, 2 blocks, no masks, 20 numbers uploaded; counts
    3 5 5 0 42 0                        row_records: row 3, 5 known tokens, all of the prompt, temperature 0, seed
    11 12 13 14 15                      known_tokens
    3 0 6  3 1 7                        new_blocks: the block table of row 3 begins with blocks 6 and 7
    3 0 5                               chunks: compute 5 tokens of row 3, from token 0

    0 0 0 0 3  0 0 0 0 0 1 0 0 0 0 0    header of a decode step; one record in the sixth section, which is decode_rows
    3 0 0                               decode_rows: row 3, without prefix sharers

With several ranks, rank 0 writes the packet into shared memory; each rank copies the uploaded part to its device.
A section's records are a NamedTuple. `section` makes a NumPy dtype of it, so that host and device find columns by the
names of its fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import mul
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engine.row_options import OptionRecord, option_sections
from nanoinfer.engine.scheduled_batch import BlockCopy, NewBlock, ScheduledBatch, StateCopy
from nanoinfer.engine.sequence import Sequence

Packet = NDArray[np.int32]


class RowRecord(NamedTuple):
    """Says what every row needs to know of the sequence that gets it."""

    row: int
    num_tokens: int  # known tokens; their ids follow in the packet
    num_prompt_tokens: int
    temperature: float
    seed: np.int64


class ChunkRecord(NamedTuple):
    """Describes a prefill chunk."""

    row: int
    start: int
    length: int


class DecodeRecord(NamedTuple):
    """Names a row that computes its newest token, and the blocks that it shares with other rows."""

    row: int
    num_shared_blocks: int  # how many of its first blocks are read once for all its sharers; 0 if it has none
    num_sharers: int  # prefix sharers that begin with this row, itself included; 0 if none begin here


def section(record: type) -> Any:
    """Declare a section by the type of its records: int is int32 and float float32, so all are columns."""
    kinds: dict[Any, Any] = {int: np.int32, float: np.float32, np.int64: np.int64, np.float64: np.float64}
    columns = [(name, kinds[kind]) for name, kind in get_type_hints(record).items()]
    return field(metadata={"dtype": np.dtype(kinds.get(record, columns))})


@dataclass(slots=True)
class UploadedSections:
    """Holds views of the sections that are uploaded, (num_records, num_columns) int32; (0, 1) where there are none."""

    row_records: Any = section(RowRecord)
    known_tokens: Any = section(int)  # the ids of the admitted sequences, one sequence after another
    new_blocks: Any = section(NewBlock)
    block_copies: Any = section(BlockCopy)
    chunks: Any = section(ChunkRecord)  # the first num_prefill_samples of them sample a token
    decode_rows: Any = section(DecodeRecord)
    proposals: Any = section(int)  # for each decode row: how many tokens it has, and num_tokens - 1 ids


@dataclass(slots=True)
class AllSections(UploadedSections):
    """Holds views of every section, for hosts to read. The device gets only the inherited sections."""

    kept_states: Any = section(StateCopy)
    restored_states: Any = section(StateCopy)
    option_records: Any = section(OptionRecord)
    option_values: Any = section(np.float64)  # of all option records, end to end; float64 holds ids and float32 exactly


class Header(NamedTuple):
    """Holds the first numbers of a packet, which the host needs to launch its step."""

    num_prefill_tokens: int
    num_prefill_samples: int  # chunks that sample a token: the first ones
    num_prefill_blocks: int  # different blocks of the chunks' sequences
    awaits_masks: int  # 1 if the ranks must wait for token masks before they sample
    num_uploaded: int  # numbers after the header that are uploaded
    counts: dict[str, int]  # how many records each section has

    def on_host(self, packet: Packet) -> AllSections:
        return AllSections(*_views(packet[HEADER_SIZE:], [*self.counts.values()]))

    def uploaded(self, packet: Packet) -> Packet:
        """Return the part of a packet that is uploaded, for `on_device`."""
        return packet[HEADER_SIZE : HEADER_SIZE + self.num_uploaded]

    def on_device(self, uploaded: Any) -> UploadedSections:
        return UploadedSections(*_views(uploaded, [*self.counts.values()][:NUM_UPLOADED]))


SECTION_DTYPES: dict[str, Any] = {item.name: item.metadata["dtype"] for item in fields(AllSections)}  # a np.dtype each
NUM_COLUMNS = [dtype.itemsize // 4 for dtype in SECTION_DTYPES.values()]
NUM_UPLOADED = len(fields(UploadedSections))  # sections, which come first
FIRST_COUNT = len(Header._fields) - 1  # where the counts begin
HEADER_SIZE = FIRST_COUNT + len(SECTION_DTYPES)


def pack(batch: ScheduledBatch, awaits_masks: bool = False) -> Packet:
    """Write `batch` as a packet: the header and its sections."""
    sections = {
        "new_blocks": batch.new_blocks,
        "block_copies": batch.block_copies,
        "kept_states": batch.kept_states,
        "restored_states": batch.restored_states,
        "chunks": [(chunk.seq.held_row, chunk.start, chunk.length) for chunk in batch.prefill],  # of ChunkRecord
        "decode_rows": _decode_rows(batch),
    }
    if batch.num_tokens > 1:
        sections["proposals"] = _proposals(batch)
    if batch.admitted:
        sections |= _sections_of_admitted(batch.admitted)
    num_samples = sum(chunk.samples for chunk in batch.prefill)
    assert all(chunk.samples for chunk in batch.prefill[:num_samples]), "the chunks that sample a token come first"
    num_blocks = len(set().union(*(chunk.seq.block_table for chunk in batch.prefill)))
    return join_sections(sections, batch.num_prefill_tokens, num_samples, num_blocks, awaits_masks)


def join_sections(
    sections: Mapping[str, Any], num_prefill_tokens: int, num_samples: int, num_blocks: int, awaits_masks: bool = False
) -> Packet:
    """Write a packet of these sections, by name; missing sections are empty. The numbers: see Header."""
    records = [sections.get(name, ()) for name in SECTION_DTYPES]
    counts = [*map(len, records)]
    num_uploaded = sum(map(mul, counts[:NUM_UPLOADED], NUM_COLUMNS))
    numbers = [num_prefill_tokens, num_samples, num_blocks, int(awaits_masks), num_uploaded, *counts]
    parts = [np.array(one, dtype) for one, dtype in zip(records, SECTION_DTYPES.values(), strict=True) if len(one)]
    return np.concatenate([np.array(numbers, np.int32), *(part.view(np.int32) for part in parts)])


def read_header(packet: Packet) -> Header:
    numbers = packet[:HEADER_SIZE].tolist()
    return Header._make((*numbers[:FIRST_COUNT], dict(zip(SECTION_DTYPES, numbers[FIRST_COUNT:], strict=True))))


def _views(part: Any, counts: list[int]) -> list[Any]:
    """Cut an array or a tensor into the first sections, with so many records each.

    All empty sections share one view, because creating a tensor view is slow.
    """
    views, offset, empty = [], 0, part[:0].reshape(0, 1)
    for num_records, num_columns in zip(counts, NUM_COLUMNS, strict=False):
        end = offset + num_records * num_columns
        views.append(part[offset:end].reshape(num_records, num_columns) if num_records else empty)
        offset = end
    assert offset == len(part), f"a packet of {len(part)} numbers after its header has sections of {offset}"
    return views


def column(sections: UploadedSections, section: str, name: str) -> Any:
    """Return one int32 field of all records of a section, (num_records,): a view."""
    return getattr(sections, section)[:, SECTION_DTYPES[section].fields[name][1] // 4]


def _decode_rows(batch: ScheduledBatch) -> NDArray[Any]:
    """Return the DecodeRecords, column by column: every decode step has them, and tuples would take longer."""
    records = np.zeros(len(batch.decode), SECTION_DTYPES["decode_rows"])
    records["row"] = [seq.row for seq in batch.decode]
    for first, num_rows, num_blocks in batch.prefix_sharers:
        records["num_shared_blocks"][first : first + num_rows] = num_blocks
        records["num_sharers"][first] = num_rows
    return records


def _proposals(batch: ScheduledBatch) -> NDArray[np.int32]:
    """Return how many tokens each decode row has, and the ids of the proposals among them, then zeros."""
    numbers = np.zeros((len(batch.proposals), batch.num_tokens), np.int32)
    numbers[:, 0] = [1 + len(ids) for ids in batch.proposals]
    numbers[:, 1:][np.arange(1, batch.num_tokens) < numbers[:, :1]] = [one for ids in batch.proposals for one in ids]
    return numbers.ravel()


def _sections_of_admitted(admitted: list[Sequence]) -> dict[str, Any]:
    """Return the sections about newly admitted sequences."""
    return {
        "row_records": [
            (seq.held_row, len(seq.token_ids), seq.num_prompt_tokens, seq.sampling_params.temperature, seq.seed)
            for seq in admitted
        ],
        "known_tokens": np.frombuffer(b"".join([seq.token_ids for seq in admitted]), np.int32),
        **option_sections(admitted),
    }
