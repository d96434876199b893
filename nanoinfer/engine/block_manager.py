"""Gives the blocks of the paged KV cache to sequences, and finds cached prefixes in them. It never touches the device.

In most models all layers attend to all tokens. Such a model has one cache group with one block table. Read this file
for that case first, where `_windows` is empty and `state_group` is None. The scheduler takes a sequence through

1. `find_cached_prefix`: the longest prefix hit, as full blocks that it can share. Where the prompt parts from a cached
   text within a block, the tokens before that can be copied to a block of its own.
2. `allocate`: holds the blocks of the hit, and takes free blocks for all other tokens of the prompt.
3. `cache_blocks`: makes an entry in the prefix cache (`block_pool.py`) for each block that is full. At the end of a
   prompt or an answer, a last block that is not full gets one too, so that others can copy from it.
4. `extend`: takes the next block when the last one is full. `make_room` says before that whether enough are free.
5. `free`: gives all blocks back. A freed block keeps its contents and its entry until it is handed out again, which
   evicts the entry. Blocks without an entry are handed out first, then the least recently used. Within a sequence the
   tail is evicted before the head, because a shared prefix is the part worth keeping.

Other models have several cache groups (`cache_groups/`): of layers that attend to all tokens, to a window, or that keep
a recurrent state. Groups may have several block tables. Then a block of tokens has a page of the pool in each table,
and one entry for all of them. The block manager asks each group, and a hit is what all groups remember.
"""

from collections.abc import Callable, Iterable
from itertools import chain

import xxhash

from nanoinfer.engine.block_pool import BlockPool
from nanoinfer.engine.cache_groups.attention_group import SlidingWindowGroup, attention_groups
from nanoinfer.engine.cache_groups.cache_group import CacheGroup, Hit
from nanoinfer.engine.cache_groups.partial_hits import MIN_COPIED_TOKENS, Columns, Parent
from nanoinfer.engine.cache_groups.specs import CacheGroupSpec, FullAttentionSpec, num_snapshots, num_tables
from nanoinfer.engine.cache_groups.state_group import StateGroup
from nanoinfer.engine.scheduled_batch import BlockCopy, ScheduledBatch, StateCopy
from nanoinfer.engine.sequence import Sequence


class BlockManager:
    """Gives blocks to sequences, takes them back, and finds prefixes that are already computed.

    `prefix_hashes` of a Sequence outlive `free`, so that no block is hashed twice. `allocate` sets its
    `num_computed_tokens` to the length of the cached prefix, `free` to 0; in between, the scheduler advances it.

    num_blocks: blocks in the pool. block_size: tokens in a block. specs: of the cache groups; by default there is one,
    of all tokens. max_num_seqs: rows of a table on the device, without the spare one. max_chunk_tokens: the most tokens
    of a chunk. hash_function: bytes to an unsigned 64-bit integer. min_copied_tokens: if a prompt has fewer tokens in
    common with a cached block, they are computed again.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        specs: tuple[CacheGroupSpec, ...] = (FullAttentionSpec(),),
        *,
        max_num_seqs: int = 0,
        max_chunk_tokens: int = 0,
        hash_function: Callable[[bytes], int] = xxhash.xxh64_intdigest,
        min_copied_tokens: int = MIN_COPIED_TOKENS,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        has_windows = any(spec.window for spec in specs)
        self.num_blocks = num_blocks - has_windows  # with windows, cleared table entries point to page 0
        self.num_tables = num_tables(specs)
        self.keeps_all = isinstance(specs[0], FullAttentionSpec)  # whether `block_table` has the blocks of all tokens
        num_states = num_snapshots(specs) if enable_prefix_caching else 0
        self.pool = BlockPool(
            num_blocks,
            block_size,
            first_block=has_windows,
            first_holds_all=self.keeps_all,
            hash_function=hash_function,
            min_copied_tokens=1 if num_states else min_copied_tokens,
        )
        self._holding: set[Sequence] = set()
        self.attention = attention_groups(self.pool, specs, max_num_seqs + 1, max_chunk_tokens)
        self.groups: list[CacheGroup] = [*self.attention]
        self._windows = [group for group in self.attention if isinstance(group, SlidingWindowGroup)]
        self._num_full_tables = specs[0].num_tables if self.keeps_all else 0
        self.state_group: StateGroup | None = None
        if num_states:
            self.state_group = StateGroup(self.pool, max_num_seqs, num_states, copies_blocks=bool(self.attention))
            self.groups.append(self.state_group)
            self.pool.forget = self.state_group.snapshots.drop_children
        self._trimming = [*self._windows, *self.groups[len(self.attention) :]]  # which may shorten a hit

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, including those with an entry in the prefix cache."""
        return len(self.pool.free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Full blocks of text with an entry in the prefix cache, whether in use or free."""
        return self.pool.num_full_entries

    @property
    def num_snapshots(self) -> int:
        """Recurrent states that are kept for prefix hits."""
        return 0 if self.state_group is None else len(self.state_group.snapshots)

    def can_hold(self, num_tokens: int) -> bool:
        """Return whether a sequence of so many tokens fits into the pool."""
        return self._max_blocks(num_tokens) <= self.num_blocks

    def start_step(self) -> None:
        """Let the next step copy what the steps before it compute."""
        self.pool.copies.start_step()
        if self.state_group is not None:
            self.state_group.snapshots.start_step()

    def enqueue(self, seq: Sequence) -> None:
        """Note that a sequence waits for blocks."""
        if self.state_group is not None:
            self.state_group.enqueue(seq)

    def dequeue(self, seq: Sequence) -> None:
        """Note that a sequence waits no more."""
        if self.state_group is not None:
            self.state_group.dequeue(seq)

    def find_cached_prefix(self, seq: Sequence) -> Hit:
        """Return the longest prefix of `seq` that every group remembers; it may be empty."""
        hit = Hit([], [])
        if self.enable_prefix_caching:
            hit.entries = self.pool.find_chain(seq)
            # A hit that one group has shortened may be too long for another, so ask until none shortens it.
            while self._trimming and any(group.trim(seq, hit) for group in self._trimming):
                pass
            if self.state_group is None:
                hit.source, hit.num_copied, hit.num_later = self.pool.find_copy(seq, hit.entries)
            else:
                if hit.source and self._max_blocks(seq.num_tokens) + self.num_tables > self.num_blocks:
                    # The sequence may need all blocks itself, and then none can be held to copy from.
                    hit = Hit([], [])
                hit.num_later = self.state_group.num_found_later(seq, hit)
        hit.pages = [group.needed_pages(hit.entries) for group in self.attention]
        return hit

    def num_blocks_to_allocate(self, seq: Sequence, hit: Hit) -> int:
        """Return how many free blocks an admitted sequence takes: new ones, and cached ones that no sequence uses."""
        # A copy that only saves time needs no block: `allocate` drops it if its source does not fit.
        num_blocks = self.pool.num_idle(hit.source.pages) if hit.source and hit.snapshot else 0
        for group in self.attention:
            num_blocks += group.cost(seq, hit)
        return num_blocks

    def allocate(self, batch: ScheduledBatch, seq: Sequence, hit: Hit) -> None:
        """Give `seq` its cached prefix, and blocks for all its tokens. In windows, each chunk takes its blocks later.

        Tell the batch of the blocks, and of the copies that it begins with. Their sources are held until `release`.
        """
        assert seq not in self._holding, f"sequence {seq.seq_id} already holds blocks"
        if hit.source and hit.snapshot is None:
            num_idle = self.pool.num_idle(hit.source.pages)
            if num_idle and self.num_blocks_to_allocate(seq, hit) + num_idle > self.num_free_blocks:
                hit.source, hit.num_copied = None, 0
        self._holding.add(seq)
        if hit.entries or hit.source:  # all that is found is held before anything new is taken
            seq.prefix_serials += [entry.serial for entry in hit.entries]
            self.pool.retain(seq.prefix_serials)
            self.pool.hold(chain(*hit.pages, hit.source.pages if hit.source else ()))
        seq.num_computed_tokens = len(hit.entries) * self.block_size + hit.num_copied
        for group in self.groups:
            group.admit(batch, seq, hit)
        num_slots = seq.num_computed_tokens if self._windows else seq.num_tokens
        seq.num_slots = self.pool.num_blocks_for(num_slots) * self.block_size

    def needing_block(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences whose next token to compute lies past their blocks."""
        return [seq for seq in seqs if seq.num_computed_tokens >= seq.num_slots]

    def make_room(self, seqs: list[Sequence], num_tokens: int = 1) -> bool:
        """Take back blocks that have left the windows of these sequences; return whether `extend` has enough blocks.

        num_tokens: how many each of them is about to compute.
        """
        if self._windows:
            for seq in seqs:
                for group in self._windows:
                    group.leave_window(seq)
        if len(seqs) * self.num_tables * self.pool.num_blocks_for(num_tokens) <= self.num_free_blocks:
            return True
        ends = [(seq, seq.num_computed_tokens + num_tokens) for seq in seqs]
        return sum(group.num_missing(*end) for end in ends for group in self.attention) <= self.num_free_blocks

    def extend(self, batch: ScheduledBatch, seqs: list[Sequence], num_tokens: int = 1) -> None:
        """Give each sequence the blocks of the tokens that it computes next, and tell the batch of them."""
        for seq in seqs:
            end = seq.num_computed_tokens + num_tokens
            if end > seq.num_slots or self._windows:
                for group in self.attention:
                    group.extend(batch, seq, end)
                seq.num_slots = max(seq.num_slots, -(-end // self.block_size) * self.block_size)

    def num_growing_tables(self, seq: Sequence) -> int:
        """Return how many of a sequence's tables take a block when it grows by a block of tokens."""
        num_tables = self._num_full_tables
        for group in self._windows:
            num_tables += group.num_growing_tables(seq)
        return num_tables

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Return where a chunk that could compute the tokens before `end` is to end."""
        return end if self.state_group is None else self.state_group.clip(seq, end)

    def cache_blocks(self, seq: Sequence, num_computed: int, with_last: bool = False, ends: bool = False) -> None:
        """Make entries for the full blocks among the first `num_computed` tokens of `seq`.

        These tokens are computed, or will be by a step that is already scheduled: every later step runs after it.
        with_last: also make an entry for the last block of these tokens, if it is not full, so that prompts that begin
        with this text find all of it. ends: whether the sequence ends with these tokens.
        """
        if not self.enable_prefix_caching:
            return
        serials, (end, num_last) = seq.prefix_serials, divmod(num_computed, self.block_size)
        parent: Parent = serials[-1] if serials else seq.prefix_root
        for index in range(len(serials), end):
            entry = self.pool.find(seq, index, parent)
            if entry is None:
                key, tokens = seq.prefix_hashes[index]
                entry = self.pool.add(parent, key, tokens, self._columns(seq, index))
            elif None in entry.columns:
                self.pool.attach(entry, self._columns(seq, index))
            parent = entry.serial
            serials.append(parent)
            if self.pool.counts_uses:
                self.pool.retain((parent,))
        if self.state_group is not None:
            with_last |= self.state_group.note(seq, num_computed, ends)
        # A block without an entry before it cannot be found.
        if with_last and end == len(serials) and num_last >= self.pool.copies.min_tokens:
            columns = self._columns(seq, end)
            if any(columns):
                self.pool.add(parent, None, seq.token_ids[num_computed - num_last : num_computed].tobytes(), columns)

    def cache_end(self, seq: Sequence) -> None:
        """Make the last entries for a sequence that ends."""
        num_computed, num_known = seq.num_computed_tokens, len(seq.token_ids)
        if self.state_group is None or num_computed > num_known:
            # A step in flight may compute the newest token, and may still fail. States that include tokens after the
            # end are of no use.
            self.cache_blocks(seq, num_known - 1, with_last=self.state_group is None)
        else:  # the row's states are those after these tokens
            self.cache_blocks(seq, num_computed, ends=True)

    def evict_failed(self, seq: Sequence, start: int = 0) -> None:
        """Evict a sequence's entries from token `start` on, which a failed step did not compute, or computed as NaN."""
        if self.state_group is not None:
            # Snapshots may hold states of the failed step, or states computed from them.
            self.reset_prefix_cache()
        elif self.holds(seq):
            index = start // self.block_size
            pages = chain.from_iterable(group.pages_from(seq, index) for group in self.attention)
            self.pool.evict(pages, seq.prefix_serials[index:])

    def holds(self, seq: Sequence) -> bool:
        """Return whether a sequence holds its blocks."""
        return seq in self._holding

    def free(self, seq: Sequence) -> None:
        """Take back all that `seq` holds, if anything. Its entries can be hit until its blocks are handed out again."""
        for group in reversed(self.groups):
            group.free(seq)
        if self.pool.counts_uses:
            self.pool.release(seq.prefix_serials)
        self._holding.discard(seq)
        seq.block_table.clear()
        seq.prefix_serials.clear()
        seq.num_computed_tokens = seq.num_slots = 0

    def release(self, copies: list[BlockCopy]) -> None:
        """Give back the sources of copies that have been made, or that never will be."""
        if copies:
            self.pool.give_back(copy.source for copy in copies)

    def reset_prefix_cache(self) -> None:
        """Evict every entry of the prefix cache. Running sequences keep their blocks."""
        self.pool.clear()
        if self.state_group is not None:
            self.state_group.snapshots.clear()

    def take_state_copies(self) -> tuple[list[StateCopy], list[StateCopy]]:
        """Return the copies of recurrent states that begin the scheduled step: those to snapshots, those from them."""
        return ([], []) if self.state_group is None else self.state_group.snapshots.take_copies()

    def _columns(self, seq: Sequence, index: int) -> Columns:
        """Return the pages of a block of a sequence, by group; None where a window has left them."""
        return tuple([group.column(seq, index) for group in self.attention])

    def _max_blocks(self, num_tokens: int) -> int:
        return sum(group.max_pages(num_tokens) for group in self.attention)
