"""Which decode rows read their first blocks together: sets of prefix sharers, and a row is in one set at most."""

from random import Random

import pytest

from nanoinfer.engine.prefix_sharers import SHARING_MIN_SAVED_TOKENS, PrefixSharers, SharerFinder, split_sharers
from nanoinfer.engine.sequence import Sequence
from tests.engine.helpers import make_sequence

BLOCK_SIZE = 4


def with_tables(*block_tables: list[int]) -> list[Sequence]:
    """Decode rows, numbered from 0. The last block of each holds one token, the newest."""
    seqs = [make_sequence(seq_id, [1]) for seq_id in range(len(block_tables))]
    for seq, block_table in zip(seqs, block_tables, strict=True):
        seq.block_table += block_table
        seq.num_computed_tokens = (len(block_table) - 1) * BLOCK_SIZE + 1
    return seqs


def make_prefixes(max_prefix_sharers: int = 64) -> SharerFinder:
    return SharerFinder(max_prefix_sharers, BLOCK_SIZE, min_saved_tokens=0)


def arrange(prefixes: SharerFinder, decode: list[Sequence]) -> tuple[list[int], list[PrefixSharers]]:
    order, found = prefixes.arrange(decode)
    return [seq.seq_id for seq in order], found


def test_rows_that_begin_with_the_same_blocks_share_them() -> None:
    decode = with_tables([1, 2, 10], [1, 2, 11, 12], [1, 2, 13])
    assert arrange(make_prefixes(), decode) == ([0, 1, 2], [PrefixSharers(first_index=0, num_rows=3, num_blocks=2)])


def test_sharers_come_first_and_the_others_stay_in_their_order() -> None:
    decode = with_tables([9], [5, 20], [1, 10], [8], [5, 21], [1, 11], [7])
    assert arrange(make_prefixes(), decode) == ([1, 4, 2, 5, 0, 3, 6], [PrefixSharers(0, 2, 1), PrefixSharers(2, 2, 1)])


def test_rows_that_share_nothing_stay_as_they_are() -> None:
    decode = with_tables([9, 1], [3], [7, 2], [5])
    assert arrange(make_prefixes(), decode) == ([0, 1, 2, 3], [])


def test_sharers_are_split_and_a_row_that_is_left_over_shares_with_none() -> None:
    sharers = [PrefixSharers(0, 7, 2), PrefixSharers(7, 2, 5)]
    assert split_sharers(sharers, 3) == [PrefixSharers(0, 3, 2), PrefixSharers(3, 3, 2), PrefixSharers(7, 2, 5)]
    assert split_sharers(sharers, 5) == [PrefixSharers(0, 5, 2), PrefixSharers(5, 2, 2), PrefixSharers(7, 2, 5)]
    assert split_sharers(sharers, 64) == sharers
    assert split_sharers(sharers, 1) == split_sharers(sharers, 0) == []


def test_equal_blocks_after_different_ones_are_not_a_prefix() -> None:
    decode = with_tables([1, 3, 10], [2, 3, 11])
    assert arrange(make_prefixes(), decode) == ([0, 1], [])


def test_one_row_alone_is_no_set_and_no_row_at_all_is_fine() -> None:
    assert arrange(make_prefixes(), with_tables([1, 2, 3])) == ([0], [])
    assert arrange(make_prefixes(), []) == ([], [])


@pytest.mark.parametrize(
    ("num_rows", "sizes"), [(2, [2]), (3, [3]), (4, [3]), (5, [3, 2]), (6, [3, 3]), (7, [3, 3]), (8, [3, 3, 2])]
)
def test_a_set_has_two_rows_at_least_and_no_more_than_attention_reads_at_once(num_rows: int, sizes: list[int]) -> None:
    decode = with_tables(*([1, 10 + row] for row in range(num_rows)))
    _, found = arrange(make_prefixes(max_prefix_sharers=3), decode)
    assert [one.num_rows for one in found] == sizes


@pytest.mark.parametrize("max_prefix_sharers", [0, 1])
def test_there_are_no_sets_where_attention_cannot_read_a_block_for_two_rows(max_prefix_sharers: int) -> None:
    decode = with_tables([1, 10], [2, 11], [1, 12])
    assert arrange(make_prefixes(max_prefix_sharers), decode) == ([0, 1, 2], [])


# One level of sharing: which one saves more.


def test_a_row_that_shares_less_is_left_out_where_the_others_would_lose_more_than_it_saves() -> None:
    decode = with_tables([1, 10], [1, 2, 3, 4, 11], [1, 2, 3, 4, 12])
    # As a set of three they save 2 reads, and the last two alone save 4.
    assert arrange(make_prefixes(), decode) == ([1, 2, 0], [PrefixSharers(0, 2, 4)])


def test_a_row_that_shares_less_joins_where_all_together_save_more() -> None:
    decode = with_tables([1, 2, 10], [1, 2, 3, 11], [1, 2, 3, 12])
    # As a set of three they save 4 reads, and the last two alone save 3.
    assert arrange(make_prefixes(), decode)[1] == [PrefixSharers(0, 3, 2)]


def test_samples_of_long_prompts_with_one_system_prompt_share_by_prompt() -> None:
    """Single samples that share only the system prompt, block 1, do not draw the others to their level."""
    long, shorter, single = [1, 20, 21, 22], [1, 40, 41], [1]
    decode = with_tables(
        *([*single, 10 + sample] for sample in range(2)),
        *([*long, 30 + sample] for sample in range(3)),
        *([*shorter, 50 + sample] for sample in range(2)),
    )
    order, found = arrange(make_prefixes(), decode)
    assert found == [PrefixSharers(0, 3, 4), PrefixSharers(3, 2, 3), PrefixSharers(5, 2, 1)]
    assert order == [2, 3, 4, 5, 6, 0, 1]


def test_short_prompts_with_a_long_system_prompt_are_one_set() -> None:
    decode = with_tables([1, 2, 3, 10, 20], [1, 2, 3, 10, 21], [1, 2, 3, 11, 22], [1, 2, 3, 11, 23])
    assert arrange(make_prefixes(), decode)[1] == [PrefixSharers(0, 4, 3)], "9 reads saved, and as two sets 8"


def test_a_set_cut_for_its_size_shares_all_that_its_rows_have_in_common() -> None:
    decode = with_tables([1, 2, 3, 10, 20], [1, 2, 3, 10, 21], [1, 2, 3, 11, 22], [1, 2, 3, 11, 23])
    assert arrange(make_prefixes(max_prefix_sharers=2), decode)[1] == [PrefixSharers(0, 2, 4), PrefixSharers(2, 2, 4)]


# Too little to be worth a second pass.


def test_a_step_that_would_save_less_than_the_threshold_has_no_sets() -> None:
    decode = with_tables([1, 10], [1, 11], [2, 3, 12], [2, 3, 13])  # 1 block and 2 blocks
    for min_saved_tokens, num_sets in ((3 * BLOCK_SIZE, 2), (3 * BLOCK_SIZE + 1, 0)):
        order, found = arrange(SharerFinder(64, BLOCK_SIZE, min_saved_tokens), decode)
        assert (order, len(found)) == ([0, 1, 2, 3], num_sets)


def test_by_default_two_rows_with_a_short_prefix_are_not_worth_it() -> None:
    decode = with_tables([1, 10], [1, 11])
    assert arrange(SharerFinder(64, BLOCK_SIZE), decode)[1] == []
    assert SHARING_MIN_SAVED_TOKENS > BLOCK_SIZE


def test_sets_that_come_under_the_threshold_as_rows_leave_are_dissolved() -> None:
    decode = with_tables([1, 10], [9], [1, 11], [1, 12])
    prefixes = SharerFinder(64, BLOCK_SIZE, min_saved_tokens=2 * BLOCK_SIZE)
    assert arrange(prefixes, decode) == ([0, 2, 3, 1], [PrefixSharers(0, 3, 1)])
    assert arrange(prefixes, decode[:3]) == ([0, 1, 2], [])


# From step to step.


def test_a_step_with_the_same_sequences_gets_the_very_same_arrangement() -> None:
    prefixes, decode = make_prefixes(), with_tables([1, 10], [1, 11])
    order, found = prefixes.arrange(decode)
    decode[0].block_table.append(12)  # a block of its own for its next tokens
    again, found_again = prefixes.arrange([*decode])
    assert again is order
    assert found_again is found


def test_a_row_that_leaves_is_dropped_from_its_set_and_the_other_sets_stay() -> None:
    decode = with_tables([1, 10], [1, 11], [1, 12], [5, 20], [5, 21], [9])
    prefixes = make_prefixes()
    arrange(prefixes, decode)
    left = [seq for seq in decode if seq.seq_id != 1]
    assert arrange(prefixes, left) == ([0, 2, 3, 4, 5], [PrefixSharers(0, 2, 1), PrefixSharers(2, 2, 1)])


def test_a_set_with_one_row_left_is_dissolved() -> None:
    decode = with_tables([1, 10], [1, 11], [5, 20], [5, 21])
    prefixes = make_prefixes()
    arrange(prefixes, decode)
    assert arrange(prefixes, decode[1:]) == ([2, 3, 1], [PrefixSharers(0, 2, 1)])
    assert arrange(prefixes, decode[1:3]) == ([1, 2], [])


def test_small_sets_are_joined_where_fewer_than_three_quarters_of_the_rows_are_left() -> None:
    decode = with_tables(*([1, 10 + row] for row in range(8)))
    prefixes = make_prefixes(max_prefix_sharers=4)
    assert arrange(prefixes, decode)[1] == [PrefixSharers(0, 4, 1), PrefixSharers(4, 4, 1)]
    assert arrange(prefixes, decode[2:])[1] == [PrefixSharers(0, 2, 1), PrefixSharers(2, 4, 1)], "six of eight stay"
    assert arrange(prefixes, decode[2:6])[1] == [PrefixSharers(0, 4, 1)]
    assert arrange(prefixes, decode[3:6])[1] == [PrefixSharers(0, 3, 1)], "three of the last four stay"


def test_a_row_that_joins_finds_its_set() -> None:
    decode = with_tables([1, 10], [9], [1, 11], [1, 12])
    prefixes = make_prefixes()
    assert arrange(prefixes, decode[:2]) == ([0, 1], [])
    prefixes.forget()
    assert arrange(prefixes, decode) == ([0, 2, 3, 1], [PrefixSharers(0, 3, 1)])


def test_a_row_with_another_block_table_than_before_loses_its_set() -> None:
    decode = with_tables([1, 10], [1, 11], [1, 12])
    prefixes = make_prefixes()
    arrange(prefixes, decode)
    decode[1].block_table[:] = [7, 13]  # preempted and admitted again between two decode steps
    prefixes.forget()
    assert arrange(prefixes, decode) == ([0, 2, 1], [PrefixSharers(0, 2, 1)])


def test_a_shared_block_that_holds_the_newest_token_is_noticed() -> None:
    decode = with_tables([1, 10], [1, 11])
    decode[1].num_computed_tokens = BLOCK_SIZE
    with pytest.raises(AssertionError, match="the newest of 4 tokens lies in a shared block: 1 of 4 are shared"):
        make_prefixes().arrange(decode)


# Random block tables.


def random_sequence(random: Random, others: list[Sequence], seq_id: int) -> Sequence:
    """A sequence that shares up to all full blocks of another one, if there is one. Block ids are never used again."""
    shared: list[int] = []
    if others and random.random() < 0.8:
        table = random.choice(others).block_table
        shared = table[: random.randint(0, len(table) - 1)]
    own = [1000 * (seq_id + 1) + column for column in range(random.randint(1, 4))]
    (seq,) = with_tables(shared + own)
    seq.seq_id = seq_id
    return seq


def num_common_blocks(seqs: list[Sequence]) -> int:
    """How many first blocks all of them have."""
    tables = [seq.block_table for seq in seqs]
    return next(n for n in range(len(tables[0]), -1, -1) if all(table[:n] == tables[0][:n] for table in tables))


def check(prefixes: SharerFinder, decode: list[Sequence]) -> int:
    """Whatever was asked for before, an arrangement keeps all rules; return how many block reads it saves."""
    order, found = prefixes.arrange(decode)
    assert len(order) == len(decode)
    assert set(order) == set(decode)
    next_row = num_saved = 0
    for first, num_rows, num_blocks in found:
        assert first == next_row, "sets lie side by side from row 0 on, so no row is in two"
        next_row += num_rows
        seqs = order[first:next_row]
        assert 2 <= num_rows <= prefixes.max_prefix_sharers
        assert 1 <= num_blocks <= num_common_blocks(seqs)
        assert all(num_blocks * BLOCK_SIZE < seq.num_computed_tokens for seq in seqs)
        num_saved += (num_rows - 1) * num_blocks
    assert order[next_row:] == [seq for seq in decode if seq not in order[:next_row]]
    assert not found or num_saved * BLOCK_SIZE >= prefixes.min_saved_tokens
    return num_saved


def best_level(decode: list[Sequence]) -> int:
    """The most that sets by one common length save: of all rows with equal first n blocks, for the best n."""
    most = 0
    for num_blocks in range(1, max(len(seq.block_table) for seq in decode)):
        prefixes = [tuple(seq.block_table[:num_blocks]) for seq in decode if len(seq.block_table) > num_blocks]
        most = max(most, (len(prefixes) - len(set(prefixes))) * num_blocks)
    return most


@pytest.mark.parametrize("seed", range(100))
def test_random_rows_that_come_and_go_are_arranged_by_the_rules(seed: int) -> None:
    random = Random(seed)
    prefixes = SharerFinder(random.choice([2, 3, 5, 64]), BLOCK_SIZE, random.choice([0, 20, 60]))
    decode: list[Sequence] = []
    for step in range(40):
        if random.random() < 0.3:
            for joining in range(random.randint(1, 8)):
                decode = [*decode, random_sequence(random, decode, 10 * step + joining)]
            prefixes.forget()
        if random.random() < 0.3:
            decode = [seq for seq in decode if random.random() < 0.9]
        check(prefixes, decode)


@pytest.mark.parametrize("seed", range(50))
def test_sets_save_about_what_the_best_common_length_saves_or_more(seed: int) -> None:
    random = Random(seed)
    decode: list[Sequence] = []
    for seq_id in range(random.randint(2, 40)):
        decode.append(random_sequence(random, decode, seq_id))
    assert check(make_prefixes(max_prefix_sharers=1000), decode) >= 0.8 * best_level(decode)
