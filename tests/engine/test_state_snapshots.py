"""Prefix hits of hybrids: where states are kept, what waits for them, what is found, and what is really spared."""

from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.cache_groups.queued_prompts import QueuedPrompts
from nanoinfer.engine.cache_groups.specs import FullAttentionSpec, RecurrentStateSpec
from nanoinfer.engine.cache_groups.state_group import StateGroup
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence
from nanoinfer.token_ids import NO_TOKEN
from tests.engine.helpers import FakeDevice, add_prompts, make_sequence, run_to_the_end, step
from tests.models.test_architectures import GREEDY, HYBRIDS, checkpoint, draw_prompts

__all__ = ["checkpoint"]


def text(*token_ids: int) -> "array[int]":
    return array("i", token_ids)


def hybrid_scheduler(
    num_snapshots: int = 8,
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 100,
    min_kept_tokens: int = 1000,
) -> Scheduler:
    """By default only where prompts part states are kept, however little that spares."""
    specs = FullAttentionSpec(), RecurrentStateSpec(num_snapshots)
    manager = BlockManager(num_blocks, block_size, True, specs, max_num_seqs=max_num_seqs)
    states_of(manager).min_saved_tokens, states_of(manager).min_kept_tokens = 1, min_kept_tokens
    scheduler = Scheduler(
        manager,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=num_blocks * block_size,
        reserved_tokens=block_size,
    )
    scheduler.min_awaited_tokens = scheduler.min_awaited_in_all = 1
    return scheduler


def states_of(manager: BlockManager) -> StateGroup:
    assert manager.state_group is not None
    return manager.state_group


def chunks(batch: ScheduledBatch) -> list[tuple[int, int, int]]:
    return [(chunk.seq.seq_id, chunk.start, chunk.length) for chunk in batch.prefill]


# --- the texts that wait ---


def test_partings_are_where_waiting_texts_part_from_one_the_last_place_first() -> None:
    queued = QueuedPrompts()
    for waiting in (text(1, 2, 3, 9), text(1, 2, 3, 4, 7), text(1, 2, 3, 4, 8), text(1, 5), text(6, 6)):
        queued.add(waiting)
    assert queued.partings(text(1, 2, 3, 4, 5), above=0) == [(4, 2), (3, 3), (1, 4)]
    assert queued.partings(text(1, 2, 3, 4, 5), above=3) == [(4, 2)]
    assert queued.partings(text(7), above=0) == []
    assert queued.num_beginning_with(text(1, 2)) == 3


def test_the_last_token_of_either_text_is_not_shared() -> None:
    queued = QueuedPrompts()
    queued.add(text(1, 2, 3))
    assert queued.partings(text(1, 2, 3), above=0) == [(2, 1)]
    assert queued.partings(text(1, 2, 3, 4), above=0) == [(2, 1)]
    assert queued.partings(text(1, 2), above=0) == [(1, 1)]


class CountedText(array):  # type: ignore[type-arg]
    """Counts how often texts are compared."""

    num_compared = 0

    def __lt__(self, other: Any) -> bool:
        CountedText.num_compared += 1
        return bool(super().__lt__(other))


def test_a_text_that_comes_late_is_compared_with_a_few_of_those_that_wait() -> None:
    queued = QueuedPrompts()
    for number in range(1000):
        queued.add(CountedText("i", [number]))
    assert queued.num_beginning_with(text(5)) == 1
    CountedText.num_compared = 0
    queued.add(CountedText("i", [5, 1]))
    assert queued.num_beginning_with(text(5)) == 2
    assert CountedText.num_compared < 50


def test_of_equal_texts_the_one_that_is_meant_leaves() -> None:
    queued, one, other = QueuedPrompts(), text(1, 2), text(1, 2)
    queued.add(one)
    queued.add(other)
    queued.remove(other)
    other.append(3)
    assert queued.partings(text(1, 2, 4), above=0) == [(1, 1)]
    queued.remove(one)
    assert len(queued) == 0


# --- what the scheduler makes of them ---


def test_a_chunk_ends_where_queued_prompts_part_and_those_begin_there() -> None:
    scheduler = hybrid_scheduler()
    shared = [1, 2, 3, 4, 5, 6]
    seqs = add_prompts(scheduler, [*shared, 7, 8], [*shared, 9, 10, 11], [*shared, 12])
    first, second = step(scheduler), step(scheduler)
    assert chunks(first) == [(0, 0, 6)], "the others wait"
    assert chunks(second) == [(0, 6, 2), (1, 6, 3), (2, 6, 1)]
    assert second.kept_states == [(0, 8)], "from row 0 to the first place behind the rows"
    assert second.restored_states == [(8, 1), (8, 2)]
    assert [copy.num_tokens for copy in second.block_copies] == [2, 2], "one block is shared, and a half is copied"
    assert [seq.num_cached_tokens for seq in seqs] == [0, 6, 6]


def test_groups_within_a_group_part_where_they_do() -> None:
    scheduler = hybrid_scheduler()
    system, shots = [1] * 5, [2] * 5
    prompts = [[*system, *shots, 3], [*system, *shots, 4], [*system, 5], [*system, 6]]
    seqs = add_prompts(scheduler, *prompts)
    batches = run_to_the_end(scheduler)
    assert [chunks(batch) for batch in batches[:3]] == [
        [(0, 0, 5)],
        [(2, 5, 1), (3, 5, 1), (0, 5, 5)],
        [(1, 10, 1)],
    ], "the longer prompt waits for its own group, and those of the larger one do not"
    assert seqs[0] in batches[3].decode, "a last token is computed by a decode step"
    assert [seq.num_cached_tokens for seq in seqs] == [0, 10, 5, 5]


def test_samples_of_a_prompt_fork_the_state_before_its_last_token() -> None:
    scheduler = hybrid_scheduler()
    seqs = add_prompts(scheduler, *[[1, 2, 3, 4, 5, 6, 7]] * 4)
    assert chunks(step(scheduler)) == [(0, 0, 6)]
    assert chunks(step(scheduler)) == [(1, 6, 1), (2, 6, 1), (3, 6, 1)]
    assert [seq.seq_id for seq in step(scheduler).decode] == [0, 1, 2, 3], "the first computes its last token here"
    assert [seq.num_cached_tokens for seq in seqs] == [0, 6, 6, 6]


def test_prompts_wait_while_a_prefix_is_computed_in_several_steps_and_others_overtake_them() -> None:
    scheduler = hybrid_scheduler(max_num_batched_tokens=4)
    shared = [1, 2, 3, 4, 5, 6]
    add_prompts(scheduler, [*shared, 7], [*shared, 8], [9, 10])
    assert [chunks(step(scheduler)) for _ in range(3)] == [[(0, 0, 4)], [(2, 0, 2), (0, 4, 2)], [(1, 6, 1)]]


def test_prompts_compute_a_prefix_themselves_if_the_one_that_would_is_dropped() -> None:
    scheduler = hybrid_scheduler(max_num_batched_tokens=4)
    shared = [1, 2, 3, 4, 5, 6]
    add_prompts(scheduler, [*shared, 7], [*shared, 8], [*shared, 9])
    step(scheduler)
    scheduler.abort({0})
    assert chunks(step(scheduler)) == [(1, 0, 4)]
    assert chunks(step(scheduler)) == [(1, 4, 2)]
    assert chunks(step(scheduler)) == [(2, 6, 1)]


def test_nobody_waits_for_a_paused_sequence() -> None:
    scheduler = hybrid_scheduler(max_num_batched_tokens=4)
    shared = [1, 2, 3, 4, 5, 6]
    add_prompts(scheduler, [*shared, 7], [*shared, 8])
    step(scheduler)
    scheduler.pause({0})
    assert chunks(step(scheduler)) == [(1, 0, 4)]


def test_what_little_sharing_would_spare_is_computed_again() -> None:
    scheduler = hybrid_scheduler()
    states_of(scheduler.block_manager).min_saved_tokens = 7
    add_prompts(scheduler, [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6])
    assert chunks(step(scheduler)) == [(0, 0, 4), (1, 0, 4), (2, 0, 4)], "2 x 3 tokens"


def test_a_prompt_that_comes_a_second_time_alone_hits_what_the_first_left_before_its_last_token() -> None:
    scheduler = hybrid_scheduler(min_kept_tokens=5)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    add_prompts(scheduler, prompt)
    assert [chunks(batch) for batch in run_to_the_end(scheduler)[:2]] == [[(0, 0, 6)], []]
    again, short = make_sequence(1, prompt), make_sequence(2, [1, 2, 3, 4, 9])
    scheduler.add(again)
    scheduler.add(short)
    assert chunks(step(scheduler)) == [(1, 6, 1), (2, 0, 5)], "the state cannot be cut"
    assert (again.num_cached_tokens, short.num_cached_tokens) == (6, 0)


@pytest.mark.parametrize("in_flight", [False, True], ids=["collected", "one token more in flight"])
def test_a_conversation_goes_on_from_the_end_of_the_answer(in_flight: bool) -> None:
    scheduler = hybrid_scheduler(min_kept_tokens=2)
    scheduler.stop_token_ids = frozenset({99})
    device = FakeDevice(block_size=4, vocab_size=2, has_states=True)
    [seq] = add_prompts(scheduler, [1, 2, 3], max_tokens=10)
    for token_id in ([], [7], [8], [99]):  # the first step computes no last token: the state before it is kept
        batch = scheduler.schedule()
        device.run(batch)
        if in_flight and token_id == [99]:
            device.token_ids[0] = [1, 2, 3, 7, 8, 99]
            device.run(scheduler.schedule(in_flight=True))
        else:
            device.token_ids[0][len(seq.token_ids) :] = token_id
        scheduler.update(batch, token_id)
    assert seq.finish_reason == "stop"
    follower = make_sequence(1, [1, 2, 3, 7, 8, 99, 4, 5])
    scheduler.add(follower)
    device.run(batch := scheduler.schedule())
    assert follower.num_cached_tokens == (6 if in_flight else 5)
    assert batch.restored_states


def test_snapshots_that_nobody_waits_for_make_room_and_others_do_not() -> None:
    scheduler = hybrid_scheduler(num_snapshots=1, max_num_seqs=1, min_kept_tokens=1)
    long, short = [1] * 9, [2] * 5
    prompts = [[*long, 3], [*short, 3], [*long, 4], [*short, 4]]
    seqs = add_prompts(scheduler, *prompts, max_tokens=1)
    run_to_the_end(scheduler)
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0, 9, 0], "the long one was waited for"
    assert scheduler.block_manager.num_snapshots == 1


def test_a_snapshot_is_lost_with_the_block_that_it_follows() -> None:
    scheduler = hybrid_scheduler(num_blocks=3, min_kept_tokens=4)
    add_prompts(scheduler, [1, 2, 3, 4, 5, 6], max_tokens=1)
    run_to_the_end(scheduler)
    manager = scheduler.block_manager
    assert manager.num_snapshots == 2, "after 5 tokens of the prompt, and after all"
    states_of(manager).min_kept_tokens = 1000
    scheduler.add(make_sequence(1, [9] * 12, max_tokens=1))
    step(scheduler)
    assert manager.num_snapshots == 0


def test_nothing_that_a_failed_step_computed_is_found() -> None:
    scheduler = hybrid_scheduler()
    shared = [1, 2, 3, 4, 5, 6]
    add_prompts(scheduler, [*shared, 7], [*shared, 8])
    first = scheduler.schedule()
    scheduler.discard([first])
    assert scheduler.block_manager.num_snapshots == 0
    assert chunks(step(scheduler)) == [(0, 0, 6)]
    batch = scheduler.schedule()
    assert chunks(batch) == [(1, 6, 1)]
    assert scheduler.block_manager.num_snapshots == 1
    scheduler.update(batch, [NO_TOKEN])
    assert scheduler.block_manager.num_snapshots == 0, "its states may be NaN"


def test_a_preempted_sequence_goes_on_from_the_longest_snapshot() -> None:
    scheduler = hybrid_scheduler(num_blocks=7, min_kept_tokens=3)
    old, new = add_prompts(scheduler, [1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5, 4, 3], max_tokens=9)
    while not scheduler.num_preemptions:
        assert step(scheduler)
    assert new.row is None
    while new.row is None:
        batch = step(scheduler)
    assert batch.restored_states
    assert new.num_computed_tokens > 6, "six of the prompt were kept"
    run_to_the_end(scheduler)
    assert len(old.completion_token_ids) == len(new.completion_token_ids) == 9


# --- whole engines ---


def run(
    folder: Path, prompts: list[list[int]], params: SamplingParams = GREEDY, **options: Any
) -> tuple[list[RequestOutput], int, LLM]:
    """Answer all prompts at once; return the outputs, how many prompt tokens were computed, and the closed engine."""
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 300, **options}
    with LLM(folder, device="cpu", dtype="float32", **options) as llm:
        llm.engine.scheduler.min_awaited_in_all = 1  # these prompts are few and short
        outputs = llm.generate(prompts, params, use_tqdm=False)
        computed = llm.get_metrics().prefill_tokens
        assert llm.get_metrics().num_used_blocks == 0
    return outputs, computed, llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_prompts_that_begin_alike_get_the_tokens_that_they_get_without_caching(
    checkpoint: Callable[..., Path], architecture: str
) -> None:
    folder = checkpoint(architecture, 7)
    shared, *tails = draw_prompts(7, (75, 1, 5, 30, 2, 3, 4))
    prompts = [shared + tail for tail in tails] + [shared[:40] + tails[2], shared[:40] + tails[4], shared]
    for options in ({}, {"max_num_batched_tokens": 20}, {"max_num_seqs": 2, "num_kvcache_blocks": 16}):
        plain, num_plain, _ = run(folder, prompts, enable_prefix_caching=False, **options)
        cached, num_cached, _ = run(folder, prompts, **options)
        assert tokens(plain) == tokens(cached)
        assert sum(output.num_cached_tokens or 0 for output in cached) > 400
        assert num_cached < num_plain / 2


def test_cached_tokens_are_what_was_really_saved(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("Qwen3_5ForCausalLM", 2)
    shared, *tails = draw_prompts(2, (50, 3, 4, 5, 6))
    prompts = [shared + tail for tail in tails]
    with LLM(folder, device="cpu", dtype="float32", kvcache_block_size=16, num_kvcache_blocks=100) as llm:
        llm.engine.scheduler.min_awaited_in_all = 1
        llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        metrics = llm.get_metrics()
    assert metrics.cached_tokens == 3 * 50
    # With one token each, a decode step computes the last token of a prompt whose state before it was kept.
    assert metrics.num_prompt_tokens - metrics.cached_tokens == metrics.prefill_tokens + metrics.decode_tokens
    assert metrics.num_snapshots > 0


def test_samples_fork_the_state_of_their_prompt(checkpoint: Callable[..., Path]) -> None:
    folder, [prompt] = checkpoint("Qwen3_5ForCausalLM", 1), draw_prompts(1, (70,))
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=4, seed=3)
    plain, _, _ = run(folder, [prompt], params, enable_prefix_caching=False)
    cached, num_computed, _ = run(folder, [prompt], params)
    assert tokens(plain) == tokens(cached)
    assert num_computed == 69 + 3, "the first computes its last token in a decode step"


def test_a_second_call_finds_prompts_and_answers_of_the_first(checkpoint: Callable[..., Path]) -> None:
    folder, [prompt, other] = checkpoint("Qwen3NextForCausalLM", 4), draw_prompts(4, (60, 45))
    with LLM(folder, device="cpu", dtype="float32", kvcache_block_size=16, num_kvcache_blocks=100) as llm:
        first = llm.generate([prompt, other], GREEDY, use_tqdm=False)
        again = llm.generate([prompt], GREEDY, use_tqdm=False)
        answered = prompt + first[0].token_ids
        [turn] = llm.generate([[*answered, 5, 6, 7]], GREEDY, use_tqdm=False)
        llm.reset_prefix_cache()
        assert llm.get_metrics().num_snapshots == 0
        [uncached] = llm.generate([[*answered, 5, 6, 7]], GREEDY, use_tqdm=False)
    assert again[0].token_ids == first[0].token_ids
    assert again[0].num_cached_tokens == 59
    assert turn.num_cached_tokens == len(answered) - 1, "the last token was never computed"
    assert (turn.token_ids, uncached.num_cached_tokens) == (uncached.token_ids, 0)


def test_of_2000_prompts_with_369_shared_tokens_each_computes_its_own_alone() -> None:
    """What is computed is counted by the scheduler, without a model: the time of a run follows from it."""
    random = Random(0)
    shared = random.choices(range(1000), k=369)
    tails = [random.choices(range(1000), k=random.randint(50, 150)) for _ in range(2000)]
    scheduler = Scheduler(
        BlockManager(2000, 256, True, (FullAttentionSpec(), RecurrentStateSpec(25)), max_num_seqs=256),
        max_num_seqs=256,
        max_num_batched_tokens=16384,
        max_model_len=4096,
    )
    seqs = [Sequence(i, shared + tail, SamplingParams(max_tokens=32)) for i, tail in enumerate(tails)]
    for seq in seqs:
        scheduler.add(seq)
    batches = run_to_the_end(scheduler)
    num_own, num_computed = sum(map(len, tails)), sum(batch.num_prefill_tokens for batch in batches)
    assert num_own + 369 - 2000 <= num_computed <= 1.02 * num_own, "of each the last token may be left to decode"
    assert sum(seq.num_cached_tokens or 0 for seq in seqs) >= 1999 * 369
    assert 2000 * 369 + num_own > 4.5 * num_computed, "without snapshots all are computed"
    assert len(batches) <= 1.1 * 32 * 2000 / 256 + 60
