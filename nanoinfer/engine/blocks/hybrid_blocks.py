"""Gives blocks to the sequences of hybrids of linear and full attention, whose prefix hits end at kept states.

A hit needs the keys and values of all its tokens and the states after the last of them. Full blocks are shared, as in
every model. Before the step computes anything, the tokens after them are copied from another block, and the states from
a snapshot. Where waiting texts part from the one that is computed, its chunk ends and the states are kept, if that
saves these texts enough; they wait for it. For prompts that nobody knows of yet, states are also kept before the last
token of a prompt, which is always computed, and at the end of an answer.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import xxhash

from nanoinfer.engine.block_manager import ROOT_SERIAL, Block, BlockManager
from nanoinfer.engine.blocks.partial_hits import BlockCopy, PartialHit
from nanoinfer.engine.blocks.queued_prompts import QueuedPrompts
from nanoinfer.engine.blocks.state_snapshots import Snapshot, StateCopy, StateSnapshots
from nanoinfer.engine.sequence import Sequence

# A snapshot costs a copy of the states, and an end of a chunk: about as much as computing a few dozens of tokens.
MIN_SAVED_TOKENS = 64
MIN_KEPT_TOKENS = 32


class Hit(NamedTuple):
    """What a sequence can begin with after its shared blocks. source: has the tokens after them, if there are any."""

    snapshot: Snapshot
    source: Block | None


class HybridBlockManager(BlockManager):
    """Finds prefixes that end where a state is kept, and decides which states are kept.

    num_rows: places for the states of running sequences; the places for snapshots come after them. num_snapshots:
    places for snapshots. min_saved_tokens: the least that a snapshot must save the texts that wait for it, together.
    min_kept_tokens: texts with fewer tokens leave no state at their end. The other parameters are those of
    BlockManager.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        num_snapshots: int,
        hash_function: Callable[[bytes], int] = xxhash.xxh64_intdigest,
        min_saved_tokens: int = MIN_SAVED_TOKENS,
        min_kept_tokens: int = MIN_KEPT_TOKENS,
    ) -> None:
        super().__init__(num_blocks, block_size, hash_function=hash_function, min_copied_tokens=1)
        self.min_saved_tokens, self.min_kept_tokens = min_saved_tokens, min_kept_tokens
        self._queued = QueuedPrompts()
        self.snapshots = StateSnapshots(num_rows, num_snapshots, self._queued)
        self._plans: dict[Sequence, list[Snapshot]] = {}  # what running sequences are to leave, the next one first
        self._num_uses = [0] * num_blocks  # how often a block was handed out

    @property
    def num_snapshots(self) -> int:
        return len(self.snapshots)

    @property
    def keeps_rows(self) -> bool:
        return True

    def start_step(self) -> None:
        super().start_step()
        self.snapshots.start_step()

    def take_state_copies(self) -> tuple[list[StateCopy], list[StateCopy]]:
        return self.snapshots.take_copies()

    def enqueue(self, seq: Sequence) -> None:
        self._queued.add(seq.token_ids)

    def dequeue(self, seq: Sequence) -> None:
        self._queued.remove(seq.token_ids)

    def find_cached_prefix(self, seq: Sequence) -> list[int]:
        found = super().find_cached_prefix(seq)
        while found and self._hit(seq, found) is None:
            found.pop()
        return found

    def num_found_later(self, seq: Sequence, cached_block_ids: list[int]) -> int:
        hit = self._hit(seq, cached_block_ids)
        num_found = len(hit.snapshot.text) if hit else 0
        return max(0, self.snapshots.find_later(seq, seq.max_cached_tokens) - num_found)

    def num_blocks_to_allocate(self, seq: Sequence, cached_block_ids: list[int]) -> int:
        hit = self._hit(seq, cached_block_ids)
        holds_source = hit is not None and hit.source is not None and hit.source.ref_count == 0
        return super().num_blocks_to_allocate(seq, cached_block_ids) + holds_source

    def allocate(self, seq: Sequence, cached_block_ids: list[int]) -> list[BlockCopy]:
        hit = self._hit(seq, cached_block_ids)
        copies = super().allocate(seq, cached_block_ids)
        num_found = len(hit.snapshot.text) if hit else 0
        assert seq.num_computed_tokens == num_found, f"no state is kept after {seq.num_computed_tokens} cached tokens"
        if hit is not None:
            self.snapshots.restore(hit.snapshot, seq)
        self._plan(seq)
        return copies

    def append_block(self, seq: Sequence) -> int:
        block_id = super().append_block(seq)
        self._num_uses[block_id] += 1
        return block_id

    def chunk_end(self, seq: Sequence, end: int) -> int:
        planned = self._plans.get(seq)
        return min(end, len(planned[0].text)) if planned else end

    def cache_blocks(self, seq: Sequence, num_computed_tokens: int) -> None:
        super().cache_blocks(seq, num_computed_tokens)
        planned = self._plans.get(seq)
        if planned and len(planned[0].text) == num_computed_tokens:
            self._keep(planned.pop(0))

    def cache_end(self, seq: Sequence) -> None:
        # The row holds the states after all that was computed, a step in flight included.
        num_tokens = seq.num_computed_tokens
        self.cache_blocks(seq, num_tokens)
        if num_tokens >= self.min_kept_tokens:
            snapshot = self.snapshots.plan(seq, num_tokens, may_evict=True)
            if snapshot is not None:
                self._keep(snapshot)

    def evict_failed(self, block_ids: Iterable[int]) -> None:
        # States of the failed steps may be kept by now, and others that began with them.
        self.reset_prefix_cache()

    def free(self, seq: Sequence) -> None:
        for snapshot in self._plans.pop(seq, ()):
            self.snapshots.drop_plan(snapshot)
        super().free(seq)

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self.snapshots.clear()

    def _remove_entry(self, block: Block) -> None:
        assert block.entry is not None, f"block {block.block_id} has no entry to remove"
        self.snapshots.drop_children(block.entry.serial)
        super()._remove_entry(block)

    def _find_partial_hit(self, seq: Sequence) -> PartialHit | None:
        hit = self._hit(seq, seq.block_table)
        return PartialHit(hit.source.block_id, len(hit.snapshot.tail) // 4) if hit and hit.source else None

    def _hit(self, seq: Sequence, cached_block_ids: list[int]) -> Hit | None:
        """Return the longest hit of a sequence that shares just these blocks."""
        next_tokens = self._next_tokens(seq, len(cached_block_ids))
        for snapshot in self.snapshots.find(self._serial_of(cached_block_ids), next_tokens):
            if not snapshot.tail:
                return Hit(snapshot, None)
            # The source of the copy is held beside the sequence's own blocks, which may be all that there are.
            if self._num_blocks_for(seq.num_tokens) < self.num_blocks and (source := self._source(snapshot)):
                return Hit(snapshot, source)
        return None

    def _source(self, snapshot: Snapshot) -> Block | None:
        """Return a block that has had the keys and values of the snapshot's tail since before this step."""
        if snapshot.block is not None and self._num_uses[snapshot.block[0]] == snapshot.block[1]:
            return self._blocks[snapshot.block[0]]
        hit = self._partial_hits.find(snapshot.parent_serial, snapshot.tail)
        return self._blocks[hit.block_id] if hit and hit.num_tokens == len(snapshot.tail) // 4 else None

    def _plan(self, seq: Sequence) -> None:
        """Decide where an admitted sequence leaves states: where others part from it, and before its last token."""
        start, last = seq.num_computed_tokens, len(seq.token_ids) - 1
        partings = self._queued.partings(seq.token_ids, start)
        planned: list[Snapshot] = []  # the last one first
        num_served = 0  # texts that will begin further on
        for (num_tokens, num_texts), before in pairwise([*partings, (start, 0)]):
            num_users = num_texts - num_served
            if num_users * (num_tokens - before[0]) >= self.min_saved_tokens:
                num_served = num_texts
                if snapshot := self.snapshots.plan_awaited(seq, num_tokens, num_users):
                    planned.append(snapshot)
        longest = len(planned[0].text) if planned else start
        if last - longest >= self.min_kept_tokens and (snapshot := self.snapshots.plan(seq, last)):
            planned.insert(0, snapshot)
        if planned:
            self._plans[seq] = planned[::-1]

    def _keep(self, snapshot: Snapshot) -> None:
        """Keep the states of a place that the step being scheduled reaches, and what finds it."""
        seq = snapshot.seq
        num_blocks, num_tail = divmod(len(snapshot.text), self.block_size)
        self.cache_last_block(seq, len(snapshot.text))
        parent_serial = seq.prefix_serials[num_blocks - 1] if num_blocks else ROOT_SERIAL
        block = None
        if num_tail:
            block_id = seq.block_table[num_blocks]
            block = block_id, self._num_uses[block_id]
        tail = snapshot.text[num_blocks * self.block_size :].tobytes()
        self.snapshots.keep(snapshot, parent_serial, tail, block)
