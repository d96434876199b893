"""Blocks of models with windows in some layers: what is given back, counted and found."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.caches.block_layout import BlockLayout
from nanoinfer.caches.kv_cache_layout import KVCacheLayout, TableLayout
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.cache_groups.specs import FullAttentionSpec, SlidingWindowSpec
from nanoinfer.engine.hidden_states_request import HiddenStatesRequest
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.errors import ConfigError
from tests.engine.helpers import add_prompts, make_sequence, run_to_the_end, step
from tests.models.test_architectures import checkpoint, draw_prompts, reference_tokens

__all__ = ["checkpoint"]


def windowed_scheduler(
    num_pages: int = 100, window: int = 8, num_groups: int = 1, block_size: int = 4, max_num_batched_tokens: int = 100
) -> tuple[Scheduler, BlockManager]:
    specs = FullAttentionSpec(), SlidingWindowSpec(window, num_groups)
    sizes = {"max_num_seqs": 8, "max_chunk_tokens": max_num_batched_tokens, "min_copied_tokens": 1}
    manager = BlockManager(num_pages, block_size, True, specs, **sizes)
    scheduler = Scheduler(
        manager,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max(length for length in range(1000) if manager.can_hold(length)),
        reserved_tokens=block_size,
    )
    return scheduler, manager


def test_blocks_that_have_left_the_window_are_given_back_while_the_sequence_runs() -> None:
    scheduler, manager = windowed_scheduler(window=8, num_groups=2)
    add_prompts(scheduler, [1] * 21, max_tokens=20)
    step(scheduler)
    assert manager.num_used_blocks == 3 * 6, "a chunk has all blocks of its tokens"
    while not (batch := step(scheduler)).new_blocks:
        pass
    # The 25th token attends to tokens from 17 on, so to blocks 4, 5 and 6.
    assert manager.num_used_blocks == 7 + 2 * 3
    assert [tuple(new) for new in batch.new_blocks if new.block_id == 0] == [
        (9 * group, column, 0) for column in range(4) for group in (1, 2)
    ]
    run_to_the_end(scheduler)
    assert manager.num_used_blocks == 0


def test_sequences_that_gave_their_blocks_back_with_their_prompts_are_queued_again_if_their_steps_fail() -> None:
    scheduler, manager = windowed_scheduler(max_num_batched_tokens=4)
    seqs = [make_sequence(index, [1, 2, 3, 4]) for index in range(2)]
    for seq in seqs:
        seq.hidden_states_request = HiddenStatesRequest(pools=True, first=0)
        scheduler.add(seq)
    scheduler.max_num_seqs = 1
    batches = [scheduler.schedule(), scheduler.schedule(in_flight=True)]
    assert [[chunk.seq for chunk in batch.prefill] for batch in batches] == [[seq] for seq in seqs]
    scheduler.discard(batches)
    assert (scheduler.num_waiting, manager.num_used_blocks) == (2, 0)


@pytest.mark.parametrize("window", [1, 4, 9, 64])
@pytest.mark.parametrize(("num_groups", "chunk"), [(1, 1), (2, 7), (5, 100)])
def test_what_is_promised_at_load_is_what_admission_holds(window: int, num_groups: int, chunk: int) -> None:
    """The longest sequence is read from the layout of the cache, and the manager has a rule of its own."""
    for num_pages in (12, 40, 41, 150):
        layers = (BlockLayout.of_kv(1, 1),)
        layout = KVCacheLayout((TableLayout(None, layers), *[TableLayout(window, layers)] * num_groups), ())
        longest = layout.max_tokens(num_pages, 4, chunk)
        _, manager = windowed_scheduler(num_pages, window, num_groups, 4, chunk)
        assert manager.can_hold(longest)
        assert not manager.can_hold(longest + 1)


def test_asking_what_a_chunk_takes_gives_nothing_back_and_leaving_the_window_does() -> None:
    scheduler, manager = windowed_scheduler(window=8)
    [seq] = add_prompts(scheduler, [1] * 21)
    step(scheduler)
    windows = manager.attention[1]
    for asked in (21, 24, 25):
        assert windows.num_missing(seq, asked) == (asked > 24)
        assert manager.num_used_blocks == 2 * 6
    assert manager.make_room([seq])
    assert manager.num_used_blocks == 6 + 3, "the 22nd token attends to tokens from 14 on, so to blocks 3, 4 and 5"


def test_a_long_prompt_holds_the_window_and_a_chunk() -> None:
    scheduler, manager = windowed_scheduler(num_pages=31, window=8, max_num_batched_tokens=8)
    [seq] = add_prompts(scheduler, [1] * 80, max_tokens=4)
    while seq.num_computed_tokens < 80:
        step(scheduler)
        assert manager.num_used_blocks <= 20 + 5, "7 tokens before a chunk and its 8 lie in up to 5 blocks"


def test_as_many_sequences_run_as_their_windows_have_room() -> None:
    """Of 41 pages, sequences of 40 tokens would take 20 each if they kept all."""
    scheduler, _ = windowed_scheduler(num_pages=42, window=4, max_num_batched_tokens=4)
    add_prompts(scheduler, *([number] * 37 for number in range(5)), max_tokens=3)
    most = 0
    while not scheduler.is_finished():
        step(scheduler)
        most = max(most, len(scheduler.running))
    assert most == 3
    assert scheduler.num_preemptions == 0


def test_a_cached_prefix_needs_the_blocks_within_the_window_alone() -> None:
    scheduler, manager = windowed_scheduler(window=5)
    shared = list(range(1, 17))
    add_prompts(scheduler, [*shared, 99], max_tokens=9)
    run_to_the_end(scheduler)
    follower = make_sequence(1, [*shared, 7, 8])
    scheduler.add(follower)
    step(scheduler)
    windows = manager.attention[1]
    assert follower.num_cached_tokens == 16
    assert windows.held[follower].first == 3, "token 16 attends to tokens from 12 on"


def test_a_prefix_whose_windows_were_handed_out_again_is_found_no_more_and_computed_anew() -> None:
    scheduler, manager = windowed_scheduler(num_pages=11, window=5)
    shared = list(range(1, 9))
    add_prompts(scheduler, [*shared, 99], max_tokens=1)
    run_to_the_end(scheduler)
    for entry in manager.pool.find_chain(make_sequence(9, [*shared, 99])):
        manager.pool._detach(entry, 1)
    for number in (1, 2):
        follower = make_sequence(number, [*shared, 7, 8], max_tokens=1)
        scheduler.add(follower)
        run_to_the_end(scheduler)
        assert follower.num_cached_tokens == (0 if number == 1 else 9)


def test_copies_within_a_block_are_made_in_every_group() -> None:
    scheduler, _ = windowed_scheduler(window=5, num_groups=2)
    add_prompts(scheduler, [1, 2, 3, 4, 5, 6, 7], max_tokens=1)
    run_to_the_end(scheduler)
    follower = make_sequence(1, [1, 2, 3, 4, 5, 6, 9])
    scheduler.add(follower)
    batch = step(scheduler)
    assert follower.num_cached_tokens == 6
    assert [copy.num_tokens for copy in batch.block_copies] == [2, 2, 2]


# --- whole engines ---


@pytest.mark.parametrize(
    "architecture", ["Cohere2ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo3ForCausalLM"]
)
def test_tokens_are_those_of_transformers_while_blocks_are_given_back_and_found(
    checkpoint: Callable[..., Path], architecture: str
) -> None:
    folder = checkpoint(architecture, 3, sliding_window=11)
    shared, *tails = draw_prompts(3, (70, 3, 20, 40))
    prompts = [*(shared + tail for tail in tails), shared]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with LLM(folder, device="cpu", dtype="float32", num_kvcache_blocks=40, kvcache_block_size=16) as llm:
        manager = llm.engine.block_manager
        assert manager.num_tables > 1
        answers = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        again = llm.generate(prompts, params, use_tqdm=False)
        assert llm.get_metrics().num_used_blocks == 0
    with LLM(folder, device="cpu", dtype="float32", enable_prefix_caching=False, kvcache_block_size=16) as llm:
        plain = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert answers == [output.token_ids for output in again] == plain
    assert reference_tokens(folder, prompts, answers) == answers
    assert min(output.num_cached_tokens or 0 for output in again) >= 64


def test_a_sequence_that_the_pages_cannot_hold_is_refused_by_number(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("Gemma3ForCausalLM", 0, sliding_window=11)
    with pytest.raises(ConfigError, match="max_model_len=112 is more than the KV cache holds"):
        LLM(folder, device="cpu", num_kvcache_blocks=3, kvcache_block_size=16, max_model_len=112)
