"""Streams: chunks that add up to what generate gives, calls that interleave, and streams that are left early."""

import gc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nanoinfer import LLM, RequestError, SamplingParams, StreamChunk, tiny_model_path

Checkpoint = Callable[..., Path]
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
QUESTIONS = ["introduce yourself", "What is 312 + 48?", "list all prime numbers within 100"]


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def shared(random_checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Iterator[LLM]:
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 64, "max_model_len": 256, "overlap": request.param}
    with LLM(random_checkpoint(), device="cpu", **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu") as llm:
        yield llm


def num_used_blocks(llm: LLM) -> int:
    return llm.engine.block_manager.num_used_blocks


def joined_ids(chunks: list[StreamChunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def test_the_joined_chunks_are_what_generate_gives(tiny: LLM) -> None:
    prompts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS] * 3
    stops = [None] * 3 + ["0"] * 3 + [[", 31", "am "]] * 3
    params = [SamplingParams(temperature=0, max_tokens=40, stop=stop) for stop in stops]
    chunks = list(tiny.stream(prompts, params))
    for index, output in enumerate(tiny.generate(prompts, params, use_tqdm=False)):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert "".join([chunk.text for chunk in mine]) == output.text
        assert joined_ids(mine) == output.token_ids
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + [output.finish_reason]
        assert len(mine) == len(output.token_ids), "a chunk for each token"


def test_chunks_that_another_threads_step_brings_at_the_end_are_not_lost(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Chunks(deque[StreamChunk]):
        def __bool__(self) -> bool:
            were_there = len(self) > 0
            while not were_there and not llm.is_finished():
                llm.queue.step()  # as another thread does just after this one has looked
            return were_there

    monkeypatch.setattr("nanoinfer.engine.request_queue.deque", Chunks)
    expected = llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0].token_ids
    assert joined_ids(list(llm.stream([1, 2, 3], SHORT))) == expected


def test_chunks_have_the_logprobs_of_their_tokens(llm: LLM, tiny: LLM) -> None:
    params = SamplingParams(n=2, temperature=1.0, max_tokens=6, ignore_eos=True, seed=5, logprobs=2)
    job = [[1, 2, 3], [4, 5]], [params, replace(params, logprobs=None)]
    chunks = list(llm.stream(*job))
    for completion in llm.generate(*job, use_tqdm=False)[0].outputs:
        mine = [chunk for chunk in chunks if (chunk.index, chunk.sample) == (0, completion.index)]
        assert joined_ids(mine) == completion.token_ids
        assert [entry for chunk in mine for entry in chunk.logprobs or []] == completion.logprobs
    assert all(chunk.logprobs is None for chunk in chunks if chunk.index == 1)
    # A stop string is held back, but not the log-probabilities of the ids that come with it.
    params = SamplingParams(temperature=0, max_tokens=40, stop="11, ", logprobs=0)
    prompt = f"<|im_start|>user\n{QUESTIONS[2]}<|im_end|>\n<|im_start|>assistant\n"
    chunks, [output] = list(tiny.stream(prompt, params)), tiny.generate(prompt, params, use_tqdm=False)
    assert [entry for chunk in chunks for entry in chunk.logprobs or []] == output.outputs[0].logprobs
    assert all(len(chunk.logprobs or []) == len(chunk.token_ids) for chunk in chunks)
    assert output.finish_reason == "stop"


def test_what_cannot_be_streamed_is_refused_by_the_call_itself_which_queues_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1 is empty"):
        llm.stream([[1], []], SHORT)
    with pytest.raises(RequestError, match="prompt_logprobs=1 cannot be streamed; use generate"):
        llm.stream([[1, 2, 3], [4]], [SHORT, replace(SHORT, prompt_logprobs=1)])
    unread = llm.stream([1, 2, 3], SHORT)
    assert llm.is_finished()
    assert [(len(chunk.token_ids), chunk.finish_reason) for chunk in unread] == [(1, None), (1, None), (1, "length")]
    assert list(llm.stream([], SHORT)) == []


def test_breaking_out_of_the_loop_frees_everything_with_the_next_step(llm: LLM) -> None:
    for chunk in llm.stream([[1] * 20, [2] * 20], LONG):
        if len(chunk.token_ids) > 0 and chunk.index == 1:
            break
    assert num_used_blocks(llm) > 0
    assert llm.step() == [], "nobody asked for the outputs"
    assert num_used_blocks(llm) == 0
    assert llm.is_finished()


def test_an_exception_in_the_loop_frees_everything_with_the_next_generate(llm: LLM) -> None:
    def read() -> None:
        for _ in llm.stream([[1] * 20, [2] * 20], LONG):
            raise KeyError("the reader's own")

    with pytest.raises(KeyError, match="own"):
        read()
    gc.collect()
    assert len(llm.generate([1, 2, 3], SHORT, use_tqdm=False)[0].token_ids) == 3
    assert num_used_blocks(llm) == 0
    assert llm.is_finished()


def test_a_stream_that_is_dropped_frees_everything_with_the_next_step(llm: LLM) -> None:
    stream = llm.stream([1] * 20, LONG)
    next(stream)
    del stream
    gc.collect()
    llm.step()
    assert num_used_blocks(llm) == 0


def test_streams_and_generate_interleave(llm: LLM) -> None:
    alone = [llm.generate([prompt], LONG, use_tqdm=False)[0].token_ids for prompt in ([1] * 9, [2] * 9)]
    added = llm.add_request([4, 5], SHORT)
    first, second = llm.stream([1] * 9, LONG), llm.stream([2] * 9, LONG)
    got: list[list[StreamChunk]] = [[next(first)], [next(second)]]
    assert len(llm.generate([3, 3], SHORT, use_tqdm=False)[0].token_ids) == 3
    for _ in range(10):
        got[0].append(next(first))
        got[1].append(next(second))
    assert [output.request_id for output in llm.step()] == [added], "and step returns what was added alone"
    got[1] += second
    got[0] += first
    assert [joined_ids(chunks) for chunks in got] == alone
    assert llm.is_finished()


def test_an_aborted_request_is_returned_as_it_is(llm: LLM) -> None:
    kept, aborted = llm.add_request([1, 2], SHORT), llm.add_request([3, 4], LONG)
    for _ in range(2):
        assert llm.step() == []
    llm.abort(aborted)
    llm.abort([aborted, 12345])
    outputs = {}
    while not llm.is_finished():
        outputs |= {output.request_id: output for output in llm.step()}
    assert (outputs[kept].finish_reason, outputs[aborted].finish_reason) == ("length", "abort")
    assert len(outputs[kept].token_ids) == 3
    assert 1 <= len(outputs[aborted].token_ids) <= 3
    assert num_used_blocks(llm) == 0
    llm.abort(kept)
    assert llm.step() == []


@pytest.mark.parametrize("wrong", [None, [None, 3], [[1]], "0", True])
def test_what_is_no_request_id_cannot_be_aborted(llm: LLM, wrong: object) -> None:
    with pytest.raises(RequestError, match="give an id that add_request returned"):
        llm.abort(wrong)


def test_an_aborted_request_whose_step_fails_leaves_nothing_in_the_prefix_cache(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not llm.engine.config.overlap:
        pytest.skip("nothing is in flight between two steps")
    prompt = list(range(3, 3 + 2 * llm.engine.config.kvcache_block_size))
    request_id = llm.add_request(prompt, LONG)
    llm.step()  # its prefill is in flight
    llm.abort(request_id)
    with monkeypatch.context() as broken:
        broken.setattr(llm.engine.runner, "wait", lambda handle: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.step()
    [output] = llm.step()
    assert (output.request_id, output.finish_reason) == (request_id, "abort")
    [output] = llm.generate([prompt], SHORT, use_tqdm=False)
    assert output.num_cached_tokens == 0


def test_a_pause_after_a_stop_is_not_counted_as_work(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    [output] = llm.generate([[1, 2]], SHORT, use_tqdm=False)
    llm.generate([[1, 2]], replace(SHORT, max_tokens=50, stop_token_ids=[output.token_ids[-1]]), use_tqdm=False)
    waits = []
    monkeypatch.setattr(llm.engine.runner, "wait", waits.append)
    llm.step()
    assert waits == [], "the step after the stop was collected at once"


def test_ids_that_are_not_given_out_yet_are_passed_over_and_waiting_requests_aborted(llm: LLM) -> None:
    request_id = llm.add_request([1, 2], LONG)
    llm.abort([request_id, request_id + 1, request_id + 2, request_id + 1000])
    outputs = llm.generate([[1], [2]], SHORT, use_tqdm=False)
    assert [output.finish_reason for output in outputs] == ["length", "length"]
    [output] = llm.step()
    assert (output.request_id, output.token_ids, output.finish_reason) == (request_id, [], "abort")


def test_a_request_of_a_stream_can_be_aborted_alone(llm: LLM) -> None:
    before = llm.generate([1], SHORT, use_tqdm=False)[0].request_id
    reasons, lengths = {}, [0, 0]
    for chunk in llm.stream([[1] * 5, [2] * 5], LONG):
        lengths[chunk.index] += len(chunk.token_ids)
        if lengths == [4, 3]:
            llm.abort(before + 1)
        reasons[chunk.index] = chunk.finish_reason
    assert reasons == {0: "abort", 1: "length"}
    assert lengths[0] < 8
    assert lengths[1] == 40


def test_preemption_changes_neither_streams_nor_stop_strings(tiny: LLM) -> None:
    prompts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS[:2] * 4]
    params = [SamplingParams(temperature=0, max_tokens=60, stop=stop) for stop in (None, "0", ", 31", "am ")] * 2
    expected = [(output.text, output.finish_reason) for output in tiny.generate(prompts, params, use_tqdm=False)]
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 12, "max_model_len": 160}
    with LLM(tiny_model_path(), device="cpu", **options) as tight:
        tight.engine.scheduler.reserved_tokens = 0  # so that blocks do run short
        texts, reasons = [""] * 8, [""] * 8
        for chunk in tight.stream(prompts, params):
            texts[chunk.index] += chunk.text
            reasons[chunk.index] = chunk.finish_reason or ""
        assert tight.get_metrics().num_preemptions > 0
        assert num_used_blocks(tight) == 0
    assert list(zip(texts, reasons, strict=True)) == expected


def test_a_step_that_fails_ends_the_stream_and_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = llm.generate([1] * 9, SHORT, use_tqdm=False)[0].token_ids
    stream = llm.stream([2] * 9, LONG)
    next(stream)
    assert llm.engine.runner is not None
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "launch", lambda packet: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(stream)
    assert llm.generate([1] * 9, SHORT, use_tqdm=False)[0].token_ids == alone
    assert num_used_blocks(llm) == 0
    assert llm.is_finished()
