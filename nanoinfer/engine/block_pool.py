"""Holds the pages that all cache groups share, and the texts whose keys, values or states are cached: the prefix cache.

The cache is a pool of pages of `block_size` tokens (PagedAttention, Kwon et al. 2023). A block of text that is computed
gets an entry. Entries form chains: each names the entry of the block before it. A full block is looked up by the hash
of its tokens, chained to the hash of the block before. A hash only finds a candidate: it is a hit if the tokens are
equal too, and if the entry's parent is the entry just hit. Entries are told apart by serial numbers that are never used
again, so a hash collision can never give a sequence the keys and values of another text. What else keys and values
depend on, such as an adapter, is the `identity` of a sequence: first blocks have it as their parent.

What an entry stands for hangs on it: a column of pages for each group with block tables (`Column`), and the snapshots
of recurrent states. A page that nobody uses keeps its contents until it is handed out again. Pages without an entry are
handed out first, then the least recently used.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from nanoinfer.engine.cache_groups.partial_hits import CacheEntry, Column, Columns, Parent, PartialHits
from nanoinfer.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Block:
    """Describes a page of the pool.

    A group with several tables holds several pages, a column, for the same block_size tokens of a sequence.
    """

    block_id: int
    ref_count: int = 0  # sequences that use it, and steps that copy from it
    entry: CacheEntry | None = None  # whose column it is in; None if it is not in the prefix cache


class BlockPool:
    """Hands out pages, takes them back, and keeps the entries of the prefix cache.

    num_blocks: pages. first_block: pages before this one are never handed out. first_holds_all: whether the first group
    holds the blocks of all tokens, so that an entry that has lost them is worthless. Where no group does, an entry
    lives as long as something hangs on it, such as the entry of the next block.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        first_block: int,
        first_holds_all: bool,
        hash_function: Callable[[bytes], int],
        min_copied_tokens: int,
    ) -> None:
        self.block_size = block_size
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.copies = PartialHits(min_copied_tokens)
        self.num_frees = 0  # changes whenever pages come back: a prompt that did not fit may fit now
        # Pages that can be handed out, those in the prefix cache included, in the order in which they will be.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(first_block, num_blocks))
        self._full: dict[int, CacheEntry] = {}  # entries of full blocks, by hash
        self._entries: dict[Parent, CacheEntry] = {}  # all entries, by serial number
        self._serials = count()
        self.counts_uses = not first_holds_all
        self._hash = hash_function
        self.forget: Callable[[CacheEntry], None] | None = None  # is called with each entry that is removed

    @property
    def num_full_entries(self) -> int:
        return len(self._full)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # Pages.

    def take(self, num_pages: int) -> list[int]:
        """Hand out free pages."""
        taken = []
        for _ in range(num_pages):
            block_id, _ = self.free.popitem(last=False)
            block = self.blocks[block_id]
            assert block.ref_count == 0, f"block {block_id} is handed out while a sequence still uses it"
            if block.entry is not None:
                self._lose(block.entry, block_id)
            block.ref_count = 1
            taken.append(block_id)
        return taken

    def hold(self, block_ids: Iterable[int]) -> None:
        """Count one more user of each of these pages."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.free[block_id]
            block.ref_count += 1

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Take pages back from a user, in the order in which they are to be reused."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed more often than it was given out"
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free[block_id] = None
                if block.entry is None:
                    self.free.move_to_end(block_id, last=False)
        self.num_frees += 1

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Return how many of these pages nobody uses."""
        return sum([self.blocks[block_id].ref_count == 0 for block_id in block_ids])

    # Entries.

    def texts(self) -> Iterator[bytes]:
        """Yield the tokens of each entry."""
        for entry in self._entries.values():
            yield entry.tokens
            yield entry.copyable

    def find_chain(self, seq: Sequence) -> list[CacheEntry]:
        """Return the entries of the first blocks of `seq`, as far as it may take them from the cache."""
        found: list[CacheEntry] = []
        for index in range(seq.max_cached_tokens // self.block_size):
            entry = self.find(seq, index, found[-1].serial if found else seq.prefix_root)
            if entry is None:
                break
            found.append(entry)
        return found

    def after(self, seq: Sequence, entries: list[CacheEntry]) -> tuple[Parent, bytes]:
        """Return the parent of the block after these entries of `seq`, and its tokens that may come from the cache."""
        start = len(entries) * self.block_size
        tokens = seq.token_ids[start : min(start + self.block_size, seq.max_cached_tokens)].tobytes()
        return entries[-1].serial if entries else seq.prefix_root, tokens

    def find_copy(self, seq: Sequence, entries: list[CacheEntry]) -> tuple[CacheEntry | None, int, int]:
        """Return the entry that begins like the block after these entries of `seq`, and how many of its tokens to copy.

        The entry is None if these are too few. The last number says how many more tokens can be copied from the next
        step on, since that comes after what this step computes.
        """
        parent, tokens = self.after(seq, entries)
        source, num_common = self.copies.find(parent, tokens)
        return source, num_common if source else 0, self.copies.num_found_later(parent, tokens, num_common)

    def find(self, seq: Sequence, index: int, parent: Parent) -> CacheEntry | None:
        """Return the entry of block `index` of `seq`, if the block before it has this parent's entry."""
        hashes = seq.prefix_hashes
        if len(hashes) == index:  # every block before it was looked up
            start = index * self.block_size
            tokens = seq.token_ids[start : start + self.block_size].tobytes()
            before = hashes[-1][0] if hashes else hash(parent) % 2**64
            hashes.append((self._hash(before.to_bytes(8, "little") + tokens), tokens))
        key, tokens = hashes[index]
        entry = self._full.get(key)
        return entry if entry and entry.parent == parent and entry.tokens == tokens else None

    def add(self, parent: Parent, key: int | None, tokens: bytes, columns: Columns) -> CacheEntry:
        """Make an entry for a block of text in these columns. If they have one with fewer of its tokens, it grows.

        key: its hash; None if the block is not full.
        """
        entry = None
        for column in columns:
            if column and entry is None:
                entry = self.blocks[column[0]].entry
        if key is not None and key in self._full:  # a collision, or an orphan: the newest one stays
            self.remove(self._full[key])
        if entry is None:
            entry = CacheEntry(next(self._serials), parent, columns, key, tokens)
            self._entries[entry.serial] = entry
            for column in columns:
                for block_id in column or ():
                    self.blocks[block_id].entry = entry
            if self.counts_uses:
                entry.num_uses = len(columns) - columns.count(None)
                self.retain((parent,))
            if None not in columns:
                self.copies.add(entry)
        else:
            self.copies.remove_new(entry)
            entry.hash, entry.tokens = key, tokens
            self.attach(entry, columns)
        if key is not None:
            self._full[key] = entry
        return entry

    def attach(self, entry: CacheEntry, columns: Columns) -> None:
        """Give an entry those of these columns that it lacks. Later steps can copy it if it has all."""
        if None in entry.columns:
            for group, column in enumerate(columns):
                if not column or entry.columns[group] is not None:
                    continue
                for block_id in column:
                    block = self.blocks[block_id]
                    if block.entry is not None:
                        self._detach(block.entry, group)
                    block.entry = entry
                self.retain((entry.serial,))
            entry.columns = tuple([own or new for own, new in zip(entry.columns, columns, strict=True)])
        if None not in entry.columns:
            self.copies.add(entry)

    def evict(self, block_ids: Iterable[int], serials: Iterable[Parent]) -> None:
        """Remove the entries that have one of these pages, and those with these serial numbers."""
        found = [self.blocks[block_id].entry for block_id in block_ids] + [self._entries.get(one) for one in serials]
        for entry in found:
            if entry is not None and entry.serial in self._entries:
                self.remove(entry)

    def clear(self) -> None:
        """Remove all entries. Pages in use stay with their users."""
        self.evict(range(len(self.blocks)), [*self._entries])

    def remove(self, entry: CacheEntry) -> None:
        """Remove an entry. Nothing after it is found any more."""
        self._remove(entry)
        if self.counts_uses:
            self.release((entry.parent,))

    def retain(self, serials: Iterable[Parent]) -> None:
        """Count one more use of each of these entries."""
        if self.counts_uses:
            for serial in serials:
                if serial in self._entries:
                    self._entries[serial].num_uses += 1

    def release(self, serials: Iterable[Parent]) -> None:
        """Count one use less of each of these entries, and remove those that have none left."""
        if self.counts_uses:
            left = [*serials]
            while left:
                entry = self._entries.get(left.pop())
                if entry is not None:
                    entry.num_uses -= 1
                    if entry.num_uses == 0:
                        self._remove(entry)
                        left.append(entry.parent)

    def _remove(self, entry: CacheEntry) -> None:
        del self._entries[entry.serial]
        if entry.hash is not None:
            del self._full[entry.hash]
        self.copies.remove(entry)
        for column in entry.columns:
            self._disown(column)
        if self.forget is not None:
            self.forget(entry)

    def _lose(self, entry: CacheEntry, block_id: int) -> None:
        """Take a page from its entry."""
        for group, column in enumerate(entry.columns):
            if column is not None and block_id in column:
                if group == 0 and not self.counts_uses:
                    self._remove(entry)
                else:
                    self._detach(entry, group)
                return

    def _detach(self, entry: CacheEntry, group: int) -> None:
        """Take a group's column from its entry. The entry can still be found, but not copied."""
        self.copies.remove(entry)
        self._disown(entry.columns[group])
        entry.columns = (*entry.columns[:group], None, *entry.columns[group + 1 :])
        self.release((entry.serial,))

    def _disown(self, column: Column | None) -> None:
        for block_id in column or ():
            self.blocks[block_id].entry = None
            if block_id in self.free:
                self.free.move_to_end(block_id, last=False)
