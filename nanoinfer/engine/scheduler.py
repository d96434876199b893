"""Chooses what runs next, by the lengths of sequences alone. Only `update` looks at tokens, as some end a sequence.

A step is either prefill (prompts are computed, whole or in chunks) or decode (every running sequence gets one token).
Prefill goes first, so that the decode batch is as full as it can be. A sequence is

    WAITING --admit: a row, blocks for all its tokens--> RUNNING --stop token, or length--> FINISHED
       ^                                                   |
       '------preempt: blocks are short; last in line first'

    WAITING or RUNNING --pause--> PAUSED --resume--> RUNNING if it still holds its row and blocks, else WAITING

When max_tokens ends a sequence, its last step is known when it is launched. Steps run in order, so the next step may
already give its row to another sequence. Its blocks are freed, and its output is made, when its last step is collected.
A sequence that samples nothing ends with its prompt, and frees its blocks as early as its row.

Preemption frees a sequence's blocks and computes it again later, its generated tokens included (recomputation, as in
PagedAttention, Kwon et al. 2023). Paused sequences give up their blocks first, also to waiting ones. The waiting queue
is ordered by priority, then by arrival. So a preempted sequence is the first of its priority to be admitted again: it
arrived before all that still wait.
"""

import heapq
from collections.abc import Callable
from operator import attrgetter

from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.cache_groups.cache_group import Hit
from nanoinfer.engine.cache_groups.partial_hits import MIN_AWAITED_IN_ALL, MIN_AWAITED_TOKENS, PassedOver
from nanoinfer.engine.interfaces import SILENT, Listener
from nanoinfer.engine.prefix_sharers import SharerFinder
from nanoinfer.engine.proposer import Proposer, add_proposals
from nanoinfer.engine.scheduled_batch import PrefillChunk, ScheduledBatch
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.engine.stopping import Stopping
from nanoinfer.token_ids import NO_TOKEN

# Under a long queue, so many rows are refilled at once: a prefill step for each finished sequence would stall decode.
MIN_REFILLED_ROWS = 16
# Less room leads to preemptions, and more leaves rows empty.
RESERVED_TOKENS = 128


class Scheduler:
    """Chooses the sequences of each step and gives out rows and blocks.

    max_num_seqs: the most sequences in the running set. max_num_batched_tokens: the most tokens of a prefill step.
    max_model_len: a sequence of so many tokens is finished. stop_token_ids: the model's stop tokens.
    reserved_tokens: for how many tokens an admission leaves each running sequence room to grow, or fewer if the
    sequence will end sooner. max_prefix_sharers: for how many decode rows attention can read a shared prefix at once;
    0 if it cannot. whole_prompts: compute each prompt in one step, without chunked prefill.
    max_row_tokens: the most tokens of a decode row, with those that a proposer adds.
    on_finish: is called with a running sequence that finishes, while it still holds its blocks.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        stop_token_ids: frozenset[int] = frozenset(),
        reserved_tokens: int = RESERVED_TOKENS,
        max_prefix_sharers: int = 0,
        whole_prompts: bool = False,
        max_row_tokens: int = 1,
        on_finish: Callable[[Sequence], object] | None = None,
    ) -> None:
        assert block_manager.can_hold(max_model_len), f"the cache cannot hold a sequence of {max_model_len} tokens"
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.stop_token_ids = stop_token_ids
        self.reserved_tokens = reserved_tokens
        self.whole_prompts = whole_prompts
        self.max_row_tokens = max_row_tokens
        self._on_finish = on_finish
        self.min_awaited_tokens = MIN_AWAITED_TOKENS
        self.min_awaited_in_all = MIN_AWAITED_IN_ALL
        num_sharers = max_prefix_sharers if block_manager.keeps_all else 0  # else windows give up shared blocks
        self.sharer_finder = SharerFinder(num_sharers, block_manager.block_size)
        self.running: list[Sequence] = []
        self.paused: list[Sequence] = []  # those with a row still hold their blocks
        self.num_preemptions = 0
        self.listener: Listener = SILENT  # is told what happens
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # a heap on (-priority, seq_id)
        self._free_rows = list(range(max_num_seqs))  # a heap: low rows first
        self._ending: list[Sequence] = []  # their last step is scheduled, so others may get their rows
        self._has_proposals = False  # whether rows of the last decode step may have several tokens
        self._awaits_prefix = False  # whether the last admission passed over prompts, which come next
        self._blocked_head: tuple[int, int] | None = None  # (seq_id, num_frees) of a queue head that did not fit

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def is_finished(self) -> bool:
        """Return whether nothing is left to run; paused sequences are not looked at."""
        return not self._waiting and not self.running

    def add(self, seq: Sequence) -> None:
        """Find what will end a new sequence, and queue it."""
        params, wanted = seq.sampling_params, seq.hidden_states_request
        pools = wanted is not None and wanted.pools
        seq.stopping = Stopping.of(params, seq.num_prompt_tokens, self.stop_token_ids, self.max_model_len, pools)
        self._enqueue(seq)

    def _enqueue(self, seq: Sequence) -> None:
        """Have a sequence wait, by its priority and arrival."""
        heapq.heappush(self._waiting, (seq.queue_key, seq))
        self.block_manager.enqueue(seq)

    def schedule(self, in_flight: bool = False, proposer: Proposer | None = None) -> ScheduledBatch:
        """Choose the next step and advance its sequences by it.

        in_flight: whether a scheduled step has not been given to `update` yet. proposer: proposes tokens to decode
        rows. The batch is empty if there is nothing to do, or if nothing can run until the step in flight is collected:
        a sequence can be preempted only when all its tokens are known.
        """
        self.block_manager.start_step()
        if self._ending:
            self._release_ending()
        batch, has_to_wait = self._schedule_prefill(in_flight)
        if not (batch or has_to_wait):
            batch = self._schedule_decode(in_flight, proposer)
        if batch:
            batch.sampled = [chunk.seq for chunk in batch.prefill if chunk.samples] or batch.decode
            batch.kept_states, batch.restored_states = self.block_manager.take_state_copies()
        return batch

    def update(self, batch: ScheduledBatch, token_ids: list[int]) -> list[Sequence]:
        """Append the sampled tokens, one for each of `batch.sampled`; return the sequences that finished.

        When a stop token becomes known, the next step may be under way already: what it samples for the finished
        sequence is dropped here. Its row and blocks may still be given out at once, since steps run in order.
        """
        block_size = self.block_manager.block_size
        self.block_manager.release(batch.block_copies)
        finished = [(seq, "length") for seq in batch.pooled if seq.status is SequenceStatus.RUNNING]
        for seq, token_id in zip(batch.sampled, token_ids, strict=True):
            if token_id == NO_TOKEN:
                # Its keys and values may be NaN as well, so no prefix hit may find them.
                self.block_manager.evict_failed(seq)
            if seq.status is SequenceStatus.FINISHED:
                continue
            seq.num_pending_tokens -= 1
            if token_id == NO_TOKEN:
                finished.append((seq, "error"))
                continue
            num_computed = len(seq.token_ids)  # by this step and those before it
            seq.token_ids.append(token_id)
            if num_computed % block_size == 0:
                self.block_manager.cache_blocks(seq, num_computed)
            stopping = seq.stopping
            # Most tokens end nothing, and a look at the set takes less time than a call.
            may_end = token_id in stopping.tokens.ids or seq.constraint is not None
            if may_end and stopping.advance(token_id, seq.constraint):
                finished.append((seq, "stop"))
            elif (num_left := stopping.max_num_tokens - num_computed - 1) <= seq.num_pending_tokens:  # all in flight
                if num_left > 0:
                    self._ending.append(seq)
                else:
                    finished.append((seq, "length"))
        return self.finish(finished)

    def finish(self, reasons: list[tuple[Sequence, str]]) -> list[Sequence]:
        """Finish running sequences, each for its reason: free their rows and blocks. Return the sequences."""
        for seq, reason in reasons:
            seq.finish_reason = reason
            if seq.row is None and seq.stopping.ends_with_prompt:  # a later step has its row and blocks
                seq.status = SequenceStatus.FINISHED
                continue
            if reason in ("stop", "length") and not seq.stopping.ends_with_prompt:
                self.block_manager.cache_end(seq)
            if self._on_finish is not None:
                self._on_finish(seq)
            self._release(seq, SequenceStatus.FINISHED)
        if reasons:
            self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]
        return [seq for seq, _ in reasons]

    def discard(self, batches: list[ScheduledBatch]) -> None:
        """Undo steps that failed: their sequences go back to the queue, and their cache entries are evicted."""
        chunks = [chunk for batch in batches for chunk in batch.prefill]
        manager = self.block_manager
        if manager.state_group or not all(manager.holds(chunk.seq) for chunk in chunks):
            # Snapshots may hold states of these steps, or states computed from them. And a sequence that ends with its
            # prompt has freed its blocks, so nobody knows which blocks its step was to fill.
            manager.reset_prefix_cache()
        for chunk in chunks:
            manager.evict_failed(chunk.seq, chunk.start)
        for batch in batches:
            self.block_manager.release(batch.block_copies)
        for seq in [chunk.seq for chunk in chunks] + [seq for batch in batches for seq in batch.decode]:
            if seq.status is SequenceStatus.RUNNING:
                self._send_back(seq)

    def abort(self, seq_ids: set[int]) -> None:
        """Drop these sequences wherever they are; unknown ids and finished sequences are ignored."""
        holding = [seq for seq in self.running + self.paused if seq.row is not None]
        self.finish([(seq, "abort") for seq in holding if seq.seq_id in seq_ids])
        for seq in self._withdraw(seq_ids):
            seq.status, seq.finish_reason = SequenceStatus.FINISHED, "abort"

    def pause(self, seq_ids: set[int]) -> None:
        """Let these sequences compute nothing until they are resumed. No step may be in flight.

        A running sequence keeps its row and blocks, so that resuming it costs nothing, until `reclaim` takes both for
        others. A waiting one leaves the queue.
        """
        running = [seq for seq in self.running if seq.seq_id in seq_ids]
        self.running = [seq for seq in self.running if seq.seq_id not in seq_ids]
        already_paused = {*self.paused}
        for seq in running + self._withdraw(seq_ids):
            assert seq.num_pending_tokens == 0, f"sequence {seq.seq_id} is paused while a step computes its next token"
            seq.status = SequenceStatus.PAUSED
            self.paused.append(seq)
            if seq not in already_paused:
                self.listener.paused(seq)
        self._blocked_head = None  # a prompt that did not fit may fit now

    def resume(self, seq_ids: set[int]) -> None:
        """Let paused sequences go on: at once if they hold a row and blocks, else from their old place in the queue.

        Sequences that are not paused stay as they are.
        """
        resumed = [seq for seq in self.paused if seq.seq_id in seq_ids]
        self.paused = [seq for seq in self.paused if seq.seq_id not in seq_ids]
        for seq in resumed:
            if seq.row is None:
                seq.status = SequenceStatus.WAITING
                self._enqueue(seq)
            else:
                seq.status = SequenceStatus.RUNNING
                self.running.append(seq)
            self.listener.resumed(seq)
        self.sharer_finder.forget()

    def _withdraw(self, seq_ids: set[int]) -> list[Sequence]:
        """Take these sequences from the queue and from the paused ones; return them."""
        waiting = [seq for _, seq in self._waiting if seq.seq_id in seq_ids]
        for seq in waiting:
            self.block_manager.dequeue(seq)
        taken = [seq for seq in self.paused if seq.seq_id in seq_ids] + waiting
        self.paused = [seq for seq in self.paused if seq.seq_id not in seq_ids]
        self._waiting = [item for item in self._waiting if item[1].seq_id not in seq_ids]
        heapq.heapify(self._waiting)
        return taken

    def reclaim(self) -> bool:
        """Take row and blocks from the paused sequence that is last in the queue's order; False if none holds any."""
        last = max((seq for seq in self.paused if seq.row is not None), key=lambda seq: seq.queue_key, default=None)
        if last is None:
            return False
        self.num_preemptions += 1
        self._release(last, SequenceStatus.PAUSED)
        return True

    def _schedule_prefill(self, in_flight: bool) -> tuple[ScheduledBatch, bool]:
        """Schedule chunks of prompts begun earlier, then of new ones, until the step's token budget is used.

        Also return whether a chunk has to wait for blocks until the step in flight is collected.
        """
        batch = ScheduledBatch()
        budget = self.max_num_batched_tokens
        for seq in self.running.copy():
            num_left = len(seq.token_ids) - seq.num_computed_tokens
            if num_left <= 0:
                continue  # all its known tokens are computed
            needs_states = seq.hidden_states_request is not None and seq.num_computed_tokens < seq.num_prompt_tokens
            if num_left == 1 and not needs_states:
                continue  # decode computes its newest token; hidden states have to come from prefill
            if budget <= 0 or seq.row is None:
                continue  # it has no row: it was preempted for a sequence before it
            if not self._make_room(seq, budget, may_preempt=not (batch or in_flight)):
                return batch, True
            if seq.row is not None:  # None: it was preempted itself
                budget -= self._add_chunk(batch, seq, budget)
        if not (batch.prefill or self._worth_admitting()):
            return batch, False
        passed_over = PassedOver()
        budget = self._admit(batch, budget, passed_over)
        # Waiting would save too little to leave room in the step: admit prompts without passing over any.
        if budget > 0 and 0 < passed_over.num_saved < self.min_awaited_in_all:
            self._admit(batch, budget, PassedOver(max_prompts=0))
        batch.prefill.sort(key=attrgetter("samples"), reverse=True)  # stable: the others keep their order
        return batch, False

    def _make_room(self, seq: Sequence, budget: int, may_preempt: bool) -> bool:
        """Free blocks for the next chunk of a sequence, which may itself be preempted; False if it has to wait."""
        num_tokens = min(budget, seq.num_tokens - seq.num_computed_tokens)
        while seq.row is not None and not self.block_manager.make_room([seq], num_tokens):
            if self.reclaim():
                continue
            if not may_preempt:
                return False
            self._preempt(self.running)
        return True

    def _admit(self, batch: ScheduledBatch, budget: int, passed_over: PassedOver) -> int:
        """Schedule new prompts; return what is left of the budget. Prompts that are passed over stay in the queue."""
        manager = self.block_manager
        growth = sum(self._growth(seq) for seq in self.running) if self._waiting else 0
        while budget > 0 and self._waiting and (len(self._free_rows) > len(passed_over.seqs) or self.reclaim()):
            seq = self._waiting[0][1]
            if self.whole_prompts and seq.num_tokens > budget:
                break  # it is the first of the next step; a shorter one behind it may not overtake
            if self.running and self._blocked_head == (seq.seq_id, manager.pool.num_frees):
                break  # no blocks came back since it did not fit, so looking it up again would find the same
            hit = manager.find_cached_prefix(seq)
            if hit.num_later >= self.min_awaited_tokens:
                if not passed_over.is_full:
                    heapq.heappop(self._waiting)
                    passed_over.add(seq, hit.num_later)
                    # Prompts that overtake it leave free the blocks that it needs in the next step.
                    num_blocks = manager.num_blocks_to_allocate(seq, hit)
                    growth += num_blocks * manager.block_size + self._growth(seq)
                    continue
                if passed_over.num_saved >= budget:
                    break  # waiting saves more than the step has room for, so it looks up no more prompts
            growth += self._growth(seq)
            if not self._try_admit(batch, seq, hit, growth):
                break  # shorter prompts behind it would fit, but would keep it waiting
            budget -= self._add_chunk(batch, seq, budget)
        for seq in passed_over.seqs:
            heapq.heappush(self._waiting, (seq.queue_key, seq))
        self._awaits_prefix = bool(passed_over.seqs)
        return budget

    def _schedule_decode(self, in_flight: bool, proposer: Proposer | None) -> ScheduledBatch:
        """Schedule one token for each running sequence; while blocks are short, the last in order are preempted.

        With proposals it may be several tokens. Such a step, and the next one, waits for the step before it.
        """
        if in_flight and ((proposer is not None and proposer.waits(self.running)) or self._has_proposals):
            return ScheduledBatch()
        # Leave out sequences whose last token is in flight. The sum is `num_tokens`, without a call for each row.
        decode = [
            seq for seq in self.running if len(seq.token_ids) + seq.num_pending_tokens < seq.stopping.max_num_tokens
        ]
        manager = self.block_manager
        needy = manager.needing_block(decode)
        while not manager.make_room(needy):
            if self.reclaim():
                continue
            if in_flight:
                return ScheduledBatch()
            last = self._preempt(decode)
            decode.remove(last)
            needy = [seq for seq in needy if seq is not last]
        batch = ScheduledBatch()
        proposals = proposer.propose(decode) if proposer is not None else []
        manager.extend(batch, needy)
        for seq in decode:
            seq.num_computed_tokens += 1
            seq.num_pending_tokens += 1
        batch.decode, batch.prefix_sharers = self.sharer_finder.arrange(decode)
        self._has_proposals = bool(proposals)
        if proposals:
            add_proposals(batch, decode, proposals, self.max_row_tokens, manager, self.sharer_finder.max_prefix_sharers)
        return batch

    def _preempt(self, seqs: list[Sequence]) -> Sequence:
        """Send one of these sequences back to the queue, the last in the queue's order, and return it."""
        last = max(seqs, key=lambda seq: seq.queue_key)
        self.num_preemptions += 1
        self._send_back(last)
        self.listener.preempted(last)
        return last

    def _worth_admitting(self) -> bool:
        """Return False while sequences decode under a long queue and too few rows are free (hysteresis)."""
        num_rows = min(MIN_REFILLED_ROWS, max(1, self.max_num_seqs // 4), len(self._waiting))
        return not self.running or self._awaits_prefix or self.max_num_seqs - len(self.running) >= num_rows

    def _growth(self, seq: Sequence) -> int:
        """Return for how many tokens, summed over block tables, a running sequence needs room to grow."""
        num_tokens = min(self.reserved_tokens, seq.stopping.max_num_tokens - seq.num_tokens)
        return num_tokens * self.block_manager.num_growing_tables(seq)

    def _try_admit(self, batch: ScheduledBatch, seq: Sequence, hit: Hit, growth: int) -> bool:
        """Move the head of the queue into the running set if its blocks, and those for `growth` tokens, are free."""
        manager = self.block_manager
        reserve = manager.pool.num_blocks_for(growth) if self.running else 0
        while manager.num_blocks_to_allocate(seq, hit) + reserve > manager.num_free_blocks:
            if not self.reclaim():
                self._blocked_head = (seq.seq_id, manager.pool.num_frees)
                return False
        heapq.heappop(self._waiting)
        manager.dequeue(seq)
        seq.row = heapq.heappop(self._free_rows)
        manager.allocate(batch, seq, hit)
        self.sharer_finder.forget()  # if it ran before, it now has another block table
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
        seq.status = SequenceStatus.RUNNING
        self.running.append(seq)
        batch.admitted.append(seq)
        return True

    def _add_chunk(self, batch: ScheduledBatch, seq: Sequence, budget: int) -> int:
        """Schedule as much of `seq` as the budget allows; return the number of tokens."""
        manager, start, num_tokens = self.block_manager, seq.num_computed_tokens, seq.num_tokens
        end = manager.chunk_end(seq, min(start + budget, num_tokens))
        samples = end == num_tokens and not seq.stopping.ends_with_prompt
        batch.prefill.append(PrefillChunk(seq, start, end - start, samples))
        manager.extend(batch, [seq], end - start)
        seq.num_computed_tokens = end
        # At once, so that an equal prompt admitted later in this very step shares the blocks.
        manager.cache_blocks(seq, end, with_last=end == num_tokens)
        seq.num_pending_tokens += samples
        if end == num_tokens and num_tokens + samples >= seq.stopping.max_num_tokens:
            self._ending.append(seq)
        return end - start

    def _send_back(self, seq: Sequence) -> None:
        """Free the row and blocks of a running sequence and queue it again; its known tokens stay."""
        if seq.row is not None:
            self.running.remove(seq)
        self._release(seq, SequenceStatus.WAITING)
        seq.num_pending_tokens = 0
        self._enqueue(seq)

    def _release_ending(self) -> None:
        """Take the rows of sequences whose last step is in flight, if others wait for them and there are blocks.

        They keep their blocks until that step is collected and the blocks are cached, unless they end with their
        prompts. In a hybrid model they keep their rows too, because the rows' states are cached at that time.
        """
        manager = self.block_manager
        # Some may have finished or been sent back since.
        ending = [seq for seq in self._ending if seq.row is not None and seq.num_tokens == seq.stopping.max_num_tokens]
        takes_rows = False
        if ending and self._waiting and manager.state_group is None:
            # With fewer free blocks than these hold, only some could be replaced. Shared blocks count once.
            tables, num_free = [seq.block_table for seq in ending], manager.num_free_blocks
            takes_rows = sum(map(len, tables)) <= num_free or len(set().union(*tables)) <= num_free
        for seq in ending:
            if seq.stopping.ends_with_prompt:
                self._release(seq, seq.status)
            elif takes_rows and seq.num_pending_tokens:
                self._release_row(seq)
        self.running = [seq for seq in self.running if seq.row is not None]
        self._ending = []

    def _release(self, seq: Sequence, status: SequenceStatus) -> None:
        if seq.row is not None:
            self._release_row(seq)
        seq.status = status
        self.block_manager.free(seq)

    def _release_row(self, seq: Sequence) -> None:
        assert seq.row is not None, f"sequence {seq.seq_id} is released and has no row"
        heapq.heappush(self._free_rows, seq.row)
        seq.row = None
