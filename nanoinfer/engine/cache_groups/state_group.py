"""Finds prefixes of models with recurrent states: their prefix hits end at kept states.

A hit needs the states after the last of its tokens, beside the keys and values that other groups find. Before the step
computes anything, the states are copied from a snapshot, and the keys and values of the tokens after the last full
block from another block. Where waiting texts part from the one that is computed, its chunk ends and the states are
kept, if that saves these texts enough; they wait for it. For prompts that nobody knows of yet, states are also kept
before the last token of a prompt, which is always computed, and at the end of an answer.
"""

from collections import defaultdict
from collections.abc import Hashable
from itertools import pairwise

from nanoinfer.engine.block_pool import BlockPool
from nanoinfer.engine.cache_groups.cache_group import CacheGroup, Hit
from nanoinfer.engine.cache_groups.queued_prompts import QueuedPrompts
from nanoinfer.engine.cache_groups.state_snapshots import Snapshot, StateSnapshots
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.sequence import Sequence

# A snapshot costs a copy of the states, and an end of a chunk: about as much as computing a few dozens of tokens.
SNAPSHOT_MIN_SAVED_TOKENS = 64
MIN_KEPT_TOKENS = 32


class StateGroup(CacheGroup):
    """Shortens hits to where a state is kept, and decides which states are kept.

    max_num_seqs: places for the states of running sequences; the places for snapshots come after them. num_snapshots:
    places for snapshots. copies_blocks: whether other groups have keys and values: they are copied too where a hit ends
    within a block. `min_saved_tokens` is the least that a snapshot must save the texts that wait for it, together.
    Texts with fewer than `min_kept_tokens` tokens leave no state at their end.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, num_snapshots: int, copies_blocks: bool) -> None:
        self.min_saved_tokens, self.min_kept_tokens = SNAPSHOT_MIN_SAVED_TOKENS, MIN_KEPT_TOKENS
        self._pool, self._copies_blocks = pool, copies_blocks
        self.queued: defaultdict[Hashable, QueuedPrompts] = defaultdict(QueuedPrompts)  # by identity
        self.snapshots = StateSnapshots(pool, max_num_seqs, num_snapshots, self.queued)
        self.plans: dict[Sequence, list[Snapshot]] = {}  # what running sequences are to leave, the next one first

    def enqueue(self, seq: Sequence) -> None:
        """Note that a sequence waits to be admitted."""
        self.queued[seq.identity].add(seq.token_ids)

    def dequeue(self, seq: Sequence) -> None:
        """Note that a sequence waits no more."""
        self.queued[seq.identity].remove(seq.token_ids)
        if not self.queued[seq.identity]:
            del self.queued[seq.identity]

    def trim(self, seq: Sequence, hit: Hit) -> bool:
        length = len(hit.entries)
        while not self._ends_at_snapshot(seq, hit) and hit.entries:
            hit.entries.pop()
        return len(hit.entries) < length

    def num_found_later(self, seq: Sequence, hit: Hit) -> int:
        """Return how many more tokens a lookup finds once another sequence has computed them."""
        num_found = len(hit.snapshot.text) if hit.snapshot else 0
        return max(0, self.snapshots.find_later(seq, seq.max_cached_tokens) - num_found)

    def admit(self, batch: ScheduledBatch, seq: Sequence, hit: Hit) -> None:
        if hit.snapshot is not None:
            self.snapshots.restore(hit.snapshot, seq)
        self._plan(seq, seq.num_computed_tokens)

    def clip(self, seq: Sequence, end: int) -> int:
        """Return where a chunk that could compute the tokens before `end` is to end."""
        planned = self.plans.get(seq)
        return min(end, len(planned[0].text)) if planned else end

    def note(self, seq: Sequence, num_computed: int, ends: bool) -> bool:
        """Keep the states after the first `num_computed` tokens if that is planned, or if the sequence ends with them.

        Return whether they are kept: then the block that ends there has to be found, too.
        """
        planned, snapshot = self.plans.get(seq), None
        if planned and len(planned[0].text) == num_computed:
            snapshot = planned.pop(0)
        elif ends and num_computed >= self.min_kept_tokens:
            snapshot = self.snapshots.plan(seq, num_computed, may_evict=True)
        if snapshot is None:
            return False
        num_blocks = num_computed // self._pool.block_size
        parent = seq.prefix_serials[num_blocks - 1] if num_blocks else seq.prefix_root
        tail = snapshot.text[num_blocks * self._pool.block_size :].tobytes()
        self.snapshots.keep(snapshot, parent, tail)
        return True

    def free(self, seq: Sequence) -> None:
        for snapshot in self.plans.pop(seq, ()):
            self.snapshots.drop_plan(snapshot)

    def _ends_at_snapshot(self, seq: Sequence, hit: Hit) -> bool:
        """Have a hit of these entries end at the longest snapshot after them, if there is any."""
        hit.source, hit.num_copied, hit.snapshot = None, 0, None
        parent, tokens = self._pool.after(seq, hit.entries)
        for snapshot in self.snapshots.find(parent, tokens):
            source, num_tail = None, len(snapshot.tail) // 4
            if num_tail and self._copies_blocks:
                source, num_found = self._pool.copies.find(parent, snapshot.tail)
                if num_found < num_tail:
                    continue
            hit.source, hit.num_copied, hit.snapshot = source, num_tail, snapshot
            return True
        return False

    def _plan(self, seq: Sequence, start: int) -> None:
        """Decide where an admitted sequence leaves states: where others part from it, and before its last token."""
        last = len(seq.token_ids) - 1
        queued = self.queued.get(seq.identity)
        partings = queued.partings(seq.token_ids, start) if queued else []
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
            self.plans[seq] = planned[::-1]
