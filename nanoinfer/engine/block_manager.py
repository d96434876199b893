"""Gives the blocks of the paged KV cache to sequences, and finds cached prefixes in them. It never touches the device.

The cache is a pool of blocks of `block_size` tokens (PagedAttention, Kwon et al. 2023). A full block whose keys and
values are computed gets an entry in the prefix cache, under the hash of its tokens chained to the hash of the block
before it. So equal prefixes have equal hashes. A hash only finds a candidate: it is a hit if the tokens are equal too,
and if the entry's parent is the entry just hit. Entries are told apart by serial numbers that are never used again, so
a hash collision can never give a sequence the keys and values of another text.

A freed block keeps its contents and its entry until it is handed out again, which evicts the entry. Blocks without an
entry are handed out first, then the least recently used. Within a sequence the tail is evicted before the head, because
a shared prefix is the part worth keeping.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import xxhash

from nanoinfer.engine.sequence import Sequence

ROOT_SERIAL = 0  # the parent of every first block


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An entry of the prefix cache: which block it is, and what verifies a hit."""

    block_id: int
    hash: int
    serial: int
    parent_serial: int  # of the entry of the block before it
    tokens: bytes  # block_size ids as int32


@dataclass(slots=True, eq=False)
class Block:
    """A block of the KV cache."""

    block_id: int
    ref_count: int = 0  # sequences that use it
    entry: CacheEntry | None = None  # None if it is not in the prefix cache


class BlockManager:
    """Gives blocks to sequences, takes them back, and finds prefixes that are already computed.

    Three fields of a Sequence are written by nobody else: `block_table`, `prefix_serials`, and `prefix_hashes`, which
    outlives `free` so that no block is hashed twice. `allocate` also sets `num_computed_tokens` to the length of the
    cached prefix, and `free` sets it to 0; in between, the scheduler advances it.

    num_blocks: blocks in the pool. block_size: tokens in a block. hash_function: bytes to an unsigned 64-bit integer.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_function: Callable[[bytes], int] = xxhash.xxh64_intdigest,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_frees = 0  # changes whenever blocks come back: a prompt that did not fit may fit now
        self._hash = hash_function
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # in the order of reuse
        self._entries: dict[int, CacheEntry] = {}  # the prefix cache, by hash
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

    def find_cached_prefix(self, seq: Sequence) -> list[int]:
        """Return the ids of the blocks that hold the longest cached prefix of `seq`, which may be empty.

        The last token is always left to compute, since its logits are needed. If log-probabilities of prompt tokens are
        wanted, so is all from the token before the first of them.
        """
        if not self.enable_prefix_caching:
            return []
        found: list[int] = []
        parent_serial = ROOT_SERIAL
        for index in range(((seq.prompt_logprobs_start or len(seq.token_ids)) - 1) // self.block_size):
            entry = self._find(seq, index, parent_serial)
            if entry is None:
                break
            parent_serial = entry.serial
            found.append(entry.block_id)
        return found

    def num_blocks_to_allocate(self, seq: Sequence, cached_block_ids: list[int]) -> int:
        """Return how many free blocks `allocate` would take: new ones, and cached ones that no sequence uses now."""
        num_idle = sum(self._blocks[block_id].ref_count == 0 for block_id in cached_block_ids)
        return self._num_blocks_for(seq.num_tokens) - len(cached_block_ids) + num_idle

    def allocate(self, seq: Sequence, cached_block_ids: list[int]) -> None:
        """Give `seq` blocks for all its tokens. The first ones are those that `find_cached_prefix` has found."""
        assert not seq.block_table, f"sequence {seq.seq_id} already holds blocks"
        for block_id in cached_block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
            block.ref_count += 1
            assert block.entry is not None, f"block {block_id} was found in the prefix cache and has no entry"
            seq.prefix_serials.append(block.entry.serial)
        seq.block_table.extend(cached_block_ids)
        seq.num_computed_tokens = len(cached_block_ids) * self.block_size
        while len(seq.block_table) < self._num_blocks_for(seq.num_tokens):
            self.append_block(seq)

    def needs_block(self, seq: Sequence) -> bool:
        """Return whether the next token to compute lies past the blocks of `seq`."""
        return seq.num_computed_tokens >= len(seq.block_table) * self.block_size

    def append_block(self, seq: Sequence) -> int:
        """Take the next free block for `seq` and return its id."""
        block_id, _ = self._free.popitem(last=False)
        block = self._blocks[block_id]
        assert block.ref_count == 0, f"block {block_id} is handed out while a sequence still uses it"
        self.evict_blocks([block_id])
        block.ref_count = 1
        seq.block_table.append(block_id)
        return block_id

    def cache_blocks(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Make entries for the full blocks among the first `num_computed_tokens` of `seq`.

        These tokens are computed, or will be by a step that is already scheduled: every later step runs after it.
        """
        if not self.enable_prefix_caching:
            return
        for index in range(len(seq.prefix_serials), num_computed_tokens // self.block_size):
            parent_serial = seq.prefix_serials[-1] if seq.prefix_serials else ROOT_SERIAL
            entry = self._find(seq, index, parent_serial)
            if entry is None:
                key, tokens = seq.prefix_hashes[index]
                if key in self._entries:  # a collision, or an entry whose parent was evicted: the newest one stays
                    self.evict_blocks([self._entries[key].block_id])
                block_id = seq.block_table[index]
                entry = CacheEntry(block_id, key, self._next_serial, parent_serial, tokens)
                self._blocks[block_id].entry = self._entries[key] = entry
                self._next_serial += 1
            seq.prefix_serials.append(entry.serial)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Remove these blocks from the prefix cache, for example because the step that was to fill them failed."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.entry is not None:
                del self._entries[block.entry.hash]
                block.entry = None
                if block_id in self._free:
                    self._free.move_to_end(block_id, last=False)

    def free(self, seq: Sequence) -> None:
        """Take all blocks of `seq` back. Their entries can be hit until the blocks are handed out again."""
        # Free the tail first: a shared prefix is the part worth keeping.
        for block_id in reversed(seq.block_table):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed more often than it was given out"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if block.entry is None:
                    self._free.move_to_end(block_id, last=False)
        seq.block_table.clear()
        seq.prefix_serials.clear()
        seq.num_computed_tokens = 0
        self.num_frees += 1

    def reset_prefix_cache(self) -> None:
        """Evict every entry of the prefix cache. Running sequences keep their blocks."""
        self.evict_blocks([entry.block_id for entry in self._entries.values()])

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _find(self, seq: Sequence, index: int, parent_serial: int) -> CacheEntry | None:
        """Return the entry that block `index` of `seq` hits, if the block before it has hit `parent_serial`."""
        hashes = seq.prefix_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            tokens = array("i", seq.token_ids[start : start + self.block_size]).tobytes()
            parent = hashes[-1][0].to_bytes(8, "little") if hashes else b""
            hashes.append((self._hash(parent + tokens), tokens))
        key, tokens = hashes[index]
        entry = self._entries.get(key)
        return entry if entry and (entry.parent_serial, entry.tokens) == (parent_serial, tokens) else None
