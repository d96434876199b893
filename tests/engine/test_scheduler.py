"""Who runs next: order, bounds, endings, and what happens when blocks are short or a step fails."""

import pytest

from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.cache_groups.cache_group import Hit
from nanoinfer.engine.cache_groups.partial_hits import PassedOver
from nanoinfer.engine.scheduled_batch import NewBlock, ScheduledBatch
from nanoinfer.engine.scheduler import RESERVED_TOKENS, Scheduler
from nanoinfer.engine.sequence import Sequence, SequenceStatus
from nanoinfer.sampling_params import SamplingParams
from tests.engine.helpers import (
    add_prompts,
    benchmark_requests,
    check_invariants,
    found_block_ids,
    make_scheduler,
    make_sequence,
    run_to_the_end,
    step,
)


def ids(seqs: list[Sequence]) -> list[int]:
    return [seq.seq_id for seq in seqs]


def chunks(batch: ScheduledBatch) -> list[tuple[int, int, int, bool]]:
    """(sequence, start, length, samples) of each chunk."""
    return [(seq.seq_id, start, length, samples) for seq, start, length, samples in batch.prefill]


class LookupCounter(BlockManager):
    """Counts how often a prompt is looked up in the prefix cache."""

    num_lookups = 0

    def find_cached_prefix(self, seq: Sequence) -> Hit:
        self.num_lookups += 1
        return super().find_cached_prefix(seq)


# Order and bounds.


def test_requests_are_admitted_in_the_order_they_came() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    assert scheduler.is_finished()
    assert not scheduler.schedule()
    add_prompts(scheduler, [1], [2], [3], [4], [5], max_tokens=1)
    batches = run_to_the_end(scheduler)
    assert [ids(batch.admitted) for batch in batches] == [[0, 1], [2, 3], [4]]


def test_the_next_step_has_the_rows_of_sequences_whose_last_token_is_in_flight() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add_prompts(scheduler, [1], [2], [3], [4], max_tokens=2)
    prompts, last = scheduler.schedule(), scheduler.schedule(in_flight=True)
    scheduler.update(prompts, [7, 7])
    following = scheduler.schedule(in_flight=True)
    assert (ids(last.decode), ids(following.admitted)) == ([0, 1], [2, 3])
    assert [seq.row for seq in following.admitted] == [0, 1]
    assert all(seq.block_table for seq in last.decode), "what is cached at their end is not known yet"
    assert ids(scheduler.update(last, [8, 8])) == [0, 1]
    assert [seq.token_ids.tolist() for seq in last.decode] == [[1, 7, 8], [2, 7, 8]]
    assert scheduler.block_manager.num_used_blocks == 2
    scheduler.update(following, [9, 9])
    run_to_the_end(scheduler)
    assert scheduler.block_manager.num_used_blocks == 0


def test_rows_stay_with_their_sequences_where_nobody_waits_or_blocks_are_short() -> None:
    for num_waiting, num_blocks in ((0, 8), (2, 3)):
        scheduler = make_scheduler(max_num_seqs=2, num_blocks=num_blocks, max_model_len=4)
        add_prompts(scheduler, *[[index] for index in range(2 + num_waiting)], max_tokens=1)
        prompts = scheduler.schedule()
        assert not scheduler.schedule(in_flight=True)
        assert [seq.row for seq in prompts.admitted] == [0, 1]
        assert ids(scheduler.update(prompts, [7, 7])) == [0, 1]
        assert len(scheduler.schedule().admitted) == num_waiting


def test_a_shared_block_counts_once_where_rows_are_given_on() -> None:
    for num_blocks, given_on in ((8, [2, 3]), (7, [])):
        scheduler = make_scheduler(max_num_seqs=2, num_blocks=num_blocks, block_size=2, max_model_len=8)
        add_prompts(scheduler, *[[1, 2, 3, 4, index] for index in range(4)], max_tokens=1)
        scheduler.schedule()
        assert scheduler.block_manager.num_used_blocks == 4, "two that both share, and one of each"
        assert ids(scheduler.schedule(in_flight=True).admitted) == given_on


def test_prefill_comes_before_decode() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, [1, 2]))
    assert ids([chunk.seq for chunk in step(scheduler).prefill]) == [0]
    scheduler.add(make_sequence(1, [3, 4]))  # comes while 0 is decoding
    batch = step(scheduler)
    assert (ids(batch.sampled), batch.decode) == ([1], [])
    batch = step(scheduler)
    assert (batch.prefill, ids(batch.decode)) == ([], [0, 1])


def test_a_step_says_which_rows_and_blocks_are_new() -> None:
    scheduler = make_scheduler(block_size=2)
    add_prompts(scheduler, [1, 2, 3], [4])
    batch = step(scheduler)
    assert [seq.row for seq in batch.admitted] == [0, 1]
    assert batch.new_blocks == [NewBlock(0, 0, 0), NewBlock(0, 1, 1), NewBlock(1, 0, 2)]
    assert step(scheduler).new_blocks == []  # tokens 3 and 1: both blocks had room
    batch = step(scheduler)
    assert (batch.admitted, batch.new_blocks) == ([], [NewBlock(0, 2, 3), NewBlock(1, 1, 4)])


def test_no_more_sequences_run_than_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    seqs = add_prompts(scheduler, [1], [2], [3], [4], max_tokens=3)
    while not scheduler.is_finished():
        step(scheduler)
        assert len(scheduler.running) <= 2
        check_invariants(scheduler, seqs)


def test_the_prompt_that_meets_the_end_of_the_budget_is_cut_and_continued_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    _, seq, _ = add_prompts(scheduler, [1] * 2, [2] * 15, [3] * 3, max_tokens=1)
    assert chunks(step(scheduler)) == [(0, 0, 2, True), (1, 0, 4, False)]
    assert chunks(step(scheduler)) == [(1, 4, 6, False)]
    batch = scheduler.schedule()
    assert chunks(batch) == [(1, 10, 5, True), (2, 0, 1, False)]
    assert (seq.num_tokens, seq.completion_token_ids) == (16, []), "the token that the step will sample counts"
    scheduler.update(batch, [5])
    assert (seq.num_tokens, seq.completion_token_ids) == (16, [5])
    assert chunks(step(scheduler)) == [(2, 1, 2, True)]
    assert scheduler.is_finished()


def test_the_last_token_of_a_cut_prompt_may_run_with_the_decode_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    (seq,) = add_prompts(scheduler, [1, 2, 3, 4, 5], max_tokens=1)
    assert chunks(step(scheduler)) == [(0, 0, 4, False)]
    assert ids(step(scheduler).decode) == [0]
    assert seq.completion_token_ids == [0]


# Endings.


def test_update_returns_the_sequences_that_finished_and_frees_what_they_held() -> None:
    scheduler = make_scheduler()
    short, long = make_sequence(0, [1], max_tokens=1), make_sequence(1, [2], max_tokens=2)
    scheduler.add(short)
    scheduler.add(long)
    assert scheduler.update(scheduler.schedule(), [5, 5]) == [short]
    assert (short.row, short.block_table, scheduler.running) == (None, [], [long])
    assert scheduler.update(scheduler.schedule(), [5]) == [long]
    assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks


def test_a_sequence_that_finishes_is_shown_to_an_observer_while_it_holds_its_blocks() -> None:
    shown: list[tuple[int, list[int], int]] = []
    scheduler = Scheduler(
        BlockManager(10, 4),
        max_num_seqs=2,
        max_num_batched_tokens=100,
        max_model_len=40,
        on_finish=lambda seq: shown.append((seq.seq_id, seq.block_table.copy(), seq.num_computed_tokens)),
    )
    add_prompts(scheduler, [1, 2, 3, 4, 5], [6, 7, 8], max_tokens=2)
    run_to_the_end(scheduler)
    assert shown == [(0, [0, 1], 6), (1, [2], 4)]
    [waiting] = add_prompts(scheduler, [1])
    scheduler.abort({waiting.seq_id})
    assert len(shown) == 2, "what still waits holds nothing"


def test_a_prompt_that_fills_the_whole_cache_but_one_token_finishes() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=2)
    full, after = add_prompts(scheduler, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    run_to_the_end(scheduler, max_steps=2)
    assert [(seq.finish_reason, seq.num_tokens) for seq in (full, after)] == [("length", 6), ("length", 6)]


# The prefix cache, as the scheduler uses it.


def test_equal_prompts_share_blocks_within_their_first_step() -> None:
    scheduler = make_scheduler(block_size=2)
    first, second = add_prompts(scheduler, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    batch = scheduler.schedule()
    assert chunks(batch) == [(0, 0, 5, True), (1, 4, 1, True)]
    assert first.block_table == [0, 1, 2]
    assert second.block_table == [0, 1, 3]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)


@pytest.mark.parametrize(("saved_in_all", "waits"), [(40, True), (41, False)])
def test_prompts_that_share_a_prefix_within_a_block_wait_for_the_one_that_computes_it(
    saved_in_all: int, waits: bool
) -> None:
    """Where the step has room left, only if those that wait spare enough together: here 20 tokens each."""
    scheduler = make_scheduler(num_blocks=20, block_size=32, max_num_batched_tokens=200)
    scheduler.min_awaited_tokens, scheduler.min_awaited_in_all = 20, saved_in_all
    shared = [7] * 20
    add_prompts(scheduler, [*shared, 1], [*shared, 2, 2], [5] * 30, [*shared, 3, 3, 3])
    first = scheduler.schedule()
    scheduler.update(first, [9] * len(first.sampled))
    if not waits:
        assert ids(first.admitted) == [0, 2, 1, 3]
        assert not first.block_copies
        return
    assert ids(first.admitted) == [0, 2]
    second = scheduler.schedule()
    assert chunks(second) == [(1, 20, 2, True), (3, 20, 3, True)]
    assert [copy.num_tokens for copy in second.block_copies] == [20, 20]
    assert scheduler.block_manager.num_used_blocks == 4, "the source is one of them"
    scheduler.update(second, [9, 9])
    check_invariants(scheduler, [chunk.seq for chunk in first.prefill + second.prefill])


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"num_blocks": 3}])
@pytest.mark.parametrize("saved_in_all", [20, 1000])
def test_a_prompt_that_waits_for_a_prefix_loses_neither_row_nor_blocks(
    limits: dict[str, int], saved_in_all: int
) -> None:
    scheduler = make_scheduler(**{"num_blocks": 20, "block_size": 32, "max_num_batched_tokens": 200} | limits)
    scheduler.reserved_tokens, scheduler.min_awaited_tokens, scheduler.min_awaited_in_all = 0, 20, saved_in_all
    add_prompts(scheduler, [7] * 20 + [1], [7] * 20 + [2], [5] * 60)
    admitted = [ids(step(scheduler, 9).admitted) for _ in range(2)]
    assert admitted == ([[0], [1]] if saved_in_all == 20 else [[0, 1], []])


def test_a_prompt_waits_for_a_prefix_one_step_and_not_until_many_rows_are_free() -> None:
    scheduler = make_scheduler(num_blocks=100, block_size=32, max_num_seqs=16, max_num_batched_tokens=200)
    scheduler.min_awaited_tokens, scheduler.min_awaited_in_all = 20, 20
    prompts = (
        [[number] * 5 for number in range(100, 112)],
        [[7] * 20 + [1], [7] * 20 + [2]],
        [[8] * 5, [9] * 5, [6] * 5],
    )
    add_prompts(scheduler, *(prompt for group in prompts for prompt in group))
    assert ids(step(scheduler, 9).admitted) == [*range(13), 14, 15]
    assert ids(step(scheduler, 9).admitted) == [13]


def test_no_prompt_waits_for_a_few_tokens() -> None:
    scheduler = make_scheduler(num_blocks=20, block_size=32, max_num_batched_tokens=200)
    scheduler.min_awaited_tokens = 20
    add_prompts(scheduler, [7] * 19 + [1], [7] * 19 + [2], [7] * 19 + [3])
    assert ids(scheduler.schedule().admitted) == [0, 1, 2]


@pytest.mark.parametrize(("num_tokens", "admitted"), [(61, [0]), (62, [0, 3])])
def test_of_many_prompts_that_wait_only_some_are_looked_up(
    num_tokens: int, admitted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beyond are admitted if the step has room for more tokens than waiting spares: here twice 20."""
    monkeypatch.setattr("nanoinfer.engine.scheduler.PassedOver", lambda max_prompts=2: PassedOver(max_prompts))
    scheduler = make_scheduler(num_blocks=20, block_size=32, max_num_batched_tokens=num_tokens)
    scheduler.min_awaited_tokens, scheduler.min_awaited_in_all = 20, 40
    scheduler.block_manager = manager = LookupCounter(num_blocks=20, block_size=32)
    add_prompts(scheduler, *([7] * 20 + [end] for end in (1, 2, 3, 4, 5)))
    assert ids(scheduler.schedule().admitted) == admitted
    assert manager.num_lookups <= 4 + 2 * (len(admitted) - 1)


def test_a_blocked_queue_head_is_not_looked_up_again_until_blocks_come_back() -> None:
    scheduler = make_scheduler()
    scheduler.block_manager = manager = LookupCounter(num_blocks=6, block_size=2)
    add_prompts(scheduler, [1, 2, 3, 4], [5, 6, 7, 8, 9], max_tokens=4)
    batch = step(scheduler)
    assert (ids(batch.admitted), manager.num_lookups) == ([0], 2)  # 3 blocks and a reserve of 2 are not free
    for _ in range(2):
        assert ids(step(scheduler).decode) == [0]
        assert manager.num_lookups == 2
    assert ids(step(scheduler).decode) == [0]  # finishes
    assert (ids(step(scheduler).admitted), manager.num_lookups) == ([1], 3)


def test_a_blocked_queue_head_is_admitted_while_others_still_run() -> None:
    scheduler = make_scheduler(num_blocks=7, block_size=2)
    for seq in (make_sequence(0, [1], max_tokens=2), make_sequence(1, [2], max_tokens=9), make_sequence(2, [3] * 5)):
        scheduler.add(seq)
    assert ids(step(scheduler).admitted) == [0, 1]  # 3 blocks and a reserve of 3 are not free for 2
    assert ids(step(scheduler).decode) == [0, 1]  # 0 finishes
    assert ids(step(scheduler).admitted) == [2]


def test_a_new_queue_head_is_looked_up_though_the_last_one_was_blocked() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=2)
    add_prompts(scheduler, [1, 2, 3, 4], [5] * 9, [6], max_tokens=8)
    step(scheduler)
    step(scheduler)
    assert ids(scheduler.running) == [0]
    scheduler.abort({1})
    step(scheduler)
    assert ids(scheduler.running) == [0, 2]


# Short of blocks.


def test_a_prompt_is_admitted_only_with_a_block_in_reserve_for_each_running_sequence() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2)
    add_prompts(scheduler, [1, 1], [2, 2], [3, 3])
    # 1 block for 0; 1 for 1 and a reserve of 2; then 2 blocks are left, and 1 for 2 and a reserve of 3 do not fit.
    assert ids(step(scheduler).admitted) == [0, 1]


def test_the_youngest_is_preempted_and_is_first_in_the_queue() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    seqs = add_prompts(scheduler, [1, 1], [2, 2], [3], max_tokens=7)
    assert ids(step(scheduler).admitted) == [0, 1]
    step(scheduler)
    step(scheduler)  # both have 4 computed tokens in 2 blocks, and 1 block is left
    assert [seq.num_computed_tokens for seq in seqs] == [4, 4, 0]
    batch = step(scheduler)
    assert (ids(batch.decode), scheduler.num_preemptions) == ([0], 1)
    assert [seq.status for seq in seqs[1:]] == [SequenceStatus.WAITING] * 2
    check_invariants(scheduler, seqs)
    readmitted = [ids(batch.admitted) for batch in run_to_the_end(scheduler) if batch.admitted]
    assert readmitted == [[1], [2]]


def test_a_preempted_sequence_computes_prompt_and_generated_tokens_once_more() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    old, young = add_prompts(scheduler, [1, 1], [2, 2], max_tokens=7)
    for token_id in (10, 11, 12):
        step(scheduler, token_id)
    scheduler.block_manager.reset_prefix_cache()  # so that nothing is found again
    step(scheduler, 13)
    assert scheduler.num_preemptions == 1
    assert (young.status, young.row, young.block_table) == (SequenceStatus.WAITING, None, [])
    assert young.token_ids.tolist() == [2, 2, 10, 11, 12]
    while old.status is SequenceStatus.RUNNING:
        step(scheduler, 14)
    assert chunks(step(scheduler, 15)) == [(1, 0, 5, True)]
    assert young.completion_token_ids == [10, 11, 12, 15]


def test_a_preempted_sequence_finds_what_is_left_of_its_blocks() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    old, young = make_sequence(0, [1, 1], max_tokens=4), make_sequence(1, [2, 2], max_tokens=7)
    scheduler.add(old)
    scheduler.add(young)
    for _ in range(4):
        step(scheduler)
    assert (scheduler.num_preemptions, old.status) == (1, SequenceStatus.FINISHED)
    batch = step(scheduler)
    assert chunks(batch) == [(1, 4, 1, True)]
    assert young.num_cached_tokens == 0  # of the first admission


def test_preemption_stops_as_soon_as_the_others_have_enough() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=2)
    seqs = add_prompts(scheduler, [1, 1], [2, 2], [3, 3], [4, 4], max_tokens=9)
    for _ in range(3):
        step(scheduler)
    assert [len(seq.block_table) for seq in seqs] == [2, 2, 2, 2]
    batch = step(scheduler)  # 4 need a block and 1 is free; without the youngest, 3 need one and 3 are free
    assert (ids(batch.decode), scheduler.num_preemptions) == ([0, 1, 2], 1)


# Failed steps and aborts.


def test_a_failed_prefill_leaves_all_requests_queued_and_nothing_cached() -> None:
    scheduler = make_scheduler(block_size=2, max_num_batched_tokens=8)
    seqs = add_prompts(scheduler, [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7] * 5)
    batch = scheduler.schedule()
    assert chunks(batch) == [(0, 0, 5, True), (1, 4, 1, True), (2, 0, 2, False)]
    assert scheduler.block_manager.num_cached_blocks == 3
    scheduler.discard([batch])
    assert scheduler.block_manager.num_cached_blocks == 0
    assert scheduler.block_manager.num_used_blocks == 0
    assert (scheduler.num_waiting, scheduler.running) == (3, [])
    check_invariants(scheduler, seqs)
    assert chunks(scheduler.schedule()) == chunks(batch)
    assert [seq.completion_token_ids for seq in seqs] == [[], [], []]


def test_a_failed_chunk_takes_back_the_block_that_it_was_to_complete_and_no_other() -> None:
    scheduler = make_scheduler(block_size=4, max_num_batched_tokens=6)
    add_prompts(scheduler, list(range(10)))
    step(scheduler)  # tokens 0 to 5: one block, and half of the next
    batch = scheduler.schedule()
    assert scheduler.block_manager.num_cached_blocks == 2
    scheduler.discard([batch])
    assert scheduler.block_manager.num_cached_blocks == 1
    assert chunks(scheduler.schedule()) == [(0, 4, 6, True)]


def test_a_failed_prefill_leaves_what_earlier_steps_cached() -> None:
    scheduler = make_scheduler(block_size=2)
    scheduler.add(make_sequence(0, [1, 2, 3]))
    step(scheduler)
    scheduler.add(make_sequence(1, [1, 2, 5, 6, 7]))
    batch = scheduler.schedule()
    assert chunks(batch) == [(1, 2, 3, True)]
    scheduler.discard([batch])
    assert ids(scheduler.running) == [0]
    assert found_block_ids(scheduler.block_manager, make_sequence(2, [1, 2, 5, 6, 7])) == [0]


def test_a_failed_decode_leaves_all_requests_queued_with_their_tokens() -> None:
    scheduler = make_scheduler(block_size=2)
    first, second = add_prompts(scheduler, [1, 2, 3], [4, 5])
    step(scheduler, 9)
    scheduler.discard([scheduler.schedule()])
    check_invariants(scheduler, [first, second])
    assert [seq.token_ids.tolist() for seq in (first, second)] == [[1, 2, 3, 9], [4, 5, 9]]
    assert scheduler.block_manager.num_cached_blocks == 2  # the prompts' own; not [3, 9], which was being computed
    assert chunks(scheduler.schedule()) == [(0, 2, 2, True), (1, 2, 1, True)]


def test_a_running_sequence_can_be_aborted_also_between_two_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    cut, first, second = seqs = add_prompts(scheduler, [1] * 10, [2], [3])
    step(scheduler)
    scheduler.abort({0})
    assert (cut.status, cut.row, cut.block_table) == (SequenceStatus.FINISHED, None, [])
    check_invariants(scheduler, seqs)
    assert chunks(step(scheduler)) == [(1, 0, 1, True), (2, 0, 1, True)]
    scheduler.abort({1})
    assert (first.row, scheduler.running, scheduler.block_manager.num_used_blocks) == (None, [second], 1)
    check_invariants(scheduler, seqs)
    run_to_the_end(scheduler)
    assert len(second.completion_token_ids) == 4


def test_a_waiting_sequence_can_be_aborted() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    first, second, third = add_prompts(scheduler, [1], [2], [3], max_tokens=1)
    scheduler.abort({0, 1, 99})
    assert scheduler.num_waiting == 1
    assert first.status is second.status is SequenceStatus.FINISHED
    run_to_the_end(scheduler)
    assert [len(seq.completion_token_ids) for seq in (first, second, third)] == [0, 0, 1]


# What a long queue costs.


def test_under_a_long_queue_rows_are_refilled_in_groups() -> None:
    scheduler = make_scheduler(max_num_seqs=8)  # groups of a quarter: 2
    for seq_id in range(8):
        scheduler.add(make_sequence(seq_id, [1], max_tokens=2 + seq_id))  # one finishes in each step
    for seq_id in range(8, 20):
        scheduler.add(make_sequence(seq_id, [1], max_tokens=50))
    admitted = [ids(step(scheduler).admitted) for _ in range(8)]
    assert admitted == [[0, 1, 2, 3, 4, 5, 6, 7], [], [], [8, 9], [], [], [10, 11], []]


def test_a_prefill_step_that_comes_anyway_is_filled_up_without_waiting_for_a_group() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=7)
    add_prompts(scheduler, [0], [1], [2], [3], [4], [5], [6] * 6, [7], [8])
    assert ids(step(scheduler).admitted) == [0, 1, 2, 3, 4, 5, 6]  # and one row is left
    assert chunks(step(scheduler)) == [(6, 1, 5, True), (7, 0, 1, True)]


def test_the_end_of_the_queue_does_not_wait_for_a_group() -> None:
    scheduler = make_scheduler(max_num_seqs=8)
    for seq_id in range(9):
        scheduler.add(make_sequence(seq_id, [1], max_tokens=2 + seq_id))
    admitted = [ids(step(scheduler).admitted) for _ in range(3)]
    assert admitted == [[0, 1, 2, 3, 4, 5, 6, 7], [], [8]]


def test_a_long_queue_takes_few_prefill_steps() -> None:
    scheduler = make_scheduler(num_blocks=256, block_size=256, max_num_seqs=32, max_num_batched_tokens=16_384)
    for seq in benchmark_requests(256):
        scheduler.add(seq)
    batches = run_to_the_end(scheduler)
    assert sum(bool(batch.prefill) for batch in batches) <= 40, "one by one they take 221"


@pytest.mark.parametrize("num_blocks", [300, 400])
def test_the_reserve_keeps_the_benchmark_from_computing_its_prompts_twice(num_blocks: int) -> None:
    scheduler = make_scheduler(num_blocks, 256, 512, max_num_batched_tokens=16_384, max_model_len=4096)
    scheduler.reserved_tokens = RESERVED_TOKENS  # as the engine has it
    seqs = benchmark_requests(256)
    for seq in seqs:
        scheduler.add(seq)
    num_prompt_tokens = sum(seq.num_prompt_tokens for seq in seqs)
    num_computed_tokens = sum(batch.num_prefill_tokens for batch in run_to_the_end(scheduler))
    # Without the reserve 40% are computed twice, with 400 blocks.
    assert num_computed_tokens <= 1.05 * num_prompt_tokens
    assert scheduler.num_preemptions <= 12, "of 256 requests"


# --- priorities ---


def add_with_priorities(scheduler: Scheduler, priorities: list[int], max_tokens: int = 4) -> list[Sequence]:
    seqs = []
    for seq_id, priority in enumerate(priorities):
        seqs.append(make_sequence(seq_id, [seq_id, seq_id], max_tokens))
        seqs[-1].priority = priority
        scheduler.add(seqs[-1])
    return seqs


def test_higher_priorities_are_admitted_first_and_equal_ones_by_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add_with_priorities(scheduler, [0, -1, 5, 0, 5], max_tokens=1)
    admitted = [ids(batch.admitted) for batch in run_to_the_end(scheduler)]
    assert admitted == [[2], [4], [0], [3], [1]]


def test_the_lowest_priority_is_preempted_first_and_comes_back_last() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    seqs = add_with_priorities(scheduler, [0, 1], max_tokens=6)
    assert ids(step(scheduler).admitted) == [1, 0]
    while scheduler.num_preemptions == 0:
        batch = step(scheduler)
    assert ids(batch.decode) == [1], "the one that came later stays"
    assert seqs[0].status is SequenceStatus.WAITING
    check_invariants(scheduler, seqs)
    run_to_the_end(scheduler)


# --- stop strings ---


def test_a_sequence_stopped_from_outside_gives_row_and_blocks_back_and_its_next_token_is_dropped() -> None:
    scheduler = make_scheduler()
    [seq, other] = add_prompts(scheduler, [1, 2], [3, 4])
    step(scheduler)
    in_flight = scheduler.schedule()
    scheduler.finish([(seq, "stop")])
    assert (seq.status, seq.finish_reason, seq.row, seq.block_table) == (SequenceStatus.FINISHED, "stop", None, [])
    check_invariants(scheduler, [seq, other])
    assert scheduler.update(in_flight, [7, 8]) == []
    assert (seq.completion_token_ids, other.completion_token_ids) == ([0], [0, 8])


@pytest.mark.parametrize(
    ("options", "completion", "reason"),
    [
        ({}, [9, 7], "stop"),
        ({"max_tokens": 1}, [9], "length"),
        ({"max_tokens": 2}, [9, 7], "stop"),
        ({"stop_token_ids": [8]}, [9, 7], "stop"),
        ({"stop_token_ids": [8], "ignore_eos": True}, [9, 7, 8], "stop"),
        ({"ignore_eos": True}, [9, 7, 8, 9], "length"),
    ],
    ids=str,
)
def test_a_stop_token_of_the_model_or_the_request_or_max_tokens_ends_a_completion(
    options: dict, completion: list[int], reason: str
) -> None:
    scheduler = make_scheduler(stop_token_ids=frozenset({7}))
    seq = Sequence(0, [1, 7, 8], SamplingParams(**{"max_tokens": 4} | options))  # in a prompt they mean nothing
    scheduler.add(seq)
    for token_id in (9, 7, 8, 9)[: len(completion)]:
        assert not scheduler.is_finished()
        step(scheduler, token_id)
    assert scheduler.is_finished()
    assert (seq.finish_reason, seq.completion_token_ids) == (reason, completion)
    assert seq.status is SequenceStatus.FINISHED


# --- prefix sharers among decode rows ---


def sharers(batch: ScheduledBatch) -> list[tuple[list[int], int]]:
    """(sequences, shared blocks) of each set of prefix sharers."""
    return [
        (ids(batch.decode[first_row : first_row + num_rows]), num_blocks)
        for first_row, num_rows, num_blocks in batch.prefix_sharers
    ]


def test_prompts_with_equal_first_blocks_decode_as_sharers() -> None:
    scheduler = make_scheduler(block_size=2, max_prefix_sharers=8)
    add_prompts(scheduler, [1, 2, 3, 4, 5], [9], [1, 2, 3, 4, 6, 7], [1, 2, 3, 4, 8])
    step(scheduler)
    batch = step(scheduler, token_id=5)
    assert (ids(batch.decode), sharers(batch)) == ([0, 2, 3, 1], [([0, 2, 3], 2)])
    assert ids(batch.sampled) == [0, 2, 3, 1], "the tokens come in the order of the rows"


def test_the_samples_of_one_prompt_share_all_but_its_last_block() -> None:
    scheduler = make_scheduler(block_size=2, max_prefix_sharers=8)
    add_prompts(scheduler, [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4])  # the last token is computed by each
    step(scheduler)
    assert sharers(step(scheduler)) == [([0, 1, 2], 1)]


def test_a_batch_without_shared_blocks_keeps_its_order_and_has_no_sharers() -> None:
    scheduler = make_scheduler(block_size=2, max_prefix_sharers=8)
    add_prompts(scheduler, [3, 3, 3], [1, 1, 1], [2, 2, 2])
    step(scheduler)
    batch = step(scheduler)
    assert (ids(batch.decode), batch.prefix_sharers) == ([0, 1, 2], [])


def test_where_attention_cannot_read_a_shared_prefix_at_once_there_are_no_sharers() -> None:
    scheduler = make_scheduler(block_size=2)
    add_prompts(scheduler, [1, 2, 3], [9], [1, 2, 3])
    step(scheduler)
    batch = step(scheduler)
    assert (ids(batch.decode), batch.prefix_sharers) == ([0, 1, 2], [])


def test_a_sequence_joins_sharers_when_it_is_admitted_and_leaves_them_when_it_ends() -> None:
    scheduler = make_scheduler(block_size=2, max_prefix_sharers=8)
    for seq_id, max_tokens in enumerate((9, 3)):
        scheduler.add(make_sequence(seq_id, [1, 2, 3], max_tokens))
    step(scheduler)
    assert sharers(step(scheduler)) == [([0, 1], 1)]
    scheduler.add(make_sequence(2, [1, 2, 4], max_tokens=9))
    step(scheduler)
    assert sharers(step(scheduler)) == [([0, 1, 2], 1)]  # 1 ends
    assert sharers(step(scheduler)) == [([0, 2], 1)]
    scheduler.abort({0})
    batch = step(scheduler)
    assert (ids(batch.decode), sharers(batch)) == ([2], [])


def test_a_preempted_sequence_leaves_its_sharers_and_finds_them_again_when_it_is_readmitted() -> None:
    scheduler = make_scheduler(num_blocks=10, block_size=2, max_prefix_sharers=8)
    add_prompts(scheduler, [1, 2, 10], [1, 2, 11], [1, 2, 12], max_tokens=9)
    step(scheduler)  # one shared block and one block each
    for _ in range(5):
        assert sharers(step(scheduler)) == [([0, 1, 2], 1)]
    batch = step(scheduler)  # all need a fifth block, and none is free
    assert (scheduler.num_preemptions, sharers(batch)) == (1, [([0, 1], 1)])
    scheduler.abort({0})
    scheduler.reserved_tokens = 0  # so that the blocks of 0 are enough
    assert ids(step(scheduler).admitted) == [2]
    [(members, num_blocks)] = sharers(step(scheduler))
    assert (sorted(members), num_blocks) == ([1, 2], 1)


def test_sequences_of_a_failed_step_share_by_their_new_block_tables() -> None:
    scheduler = make_scheduler(block_size=2, max_prefix_sharers=8)
    add_prompts(scheduler, [1, 2, 3], [1, 2, 3], max_tokens=8)
    for _ in range(2):
        step(scheduler, token_id=7)
    batch = scheduler.schedule()
    assert sharers(batch) == [([0, 1], 1)]
    scheduler.discard([batch])
    step(scheduler, token_id=7)  # both know 1, 2, 3, 7, 7
    [(members, num_blocks)] = sharers(scheduler.schedule())
    assert (sorted(members), num_blocks) == ([0, 1], 2)
