"""The packet that tells the device of a step, in one copy, and other processes in one write: a flat int32 array.

The device remembers what it was told. A running sequence owns one row of the tables in `runner/step_tables.py`, and a
packet carries only what is new: rows given to sequences that were admitted, blocks that were allocated, the prompt
chunks to compute, the rows to decode.

A section's records are a NamedTuple. `record_dtype` makes a NumPy dtype of it, so that host and device find columns by
the names of its fields.
"""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engine.blocks.partial_hits import BlockCopy
from nanoinfer.engine.blocks.state_snapshots import StateCopy
from nanoinfer.engine.hidden_states_request import HiddenStatesRecord
from nanoinfer.engine.row_options import SamplingRecord, TokenBias, sampling_sections
from nanoinfer.engine.scheduled_batch import NewBlock, ScheduledBatch
from nanoinfer.engine.sequence import Sequence

Packet = NDArray[np.int32]


class RowRecord(NamedTuple):
    """What every admitted sequence tells the device about its row."""

    row: int
    num_tokens: int  # known tokens; their ids follow in the packet
    temperature: float
    seed: np.int64


class ChunkRecord(NamedTuple):
    """A prefill chunk as the packet carries it."""

    row: int
    start: int
    length: int


class DecodeRecord(NamedTuple):
    """A row that computes one token, as the packet carries it."""

    row: int
    num_shared_blocks: int  # how many of its first blocks are read together with its prefix group; 0 outside of groups
    num_group_rows: int  # rows of the prefix group that begins with this one; 0 where none begins


class PacketSections(NamedTuple):
    """Holds the records of each section after the header: int32 views (num_records, num_columns); (0, 1) without any.

    They are views of an array, or of a tensor on the device. Each field is annotated with the type of its records.
    """

    row_records: Annotated[Any, RowRecord]
    known_tokens: Annotated[Any, int]  # the ids of the admitted sequences, one sequence after another
    new_blocks: Annotated[Any, NewBlock]
    block_copies: Annotated[Any, BlockCopy]
    kept_states: Annotated[Any, StateCopy]
    restored_states: Annotated[Any, StateCopy]
    chunks: Annotated[Any, ChunkRecord]  # the first num_prefill_samples of them sample a token
    decode_rows: Annotated[Any, DecodeRecord]
    sampling_records: Annotated[Any, SamplingRecord]
    stop_ids: Annotated[Any, int]  # of all sampling records, one record after another; so are the next two
    biases: Annotated[Any, TokenBias]
    logprob_ids: Annotated[Any, int]
    hidden_states_records: Annotated[Any, HiddenStatesRecord]
    wanted_layers: Annotated[Any, int]  # whose hidden states are wanted, one states record after another


class Header(NamedTuple):
    """The first numbers of a packet: what the host must know to launch."""

    num_prefill_tokens: int
    num_prefill_samples: int  # chunks that sample a token: the first ones
    num_prefill_blocks: int  # different blocks of the chunks' sequences
    awaits_masks: int  # 1 if the ranks must wait for token masks before they sample
    counts: dict[str, int]  # how many records each section has


def record_dtype(record: type) -> np.dtype[Any]:
    """Return the dtype of a record, structured if it has fields: int is int32 and float float32, so all are columns."""
    kinds = {int: np.int32, float: np.float32, np.int64: np.int64}
    if record in kinds:
        return np.dtype(kinds[record])
    return np.dtype([(name, kinds[kind]) for name, kind in get_type_hints(record).items()])


SECTION_DTYPES: dict[str, Any] = {  # a np.dtype each
    name: record_dtype(hint.__metadata__[0])
    for name, hint in get_type_hints(PacketSections, include_extras=True).items()
}
NUM_COLUMNS = [dtype.itemsize // 4 for dtype in SECTION_DTYPES.values()]
FIRST_COUNT = len(Header._fields) - 1  # where the counts begin
HEADER_SIZE = FIRST_COUNT + len(SECTION_DTYPES)


def pack(batch: ScheduledBatch, awaits_masks: bool = False) -> Packet:
    """Write `batch` as a packet: the header and its sections."""
    sections = {
        "new_blocks": batch.new_blocks,
        "block_copies": batch.block_copies,
        "kept_states": batch.kept_states,
        "restored_states": batch.restored_states,
        "chunks": [ChunkRecord(chunk.seq.held_row, chunk.start, chunk.length) for chunk in batch.prefill],
        "decode_rows": _decode_rows(batch),
    }
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
    numbers = [num_prefill_tokens, num_samples, num_blocks, int(awaits_masks), *map(len, records)]
    parts = [np.array(one, dtype) for one, dtype in zip(records, SECTION_DTYPES.values(), strict=True) if len(one)]
    return np.concatenate([np.array(numbers, np.int32), *(part.view(np.int32) for part in parts)])


def read_header(packet: Packet) -> Header:
    numbers = packet[:HEADER_SIZE].tolist()
    return Header._make((*numbers[:FIRST_COUNT], dict(zip(SECTION_DTYPES, numbers[FIRST_COUNT:], strict=True))))


def split_packet(packet: Any, header: Header) -> PacketSections:
    """Cut a packet (an array, or a tensor on the device) into views of its sections.

    All empty sections share one view, because creating a tensor view is slow.
    """
    views, offset, empty = [], HEADER_SIZE, packet[:0].reshape(0, 1)
    for num_records, num_columns in zip(header.counts.values(), NUM_COLUMNS, strict=True):
        end = offset + num_records * num_columns
        views.append(packet[offset:end].reshape(num_records, num_columns) if num_records else empty)
        offset = end
    assert offset == len(packet), f"a packet of {len(packet)} numbers has sections of {offset}"
    return PacketSections(*views)


def column(sections: PacketSections, section: str, name: str) -> Any:
    """Return one int32 field of all records of a section, (num_records,): a view. Sections: see `split_packet`."""
    return getattr(sections, section)[:, SECTION_DTYPES[section].fields[name][1] // 4]


def _decode_rows(batch: ScheduledBatch) -> NDArray[Any]:
    """Return the DecodeRecords, column by column: every decode step has them, and tuples would take longer."""
    records = np.zeros(len(batch.decode), SECTION_DTYPES["decode_rows"])
    records["row"] = [seq.row for seq in batch.decode]
    for first_row, num_rows, num_blocks in batch.prefix_groups:
        records["num_shared_blocks"][first_row : first_row + num_rows] = num_blocks
        records["num_group_rows"][first_row] = num_rows
    return records


def _sections_of_admitted(admitted: list[Sequence]) -> dict[str, Any]:
    """Return the sections that tell of newly admitted sequences."""
    asking = [(seq, seq.hidden_states_request) for seq in admitted if seq.hidden_states_request is not None]
    return {
        "row_records": [
            RowRecord(seq.held_row, len(seq.token_ids), seq.sampling_params.temperature, np.int64(seq.seed))
            for seq in admitted
        ],
        "known_tokens": np.concatenate([np.frombuffer(seq.token_ids, np.int32) for seq in admitted]),
        "hidden_states_records": [request.record(seq.held_row, seq.num_prompt_tokens) for seq, request in asking],
        "wanted_layers": [layer for _, request in asking for layer in request.layers],
        **sampling_sections(admitted),
    }
