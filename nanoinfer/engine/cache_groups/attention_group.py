"""Gives sequences blocks for keys and values: those of all tokens, or of the tokens that a window reaches.

A group has one block table, or several in which a block of text has a page each: a column. A sequence is given the
columns of all its known tokens when it is admitted, in a group that keeps all, and in a group with a window those of
the next chunk. There it gives back what its window has left, and the entries of its table then point to page 0, which
is never handed out.

A cached prefix needs the columns that the window before its end reaches. Once given back, these stay cached; if they
are handed out again, shorter prefixes are found.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from nanoinfer.engine.block_pool import BlockPool
from nanoinfer.engine.cache_groups.cache_group import CacheGroup, Hit
from nanoinfer.engine.cache_groups.partial_hits import Column
from nanoinfer.engine.scheduled_batch import BlockCopy, NewBlock
from nanoinfer.engine.sequence import Sequence

NULL_BLOCK = 0  # the page that table entries point to where no block is held any more


@dataclass(slots=True)
class HeldColumns:
    """The columns of a sequence. All tables of a group are alike, so one list says all.

    first, end: the places of the first column that is held, and after the last one. columns: by place, in order.
    num_cleared: how many of the first entries are cleared on the device, because their blocks were given back.
    num_told: how many of the first entries the device was told.
    """

    first: int
    end: int
    columns: dict[int, Column]
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
        self._max_columns = sys.maxsize if window is None else pool.num_blocks_for(window - 1 + max_chunk_tokens) + 1

    def max_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of so many tokens holds at most."""
        return self.num_tables * min(self._pool.num_blocks_for(num_tokens), self._max_columns)

    def trim(self, seq: Sequence, hit: Hit) -> None:
        if self.window is None:
            return  # an entry that has lost these blocks is removed
        index = len(hit.entries)
        while index > self._first_column(len(hit.entries) * self._pool.block_size):
            index -= 1
            if hit.entries[index].columns[self.index] is None:
                del hit.entries[index:]

    def cost(self, seq: Sequence, hit: Hit) -> int:
        """Return how many free blocks an admitted sequence takes at most until its prompt is computed."""
        # Cached columns that others hold are not counted: they stay when the window has left them.
        num_idle = self._pool.num_idle(self._columns_of(hit))
        num_own = self._pool.num_blocks_for(seq.num_tokens) - len(hit.entries) + num_idle
        num_idle_sources = self._pool.num_idle(filter(None, [self._source_of(hit)]))
        return self.num_tables * (min(num_own, self._max_columns) + num_idle_sources)

    def hold(self, seq: Sequence, hit: Hit) -> None:
        columns, end = self._columns_of(hit), len(hit.entries)
        self._pool.hold(chain(*columns, self._source_of(hit)))
        first = end - len(columns)
        self.held[seq] = HeldColumns(first, end, dict(enumerate(columns, first)))
        if self.window is None:
            seq.block_table += [column[0] for column in columns]

    def admit(self, seq: Sequence, hit: Hit) -> list[BlockCopy]:
        # A window needs no more than the block of the tokens that are copied. Chunks take the others.
        held = self._take(seq, seq.num_tokens if self.window is None else seq.num_computed_tokens)
        pairs = zip(self._source_of(hit), held.columns.get(len(hit.entries), ()), strict=False)
        return [BlockCopy(source, target, hit.num_copied) for source, target in pairs]

    def leave_window(self, seq: Sequence) -> None:
        """Take back the columns that no token after the computed ones attends to."""
        held = self.held[seq]
        first = min(self._first_column(seq.num_computed_tokens), held.end)
        for place in range(held.first, first):
            self._pool.give_back(held.columns.pop(place))
        held.first = max(held.first, first)

    def num_missing(self, seq: Sequence, end: int) -> int:
        """Return how many free blocks `extend` takes."""
        return max(0, self._pool.num_blocks_for(end) - self.held[seq].end) * self.num_tables

    def extend(self, seq: Sequence, end: int) -> list[NewBlock]:
        """Give a sequence the columns of its tokens before `end`; return what is new of its tables."""
        if self.window is not None:
            self.leave_window(seq)
        held, row = self._take(seq, end), seq.row
        assert row is not None, f"sequence {seq.seq_id} has no row"
        left, new = range(held.num_cleared, held.first), range(max(held.num_told, held.first), held.end)
        held.num_cleared, held.num_told = held.first, held.end
        new_blocks = [
            NewBlock(row + offset, place, held.columns[place][table])
            for table, offset in enumerate(self._offsets)
            for place in new
        ]
        if left:
            new_blocks += [NewBlock(row + offset, place, NULL_BLOCK) for place in left for offset in self._offsets]
        return new_blocks

    def num_growing_tables(self, seq: Sequence) -> int:
        """Return how many blocks more a sequence holds in the end for a block of new tokens."""
        return self.num_tables if self.window is None or seq.num_tokens <= self.window else 0

    def pages_from(self, seq: Sequence, index: int) -> Iterator[int]:
        """Yield the pages that a sequence holds from block `index` on."""
        for place, column in self.held[seq].columns.items():
            if place >= index:
                yield from column

    def free(self, seq: Sequence) -> None:
        held = self.held.pop(seq, None)
        if held is not None:
            # Free the tail first: a shared prefix is the part worth keeping.
            self._pool.give_back(chain.from_iterable(reversed(held.columns.values())))

    def _take(self, seq: Sequence, end: int) -> HeldColumns:
        """Take the columns that the tokens before `end` lack; return all that are held."""
        held = self.held[seq]
        while held.end * self._pool.block_size < end:
            column = held.columns[held.end] = self._pool.take(self.num_tables)
            held.end += 1
            if self.window is None:
                seq.block_table.append(column[0])
        return held

    def _first_column(self, num_computed: int) -> int:
        """Return the first column that a token after so many needs."""
        return 0 if self.window is None else max(0, num_computed - self.window + 1) // self._pool.block_size

    def _columns_of(self, hit: Hit) -> list[Column]:
        """Return the columns of a hit that the tokens after it need."""
        first = self._first_column(len(hit.entries) * self._pool.block_size)
        return [column for entry in hit.entries[first:] if (column := entry.columns[self.index])]

    def _source_of(self, hit: Hit) -> Column:
        """Return the column whose first tokens are copied; empty if none are."""
        return (hit.source and hit.source.columns[self.index]) or ()
