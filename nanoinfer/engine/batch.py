"""One step, as data: what the scheduler decided (ScheduledBatch) and what travels to the device (a packet).

The device remembers what it was told: a running sequence owns one row of the tables in `device_state.py`. So a packet
carries only what is new: rows given to sequences admitted in this step, blocks given out in this step, the chunks of
prompts to compute, and the rows to decode. It is one flat int32 array, so that it takes one copy to reach the device,
and one write to reach another process.
"""

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engine.sequence import Sequence

MANY = 2**24  # more tokens than any vocabulary or sequence has, and exact in float32
NO_TOKEN = -1  # in place of a sampled id where the logits were NaN or infinite

Packet = NDArray[np.int32]


class PrefillChunk(NamedTuple):
    """Tokens [start, start + length) of one sequence, to be computed in this step.

    samples: whether the chunk ends with the last known token, so that the step yields the next one. Only a step's
    last chunk may not: a chunk is cut short where the step's budget of tokens ends.
    """

    seq: Sequence
    start: int
    length: int
    samples: bool


class NewBlock(NamedTuple):
    """Entry `column` of the block table in `row` is `block_id` from this step on."""

    row: int
    column: int
    block_id: int


@dataclass(slots=True)
class ScheduledBatch:
    """One step. Prefill and decode parts may both be filled; today's scheduler fills one of them.

    The length of each sequence after this step is known before any token of it is: the sequences were advanced
    (num_computed_tokens, num_pending_tokens) when they were scheduled.
    """

    admitted: list[Sequence] = field(default_factory=list)  # got a row in this step
    new_blocks: list[NewBlock] = field(default_factory=list)  # those of admitted sequences included
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)  # each computes its last known token and samples the next

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.prefill)

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token in this step, in the order of the step's token ids."""
        return [chunk.seq for chunk in self.prefill if chunk.samples] + self.decode


class Header(NamedTuple):
    """The first numbers of a packet: what the host must know to launch, and how long its sections are, in order."""

    num_prefill_tokens: int
    num_prefill_samples: int  # chunks that yield a token: all, or all but the last
    num_admitted: int
    num_known_tokens: int  # of all admitted sequences together
    num_new_blocks: int
    num_chunks: int
    num_decode: int
    num_special: int
    num_stop_ids: int  # of all special rows together


class RowRecord(NamedTuple):
    """What a row is told when a sequence moves in."""

    row: int
    num_tokens: int  # known tokens; their ids follow in the packet
    temperature: int  # bits of the float32
    seed_low: int
    seed_high: int


class SpecialRecord(NamedTuple):
    """What a row asks for beyond temperature and seed, if it does. None is -1."""

    row: int
    num_generated: int  # of its known tokens
    is_masked: int
    is_penalised: int
    min_tokens: int
    num_stop_ids: int  # their ids follow in the packet
    num_logprobs: int
    num_prompt_logprobs: int
    score_from: int  # the first prompt token whose log-probability is wanted
    score_to: int  # and the first that is none
    temperature: int  # bits of the float32, as in all that follow
    top_k: int
    top_p: int
    min_p: int
    num_prompt_tokens: int
    presence_penalty: int
    frequency_penalty: int
    repetition_penalty: int


class PacketSections(NamedTuple):
    """What follows the header: views of the packet, be it an array or a tensor on the device."""

    row_records: Any  # (num_admitted, 5): RowRecord
    known_tokens: Any  # (num_known_tokens,): the ids of the admitted sequences, one after another
    new_blocks: Any  # (num_new_blocks, 3): NewBlock
    chunks: Any  # (num_chunks, 3): row, start, length; the first num_prefill_samples of them yield a token
    decode_rows: Any  # (num_decode,)
    special_records: Any  # (num_special, 18): SpecialRecord
    stop_ids: Any  # (num_stop_ids,): those of the special rows, one after another


LINE_SHAPES = ((len(RowRecord._fields),), (), (3,), (3,), (), (len(SpecialRecord._fields),), ())  # of each section


def pack(batch: ScheduledBatch) -> Packet:
    """Write `batch` as a packet: the header and its sections."""
    assert all(chunk.samples for chunk in batch.prefill[:-1]), "only the last chunk of a step may be cut short"
    special = [seq for seq in batch.admitted if _is_special(seq)]
    sections = PacketSections(
        row_records=[_row_record(seq) for seq in batch.admitted],
        known_tokens=[*chain.from_iterable(seq.token_ids for seq in batch.admitted)],
        new_blocks=batch.new_blocks,
        chunks=[(_row(chunk.seq), chunk.start, chunk.length) for chunk in batch.prefill],
        decode_rows=[seq.row for seq in batch.decode],
        special_records=[_special_record(seq) for seq in special],
        stop_ids=[token_id for seq in special for token_id in sorted(seq.stop_token_ids)],
    )
    num_samples = sum(chunk.samples for chunk in batch.prefill)
    header = Header(batch.num_prefill_tokens, num_samples, *map(len, sections))
    return np.concatenate([np.asarray(part, dtype=np.int32).ravel() for part in (header, *sections)])


def read_header(packet: Packet) -> Header:
    return Header(*packet[: len(Header._fields)].tolist())


def split(packet: Any, header: Header) -> PacketSections:
    """Cut a packet (an array, or a tensor on the device) into views of its sections."""
    views, offset = [], len(Header._fields)
    for num_lines, line_shape in zip(header[2:], LINE_SHAPES, strict=True):
        end = offset + num_lines * math.prod(line_shape)
        views.append(packet[offset:end].reshape(num_lines, *line_shape))
        offset = end
    assert offset == len(packet), f"a packet of {len(packet)} numbers has sections of {offset}"
    return PacketSections(*views)


def _row(seq: Sequence) -> int:
    assert seq.row is not None, f"sequence {seq.seq_id} is in a step and has no row"
    return seq.row


def _row_record(seq: Sequence) -> RowRecord:
    temperature = np.float32(seq.sampling_params.temperature).view(np.int32)
    seed_low, seed_high = np.array([seq.seed], dtype=np.int64).view(np.int32)
    return RowRecord(_row(seq), len(seq.token_ids), int(temperature), int(seed_low), int(seed_high))


def _is_special(seq: Sequence) -> bool:
    params = seq.sampling_params
    wants_logprobs = params.logprobs is not None or seq.score_from is not None
    return params.is_masked or params.is_penalised or params.min_tokens > 0 or wants_logprobs


def _special_record(seq: Sequence) -> SpecialRecord:
    params, num_prompt_tokens = seq.sampling_params, seq.num_prompt_tokens
    top_p = max(params.top_p, 1e-30)  # more than 0 in float32 too
    limits = params.temperature, min(max(params.top_k, 0), MANY), top_p, params.min_p
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    return SpecialRecord(
        _row(seq),
        len(seq.token_ids) - num_prompt_tokens,
        params.is_masked,
        params.is_penalised,
        min(params.min_tokens, MANY),
        len(seq.stop_token_ids),
        -1 if params.logprobs is None else params.logprobs,
        -1 if params.prompt_logprobs is None else params.prompt_logprobs,
        -1 if seq.score_from is None else seq.score_from,
        num_prompt_tokens,
        *np.array([*limits, num_prompt_tokens, *penalties], dtype=np.float32).view(np.int32).tolist(),
    )
