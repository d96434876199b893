"""Gives blocks to the sequences of models that have layers with a window beside others.

Layers are grouped (`caches/cache_groups.py`), and each group has a block table. All take blocks from one
pool of equal pages. The first group attends to all tokens: its blocks are those of the BlockManager, and find cached
prefixes. In the other groups, a sequence holds only the blocks that its window still reaches. It gives the others back
while it runs, and their table entries then point to page 0, which is never handed out.

A cached prefix needs all its blocks in the first group, and in the other groups the blocks that the window before its
end reaches. So the blocks of the other groups are noted with the entry of the first group's block. Once given back,
they stay cached like any other block; if one is handed out again, shorter prefixes are found.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import xxhash

from nanoinfer.engine.block_manager import Block, BlockManager, last_serial
from nanoinfer.engine.blocks.partial_hits import MIN_COPIED_TOKENS, BlockCopy, PartialHit
from nanoinfer.engine.scheduled_batch import NewBlock
from nanoinfer.engine.sequence import Sequence

Column = tuple[int, ...]  # the blocks of a place in all tables but the first
NULL_BLOCK = 0  # the page that table entries point to where no block is held any more


@dataclass(slots=True)
class WindowTables:
    """The block tables of a sequence in all groups but the first. They are alike, so one list of columns says all.

    first: the place of the first column that is held. num_cleared: how many of the first entries are cleared on the
    device, because their blocks were given back. num_told: how many of the first entries the device was told.
    """

    first: int
    columns: deque[Column] = field(default_factory=deque)
    num_cleared: int = 0
    num_told: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.columns)


class WindowedBlockManager(BlockManager):
    """Gives each sequence blocks for all its tokens in one group, and for those within the window in the others.

    num_pages: pages of the pool, page 0 included. window: how many tokens a token attends to in all groups but the
    first, itself included. num_windowed_groups: the number of groups but the first. max_chunk_tokens: the most tokens
    of a chunk. num_rows: rows of one group's table on the device, where the tables of the groups lie one after another.
    The other parameters are those of BlockManager.
    """

    def __init__(
        self,
        num_pages: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        window: int,
        num_windowed_groups: int,
        max_chunk_tokens: int,
        num_rows: int,
        hash_function: Callable[[bytes], int] = xxhash.xxh64_intdigest,
        min_copied_tokens: int = MIN_COPIED_TOKENS,
    ) -> None:
        super().__init__(num_pages, block_size, enable_prefix_caching, hash_function, min_copied_tokens)
        self.window, self.num_windowed_groups = window, num_windowed_groups
        self._max_columns = -(-(window - 1 + max_chunk_tokens) // block_size) + 1
        self._num_rows = num_rows
        self._tables: dict[Sequence, WindowTables] = {}
        self._cached_columns: dict[int, Column] = {}  # by the block of the first group that has the same tokens
        self._owners: dict[int, int] = {}  # by block of such a column: that block
        del self._free[NULL_BLOCK]

    @property
    def num_blocks(self) -> int:
        return len(self._blocks) - 1

    def can_hold(self, num_tokens: int) -> bool:
        num_columns = self._num_blocks_for(num_tokens)
        needed = num_columns + self.num_windowed_groups * min(num_columns, self._max_columns)
        return needed <= self.num_blocks

    def find_cached_prefix(self, seq: Sequence) -> list[int]:
        found = super().find_cached_prefix(seq)
        while found and not all(block_id in self._cached_columns for block_id in found[self._first_column(found) :]):
            found.pop()
        return found

    def num_blocks_to_allocate(self, seq: Sequence, cached_block_ids: list[int]) -> int:
        num_of_first = super().num_blocks_to_allocate(seq, cached_block_ids)
        num_idle = self._num_columns_with(0, cached_block_ids)
        return num_of_first + self.num_windowed_groups * self._num_columns_of(seq, cached_block_ids, num_idle)

    def allocate(self, seq: Sequence, cached_block_ids: list[int]) -> list[BlockCopy]:
        first = self._first_column(cached_block_ids)
        tables = self._tables[seq] = WindowTables(first)
        for block_id in cached_block_ids[first:]:
            tables.columns.append(self._cached_columns[block_id])
            self._hold_all(tables.columns[-1])
        copies = super().allocate(seq, cached_block_ids)
        if copies:
            [copy] = copies
            pairs = zip(self._cached_columns[copy.source], self._append_column(tables), strict=True)
            copies += [BlockCopy(source, target, copy.num_tokens) for source, target in pairs]
        return copies

    def free_outside_window(self, seq: Sequence) -> None:
        tables = self._tables[seq]
        first = max(0, seq.num_computed_tokens - self.window + 1) // self.block_size
        while tables.first < first and tables.columns:
            self._give_back(tables.columns.popleft())
            tables.first += 1

    def num_blocks_for_chunk(self, seq: Sequence, end: int) -> int:
        return max(0, self._num_blocks_for(end) - self._tables[seq].end) * self.num_windowed_groups

    def take_chunk_blocks(self, seq: Sequence, end: int) -> list[NewBlock]:
        tables = self._tables[seq]
        self.free_outside_window(seq)
        while tables.end < self._num_blocks_for(end):
            self._append_column(tables)
        return self._new_entries(seq, tables)

    def needing_block(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        return [seq for seq in seqs if seq.num_computed_tokens >= self._tables[seq].end * self.block_size]

    def num_blocks_to_grow(self, seqs: list[Sequence]) -> int:
        return len(super().needing_block(seqs)) + sum(
            self.num_blocks_for_chunk(seq, seq.num_computed_tokens + 1) for seq in seqs
        )

    def grow(self, seq: Sequence) -> list[NewBlock]:
        new_blocks = super().grow(seq) if super().needing_block([seq]) else []
        return new_blocks + self.take_chunk_blocks(seq, seq.num_computed_tokens + 1)

    def num_growing_tables(self, seq: Sequence) -> int:
        return 1 if seq.num_tokens > self.window else 1 + self.num_windowed_groups

    def cache_blocks(self, seq: Sequence, num_computed_tokens: int) -> None:
        if not self.enable_prefix_caching:
            return
        # One block at a time: an entry that has lost its blocks in the other groups makes room for that of this block.
        for index in range(len(seq.prefix_serials), num_computed_tokens // self.block_size):
            entry = self._find(seq, index, last_serial(seq))
            if entry is not None and entry.block_id not in self._cached_columns:
                self.evict_blocks([entry.block_id])
            super().cache_blocks(seq, (index + 1) * self.block_size)
            self._cache_column(seq, index)

    def cache_last_block(self, seq: Sequence, num_computed_tokens: int) -> None:
        super().cache_last_block(seq, num_computed_tokens)
        self._cache_column(seq, num_computed_tokens // self.block_size)

    def free(self, seq: Sequence) -> None:
        tables = self._tables.pop(seq, None)  # None where it ends with its prompt, and its last step has failed
        for column in reversed(tables.columns if tables else ()):
            self._give_back(column)
        super().free(seq)

    def _first_column(self, cached: list[int]) -> int:
        """Return the first column that a token after these blocks needs."""
        return max(0, len(cached) * self.block_size - self.window + 1) // self.block_size

    def _num_columns_with(self, num_users: int, cached: list[int]) -> int:
        """Count the columns that a token after these blocks needs, and that so many sequences hold."""
        columns = (self._cached_columns[block_id] for block_id in cached[self._first_column(cached) :])
        return sum(self._blocks[column[0]].ref_count == num_users for column in columns)

    def _num_columns_of(self, seq: Sequence, cached: list[int], num_own: int) -> int:
        """Return how many columns `seq` takes at most while its prompt is computed.

        num_own: cached columns that it needs and no other sequence holds. Those that others hold do not count: they
        stay when the window has left them.
        """
        return min(self._num_blocks_for(seq.num_tokens) - len(cached) + num_own, self._max_columns)

    def _append_column(self, tables: WindowTables) -> Column:
        column = tuple(self._take_block() for _ in range(self.num_windowed_groups))
        tables.columns.append(column)
        return column

    def _new_entries(self, seq: Sequence, tables: WindowTables) -> list[NewBlock]:
        """Return what the device does not know yet of the tables."""
        left = range(tables.num_cleared, tables.first)
        new = range(max(tables.num_told, tables.first), tables.end)
        tables.num_cleared, tables.num_told = tables.first, tables.end
        row, distance = seq.held_row, self._num_rows
        rows = range(row + distance, row + distance * (self.num_windowed_groups + 1), distance)
        return [
            *(NewBlock(row, place, NULL_BLOCK) for place in left for row in rows),
            *(
                NewBlock(row, place, block_id)
                for place in new
                for row, block_id in zip(rows, tables.columns[place - tables.first], strict=True)
            ),
        ]

    def _hold_all(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._hold(self._blocks[block_id])

    def _cache_column(self, seq: Sequence, index: int) -> None:
        """Note the blocks beside a block of `seq` that has an entry of its own."""
        tables = self._tables[seq]
        if not tables.first <= index < min(tables.end, len(seq.block_table)):
            return
        block_id, column = seq.block_table[index], tables.columns[index - tables.first]
        if self._blocks[block_id].entry is not None and block_id not in self._cached_columns:
            self._cached_columns[block_id] = column
            self._owners.update(dict.fromkeys(column, block_id))

    def _forget_column(self, block_id: int | None) -> None:
        for owned in self._cached_columns.pop(block_id, ()) if block_id is not None else ():
            del self._owners[owned]
            if owned in self._free:
                self._free.move_to_end(owned, last=False)

    def _take_block(self) -> int:
        block_id = super()._take_block()
        self._forget_column(self._owners.get(block_id))
        return block_id

    def _is_cached(self, block: Block) -> bool:
        return super()._is_cached(block) or block.block_id in self._owners

    def _remove_entry(self, block: Block) -> None:
        super()._remove_entry(block)
        self._forget_column(block.block_id)

    def _find_partial_hit(self, seq: Sequence) -> PartialHit | None:
        hit = super()._find_partial_hit(seq)
        if hit is None or hit.block_id not in self._cached_columns:
            return None
        sources = hit.block_id, *self._cached_columns[hit.block_id]
        num_idle = sum(self._blocks[block_id].ref_count == 0 for block_id in sources)
        num_own = self._num_columns_with(1, seq.block_table)
        num_new = self._num_blocks_for(seq.num_tokens) - len(seq.block_table)
        num_new += self.num_windowed_groups * (self._num_columns_of(seq, seq.block_table, num_own) - num_own)
        return hit if num_new + num_idle <= self.num_free_blocks else None

    def _hold_source(self, block_id: int) -> None:
        super()._hold_source(block_id)
        self._hold_all(self._cached_columns[block_id])
