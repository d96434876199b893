"""Paused requests: they compute nothing, keep what they can, and go on to the tokens that they would have got."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nanoinfer import LLM, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams, tiny_model_path
from nanoinfer.engine.sequence import SequenceStatus
from tests.engine.helpers import add_prompts, make_scheduler, make_sequence, run_to_the_end, step

Checkpoint = Callable[..., Path]
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SHORT = replace(LONG, max_tokens=3)


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def shared(random_checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Iterator[LLM]:
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 24, "max_num_seqs": 4, "overlap": request.param}
    with LLM(random_checkpoint(), device="cpu", max_model_len=256, **options) as llm:
        yield llm


def run(llm: LLM) -> list[RequestOutput]:
    outputs = []
    while not llm.is_finished():
        outputs += llm.step()
    return outputs


# --- Scheduler ---


def test_a_paused_sequence_computes_nothing_and_goes_on_with_its_row_and_its_blocks() -> None:
    scheduler = make_scheduler()
    seq, other = add_prompts(scheduler, [1, 2, 3, 4, 5], [6, 7], max_tokens=8)
    step(scheduler), step(scheduler)
    row, blocks = seq.row, [*seq.block_table]
    scheduler.pause({seq.seq_id})
    assert [batch_seq for _ in range(3) for batch_seq in step(scheduler).decode] == [other] * 3
    assert (seq.status, seq.row, seq.block_table) == (SequenceStatus.PAUSED, row, blocks)
    scheduler.resume({seq.seq_id})
    batch = step(scheduler)
    assert (batch.decode, batch.admitted, batch.prefill) == ([other, seq], [], []), "nothing is computed again"


def test_a_paused_sequence_gives_way_before_a_running_one_of_lower_priority() -> None:
    scheduler = make_scheduler(num_blocks=4)
    first, second = (make_sequence(seq_id, [1, 2, 3, 4 + seq_id], max_tokens=12) for seq_id in range(2))
    first.priority = 1
    for seq in (first, second):
        scheduler.add(seq)
    for _ in range(5):  # the next token of each needs a third block
        step(scheduler)
    scheduler.pause({0})
    assert [*first.block_table]
    while second.status is not SequenceStatus.FINISHED:
        assert step(scheduler).decode == [second], "it was not preempted"
    assert (first.status, first.block_table, first.row) == (SequenceStatus.PAUSED, [], None)
    assert scheduler.num_preemptions == 1
    scheduler.resume({0})
    assert first.status is SequenceStatus.WAITING
    run_to_the_end(scheduler)
    assert len(first.completion_token_ids) == 12


@pytest.mark.parametrize("options", [{"max_num_seqs": 2}, {"num_blocks": 6}], ids=["rows", "blocks"])
def test_paused_sequences_make_room_for_those_that_wait_the_last_in_rank_first(options: dict) -> None:
    scheduler = make_scheduler(**options)
    first, second, third = add_prompts(scheduler, [1] * 7, [2] * 7, [3] * 11)
    step(scheduler)
    assert scheduler.running == [first, second]
    scheduler.pause({0, 1})
    assert step(scheduler).admitted == [third]
    assert (bool(first.block_table), bool(second.block_table)) == (True, False)


def test_a_waiting_sequence_that_is_paused_comes_back_to_its_place_in_the_queue() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    _, second, third = add_prompts(scheduler, [1], [2], [3])
    step(scheduler)
    scheduler.pause({1})
    scheduler.pause({1, 99})
    assert (scheduler.num_waiting, scheduler.paused) == (1, [second])
    scheduler.resume({1, 2, 99})  # one that is not paused stays as it is
    assert (scheduler.num_waiting, scheduler.paused) == (2, [])
    admitted = [seq for batch in run_to_the_end(scheduler) for seq in batch.admitted]
    assert admitted == [second, third]


def test_aborting_a_paused_sequence_frees_what_it_holds() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    seqs = add_prompts(scheduler, [1] * 7, [2], [3])
    step(scheduler)
    scheduler.pause({0, 2})
    scheduler.abort({0, 2})
    assert [seq.finish_reason for seq in seqs] == ["abort", None, "abort"]
    assert scheduler.paused == []
    assert scheduler.block_manager.num_used_blocks == 1


# --- LLM ---


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 20])
def test_a_paused_request_gets_the_tokens_that_it_would_have_got(llm: LLM, num_steps: int) -> None:
    params = [replace(LONG, temperature=1.0, n=2), replace(LONG, presence_penalty=1.0, logprobs=1), LONG]
    prompts = [[5] * 40, [*range(20)], [7, 8, 9]]
    seeded = [replace(item, seed=3) for item in params]
    start = llm.get_metrics().prefill_tokens
    alone = llm.generate(prompts, seeded, use_tqdm=False)
    computed = llm.get_metrics().prefill_tokens - start
    llm.reset_prefix_cache()
    request_ids = [llm.add_request(prompt, its) for prompt, its in zip(prompts, seeded, strict=True)]
    outputs = [output for _ in range(num_steps) for output in llm.step()]
    llm.pause(request_ids)
    for _ in range(3):
        outputs += llm.step()
    before = llm.get_metrics().num_generated_tokens
    assert llm.step() == []
    assert llm.get_metrics().num_generated_tokens == before, "nothing is computed"
    assert not llm.is_finished()
    assert len(outputs) < 3
    llm.resume(request_ids[1])
    while request_ids[1] not in [output.request_id for output in outputs]:
        outputs += llm.step()
    llm.resume(request_ids)
    outputs += run(llm)
    outputs.sort(key=lambda output: output.request_id)
    samples, samples_alone = ([its for output in some for its in output.outputs] for some in (outputs, alone))
    assert [its.token_ids for its in samples] == [its.token_ids for its in samples_alone]
    assert len(samples[2].logprobs or []) == 30
    assert llm.get_metrics().prefill_tokens - start == 2 * computed, "nothing is computed again"


def test_requests_with_rules_say_the_same_after_a_pause() -> None:
    forms = [
        SamplingParams(seed=1, max_tokens=30, structured_outputs=StructuredOutputsParams(regex="[a-z]{20,25}")),
        SamplingParams(seed=2, max_tokens=30, bad_words=["8", "3"], stop=", 1"),
        SamplingParams(
            seed=3, max_tokens=30, logits_processors=[lambda token_ids, logits: logits / (1 + len(token_ids))]
        ),
    ]
    with LLM(tiny_model_path(), device="cpu", kvcache_block_size=16) as llm:
        alone = llm.generate(["What is 2"] * 3, forms, use_tqdm=False)
        request_ids = [llm.add_request("What is 2", params) for params in forms]
        outputs = []
        for number in range(60):
            (llm.pause if number % 2 else llm.resume)(request_ids[number % 3])
            outputs += llm.step()
        llm.resume(request_ids)
        outputs += run(llm)
    assert [output.text for output in sorted(outputs, key=lambda its: its.request_id)] == [its.text for its in alone]


def test_a_paused_request_that_gave_its_blocks_up_gets_the_same_tokens(llm: LLM) -> None:
    prompts = [[seed] * 50 for seed in range(1, 7)]
    alone = llm.generate(prompts, LONG, use_tqdm=False)
    preempted = llm.get_metrics().num_preemptions
    llm.reset_prefix_cache()
    request_ids = [llm.add_request(prompt, LONG) for prompt in prompts[:2]]
    for _ in range(8):
        llm.step()
    llm.pause(request_ids)
    others = llm.generate(prompts[2:], LONG, use_tqdm=False)
    assert llm.get_metrics().num_preemptions - preempted >= 2, "they had to give way"
    llm.reset_prefix_cache()
    llm.resume(request_ids)
    outputs = run(llm)
    assert [output.token_ids for output in outputs + others] == [output.token_ids for output in alone]


def test_the_prefix_cache_may_be_reset_while_requests_are_paused(llm: LLM) -> None:
    [alone] = llm.generate([[3] * 40], LONG, use_tqdm=False)
    request_id = llm.add_request([3] * 40, LONG)
    for _ in range(5):
        llm.step()
    llm.pause(request_id)
    llm.step()
    llm.reset_prefix_cache()
    llm.resume(request_id)
    [output] = run(llm)
    assert output.token_ids == alone.token_ids


def test_a_stream_says_nothing_of_a_paused_request_until_it_is_resumed(llm: LLM) -> None:
    alone = llm.generate([[1, 2], [3, 4]], LONG, use_tqdm=False)
    llm.reset_prefix_cache()
    token_ids: list[list[int]] = [[], []]
    order = []
    for chunk in llm.stream([[1, 2], [3, 4]], LONG):
        token_ids[chunk.index] += chunk.token_ids
        order.append(chunk.index)
        if chunk.index == 0 and len(token_ids[0]) == 4:
            llm.pause(chunk.request_id)
            paused_id = chunk.request_id
        if chunk.index == 1 and len(token_ids[1]) == 20:
            assert len(token_ids[0]) <= 6, "what was in flight still came"
            llm.resume(paused_id)
    assert token_ids == [output.token_ids for output in alone]


def test_generate_waits_for_a_paused_request_without_work_and_says_so(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nanoinfer.engine.request_queue.PATIENCE_SECONDS", 0.1)
    ids: list[int] = []
    end = llm.on_step(lambda event: ids.extend(change.request_id for change in event.changes))
    end_pausing = llm.on_step(lambda event: llm.pause(ids))
    outputs: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)))
    with caplog.at_level(logging.WARNING):
        thread.start()
        while not caplog.records:
            time.sleep(0.01)
        busy = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - busy < 0.2, "it does not spin"
    assert "only paused requests are left (1); resume or abort them" in caplog.text
    assert len(caplog.records) == 1
    assert outputs == []
    end(), end_pausing()
    assert llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)[0].finish_reason == "length", "other calls go on"
    llm.resume(ids)
    thread.join(60)
    assert [output.finish_reason for output in outputs] == ["length"]


def test_a_paused_request_can_be_aborted(llm: LLM) -> None:
    request_ids = [llm.add_request([1, 2, 3], replace(LONG, temperature=1, n=2)) for _ in range(2)]
    for _ in range(4):
        llm.step()
    llm.pause(request_ids)
    llm.step()
    llm.abort(request_ids[0])
    [output] = llm.step()
    assert (output.request_id, output.finish_reason) == (request_ids[0], "abort")
    assert len(output.token_ids) >= 2
    llm.pause(request_ids[1])
    llm.resume(request_ids[1])
    llm.abort(request_ids[1])  # they happen in their order
    [output] = llm.step()
    assert output.finish_reason == "abort"


def test_pausing_passes_over_ids_that_are_unknown_and_refuses_what_is_none(llm: LLM) -> None:
    llm.pause([10**6]), llm.resume({10**6})
    for control in (llm.pause, llm.resume, llm.abort):
        with pytest.raises(RequestError, match="give an id that add_request returned"):
            control("first")  # type: ignore[arg-type]
