"""Gives sequences pages for keys and values: those of all tokens, or of the tokens that a window reaches.

Most models have one group, which keeps all tokens and has one block table. Each block of text then has one page. A
group with several tables has a page for it in each of them: a column. A sequence is given the pages of all its known
tokens when it is admitted. In a group with a window it is given those of the next chunk instead. There it gives back
what its window has left, and the entries of its table then point to page 0, which is never handed out.

A cached prefix needs the pages that the window before its end reaches. Once given back, these stay cached; if they are
handed out again, shorter prefixes are found.
"""

from dataclasses import dataclass
from itertools import count, repeat

from nanoinfer.engine.block_pool import BlockPool
from nanoinfer.engine.cache_groups.cache_group import CacheGroup, Hit
from nanoinfer.engine.cache_groups.partial_hits import CacheEntry, Column
from nanoinfer.engine.cache_groups.specs import CacheGroupSpec, FullAttentionSpec, SlidingWindowSpec
from nanoinfer.engine.scheduled_batch import BlockCopy, NewBlock, ScheduledBatch
from nanoinfer.engine.sequence import Sequence

NULL_BLOCK = 0  # the page that table entries point to where no block is held any more


@dataclass(slots=True)
class HeldPages:
    """Holds the pages of a sequence."""

    pages: list[int]  # block after block, and of each block one for every table
    num_told: int = 0  # blocks that the device was told
    first: int = 0  # the first block that is held; a window has left those before it
    num_cleared: int = 0  # blocks before `first` that are cleared in the tables on the device


class AttentionGroup(CacheGroup):
    """Holds the pages of all tokens of sequences; those of the first table are also in `block_table`.

    index: which of the groups with tables it is. offsets: where its tables begin on the device, in rows.
    """

    def __init__(self, pool: BlockPool, index: int, offsets: range) -> None:
        self.index, self.num_tables = index, len(offsets)
        self.held: dict[Sequence, HeldPages] = {}
        self._pool, self._offsets = pool, offsets

    def max_pages(self, num_tokens: int) -> int:
        """Return how many pages a sequence of so many tokens holds at most."""
        return self.num_tables * self._pool.num_blocks_for(num_tokens)

    def trim(self, seq: Sequence, hit: Hit) -> bool:
        return False  # an entry that has lost its pages of all tokens is removed

    def needed_pages(self, entries: list[CacheEntry]) -> list[int]:
        """Return the pages of a chain that the tokens after it need."""
        return [page for entry in entries for page in entry.columns[self.index] or ()]

    def cost(self, seq: Sequence, hit: Hit) -> int:
        """Return how many free pages an admitted sequence takes at most until its prompt is computed."""
        num_new = self.num_tables * (self._pool.num_blocks_for(seq.num_tokens) - len(hit.entries))
        num_revived = self._pool.num_idle(hit.pages[self.index]) if hit.entries else 0  # cached pages of no sequence
        return num_new + num_revived

    def admit(self, batch: ScheduledBatch, seq: Sequence, hit: Hit) -> None:
        held = self.held[seq] = HeldPages(hit.pages[self.index])
        self._take(held, seq.num_tokens)
        seq.block_table += held.pages[:: self.num_tables]
        self._tell(batch, seq, held)
        if hit.source:
            self._copy(batch, seq, hit)

    def num_missing(self, seq: Sequence, end: int) -> int:
        """Return how many free pages `extend` takes."""
        held = self.held[seq]
        return max(0, (self._pool.num_blocks_for(end) - held.first) * self.num_tables - len(held.pages))

    def extend(self, batch: ScheduledBatch, seq: Sequence, end: int) -> None:
        """Give a sequence the pages of its tokens before `end`, and tell the batch of them."""
        held = self.held[seq]
        seq.block_table += self._take(held, end)[:: self.num_tables]
        self._tell(batch, seq, held)

    def num_growing_tables(self, seq: Sequence) -> int:
        """Return how many pages more a sequence holds in the end for a block of new tokens."""
        return self.num_tables

    def column(self, seq: Sequence, index: int) -> Column | None:
        """Return the pages of a block of a sequence; None if its window has left them."""
        held = self.held[seq]
        start = (index - held.first) * self.num_tables
        return tuple(held.pages[start : start + self.num_tables]) if start >= 0 else None

    def pages_from(self, seq: Sequence, index: int) -> list[int]:
        """Return the pages that a sequence holds of its blocks from this one on."""
        held = self.held[seq]
        return held.pages[max(0, index - held.first) * self.num_tables :]

    def free(self, seq: Sequence) -> None:
        held = self.held.pop(seq, None)
        if held is not None:
            # Free the tail first: a shared prefix is the part worth keeping.
            self._pool.give_back(reversed(held.pages))

    def _take(self, held: HeldPages, end: int) -> list[int]:
        """Take the pages that the tokens before `end` lack, and return them."""
        # Without a call: in some steps each row comes here.
        num_missing = (-(-end // self._pool.block_size) - held.first) * self.num_tables - len(held.pages)
        pages = self._pool.take(num_missing) if num_missing > 0 else []
        held.pages += pages
        return pages

    def _copy(self, batch: ScheduledBatch, seq: Sequence, hit: Hit) -> None:
        """Have the step begin with copies of the source of a hit."""
        sources = hit.source.columns[self.index] if hit.source else ()
        targets = self.column(seq, len(hit.entries))
        for source, target in zip(sources or (), targets or (), strict=True):
            batch.block_copies.append(BlockCopy(source, target, hit.num_copied))

    def _tell(self, batch: ScheduledBatch, seq: Sequence, held: HeldPages) -> None:
        """Tell a batch of the blocks that the device does not know yet."""
        row, first, num_tables = seq.row, held.num_told, self.num_tables
        assert row is not None, f"sequence {seq.seq_id} has no row"
        for table, offset in enumerate(self._offsets, (first - held.first) * num_tables):
            batch.new_blocks += map(NewBlock, repeat(row + offset), count(first), held.pages[table::num_tables])
        held.num_told = held.first + len(held.pages) // num_tables


class SlidingWindowGroup(AttentionGroup):
    """Holds the pages of the tokens that a window reaches, and of the chunk that is computed.

    max_chunk_tokens: the most tokens of a chunk.
    """

    def __init__(
        self, pool: BlockPool, index: int, offsets: range, spec: SlidingWindowSpec, max_chunk_tokens: int
    ) -> None:
        super().__init__(pool, index, offsets)
        self.window = spec.window
        self._max_pages = spec.max_pages_of_window(pool.block_size, max_chunk_tokens)

    def max_pages(self, num_tokens: int) -> int:
        return min(super().max_pages(num_tokens), self._max_pages)

    def trim(self, seq: Sequence, hit: Hit) -> bool:
        length = index = len(hit.entries)
        while index > self._first_block(len(hit.entries) * self._pool.block_size):
            index -= 1
            if hit.entries[index].columns[self.index] is None:
                del hit.entries[index:]
        return len(hit.entries) < length

    def needed_pages(self, entries: list[CacheEntry]) -> list[int]:
        return super().needed_pages(entries[self._first_block(len(entries) * self._pool.block_size) :])

    def cost(self, seq: Sequence, hit: Hit) -> int:
        # Cached pages that others hold are not counted: they stay when the window has left them.
        return min(super().cost(seq, hit), self._max_pages)

    def admit(self, batch: ScheduledBatch, seq: Sequence, hit: Hit) -> None:
        pages = hit.pages[self.index]
        first = len(hit.entries) - len(pages) // self.num_tables
        held = self.held[seq] = HeldPages(pages, num_told=first, first=first)
        self._take(held, seq.num_computed_tokens)  # the block of tokens that are copied; chunks take the others
        if hit.source:
            self._copy(batch, seq, hit)

    def leave_window(self, seq: Sequence) -> None:
        """Take back the pages that no token after the computed ones attends to."""
        held = self.held[seq]
        num_left = self._first_block(seq.num_computed_tokens) - held.first
        if num_left > 0:
            pages = held.pages[: num_left * self.num_tables]
            self._pool.give_back(pages)
            del held.pages[: len(pages)]
            held.first += len(pages) // self.num_tables

    def extend(self, batch: ScheduledBatch, seq: Sequence, end: int) -> None:
        self.leave_window(seq)
        held = self.held[seq]
        self._take(held, end)
        held.num_told = max(held.num_told, held.first)
        self._tell(batch, seq, held)
        for place in range(held.num_cleared, held.first):
            batch.new_blocks += [NewBlock(seq.held_row + offset, place, NULL_BLOCK) for offset in self._offsets]
        held.num_cleared = held.first

    def num_growing_tables(self, seq: Sequence) -> int:
        return self.num_tables if seq.num_tokens <= self.window else 0

    def _first_block(self, num_computed: int) -> int:
        """Return the first block that a token after so many needs."""
        return max(0, num_computed - self.window + 1) // self._pool.block_size


def attention_groups(
    pool: BlockPool, specs: tuple[CacheGroupSpec, ...], num_rows: int, max_chunk_tokens: int
) -> list[AttentionGroup]:
    """Return a group for each spec that has block tables, in their order. num_rows: of a table on the device."""
    groups: list[AttentionGroup] = []
    first = 0  # row of the device's tables, which lie one after another
    for spec in specs:
        offsets = range(first, first + spec.num_tables * num_rows, num_rows)
        first = offsets.stop
        if isinstance(spec, FullAttentionSpec):
            groups.append(AttentionGroup(pool, len(groups), offsets))
        elif isinstance(spec, SlidingWindowSpec):
            groups.append(SlidingWindowGroup(pool, len(groups), offsets, spec, max_chunk_tokens))
    return groups
