"""One step, as the scheduler decided it; `packet.py` tells the device of it."""

import collections.abc as abc
from dataclasses import dataclass, field
from typing import NamedTuple

from nanoinfer.engine.prefix_sharers import PrefixSharers
from nanoinfer.engine.sequence import Sequence


class PrefillChunk(NamedTuple):
    """Names the tokens [start, start + length) of one sequence, to be computed in this step.

    samples: whether the step samples a token after this chunk. It does not if the sequence only pools, or if the chunk
    ends before the last known token: because of the token budget, or to keep a recurrent state there.
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


class BlockCopy(NamedTuple):
    """Says that a step begins with a copy of the first `num_tokens` tokens' keys and values from block to block."""

    source: int
    target: int
    num_tokens: int


class StateCopy(NamedTuple):
    """Says that a step begins with a copy of the states of a sequence, of all layers, from place to place."""

    source: int
    target: int


@dataclass(slots=True)
class ScheduledBatch:
    """Describes one step, as the scheduler decided it: either prefill or decode.

    The scheduler advances `num_computed_tokens` and `num_pending_tokens` of its sequences when it schedules the step.
    So lengths are known before tokens are, unless rows have several tokens.
    """

    admitted: list[Sequence] = field(default_factory=list)  # sequences that got a row in this step
    new_blocks: list[NewBlock] = field(default_factory=list)  # including the blocks of admitted sequences
    block_copies: list[BlockCopy] = field(default_factory=list)  # made before anything is computed
    kept_states: list[StateCopy] = field(default_factory=list)  # rows to snapshots, made before anything is computed
    restored_states: list[StateCopy] = field(default_factory=list)  # snapshots to rows, made after kept_states
    prefill: list[PrefillChunk] = field(default_factory=list)  # chunks that sample come first
    decode: list[Sequence] = field(default_factory=list)  # each computes its last known token and samples the next
    prefix_sharers: list[PrefixSharers] = field(default_factory=list)  # they come first in `decode`, without gaps
    sampled: list[Sequence] = field(default_factory=list)  # sequences that get a token, in the order of the token ids
    num_tokens: int = 1  # the most that a decode row computes; each of `sampled` gets as many token ids
    proposals: list[abc.Sequence[int]] = field(default_factory=list)  # for each decode row; empty if no row has any

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.prefill)

    @property
    def pooled(self) -> list[Sequence]:
        """The sequences that this step completes without a token."""
        whole = (chunk for chunk in self.prefill if chunk.start + chunk.length == chunk.seq.num_prompt_tokens)
        return [chunk.seq for chunk in whole if chunk.seq.stopping.ends_with_prompt]
