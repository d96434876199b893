"""The queue that LLM, asyncio and batch jobs share: what callers add, they get; what they leave, is freed."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nanoinfer import LLM, EngineClosedError, RequestError, SamplingParams, tiny_model_path
from nanoinfer.engine.request_queue import Inbox, RequestQueue
from nanoinfer.text.completion_text import CompletionText
from nanoinfer.text.tokenizer import Tokenizer, completion_text

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu", max_num_seqs=3) as llm:
        yield llm


@pytest.fixture
def queue(llm: LLM) -> Iterator[RequestQueue]:
    """A queue that every test leaves empty."""
    yield llm.queue
    assert llm.queue.engine.is_finished()
    assert llm.get_metrics().num_used_blocks == 0


def add(llm: LLM, *prompts: str, params: SamplingParams = SHORT, is_stream: bool = False) -> Inbox:
    inbox = Inbox(is_stream)
    llm.queue.add_requests(llm.preparer.prepare([*prompts], params), inbox)
    return inbox


def run(queue: RequestQueue, inbox: Inbox) -> None:
    while not inbox.is_complete:
        queue.step()


def test_what_is_added_is_in_its_own_inbox_whoever_runs_the_steps(llm: LLM, queue: RequestQueue) -> None:
    first, second = add(llm, "1", "2"), add(llm, "3")
    run(queue, first)
    assert second.is_complete
    expected = llm.generate(["1", "2", "3"], SHORT, use_tqdm=False)
    assert [output.text for output in first.outputs + second.outputs] == [output.text for output in expected]


def test_an_inbox_may_be_collected_from_and_added_to_again_and_again(llm: LLM, queue: RequestQueue) -> None:
    inbox = Inbox()
    for _ in range(3):
        [request_id] = queue.add_requests(llm.preparer.prepare(["1"], SHORT), inbox)
        run(queue, inbox)
        assert [output.request_id for output in queue.collect(inbox)] == [request_id]
        assert (inbox.outputs, inbox.request_ids) == ([], set())


def test_chunks_come_to_the_inbox_of_a_stream_alone(llm: LLM, queue: RequestQueue) -> None:
    plain, stream = add(llm, "1"), add(llm, "1", is_stream=True)
    run(queue, stream)
    run(queue, plain)
    assert "".join(chunk.text for chunk in stream.chunks) == plain.outputs[0].text
    assert not plain.chunks


def test_what_is_dropped_is_freed_at_once_and_the_others_go_on(llm: LLM, queue: RequestQueue) -> None:
    kept, left = add(llm, "1"), add(llm, "2", "3", params=LONG)
    queue.step()
    num_used = llm.get_metrics().num_used_blocks
    queue.drop(left)
    assert llm.get_metrics().num_used_blocks == num_used - 2
    run(queue, kept)
    assert left.outputs == []


def test_what_is_dropped_is_freed_also_if_the_step_in_flight_fails(
    llm: LLM, queue: RequestQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = add(llm, "1", "2", params=LONG)
    queue.step()
    with monkeypatch.context() as broken:
        broken.setattr(llm.engine.runner, "wait", lambda handle: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            queue.drop(inbox)  # the fixture finds what is left


def test_the_stream_of_a_refused_request_has_all_its_chunks_before_its_output_is_there(
    llm: LLM, queue: RequestQueue
) -> None:
    """Another thread may look at the inbox at any moment, and takes a stream for complete with the last output."""

    class Outputs(list[Any]):
        def append(self, output: Any) -> None:
            assert len(inbox.chunks) == 2
            super().append(output)

    [request] = llm.preparer.prepare(["1"], SamplingParams(n=2))
    request.error = RequestError("no")
    inbox = Inbox(is_stream=True)
    inbox.outputs = Outputs()
    queue.add_requests([request], inbox)
    assert inbox.is_complete


def test_what_is_abandoned_ends_with_the_next_step_and_so_does_what_is_added_then(
    llm: LLM, queue: RequestQueue
) -> None:
    inbox = add(llm, "1", params=LONG)
    queue.step()
    queue.abandon(inbox)
    queue.add_requests(llm.preparer.prepare(["2"], LONG), inbox)
    queue.step()
    assert [output.finish_reason for output in inbox.outputs] == ["abort", "abort"]


def test_threads_that_run_steps_at_the_same_time_serve_each_other(llm: LLM, queue: RequestQueue) -> None:
    prompts = [f"{number}+1=" for number in range(6)]
    expected = [output.text for output in llm.generate(prompts, SHORT, use_tqdm=False)]
    inboxes = [add(llm, prompt) for prompt in prompts]
    threads = [threading.Thread(target=run, args=(queue, inbox)) for inbox in inboxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [inbox.outputs[0].text for inbox in inboxes] == expected


def test_it_is_worth_adding_twice_as_many_requests_as_run_at_a_time(queue: RequestQueue) -> None:
    assert queue.capacity == 6


def test_nothing_is_prepared_for_a_closed_engine() -> None:
    with LLM(tiny_model_path(), device="cpu") as llm:
        preparer = llm.preparer
    with pytest.raises(EngineClosedError, match="this engine was closed; make a new LLM"):
        preparer.prepare(["1"])


def test_the_text_of_a_completion_is_begun_with_its_first_step(
    llm: LLM, queue: RequestQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def begin(tokenizer: Tokenizer, params: SamplingParams, prompt: list[int]) -> CompletionText:
        begun.append(prompt)
        return completion_text(tokenizer, params, prompt)

    monkeypatch.setattr("nanoinfer.engine.request.completion_text", begin)
    inbox = add(llm, "1", "2", "3", "4")
    assert begun == []
    queue.step()
    assert len(begun) == 3, "there are three rows"
    run(queue, inbox)
    assert len(begun) == 4
    assert all(output.text for output in inbox.outputs)
