"""Gives the blocks of the paged KV cache to sequences, and finds cached prefixes in them. It never touches the device.

The cache is a pool of blocks of `block_size` tokens (PagedAttention, Kwon et al. 2023). A full block whose keys and
values are computed gets an entry in the prefix cache, under the hash of its tokens chained to the hash of the block
before it. So equal prefixes have equal hashes. A hash only finds a candidate: it is a hit if the tokens are equal too,
and if the entry's parent is the entry just hit. Entries are told apart by serial numbers that are never used again, so
a hash collision can never give a sequence the keys and values of another text. Where a prompt parts from a cached text
within a block, the tokens before that are copied (`partial_hits.py`).

A freed block keeps its contents and its entry until it is handed out again, which evicts the entry. Blocks without an
entry are handed out first, then the least recently used. Within a sequence the tail is evicted before the head, because
a shared prefix is the part worth keeping.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import xxhash

from nanoinfer.engine.blocks.block_hooks import BlockHooks
from nanoinfer.engine.blocks.partial_hits import MIN_COPIED_TOKENS, BlockCopy, CacheEntry, PartialHit, PartialHits
from nanoinfer.engine.scheduled_batch import NewBlock
from nanoinfer.engine.sequence import Sequence

ROOT_SERIAL = 0  # the parent of every first block


@dataclass(slots=True, eq=False)
class Block:
    """A block of the KV cache."""

    block_id: int
    ref_count: int = 0  # sequences that use it
    entry: CacheEntry | None = None  # None if it is not in the prefix cache


class BlockManager(BlockHooks):
    """Gives blocks to sequences, takes them back, and finds prefixes that are already computed.

    `prefix_hashes` of a Sequence outlive `free`, so that no block is hashed twice. `allocate` sets its
    `num_computed_tokens` to the length of the cached prefix, `free` to 0; in between, the scheduler advances it.

    num_blocks: blocks in the pool. block_size: tokens in a block. hash_function: bytes to an unsigned 64-bit integer.
    min_copied_tokens: if a prompt has fewer tokens in common with a cached block, they are computed again.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_function: Callable[[bytes], int] = xxhash.xxh64_intdigest,
        min_copied_tokens: int = MIN_COPIED_TOKENS,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_frees = 0  # changes whenever blocks come back: a prompt that did not fit may fit now
        self._hash = hash_function
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # in the order of reuse
        self._entries: dict[int, CacheEntry] = {}  # the prefix cache, by hash
        self._partial_hits = PartialHits(min_copied_tokens)
        self._next_serial = ROOT_SERIAL + 1

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, including those with an entry in the prefix cache."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks with an entry in the prefix cache, whether in use or free."""
        return len(self._entries)

    def can_hold(self, num_tokens: int) -> bool:
        """Return whether a sequence of so many tokens fits into the pool."""
        return self._num_blocks_for(num_tokens) <= self.num_blocks

    def start_step(self) -> None:
        """Let the next step copy what the steps before it compute."""
        self._partial_hits.start_step()

    def find_cached_prefix(self, seq: Sequence) -> list[int]:
        """Return the ids of the full blocks that hold the longest cached prefix of `seq`, which may be empty."""
        if not self.enable_prefix_caching:
            return []
        found: list[int] = []
        parent_serial = ROOT_SERIAL
        for index in range(seq.max_cached_tokens // self.block_size):
            entry = self._find(seq, index, parent_serial)
            if entry is None:
                break
            parent_serial = entry.serial
            found.append(entry.block_id)
        return found

    def num_found_later(self, seq: Sequence, cached_block_ids: list[int]) -> int:
        """Return how many more tokens a lookup will find once the step that is being scheduled is computed."""
        if not self.enable_prefix_caching:
            return 0
        next_tokens = self._next_tokens(seq, len(cached_block_ids))
        return self._partial_hits.num_found_later(self._serial_of(cached_block_ids), next_tokens)

    def num_blocks_to_allocate(self, seq: Sequence, cached_block_ids: list[int]) -> int:
        """Return how many free blocks `allocate` would take: new ones, and cached ones that no sequence uses now."""
        num_idle = sum(self._blocks[block_id].ref_count == 0 for block_id in cached_block_ids)
        return self._num_blocks_for(seq.num_tokens) - len(cached_block_ids) + num_idle

    def allocate(self, seq: Sequence, cached_block_ids: list[int]) -> list[BlockCopy]:
        """Give `seq` blocks for all its tokens, the first ones as `find_cached_prefix` has found them.

        If another cached block begins like the next one, return the copies that the step has to begin with. Their
        sources are held until they are given to `release`.
        """
        assert not seq.block_table, f"sequence {seq.seq_id} already holds blocks"
        for block_id in cached_block_ids:
            block = self._blocks[block_id]
            self._hold(block)
            assert block.entry is not None, f"block {block_id} was found in the prefix cache and has no entry"
            seq.prefix_serials.append(block.entry.serial)
        seq.block_table.extend(cached_block_ids)
        seq.num_computed_tokens = len(cached_block_ids) * self.block_size
        hit = self._find_partial_hit(seq)
        if hit is not None:
            self._hold_source(hit.block_id)
        while len(seq.block_table) < self._num_blocks_for(seq.num_tokens):
            self.append_block(seq)
        if hit is None:
            return []
        seq.num_computed_tokens += hit.num_tokens
        return [BlockCopy(hit.block_id, seq.block_table[len(cached_block_ids)], hit.num_tokens)]

    def needing_block(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences whose next token to compute lies past their blocks."""
        return [seq for seq in seqs if seq.num_computed_tokens >= len(seq.block_table) * self.block_size]

    def append_block(self, seq: Sequence) -> int:
        """Take the next free block for `seq` and return its id."""
        seq.block_table.append(self._take_block())
        return seq.block_table[-1]

    def grow(self, seq: Sequence) -> list[NewBlock]:
        """Give a decoding sequence the block of its next token."""
        column = len(seq.block_table)
        return [NewBlock(seq.held_row, column, self.append_block(seq))]

    def cache_blocks(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Make entries for the full blocks among the first `num_computed_tokens` of `seq`.

        These tokens are computed, or will be by a step that is already scheduled: every later step runs after it.
        """
        if not self.enable_prefix_caching:
            return
        for index in range(len(seq.prefix_serials), num_computed_tokens // self.block_size):
            parent_serial = last_serial(seq)
            entry = self._find(seq, index, parent_serial)
            if entry is None:
                key, tokens = seq.prefix_hashes[index]
                if key in self._entries:  # a collision, or an entry whose parent was evicted: the newest one stays
                    self.evict_blocks([self._entries[key].block_id])
                entry = self._add_entry(seq.block_table[index], key, parent_serial, tokens)
                self._entries[key] = entry
            seq.prefix_serials.append(entry.serial)

    def cache_last_block(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Make an entry for the block that ends the first `num_computed_tokens` of `seq`, if it is not full.

        Prompts that repeat this text, or go on from it, find it to its end.
        """
        index, num_tokens = divmod(num_computed_tokens, self.block_size)
        if not self.enable_prefix_caching or index != len(seq.prefix_serials):
            return
        if num_tokens >= self._partial_hits.min_tokens:
            start = index * self.block_size
            tokens = seq.token_ids[start : start + num_tokens].tobytes()
            self._add_entry(seq.block_table[index], None, last_serial(seq), tokens)

    def cache_end(self, seq: Sequence) -> None:
        """Cache what is left of a sequence that ends."""
        # A step in flight may have computed the newest token, and may still fail.
        self.cache_last_block(seq, len(seq.token_ids) - 1)

    def evict_failed(self, block_ids: Iterable[int]) -> None:
        """Remove what failed steps were to write to these blocks from the prefix cache, or what they wrote as NaN."""
        self.evict_blocks(block_ids)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Remove these blocks from the prefix cache."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.entry is not None:
                self._remove_entry(block)
                if block_id in self._free:
                    self._free.move_to_end(block_id, last=False)

    def free(self, seq: Sequence) -> None:
        """Take all blocks of `seq` back. Their entries can be hit until the blocks are handed out again."""
        # Free the tail first: a shared prefix is the part worth keeping.
        self._give_back(reversed(seq.block_table))
        seq.block_table.clear()
        seq.prefix_serials.clear()
        seq.num_computed_tokens = 0

    def release(self, copies: list[BlockCopy]) -> None:
        """Give back the sources of copies that are made, or never will be."""
        if copies:
            self._give_back(copy.source for copy in copies)

    def reset_prefix_cache(self) -> None:
        """Evict every entry of the prefix cache. Running sequences keep their blocks."""
        self.evict_blocks([block.block_id for block in self._blocks if block.entry is not None])

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take_block(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self._blocks[block_id]
        assert block.ref_count == 0, f"block {block_id} is handed out while a sequence still uses it"
        self.evict_blocks([block_id])
        block.ref_count = 1
        return block_id

    def _is_cached(self, block: Block) -> bool:
        return block.entry is not None

    def _hold(self, block: Block) -> None:
        if block.ref_count == 0:
            del self._free[block.block_id]
        block.ref_count += 1

    def _give_back(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed more often than it was given out"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if not self._is_cached(block):
                    self._free.move_to_end(block_id, last=False)
        self.num_frees += 1

    def _add_entry(self, block_id: int, key: int | None, parent_serial: int, tokens: bytes) -> CacheEntry:
        block = self._blocks[block_id]
        if block.entry is not None:  # it had fewer tokens
            self._remove_entry(block)
        block.entry = CacheEntry(block_id, key, self._next_serial, parent_serial, tokens)
        self._next_serial += 1
        self._partial_hits.add(block.entry)
        return block.entry

    def _remove_entry(self, block: Block) -> None:
        assert block.entry is not None, f"block {block.block_id} has no entry to remove"
        self._partial_hits.remove(block.entry)
        if block.entry.hash is not None:
            del self._entries[block.entry.hash]
        block.entry = None

    def _find_partial_hit(self, seq: Sequence) -> PartialHit | None:
        """Return the block that begins like the first block of `seq` that is not cached."""
        if not self.enable_prefix_caching:
            return None
        hit = self._partial_hits.find(last_serial(seq), self._next_tokens(seq, len(seq.block_table)))
        if hit is not None and self._blocks[hit.block_id].ref_count == 0:
            num_needed = self._num_blocks_for(seq.num_tokens) - len(seq.block_table)
            if num_needed == self.num_free_blocks:  # it has to be handed out itself
                return None
        return hit

    def _hold_source(self, block_id: int) -> None:
        """Hold a block that is copied from, until `release`."""
        self._hold(self._blocks[block_id])

    def _next_tokens(self, seq: Sequence, index: int) -> bytes:
        """Return the tokens of block `index` that may come from the cache."""
        start = index * self.block_size
        return seq.token_ids[start : min(start + self.block_size, seq.max_cached_tokens)].tobytes()

    def _serial_of(self, cached_block_ids: list[int]) -> int:
        """Return the serial number of the entry of the last of these blocks."""
        last = self._blocks[cached_block_ids[-1]].entry if cached_block_ids else None
        return last.serial if last else ROOT_SERIAL

    def _find(self, seq: Sequence, index: int, parent_serial: int) -> CacheEntry | None:
        """Return the entry that block `index` of `seq` hits, if the block before it has hit `parent_serial`."""
        hashes = seq.prefix_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            tokens = seq.token_ids[start : start + self.block_size].tobytes()
            parent = hashes[-1][0].to_bytes(8, "little") if hashes else b""
            hashes.append((self._hash(parent + tokens), tokens))
        key, tokens = hashes[index]
        entry = self._entries.get(key)
        return entry if entry and (entry.parent_serial, entry.tokens) == (parent_serial, tokens) else None


def last_serial(seq: Sequence) -> int:
    """Return the serial number of the entry of the last block of `seq` that has one."""
    return seq.prefix_serials[-1] if seq.prefix_serials else ROOT_SERIAL
