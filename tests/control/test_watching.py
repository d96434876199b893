"""Whoever watches a run comes and goes at any moment, and the trace has all of it, also what follows its last step."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer import LLM, SamplingParams, StepEvent, StreamChunk
from nanoinfer.control.step_events import StepEventListener
from nanoinfer.engine.interfaces import SILENT, Listener
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from tests.control.test_run_trace import OPTIONS, PARAMS, read_page
from tests.engine.helpers import add_prompts, make_scheduler

Checkpoint = Callable[..., Path]
FAST = {"use_tqdm": False}


def before(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, act: Callable[[], object], at: int) -> None:
    """Have `act` called before the call number `at` of a method, as another thread might."""
    method, numbers = getattr(place, name), iter(range(1_000_000))

    def wrapped(*args: Any) -> Any:
        if next(numbers) == at:
            act()
        return method(*args)

    monkeypatch.setattr(place, name, wrapped)


# --- Beginning and ending at any moment ---


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("place", ["launch", "sample", "wait"])
def test_who_begins_to_listen_in_the_middle_of_a_step_gets_the_next_ones(
    random_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, place: str, overlap: bool
) -> None:
    with LLM(random_checkpoint(), overlap=overlap, **OPTIONS) as llm:
        events: list[StepEvent] = []
        before(monkeypatch, llm.engine.runner, place, lambda: llm.on_step(events.append), at=5)
        [output] = llm.generate([[1, 2, 3]], PARAMS, **FAST)  # type: ignore[arg-type]
        assert len(output.token_ids) == 20
        assert len(events) >= 13
        assert [event.index for event in events] == [*range(len(events))]
        assert all(event.started < event.launched <= event.arrived <= event.ended for event in events)


@pytest.mark.parametrize("place", ["launch", "sample", "wait"])
def test_one_may_leave_and_another_come_in_the_middle_of_a_step(
    random_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with LLM(random_checkpoint(), **OPTIONS) as llm:
        first: list[StepEvent] = []
        second: list[StepEvent] = []
        end = llm.on_step(first.append)
        before(monkeypatch, llm.engine.runner, place, lambda: (end(), llm.on_step(second.append)), at=5)
        [output] = llm.generate([[1, 2, 3]], PARAMS, **FAST)  # type: ignore[arg-type]
        assert len(output.token_ids) == 20
        assert 0 < len(first) < 7 < len(second)


def test_other_threads_begin_and_end_while_one_generates(random_checkpoint: Checkpoint) -> None:
    with LLM(random_checkpoint(), **OPTIONS) as llm:
        is_over = threading.Event()
        num_events = [0]

        def count(event: StepEvent) -> None:
            num_events[0] += 1

        def watch() -> None:
            while not is_over.is_set():
                llm.on_step(count)()
                end = llm.on_step(count)
                is_over.wait(0.001)
                end()

        threads = [threading.Thread(target=watch) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                [output] = llm.generate([[1, 2, 3]], PARAMS, **FAST)  # type: ignore[arg-type]
                assert len(output.token_ids) == 20
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert num_events[0] > 0
        assert llm.engine.scheduler.listener is SILENT, "nobody listens any more"


def test_a_step_whose_launch_failed_is_never_taken_for_another() -> None:
    scheduler = make_scheduler()
    add_prompts(scheduler, [1, 2, 3])
    events = StepEventListener(scheduler, torch.device("cpu"))
    got: list[StepEvent] = []
    stale, unseen, seen = scheduler.schedule(), ScheduledBatch(), ScheduledBatch()
    events.launching(stale, 1.0)
    events.launched(unseen)
    events.collected(unseen, 2.0)
    got.extend(events.stepped())
    assert got == []
    events.failed()
    events.launching(seen, 3.0)
    events.launched(seen)
    events.launched(stale)
    events.collected(stale, 4.0)
    events.collected(seen, 5.0)
    got.extend(events.stepped())
    assert [(event.index, event.started, event.arrived) for event in got] == [(1, 3.0, 5.0)]


def test_a_callback_that_was_registered_twice_ends_twice(random_checkpoint: Checkpoint) -> None:
    with LLM(random_checkpoint(), **OPTIONS) as llm:
        events: list[StepEvent] = []
        end, end_other = llm.on_step(events.append), llm.on_step(events.append)
        llm.generate([[1]], replace(PARAMS, max_tokens=3), **FAST)  # type: ignore[arg-type]
        assert [event.index for event in events] == [0, 0, 1, 1, 2, 2]
        end(), end()
        llm.generate([[1]], replace(PARAMS, max_tokens=2), **FAST)  # type: ignore[arg-type]
        assert [event.index for event in events[6:]] == [3, 4]
        end_other()
        llm.generate([[1]], PARAMS, **FAST)  # type: ignore[arg-type]
        assert len(events) == 8


def test_the_events_are_made_of_all_that_the_engine_tells() -> None:
    told = {name for name in vars(Listener) if not name.startswith("_")}
    assert len(told) == 10
    assert told <= {*vars(StepEventListener)}, "it overrides every method"


# --- Counts ---


def test_a_preempted_sequence_counts_as_such_while_it_is_in_the_queue() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.reserved_tokens = 0  # so that blocks run short
    first, second = add_prompts(scheduler, [1] * 7, [2] * 7, max_tokens=8)
    scheduler.listener = events = StepEventListener(scheduler, torch.device("cpu"))
    got: list[StepEvent] = []

    def step() -> tuple[int, int, int]:
        batch = scheduler.schedule()
        events.launching(batch, 1.0)
        events.launched(batch)
        for seq in scheduler.update(batch, [0] * len(batch.sampled)):
            events.finished(seq)
        events.collected(batch, 2.0)
        got.extend(events.stepped())
        return got[-1].num_waiting, got[-1].num_preempted, got[-1].num_paused

    assert [step() for _ in range(3)] == [(0, 0, 0), (0, 0, 0), (1, 1, 0)], "the third block of the first"
    scheduler.pause({second.seq_id})
    assert step() == (0, 0, 1)
    scheduler.resume({second.seq_id})
    assert step() == (1, 1, 0)
    scheduler.pause({first.seq_id})
    assert step() == (0, 0, 1), "the second has the blocks of the first"
    scheduler.resume({first.seq_id})
    assert step() == (1, 1, 0), "it gave them up while it was paused"


# --- The end of a trace ---


def whats(path: Path) -> list[str]:
    page = read_page(path)
    return [page["kinds"][kind] for kind in page["changes"]["kind"]]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_trace_has_a_request_that_was_aborted_while_it_was_paused(
    random_checkpoint: Checkpoint, tmp_path: Path, overlap: bool
) -> None:
    with LLM(random_checkpoint(), trace=tmp_path / "run.html", overlap=overlap, **OPTIONS) as llm:
        request_id = llm.add_request([1, 2, 3], PARAMS)
        llm.step()
        llm.pause(request_id)
        llm.step()
        llm.abort(request_id)
        assert [output.finish_reason for output in llm.step()] == ["abort"]
    assert whats(tmp_path / "run.html") == ["arrived", "admitted", "chunk", "paused", "finished"]


def test_the_trace_has_the_requests_of_a_call_that_an_error_ended(
    random_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with LLM(random_checkpoint(), trace=tmp_path / "run.html", **OPTIONS) as llm:
        params = [replace(PARAMS, max_tokens=2), PARAMS, PARAMS]
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1], [2], [3]], params, use_tqdm=False, on_finish=lambda output: 1 / 0)
        num_steps = llm.get_metrics().num_prefill_steps + llm.get_metrics().num_decode_steps
    found = whats(tmp_path / "run.html")
    assert (found.count("arrived"), found.count("finished")) == (3, 3)
    page = read_page(tmp_path / "run.html")
    assert sorted(page["reasons"]) == ["abort", "length"]
    assert len(page["steps"]["started"]) == num_steps, "the one that the abort collected, too"


def test_the_trace_has_the_request_of_a_step_whose_tokens_nobody_waited_for(
    random_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with LLM(random_checkpoint(), trace=tmp_path / "run.html", **OPTIONS) as llm:
        llm.add_request([1, 2, 3], PARAMS)
        llm.step()
    assert whats(tmp_path / "run.html") == ["arrived", "admitted", "chunk"]
    page = read_page(tmp_path / "run.html")
    assert page["requests"]["request_id"] == [0]
    assert page["changes"]["until"][2] > page["changes"]["time"][2], "as long as it took to launch"


def test_the_trace_has_no_chunk_of_a_step_that_failed(
    random_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(random_checkpoint(), trace=tmp_path / "run.html", **OPTIONS) as llm:
        monkeypatch.setattr(llm.engine.runner, "wait", lambda handle: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1, 2, 3]], PARAMS, **FAST)  # type: ignore[arg-type]
    assert whats(tmp_path / "run.html") == ["arrived", "finished"]


# --- Ids and outputs ---


def test_a_chunk_cannot_be_made_without_the_id_of_its_request() -> None:
    with pytest.raises(TypeError, match="request_id"):
        StreamChunk(0, "a", [1], None)  # type: ignore[call-arg]
    assert StreamChunk(0, "a", [1], None, 0, None, request_id=7).request_id == 7


def test_step_hands_over_what_has_finished_while_the_engine_sleeps(random_checkpoint: Checkpoint) -> None:
    with LLM(random_checkpoint(), **OPTIONS) as llm:
        request_id = llm.add_request([1, 2, 3], SamplingParams(max_tokens=5))
        llm.step()
        llm.abort(request_id)
        llm.sleep()
        finished = []
        while not llm.is_finished():
            finished += llm.step()
        assert [output.finish_reason for output in finished] == ["abort"]
        llm.wake_up()
