"""Gives sequences blocks for keys and values: those of all tokens, or of the tokens that a window reaches.

A group has one block table, or several in which a block of text has a page each: a column. A sequence is given the
columns of all its known tokens when it is admitted, in a group that keeps all, and in a group with a window those of
the next chunk. There it gives back what its window has left, and the entries of its table then point to page 0, which
is never handed out.

A cached prefix needs the columns that the window before its end reaches. Once given back, these stay cached; if they
are handed out again, shorter prefixes are found.
"""

import sys
from dataclasses import dataclass
from itertools import chain

from nanoinfer.engine.block_pool import BlockPool
from nanoinfer.engine.cache_groups.cache_group import CacheGroup, Hit
from nanoinfer.engine.cache_groups.partial_hits import CacheEntry, Column
from nanoinfer.engine.scheduled_batch import BlockCopy, NewBlock
from nanoinfer.engine.sequence import Sequence

NULL_BLOCK = 0  # the page that table entries point to where no block is held any more


@dataclass(slots=True)
class HeldColumns:
    """The columns of a sequence. All tables of a group are alike, so one list says all.

    first, end: the places of the first column that is held, and after the last one. columns: from place to place.
    num_cleared: how many of the first entries are cleared on the device, because their blocks were given back.
    num_told: how many of the first entries the device was told.
    """

    first: int
    end: int
    columns: list[Column]
    num_cleared: int = 0
    num_told: int = 0


class AttentionGroup(CacheGroup):
    """Holds the columns of sequences for layers with the same window, or without any.

    index: which of the groups with tables it is. offsets: where its tables begin on the device, in rows. window: how
    many tokens a token attends to, itself included; None for all. max_chunk_tokens: the most tokens of a chunk.
    """

    def __init__(self, pool: BlockPool, index: int, offsets: range, window: int | None, max_chunk_tokens: int) -> None:
        self.index, self.num_tables, self.window = index, len(offsets), window
        self.held: dict[Sequence, HeldColumns] = {}
        self._pool, self._offsets = pool, offsets
        self._max_pages = sys.maxsize
        if window is not None:
            self._max_pages = self.num_tables * (pool.num_blocks_for(window - 1 + max_chunk_tokens) + 1)

    def max_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of so many tokens holds at most."""
        return min(self.num_tables * self._pool.num_blocks_for(num_tokens), self._max_pages)

    def trim(self, seq: Sequence, hit: Hit) -> None:
        if self.window is None:
            return  # an entry that has lost these blocks is removed
        index = len(hit.entries)
        while index > self._first_column(len(hit.entries) * self._pool.block_size):
            index -= 1
            if hit.entries[index].columns[self.index] is None:
                del hit.entries[index:]

    def needed_of(self, entries: list[CacheEntry]) -> list[Column]:
        """Return the columns of a chain that the tokens after it need."""
        first = self._first_column(len(entries) * self._pool.block_size)
        return [column for entry in entries[first:] if (column := entry.columns[self.index])]

    def cost(self, seq: Sequence, hit: Hit) -> int:
        """Return how many free blocks an admitted sequence takes at most until its prompt is computed."""
        # Cached columns that others hold are not counted: they stay when the window has left them.
        num_own = self.num_tables * (self._pool.num_blocks_for(seq.num_tokens) - len(hit.entries))
        return min(num_own + self._pool.num_idle(hit.columns[self.index]), self._max_pages)

    def admit(self, seq: Sequence, hit: Hit) -> list[BlockCopy]:
        columns, end = hit.columns[self.index], len(hit.entries)
        self.held[seq] = held = HeldColumns(end - len(columns), end, columns)
        if self.window is None and columns:
            seq.block_table += [column[0] for column in columns]
        # A window needs no more than the block of the tokens that are copied. Chunks take the others.
        self._take(seq, held, seq.num_tokens if self.window is None else seq.num_computed_tokens)
        if hit.source is None:
            return []
        pairs = zip(hit.source.columns[self.index] or (), held.columns[end - held.first], strict=True)
        return [BlockCopy(source, target, hit.num_copied) for source, target in pairs]

    def leave_window(self, seq: Sequence) -> None:
        """Take back the columns that no token after the computed ones attends to."""
        held = self.held[seq]
        num_left = max(0, min(self._first_column(seq.num_computed_tokens), held.end) - held.first)
        for column in held.columns[:num_left]:
            self._pool.give_back(column)
        del held.columns[:num_left]
        held.first += num_left

    def num_missing(self, seq: Sequence, end: int) -> int:
        """Return how many free blocks `extend` takes."""
        return max(0, self._pool.num_blocks_for(end) - self.held[seq].end) * self.num_tables

    def extend(self, seq: Sequence, end: int) -> list[NewBlock]:
        """Give a sequence the columns of its tokens before `end`; return what is new of its tables."""
        if self.window is not None:
            self.leave_window(seq)
        held, row = self.held[seq], seq.row
        assert row is not None, f"sequence {seq.seq_id} has no row"
        self._take(seq, held, end)
        first, left = max(held.num_told, held.first), range(held.num_cleared, held.first)
        held.num_cleared, held.num_told = held.first, held.end
        new = held.columns[first - held.first :]
        new_blocks = [
            NewBlock(row + offset, place, column[table])
            for table, offset in enumerate(self._offsets)
            for place, column in enumerate(new, first)
        ]
        if left:
            new_blocks += [NewBlock(row + offset, place, NULL_BLOCK) for place in left for offset in self._offsets]
        return new_blocks

    def num_growing_tables(self, seq: Sequence) -> int:
        """Return how many blocks more a sequence holds in the end for a block of new tokens."""
        return self.num_tables if self.window is None or seq.num_tokens <= self.window else 0

    def columns_from(self, seq: Sequence, first: int) -> "list[Column | None]":
        """Return the columns of a sequence from place `first` on; None for each that its window has left."""
        held = self.held[seq]
        return [None] * (held.first - first) + held.columns[max(0, first - held.first) :]

    def free(self, seq: Sequence) -> None:
        held = self.held.pop(seq, None)
        if held is not None:
            # Free the tail first: a shared prefix is the part worth keeping.
            self._pool.give_back(chain.from_iterable(reversed(held.columns)))

    def _take(self, seq: Sequence, held: HeldColumns, end: int) -> None:
        """Take the columns that the tokens before `end` lack."""
        num_missing = -(-end // self._pool.block_size) - held.end
        if num_missing > 0:
            pages = self._pool.take(num_missing * self.num_tables)
            held.columns += zip(*[iter(pages)] * self.num_tables, strict=True)  # a page for each table makes a column
            held.end += num_missing
            if self.window is None:
                seq.block_table += pages[:: self.num_tables]

    def _first_column(self, num_computed: int) -> int:
        """Return the first column that a token after so many needs."""
        return 0 if self.window is None else max(0, num_computed - self.window + 1) // self._pool.block_size
