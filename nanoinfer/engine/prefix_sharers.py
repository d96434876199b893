"""Finds the decode rows that begin with the same blocks of the KV cache, so that attention reads these blocks once.

Few-shot prompts, a system prompt and the n samples of a prompt share their first blocks through the prefix cache, and
decode attention is bound by reading blocks. It reads a shared block once for all rows that share it, the prefix
sharers, then the other blocks of each row, and merges the two (Hydragen, Juravsky et al. 2024; cascade attention in
FlashInfer). There is one level of sharing: a row is among one set of sharers at most.

Blocks are shared through the prefix cache only, so equal ids at the same place of two block tables mean equal text up
to there, and a shared block is full and computed. A row's newest token is never in one. New blocks are never shared, so
the sharers change only where sequences join or leave.
"""

from itertools import chain, pairwise
from operator import indexOf, ne
from typing import NamedTuple

from nanoinfer.engine.sequence import Sequence

# A pass of its own over the shared blocks costs about as much as reading so many tokens (measured on an H200 with 8 KV
# heads of 128).
SHARING_MIN_SAVED_TOKENS = 8192
# Sharers are looked for again when fewer than this share of the rows is left: small sets may then fit into one.
REGROUP_BELOW = 0.75


class Sharers(NamedTuple):
    """Holds sequences that begin with the same `num_blocks` blocks."""

    seqs: list[Sequence]
    num_blocks: int

    @property
    def num_saved_blocks(self) -> int:
        """How many block reads it saves."""
        return (len(self.seqs) - 1) * self.num_blocks


class PrefixSharers(NamedTuple):
    """Names decode rows side by side that begin with the same blocks, which attention reads once for all of them."""

    first_index: int  # among the decode rows of the step
    num_rows: int  # at least 2
    num_blocks: int  # the first entries of their block tables, at least 1


def split_sharers(prefix_sharers: list[PrefixSharers], max_rows: int) -> list[PrefixSharers]:
    """Return sharers of at most so many rows each; a single row that is left over shares with none."""
    if max_rows < 2:
        return []
    return [
        PrefixSharers(first, min(max_rows, first_index + num_rows - first), num_blocks)
        for first_index, num_rows, num_blocks in prefix_sharers
        for first in range(first_index, first_index + num_rows - 1, max_rows)
    ]


class SharerFinder:
    """Arranges the sequences of each decode step by what they share, and remembers the last arrangement.

    max_prefix_sharers: the most rows that share; below 2 there are none. block_size: tokens in a block.
    min_saved_tokens: where all sharers of a step together save fewer reads of tokens, the step has none.
    """

    def __init__(
        self, max_prefix_sharers: int, block_size: int, min_saved_tokens: int = SHARING_MIN_SAVED_TOKENS
    ) -> None:
        self.max_prefix_sharers = max_prefix_sharers
        self.block_size = block_size
        self.min_saved_tokens = min_saved_tokens
        self._decode: list[Sequence] = []  # the sequences of the last decode step, in the order they came
        self._num_searched = 0  # how many there were when sharers were last looked for
        self._sharers: list[Sharers] = []
        self._arranged: tuple[list[Sequence], list[PrefixSharers]] = ([], [])
        self._is_stale = True

    def forget(self) -> None:
        """Have the next step look at all block tables again. To be called whenever a sequence is admitted."""
        self._is_stale = True

    def arrange(self, decode: list[Sequence]) -> tuple[list[Sequence], list[PrefixSharers]]:
        """Return the sequences of a decode step in the order of its rows, and which of them share blocks.

        Sharers come first; the others stay in their order. Later steps may get the same lists, so callers must not
        change them.
        """
        if self.max_prefix_sharers < 2:
            return decode, []
        if self._is_stale or decode != self._decode:
            if self._is_stale or len(decode) < REGROUP_BELOW * self._num_searched:
                found = self._find(decode)
                self._num_searched = len(decode)
            else:
                found = self._without_leavers(decode)
            num_saved_blocks = sum(sharers.num_saved_blocks for sharers in found)
            self._sharers = found if num_saved_blocks * self.block_size >= self.min_saved_tokens else []
            self._arranged = _lay_out(decode, self._sharers)
            self._decode, self._is_stale = decode, False
        return self._arranged

    def _without_leavers(self, decode: list[Sequence]) -> list[Sharers]:
        """Return the sharers of the last step without the sequences that left."""
        if not self._sharers:
            return []
        staying = set(decode)
        left = [one._replace(seqs=[seq for seq in one.seqs if seq in staying]) for one in self._sharers]
        return [sharers for sharers in left if len(sharers.seqs) > 1]

    def _find(self, decode: list[Sequence]) -> list[Sharers]:
        """Return all sharers of a step, worth it or not, by the block tables alone."""
        # Usually nothing is shared, and this is the fastest way to see it.
        if len({seq.block_table[0] for seq in decode}) == len(decode):
            return []
        by_first_block: dict[int, list[Sequence]] = {}
        for seq in decode:
            by_first_block.setdefault(seq.block_table[0], []).append(seq)
        found = []
        for family in by_first_block.values():
            for seqs in _split_family(family):
                # A single row that is left over shares with none.
                for first in range(0, len(seqs) - 1, self.max_prefix_sharers):
                    found.append(self._of(seqs[first : first + self.max_prefix_sharers]))
        return found

    def _of(self, seqs: list[Sequence]) -> Sharers:
        # Sorted sequences between these two have the same blocks. A part of a run may share more than the run does.
        num_blocks = _num_common_blocks(seqs[0], seqs[-1])
        num_tokens = min(seq.num_computed_tokens for seq in seqs)  # the step's own included
        assert num_blocks * self.block_size < num_tokens, (
            f"the newest of {num_tokens} tokens lies in a shared block: {num_blocks} of {self.block_size} are shared"
        )
        return Sharers(seqs, num_blocks)


def _split_family(family: list[Sequence]) -> list[list[Sequence]]:
    """Cut sequences with a common first block into sorted sharers, at least two together; one alone is left out.

    Sorted by block table, sequences that share much are neighbours, and runs of neighbours with a common prefix lie
    within runs with a shorter one. They are looked at from the inside out: r sequences with n common blocks save
    (r - 1) * n reads as sharers of their own, and r * m as a part of the run around them, which has m common blocks.
    """
    family = sorted(family, key=lambda seq: seq.block_table)
    num_common = [_num_common_blocks(seq, following) for seq, following in pairwise(family)]
    found = []
    open_runs = [Sharers([], num_blocks=0)]  # runs that the current sequence lies in, the innermost last
    for seq, num_blocks in zip(family, [*num_common, 0], strict=True):  # blocks that it shares with the next one
        if num_blocks > open_runs[-1].num_blocks:
            open_runs.append(Sharers([], num_blocks))
        open_runs[-1].seqs.append(seq)
        while open_runs[-1].num_blocks > num_blocks:
            run = open_runs.pop()
            if open_runs[-1].num_blocks < num_blocks:
                open_runs.append(Sharers([], num_blocks))
            around = open_runs[-1]
            if run.num_saved_blocks > len(run.seqs) * around.num_blocks:
                found.append(run.seqs)
            else:
                around.seqs.extend(run.seqs)
    return found


def _num_common_blocks(one: Sequence, other: Sequence) -> int:
    """Return the first index at which two block tables differ. They do differ, as each one's last block is its own."""
    return indexOf(map(ne, one.block_table, other.block_table), True)


def _lay_out(decode: list[Sequence], found: list[Sharers]) -> tuple[list[Sequence], list[PrefixSharers]]:
    """Return the sequences with the sharers first, and where among them they are."""
    if not found:
        return decode, []
    order = [*chain.from_iterable(sharers.seqs for sharers in found)]
    sharing = set(order)
    prefix_sharers = []
    first_index = 0
    for sharers in found:
        prefix_sharers.append(PrefixSharers(first_index, len(sharers.seqs), sharers.num_blocks))
        first_index += len(sharers.seqs)
    return order + [seq for seq in decode if seq not in sharing], prefix_sharers
