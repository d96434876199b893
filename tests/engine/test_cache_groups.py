"""Mixes of cache groups: a prefix is found where all remember it, within an identity, and nothing is left over."""

import pytest

from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.cache_groups.specs import (
    CacheGroupSpec,
    FullAttentionSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence
from nanoinfer.token_ids import NO_TOKEN
from tests.engine.helpers import FakeDevice, check_entries, make_sequence

FULL, STATES = FullAttentionSpec(), RecurrentStateSpec(8)
MIXES: list[tuple[CacheGroupSpec, ...]] = [
    (FULL,),
    (FULL, SlidingWindowSpec(5, 2)),
    (FULL, STATES),
    (FULL, SlidingWindowSpec(5), STATES),
    (FULL, SlidingWindowSpec(3), SlidingWindowSpec(9, 2)),
    (FullAttentionSpec(2), SlidingWindowSpec(6)),
    (SlidingWindowSpec(5),),
    (SlidingWindowSpec(2), SlidingWindowSpec(9)),
    (SlidingWindowSpec(5), STATES),
    (STATES,),
]
TEXT = [*range(1, 15)]  # 3 blocks of 4 and a half


class Engine:
    """A scheduler over a mix of groups, and a device that fails where it reads anything but the right text."""

    def __init__(self, *specs: CacheGroupSpec, num_blocks: int = 100, max_num_batched_tokens: int = 100) -> None:
        windows = [
            spec.window for spec in specs if not isinstance(spec, RecurrentStateSpec) for _ in range(spec.num_tables)
        ]
        sizes = {"max_num_seqs": 2, "max_chunk_tokens": max_num_batched_tokens, "min_copied_tokens": 1}
        self.manager = BlockManager(num_blocks, 4, True, specs, **sizes)
        if self.manager.state_group:
            self.manager.state_group.min_kept_tokens = self.manager.state_group.min_saved_tokens = 1
        limits = {"max_num_seqs": 2, "max_num_batched_tokens": max_num_batched_tokens, "max_model_len": 40}
        self.scheduler = Scheduler(self.manager, **limits)
        self.scheduler.min_awaited_tokens = self.scheduler.min_awaited_in_all = 1
        self.device = FakeDevice(4, 50, STATES in specs, tuple(windows), num_rows=3)
        self.num_seqs = 0

    def run(self, prompt: list[int], identity: str | None = None, max_tokens: int = 1) -> Sequence:
        """Answer a prompt when nothing else runs."""
        seq = make_sequence(self.num_seqs, prompt, max_tokens, ignore_eos=True)
        seq.identity = identity
        self.num_seqs += 1
        self.scheduler.add(seq)
        while not self.scheduler.is_finished():
            batch = self.scheduler.schedule()
            self.scheduler.update(batch, self.device.run(batch))
        check_entries(self.manager)
        assert self.manager.num_used_blocks == 0
        return seq


@pytest.mark.parametrize("specs", MIXES, ids=str)
def test_a_text_that_comes_again_is_found_to_its_last_token(specs: tuple[CacheGroupSpec, ...]) -> None:
    engine = Engine(*specs)
    assert [engine.run(TEXT).num_cached_tokens for _ in range(2)] == [0, 13]


@pytest.mark.parametrize("specs", MIXES, ids=str)
def test_equal_tokens_of_another_identity_are_another_text(specs: tuple[CacheGroupSpec, ...]) -> None:
    engine = Engine(*specs)
    found = [engine.run(TEXT, identity).num_cached_tokens for identity in (None, "one", "other", "one", None)]
    assert found == [0, 0, 0, 13, 13]


@pytest.mark.parametrize("specs", MIXES, ids=str)
def test_prompts_wait_for_prefixes_of_their_own_identity_alone(specs: tuple[CacheGroupSpec, ...]) -> None:
    for identities, num_admitted in ((("one", "one"), 1), (("one", "other"), 2)):
        engine = Engine(*specs)
        for number, identity in enumerate(identities):
            seq = make_sequence(number, [*TEXT, 60 + number])
            seq.identity = identity
            engine.scheduler.add(seq)
        assert len(engine.scheduler.schedule().admitted) == num_admitted


def test_nothing_of_a_text_with_nan_is_found_though_its_window_has_left_some_of_it() -> None:
    for specs in ((FULL, SlidingWindowSpec(2)), (SlidingWindowSpec(2),)):
        engine = Engine(*specs, max_num_batched_tokens=4)
        engine.scheduler.add(make_sequence(0, TEXT))
        while not engine.scheduler.is_finished():
            batch = engine.scheduler.schedule()
            assert len(engine.manager.pool.find_chain(make_sequence(1, [*TEXT, 60]))) > 0
            engine.scheduler.update(batch, [NO_TOKEN] * len(batch.sampled))
        assert engine.manager.pool.find_chain(make_sequence(1, [*TEXT, 60])) == []


def test_without_a_group_of_all_tokens_a_prefix_is_found_though_its_first_blocks_were_handed_out() -> None:
    engine = Engine(SlidingWindowSpec(5), num_blocks=9, max_num_batched_tokens=4)
    engine.run(TEXT, max_tokens=6)
    assert engine.run([*TEXT, 99]).num_cached_tokens == 14, "16 tokens take 4 blocks, and 8 are there"
    engine.run([50] * 9)  # takes the blocks that were freed first
    assert engine.run([*TEXT, 99, 98]).num_cached_tokens >= 12


def test_an_entry_goes_with_the_last_of_what_hangs_on_it() -> None:
    engine = Engine(SlidingWindowSpec(2), STATES)
    engine.run(TEXT)
    entries = engine.manager.pool._entries
    assert entries
    engine.manager.reset_prefix_cache()
    assert not entries
    engine.run(TEXT)
    assert engine.manager.state_group is not None
    while engine.manager.state_group.snapshots._kept:
        engine.manager.state_group.snapshots.drop(next(iter(engine.manager.state_group.snapshots._kept)))
    check_entries(engine.manager)
    engine.manager.pool.take(engine.manager.num_free_blocks)
    assert not entries


@pytest.mark.parametrize("specs", MIXES, ids=str)
def test_an_identity_that_is_gone_leaves_nothing_behind(specs: tuple[CacheGroupSpec, ...]) -> None:
    engine = Engine(*specs)
    for identity in ("one", "other"):
        engine.run(TEXT, identity)
    engine.manager.reset_prefix_cache()
    pool, kept = engine.manager.pool, []
    if group := engine.manager.state_group:
        kept = [group.queued, group.plans, group.snapshots._children, group.snapshots._awaited]
    assert not any([pool._full, pool._entries, pool.copies._siblings, pool.copies._new, *kept])


def test_states_alone_take_no_blocks() -> None:
    engine = Engine(STATES, num_blocks=0)
    assert engine.run(TEXT, max_tokens=9).num_cached_tokens == 0
    assert engine.run([*TEXT, 99]).num_cached_tokens == 13


def test_a_hit_ends_where_every_group_remembers_it() -> None:
    engine = Engine(FULL, SlidingWindowSpec(5), SlidingWindowSpec(9))
    engine.run(TEXT)
    chain = engine.manager.pool.find_chain(make_sequence(9, [*TEXT, 99]))
    assert len(chain) == 3
    engine.manager.pool._detach(chain[2], 1)  # within the smaller window
    assert engine.run([*TEXT, 99]).num_cached_tokens == 8
    assert engine.run([*TEXT, 98]).num_cached_tokens == 14, "the sequence before has lent the entry its blocks"
    assert [*engine.manager.pool.find_chain(make_sequence(9, [*TEXT, 99]))] == chain


def test_what_is_copied_within_a_block_is_copied_in_every_table() -> None:
    engine = Engine(FULL, SlidingWindowSpec(5, 2), STATES)
    first = [1, 2, 3, 4, 5, 6, 7]
    engine.run(first)
    engine.scheduler.add(make_sequence(9, [*first, 99]))
    batch = engine.scheduler.schedule()
    assert [copy.num_tokens for copy in batch.block_copies] == [3, 3, 3]
    assert len(batch.restored_states) == 1
