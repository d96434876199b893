"""Blocks: who holds them, when they come back, and which prefixes are found in them."""

from array import array

import pytest
import xxhash

from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.cache_groups.cache_group import Hit
from nanoinfer.engine.cache_groups.partial_hits import num_common
from nanoinfer.engine.scheduled_batch import BlockCopy, NewBlock, ScheduledBatch
from nanoinfer.engine.sequence import Sequence
from tests.engine.helpers import allocate, always_seven, found_block_ids, make_sequence, prefill


class CountingHash:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, data: bytes) -> int:
        self.num_calls += 1
        return xxhash.xxh64_intdigest(data)


# Allocation and reference counts.


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_sequence_gets_blocks_for_all_its_tokens(num_tokens: int, num_blocks: int) -> None:
    manager = BlockManager(num_blocks=3, block_size=4)
    seq = make_sequence(0, [1] * num_tokens)
    assert manager.num_blocks_to_allocate(seq, Hit([], [[]])) == num_blocks
    allocate(manager, seq, Hit([], [[]]))
    assert seq.block_table == list(range(num_blocks))


def test_a_sequence_takes_one_more_block_when_its_last_is_full() -> None:
    manager = BlockManager(num_blocks=3, block_size=2)
    seq = make_sequence(0, [1, 2, 3])
    prefill(manager, seq)
    assert manager.needing_block([seq]) == []
    seq.num_computed_tokens += 1
    assert manager.needing_block([seq]) == [seq]
    seq.row = 7
    assert manager.make_room([seq])
    batch = ScheduledBatch()
    manager.extend(batch, [seq])
    assert batch.new_blocks == [NewBlock(7, 2, 2)], "the device was told of the others"
    assert seq.block_table == [0, 1, 2]
    assert manager.needing_block([seq]) == []


def test_a_shared_block_is_freed_only_after_its_last_user() -> None:
    manager = BlockManager(num_blocks=3, block_size=4)
    first, second = make_sequence(0, [1, 2, 3, 4, 5]), make_sequence(1, [1, 2, 3, 4, 6])
    prefill(manager, first)
    assert manager.num_blocks_to_allocate(second, manager.find_cached_prefix(second)) == 1, (
        "block 0 costs nothing while it is in use"
    )
    prefill(manager, second)
    assert (first.block_table, second.block_table) == ([0, 1], [0, 2])
    assert manager.num_free_blocks == 0
    manager.free(first)
    assert manager.num_free_blocks == 1, "block 0 is still the second's"
    before = manager.pool.num_frees
    manager.free(second)
    assert manager.num_free_blocks == 3
    assert manager.pool.num_frees > before, "who waits for blocks notices"
    third = make_sequence(2, [1, 2, 3, 4, 5])
    assert manager.num_blocks_to_allocate(third, manager.find_cached_prefix(third)) == 2, "an idle block is a free one"


def test_a_freed_sequence_holds_nothing_and_can_be_allocated_again() -> None:
    manager = BlockManager(num_blocks=5, block_size=2)
    seq = make_sequence(0, [1, 2, 3])
    prefill(manager, seq)
    assert (manager.num_free_blocks, manager.num_used_blocks, manager.num_cached_blocks) == (3, 2, 1)
    manager.free(seq)
    assert (manager.num_free_blocks, manager.num_used_blocks, manager.num_cached_blocks) == (5, 0, 1)
    assert (seq.block_table, seq.num_computed_tokens, seq.prefix_serials) == ([], 0, [])
    assert prefill(manager, seq) == [0]
    assert len(seq.block_table) == 2


def test_the_blocks_that_were_found_are_those_that_are_given_though_all_others_are_taken() -> None:
    manager = BlockManager(num_blocks=3, block_size=2)
    first = make_sequence(0, [1, 2, 3, 4, 5, 6])
    prefill(manager, first)
    manager.free(first)
    follower = make_sequence(1, [1, 2, 3, 4, 9])
    hit = manager.find_cached_prefix(follower)
    found = [block_id for entry in hit.entries for block_id in entry.columns[0] or ()]
    assert manager.num_blocks_to_allocate(follower, hit) == manager.num_free_blocks == 3
    allocate(manager, follower, hit)
    assert follower.block_table == [*found, 2], "the last block did not take the place of one that was found"
    assert follower.num_computed_tokens == 4
    assert found_block_ids(manager, make_sequence(2, [1, 2, 3, 4, 9])) == found


# The order in which free blocks are used again.


def test_blocks_without_an_entry_are_reused_before_cached_ones() -> None:
    manager = BlockManager(num_blocks=3, block_size=2)
    full, partial = make_sequence(0, [1, 2, 3]), make_sequence(1, [9])
    prefill(manager, full)  # block 0 is full and cached, block 1 is not
    prefill(manager, partial)  # nor is block 2
    manager.free(full)
    manager.free(partial)  # last, and still before block 0
    other = make_sequence(2, [7, 8, 9])
    allocate(manager, other, Hit([], [[]]))
    assert set(other.block_table) == {1, 2}
    assert found_block_ids(manager, make_sequence(3, [1, 2, 3])) == [0]


def test_the_tail_of_a_sequence_is_reused_before_its_head() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    seq = make_sequence(0, [1, 2, 3, 4, 5, 6, 7])
    prefill(manager, seq)
    manager.free(seq)
    other = make_sequence(1, [9] * 5)
    allocate(manager, other, Hit([], [[]]))
    assert other.block_table == [3, 2, 1]
    assert found_block_ids(manager, make_sequence(2, [1, 2, 3, 4, 5])) == [0]


def test_of_the_cached_blocks_the_least_recently_used_goes_first() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    older, newer = make_sequence(0, [1, 2, 0]), make_sequence(1, [3, 4, 0])
    for seq in (older, newer):
        prefill(manager, seq)
    for seq in (older, newer):
        manager.free(seq)
    prefill(manager, older)  # used again: now the other one is the least recently used
    manager.free(older)
    allocate(manager, make_sequence(2, [9] * 5), Hit([], [[]]))
    assert found_block_ids(manager, make_sequence(3, [1, 2, 0])) == [0]
    assert found_block_ids(manager, make_sequence(4, [3, 4, 0])) == []


def test_a_block_that_is_handed_out_again_is_found_no_more() -> None:
    manager = BlockManager(num_blocks=2, block_size=2)
    seq = make_sequence(0, [1, 2, 3])
    prefill(manager, seq)
    manager.free(seq)
    other = make_sequence(1, [7, 8, 9])
    prefill(manager, other)
    assert found_block_ids(manager, make_sequence(2, [1, 2, 3])) == []
    assert manager.num_cached_blocks == 1


# What is found in the cache.


@pytest.mark.parametrize(
    ("prompt", "cached_block_ids"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [0, 1, 2]),
        ([1, 2, 3, 4, 5, 6], [0, 1]),  # a full hit would leave nothing to compute
        ([1, 2, 3, 4, 5], [0, 1]),
        ([1, 2, 3, 4], [0]),
        ([1, 2, 3], [0]),
        ([1, 2], []),
        ([1, 2, 9, 4, 5], [0]),
        ([9, 2, 3, 4, 5], []),
        ([3, 4, 5], []),  # cached, but at another position
    ],
)
def test_a_prefix_is_found_in_full_blocks_and_one_token_is_left_to_compute(
    prompt: list[int], cached_block_ids: list[int]
) -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    prefill(manager, make_sequence(0, [1, 2, 3, 4, 5, 6, 7]))
    assert found_block_ids(manager, make_sequence(1, prompt)) == cached_block_ids


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(255, 0), (256, 0), (257, 256), (512, 256), (513, 512)])
def test_a_prompt_seen_before_still_computes_its_last_token(num_tokens: int, num_cached: int) -> None:
    manager = BlockManager(num_blocks=6, block_size=256)
    prompt = list(range(num_tokens))
    prefill(manager, make_sequence(0, prompt))
    again = make_sequence(1, prompt)
    allocate(manager, again, manager.find_cached_prefix(again))
    assert again.num_computed_tokens == num_cached


def test_a_block_is_cached_once_it_is_computed_and_not_before() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    seq, equal = make_sequence(0, [1, 2, 3]), make_sequence(1, [1, 2, 3, 4, 5])
    allocate(manager, seq, Hit([], [[]]))
    assert found_block_ids(manager, equal) == []
    seq.num_computed_tokens = 3
    manager.cache_blocks(seq, seq.num_computed_tokens)
    assert found_block_ids(manager, equal) == [0]
    seq.token_ids.append(4)  # a generated token is cached as a prompt's
    seq.num_computed_tokens = 4
    manager.cache_blocks(seq, seq.num_computed_tokens)
    assert found_block_ids(manager, equal) == [0, 1]


def test_of_two_blocks_with_the_same_text_the_first_is_found() -> None:
    manager = BlockManager(num_blocks=8, block_size=2)
    first, second = make_sequence(0, [1, 2, 3]), make_sequence(1, [1, 2, 3])
    prefill(manager, first)
    prefill(manager, second, use_cache=False)
    assert second.block_table == [2, 3]
    assert manager.num_cached_blocks == 1
    assert found_block_ids(manager, make_sequence(2, [1, 2, 3])) == [0]


def test_without_prefix_caching_nothing_is_hashed_cached_or_found() -> None:
    counting_hash = CountingHash()
    manager = BlockManager(8, block_size=2, enable_prefix_caching=False, hash_function=counting_hash)
    prefill(manager, make_sequence(0, [1, 2, 3]))
    again = make_sequence(1, [1, 2, 3])
    assert prefill(manager, again) == []
    assert again.block_table == [2, 3]
    assert (manager.num_cached_blocks, counting_hash.num_calls) == (0, 0)


def test_each_block_of_a_waiting_prompt_is_hashed_once_however_often_it_is_looked_up() -> None:
    counting_hash = CountingHash()
    manager = BlockManager(num_blocks=8, block_size=2, hash_function=counting_hash)
    prefill(manager, make_sequence(0, [1, 2, 3, 4, 0]))
    waiting = make_sequence(1, [1, 2, 3, 4, 5, 6, 7])
    counting_hash.num_calls = 0
    for _ in range(10):
        assert found_block_ids(manager, waiting) == [0, 1]
    assert counting_hash.num_calls == 3  # the third block is not found
    prefill(manager, waiting)
    assert counting_hash.num_calls == 3


# Collisions: a hash only finds a candidate.


def test_a_colliding_hash_never_serves_another_text() -> None:
    manager = BlockManager(num_blocks=8, block_size=2, hash_function=always_seven)
    prefill(manager, make_sequence(0, [1, 2, 0]))
    assert found_block_ids(manager, make_sequence(1, [3, 4, 0])) == []
    assert found_block_ids(manager, make_sequence(2, [1, 2, 0])) == [0]


def test_a_colliding_hash_never_serves_the_same_tokens_at_another_position() -> None:
    manager = BlockManager(num_blocks=8, block_size=2, hash_function=always_seven)
    prefill(manager, make_sequence(0, [5, 5, 9]))  # [T, x]
    longer = make_sequence(1, [5, 5, 5, 5, 9])  # [T, T, x]: the second T has seen another text than the first
    assert prefill(manager, longer) == [0]
    assert longer.block_table == [0, 2, 3]


def test_a_colliding_hash_never_serves_a_block_after_another_parent() -> None:
    manager = BlockManager(num_blocks=9, block_size=2, hash_function=always_seven)
    prefill(manager, make_sequence(0, [1, 1, 5, 5, 0]))  # leaves the entry of [5, 5] after [1, 1]
    assert found_block_ids(manager, make_sequence(1, [5, 5, 0])) == []
    assert found_block_ids(manager, make_sequence(2, [2, 2, 5, 5, 0])) == []


def test_of_two_colliding_texts_the_newest_is_kept() -> None:
    manager = BlockManager(num_blocks=8, block_size=2, hash_function=always_seven)
    prefill(manager, make_sequence(0, [1, 2, 0]))
    prefill(manager, make_sequence(1, [3, 4, 0]))
    assert found_block_ids(manager, make_sequence(2, [1, 2, 0])) == []
    assert found_block_ids(manager, make_sequence(3, [3, 4, 0])) == [2]
    assert manager.num_cached_blocks == 1


def test_a_block_whose_parent_is_gone_is_not_found_and_can_be_replaced() -> None:
    manager = BlockManager(num_blocks=5, block_size=2)
    first, second = make_sequence(0, [1, 2, 0]), make_sequence(1, [1, 2, 3, 4, 0])
    prefill(manager, first)  # [1, 2] is cached in block 0
    prefill(manager, second, use_cache=False)  # [3, 4] in block 3, as the child of block 0
    assert found_block_ids(manager, make_sequence(2, [1, 2, 3, 4, 0])) == [0, 3]
    manager.free(first)
    other = make_sequence(3, [7, 8, 9])
    prefill(manager, other)  # takes block 0: block 3 is an orphan now
    assert found_block_ids(manager, make_sequence(4, [1, 2, 3, 4, 0])) == []
    manager.free(other)
    manager.free(second)
    again = make_sequence(5, [1, 2, 3, 4, 0])
    assert prefill(manager, again) == []
    assert found_block_ids(manager, make_sequence(6, [1, 2, 3, 4, 0])) == again.block_table[:2]


# Forgetting.


def test_a_forgotten_block_is_not_found_and_stays_with_its_user() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    seq = make_sequence(0, [1, 2, 3, 4, 5])
    prefill(manager, seq)
    manager.evict_failed(seq, start=2)
    assert found_block_ids(manager, make_sequence(1, [1, 2, 3, 4, 5])) == [0]
    assert (manager.num_cached_blocks, manager.num_used_blocks) == (1, 3)


def test_resetting_the_cache_leaves_running_sequences_their_blocks() -> None:
    manager = BlockManager(num_blocks=6, block_size=2)
    seq, equal = make_sequence(0, [1, 2, 3]), make_sequence(1, [1, 2, 3, 4, 5])
    prefill(manager, seq)
    manager.reset_prefix_cache()
    assert manager.num_cached_blocks == 0
    assert seq.block_table == [0, 1]
    assert found_block_ids(manager, equal) == []

    seq.token_ids.append(4)  # the running sequence fills its next block
    seq.num_computed_tokens += 1
    manager.cache_blocks(seq, seq.num_computed_tokens)
    assert found_block_ids(manager, equal) == []  # what came before it was forgotten

    prefill(manager, equal)
    assert equal.block_table == [2, 3, 4]
    assert found_block_ids(manager, make_sequence(2, [1, 2, 3, 4, 5])) == [2, 3]
    manager.free(seq)
    manager.free(equal)
    manager.reset_prefix_cache()
    assert found_block_ids(manager, make_sequence(3, [1, 2, 3, 4, 5])) == [], (
        "blocks that nobody uses are forgotten too"
    )
    assert manager.num_free_blocks == 6


# Mistakes of our own.


def test_blocks_are_neither_given_nor_freed_twice() -> None:
    manager = BlockManager(num_blocks=4, block_size=2)
    seq = make_sequence(0, [1, 2, 3])
    prefill(manager, seq)
    with pytest.raises(AssertionError, match="sequence 0 already holds blocks"):
        allocate(manager, seq, Hit([], [[]]))
    block_id = seq.block_table[0]
    manager.free(seq)
    manager.free(seq)
    assert manager.num_free_blocks == 4, "it holds nothing any more"
    with pytest.raises(AssertionError, match="freed more often than it was given out"):
        manager.release([BlockCopy(block_id, 3, 1)])


# Hits that end within a block.


def run_step(manager: BlockManager, token_ids: list[int]) -> tuple[Sequence, BlockCopy | None]:
    """Compute a prompt in a step of its own."""
    manager.start_step()
    seq = make_sequence(0, token_ids)
    copies = allocate(manager, seq, manager.find_cached_prefix(seq))
    num_found, seq.num_computed_tokens = seq.num_computed_tokens, seq.num_tokens
    manager.cache_blocks(seq, seq.num_computed_tokens, with_last=True)
    seq.num_cached_tokens = num_found
    return seq, copies[0] if copies else None


def num_found_later(manager: BlockManager, prompt: list[int]) -> int:
    return manager.find_cached_prefix(make_sequence(9, prompt)).num_later


@pytest.mark.parametrize(
    ("prompt", "copy"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 9, 9], BlockCopy(1, 2, 3)),  # parts within the second block, which is full
        ([1, 2, 3, 4, 5, 6, 7, 8], BlockCopy(1, 2, 3)),  # the last token is left to compute
        ([1, 2, 9], BlockCopy(0, 2, 2)),  # within the first one
        ([1, 2, 3, 4, 5, 9], None),  # one token is too few
        ([9, 2, 3, 4, 5, 6, 7], None),
    ],
)
def test_tokens_before_the_place_where_texts_part_are_copied(prompt: list[int], copy: BlockCopy | None) -> None:
    manager = BlockManager(num_blocks=6, block_size=4, min_copied_tokens=2)
    run_step(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    seq, found = run_step(manager, prompt)
    num_full = 4 * sum(block_id < 2 for block_id in seq.block_table)
    assert found == copy
    assert seq.num_cached_tokens == num_full + (copy.num_tokens if copy else 0)


def test_the_longest_of_several_texts_is_copied_also_of_one_that_ends_within_the_block() -> None:
    manager = BlockManager(num_blocks=20, block_size=8, min_copied_tokens=1)
    for prompt in ([1, 2, 9, 9, 9, 9, 9, 9, 0], [1, 2, 3, 4, 5], [1, 2, 3, 0, 0, 0, 0, 0, 0], [7, 7]):
        run_step(manager, prompt)
    seq, copy = run_step(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert copy is not None
    assert (copy.num_tokens, seq.num_cached_tokens) == (5, 5)


def test_a_prompt_waits_only_for_tokens_that_are_not_found_already() -> None:
    manager = BlockManager(num_blocks=20, block_size=8, min_copied_tokens=1)
    run_step(manager, [1, 2, 3, 0])
    run_step(manager, [1, 2, 3, 4, 4])  # what it computes is found from the next step on
    prompts = [1, 2, 3, 4, 5], [1, 2, 3, 4, 4, 4], [1, 2, 3, 9, 9], [1, 2, 3, 0, 5], [1, 2], [9, 2, 3, 4]
    assert [num_found_later(manager, prompt) for prompt in prompts] == [1, 2, 0, 0, 0, 0]
    manager.start_step()
    assert [num_found_later(manager, prompt) for prompt in prompts] == [0] * 6


def test_what_a_step_computes_is_copied_by_later_steps_only() -> None:
    manager = BlockManager(num_blocks=6, block_size=4, min_copied_tokens=2)
    run_step(manager, [1, 2, 3, 4, 5])
    seq = make_sequence(1, [1, 2, 3, 9])
    assert allocate(manager, seq, manager.find_cached_prefix(seq)) == []
    manager.free(seq)
    manager.start_step()
    assert allocate(manager, seq, manager.find_cached_prefix(seq)) == [BlockCopy(0, seq.block_table[0], 3)]


def test_a_source_is_not_handed_out_before_it_is_released() -> None:
    manager = BlockManager(num_blocks=3, block_size=4, min_copied_tokens=2)
    first, _ = run_step(manager, [1, 2, 3, 4])
    manager.free(first)
    second, copy = run_step(manager, [1, 2, 3, 9])
    assert copy is not None
    assert manager.num_free_blocks == 1
    manager.free(second)
    other = make_sequence(2, [5] * 8)
    allocate(manager, other, Hit([], [[]]))
    assert copy.source not in other.block_table
    before = manager.pool.num_frees
    manager.release([copy])
    assert manager.num_free_blocks == 1
    assert manager.pool.num_frees > before, "who waits for blocks notices"


def test_a_source_that_must_be_handed_out_itself_is_not_copied() -> None:
    manager = BlockManager(num_blocks=2, block_size=4, min_copied_tokens=2)
    first, _ = run_step(manager, [1, 2, 3, 4])
    manager.free(first)
    second, copy = run_step(manager, [1, 2, 3, 9, 9])
    assert (copy, second.num_cached_tokens, manager.num_free_blocks) == (None, 0, 0)


def test_an_evicted_block_is_not_copied() -> None:
    manager = BlockManager(num_blocks=6, block_size=4, min_copied_tokens=2)
    full, partial = run_step(manager, [1, 2, 3, 4])[0], run_step(manager, [5, 6, 7])[0]
    manager.evict_failed(full)
    assert not found_block_ids(manager, make_sequence(1, [1, 2, 3, 4, 5]))
    manager.reset_prefix_cache()
    for prompt in ([1, 2, 3, 9], [5, 6, 7, 9]):
        assert run_step(manager, prompt)[1] is None
    assert partial.block_table


def test_a_block_that_fills_up_keeps_one_entry() -> None:
    manager = BlockManager(num_blocks=4, block_size=4, min_copied_tokens=2)
    seq, _ = run_step(manager, [1, 2, 3])
    seq.token_ids.append(4)
    seq.num_computed_tokens = 4
    manager.cache_blocks(seq, 4)
    assert manager.num_cached_blocks == 1
    manager.start_step()
    assert found_block_ids(manager, make_sequence(1, [1, 2, 3, 4, 5])) == [0]
    manager.free(seq)
    manager.reset_prefix_cache()
    assert run_step(manager, [1, 2, 3, 4, 5])[1] is None


def test_prompt_logprobs_leave_their_tokens_to_compute() -> None:
    manager = BlockManager(num_blocks=6, block_size=8, min_copied_tokens=2)
    run_step(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    manager.start_step()
    seq = make_sequence(1, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    seq.prompt_logprobs_start = 5
    [copy] = allocate(manager, seq, manager.find_cached_prefix(seq))
    assert copy.num_tokens == 4


def test_common_tokens_are_counted_to_where_texts_part() -> None:
    whole = array("i", range(100, 110))
    for length in range(11):
        for place in range(12):
            other = array("i", whole[:length])
            if place < length:
                other[place] = 7
            expected = min(length, place)
            assert num_common(whole.tobytes(), other.tobytes()) == expected
            assert num_common(*(memoryview(text).cast("B") for text in (other, whole))) == expected
