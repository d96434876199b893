"""asyncio: hundreds of calls share batches, cancelled ones free what they hold, and errors reach every task."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoinfer import (
    LLM,
    EngineClosedError,
    EngineStateError,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
    tiny_model_path,
)
from nanoinfer.outputs import RequestOutput, RequestOutputs, StreamChunk

Checkpoint = Callable[..., Path]
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = replace(SHORT, max_tokens=150)
PROMPTS = [[1 + index, 2, 3] for index in range(300)]


@pytest.fixture(scope="module")
def shared(random_checkpoint: Checkpoint) -> Iterator[LLM]:
    options: dict[str, Any] = {"kvcache_block_size": 16, "num_kvcache_blocks": 1000, "max_model_len": 200}
    with LLM(random_checkpoint(), device="cpu", **options) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """An engine that every test leaves without requests, used blocks and threads."""
    yield shared
    wait_until_idle(shared)


def wait_until_idle(llm: LLM) -> None:
    wait_until(lambda: llm.is_finished() and not driver_threads())
    assert llm.get_metrics().num_used_blocks == 0


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def driver_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nanoinfer asyncio"]


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


async def generate(llm: LLM, prompts: Any, params: SamplingParams = SHORT, **options: Any) -> list[list[int]]:
    return ids_of(await llm.agenerate(prompts, params, **options))


async def stream(llm: LLM, prompts: Any, params: SamplingParams = SHORT) -> list[StreamChunk]:
    return [chunk async for chunk in llm.astream(prompts, params)]


def run_all(*coroutines: Coroutine[Any, Any, Any], return_exceptions: bool = False) -> list[Any]:
    async def gather() -> list[Any]:
        return await asyncio.gather(*coroutines, return_exceptions=return_exceptions)

    return asyncio.run(gather())


def test_three_hundred_calls_at_once_share_batches_and_one_thread(llm: LLM) -> None:
    expected = ids_of(llm.generate(PROMPTS, SHORT, use_tqdm=False))
    before, num_threads = llm.get_metrics(), []

    async def call(prompt: list[int]) -> list[int]:
        [token_ids] = await generate(llm, prompt)
        num_threads.append(len(driver_threads()))
        return token_ids

    assert run_all(*map(call, PROMPTS)) == expected
    steps = llm.get_metrics().num_decode_steps - before.num_decode_steps
    assert steps < 3 * SHORT.max_tokens, "one after another they would take 1,500"
    assert max(num_threads) <= 1


def test_a_stream_has_the_chunks_of_a_stream_without_asyncio(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=1.0, max_tokens=9, ignore_eos=True, seed=5, logprobs=1)
    prompts = [[1, 2, 3], [4, 5]]
    streams = run_all(*(stream(llm, prompts, params) for _ in range(3)))
    expected = [but_for_rounding(chunk) for chunk in llm.stream(prompts, params)]
    for chunks in streams:
        assert len({chunk.request_id for chunk in chunks}) == 2, "requests of their own"
        assert [replace(chunk, request_id=0) for chunk in chunks] == expected


def but_for_rounding(chunk: StreamChunk) -> StreamChunk:
    """Equals chunks with other log-probabilities within 1e-4: some CPUs add up larger batches in another order."""
    assert chunk.logprobs
    places = [
        {token_id: replace(entry, logprob=pytest.approx(entry.logprob, abs=1e-4)) for token_id, entry in place.items()}
        for place in chunk.logprobs
    ]
    return replace(chunk, request_id=0, logprobs=places)


def test_chunks_come_while_others_are_computed(llm: LLM) -> None:
    async def first_of_two() -> list[int]:
        lengths: list[int] = []
        short = asyncio.create_task(generate(llm, [7, 8]))
        async for _ in llm.astream([1, 2, 3], LONG):
            lengths.append(short.done())
        await short
        return lengths

    [lengths] = run_all(first_of_two())
    assert len(lengths) == 150
    assert 0 < sum(lengths) < 150


def test_options_are_those_of_generate(llm: LLM) -> None:
    finished: list[RequestOutput] = []
    options: dict[str, Any] = {"priority": [0, 5, 1], "on_finish": finished.append}
    options["tokenization_kwargs"] = {"truncate_prompt_tokens": 2}
    [outputs] = run_all(llm.agenerate(PROMPTS[:3], [SHORT, LONG, SHORT], False, **options))
    assert [len(output.token_ids) for output in outputs] == [6, 150, 6]
    assert [output.prompt_token_ids for output in outputs] == [[2, 3]] * 3
    assert [*map(id, finished)] == [id(outputs[index]) for index in (2, 0, 1)], "the higher priority is first"
    assert isinstance(outputs, RequestOutputs), "a table in a notebook"
    assert run_all(generate(llm, []), stream(llm, [])) == [[], []]


def test_errors_of_a_call_are_those_of_generate_and_harm_no_other(llm: LLM) -> None:
    wrong: list[tuple[Coroutine[Any, Any, Any], str]] = [
        (generate(llm, [[1], []]), "prompt 1 is empty"),
        (generate(llm, "a text"), "has no tokenizer"),
        (generate(llm, [[1]], [SHORT, SHORT]), "2 sampling_params for 1 prompts"),
        (generate(llm, [[1]], on_finish=3), "on_finish=3 cannot be called"),
        (generate(llm, 5), "prompts is a int"),
        (llm.agenerate([1, 2], 5), "sampling_params=5; give a SamplingParams for all prompts"),
        (stream(llm, [1, 2], "greedy"), "sampling_params='greedy'; give a SamplingParams"),  # type: ignore[arg-type]
        (stream(llm, [[1, 2]], replace(SHORT, prompt_logprobs=1)), "prompt_logprobs=1 cannot be streamed"),
        (generate(llm, [[1]], replace(SHORT, structured_outputs=StructuredOutputsParams(regex="a"))), "about text"),
    ]
    *found, good = run_all(*(coroutine for coroutine, _ in wrong), generate(llm, [1, 2]), return_exceptions=True)
    for error, (_, message) in zip(found, wrong, strict=True):
        assert isinstance(error, RequestError)
        assert message in str(error)
    assert good == ids_of(llm.generate([1, 2], SHORT, use_tqdm=False))
    with pytest.raises(TypeError, match="agenerate has no option 'priorities'; did you mean 'priority'"):
        run_all(generate(llm, [1], priorities=[1]))


def test_a_call_that_is_refused_or_has_no_prompts_waits_for_no_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, prepare = llm.queue.step, llm.preparer.prepare
    is_prepared, has_ended = threading.Event(), threading.Event()
    steps_were_later = []

    def slow_step() -> None:
        if is_prepared.is_set() and not steps_were_later:
            steps_were_later.append(has_ended.wait(2))
        step()

    def noting_prepare(prompts: Any, *given: Any, **options: Any) -> Any:
        if prompts != [[1]]:
            is_prepared.set()
        return prepare(prompts, *given, **options)

    monkeypatch.setattr(llm.queue, "step", slow_step)
    monkeypatch.setattr(llm.preparer, "prepare", noting_prepare)

    async def check(prompts: Any) -> None:
        long = asyncio.create_task(generate(llm, [[1]], LONG))
        while llm.is_finished():
            await asyncio.sleep(0.001)
        [result] = await asyncio.gather(generate(llm, prompts), return_exceptions=True)
        has_ended.set()
        await long
        assert isinstance(result, RequestError) or result == []

    for prompts in ([[]], []):
        for each in (is_prepared, has_ended):
            each.clear()
        steps_were_later.clear()
        asyncio.run(check(prompts))
        assert steps_were_later == [True]


def test_grammars_are_compiled_beside_the_event_loop_and_the_steps() -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}"))
    wrong = replace(params, structured_outputs=StructuredOutputsParams(regex="("))
    with LLM(tiny_model_path(), device="cpu") as llm:
        calls = llm.agenerate("What", params), stream(llm, "What", params), generate(llm, "What", wrong)
        [output], chunks, error = run_all(*calls, return_exceptions=True)
        assert output.text == llm.generate("What", params, use_tqdm=False)[0].text
        assert "".join(chunk.text for chunk in chunks) == output.text
        assert isinstance(error, RequestError)
        assert len(output.text) == 3
        wait_until_idle(llm)


def test_an_error_in_on_finish_ends_its_call_alone(llm: LLM) -> None:
    def fail(_: RequestOutput) -> None:
        raise KeyError("the user's own")

    calls = generate(llm, [[1], [2]], LONG, on_finish=fail), generate(llm, [1, 2])
    error, good = run_all(*calls, return_exceptions=True)
    assert isinstance(error, KeyError)
    assert len(good[0]) == 6


def test_a_cancelled_task_frees_what_it_holds_and_the_others_go_on(llm: LLM) -> None:
    async def cancel_some() -> list[Any]:
        tasks = [asyncio.create_task(generate(llm, prompt, LONG)) for prompt in PROMPTS[:20]]
        streams = [asyncio.create_task(stream(llm, prompt, LONG)) for prompt in PROMPTS[20:40]]
        while llm.get_metrics().num_used_blocks < 40:
            await asyncio.sleep(0.001)
        for task in tasks[1:] + streams[1:]:
            task.cancel()
        while llm.get_metrics().num_used_blocks > 20:
            await asyncio.sleep(0.001)
        assert not tasks[0].done(), "what was cancelled is freed before the others end"
        return await asyncio.gather(*tasks, *streams, return_exceptions=True)

    [results] = run_all(cancel_some())
    assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 38
    assert results[0] == ids_of(llm.generate(PROMPTS[0], LONG, use_tqdm=False))
    assert len(results[20]) == 150


def test_a_timeout_aborts_and_so_does_leaving_the_loop(llm: LLM) -> None:
    async def impatient() -> int:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(llm.agenerate(PROMPTS[:3], LONG), 0.01)
        count = 0
        async for _ in llm.astream(PROMPTS[:3], LONG):
            count += 1
            if count == 5:
                break
        chunks = llm.astream(PROMPTS[:3], LONG)
        await anext(chunks)
        await chunks.aclose()
        return count

    assert run_all(impatient()) == [5]
    wait_until_idle(llm)


def test_a_call_that_is_cancelled_at_once_is_not_begun(llm: LLM) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(generate(llm, PROMPTS, LONG))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_all(cancel())
    wait_until_idle(llm)


def test_what_was_cancelled_or_left_keeps_no_trainer_waiting(llm: LLM) -> None:
    async def train() -> None:
        for _ in range(5):
            task = asyncio.create_task(llm.agenerate(PROMPTS[:4], LONG))
            while llm.get_metrics().num_used_blocks < 4:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            llm.update_weights({})
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(llm.agenerate(PROMPTS[:4], LONG), 0.01)
            llm.sleep()
            llm.wake_up()
            async for _ in llm.astream(PROMPTS[:4], LONG):
                break
            llm.update_weights({})
            async for _ in (chunks := llm.astream(PROMPTS[:4], LONG)):
                await chunks.aclose()
            llm.update_weights({})

    run_all(train())


@pytest.mark.parametrize("place", ["prepare", "add_request"])
def test_a_call_that_is_cancelled_while_it_is_queued_keeps_no_trainer_waiting(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    is_there, may_go_on = threading.Event(), threading.Event()
    owner, name = (llm.preparer, "prepare") if place == "prepare" else (llm.engine, "add_request")
    original = getattr(owner, name)

    def slowly(*args: Any, **options: Any) -> Any:
        is_there.set()
        assert may_go_on.wait(20)
        return original(*args, **options)

    async def train() -> None:
        task = asyncio.create_task(llm.agenerate(PROMPTS[:4], LONG))
        await asyncio.to_thread(is_there.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # While they are prepared nothing is queued, and while they are queued the trainer waits for its turn.
        threading.Timer(0.1, may_go_on.set).start()
        for _ in range(20):
            await asyncio.to_thread(llm.update_weights, {})
            await asyncio.sleep(0.01)

    monkeypatch.setattr(owner, name, slowly)
    monkeypatch.setattr(llm.queue, "drop", lambda *_: None)  # the driver's own, which may come before or after
    run_all(train())
    monkeypatch.undo()


def test_an_error_of_the_engine_reaches_every_task_and_the_next_call_is_served(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(llm.engine.runner, "wait", lambda handle: 1 / 0)
        calls = [generate(llm, prompt, LONG) for prompt in PROMPTS[:10]]
        errors = run_all(*calls, stream(llm, [1, 2], LONG), return_exceptions=True)
    assert [type(error) for error in errors] == [ZeroDivisionError] * 11
    wait_until_idle(llm)
    assert run_all(generate(llm, [1, 2])) == [ids_of(llm.generate([1, 2], SHORT, use_tqdm=False))]


def test_two_event_loops_and_other_threads_are_served_together(llm: LLM) -> None:
    expected = ids_of(llm.generate(PROMPTS[:40], SHORT, use_tqdm=False))
    results: dict[str, Any] = {}

    def loop(name: str) -> None:
        results[name] = [ids for [ids] in run_all(*(generate(llm, prompt) for prompt in PROMPTS[:40]))]

    def without_loop() -> None:
        results["none"] = ids_of(llm.generate(PROMPTS[:40], SHORT, use_tqdm=False))

    threads = [threading.Thread(target=loop, args=(name,)) for name in "ab"] + [threading.Thread(target=without_loop)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {"a": expected, "b": expected, "none": expected}


def test_a_loop_that_is_closed_leaves_nothing_behind(llm: LLM) -> None:
    loop = asyncio.new_event_loop()
    task = loop.create_task(generate(llm, PROMPTS[:5], LONG))
    loop.run_until_complete(asyncio.sleep(0.02))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    wait_until_idle(llm)
    with pytest.raises(RuntimeError, match="Event loop is closed"):
        task.cancel()


def test_closing_ends_every_task_with_an_error(random_checkpoint: Checkpoint) -> None:
    async def close() -> list[Any]:
        llm = LLM(random_checkpoint(), device="cpu")
        params = replace(SHORT, max_tokens=1500)
        tasks = [asyncio.create_task(generate(llm, prompt, params)) for prompt in PROMPTS[:5]]
        tasks.append(asyncio.create_task(stream(llm, [1, 2], params)))
        while llm.get_metrics().num_decode_steps < 3:
            await asyncio.sleep(0.001)
        llm.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(EngineClosedError):
            await llm.agenerate([1])
        return results

    [results] = run_all(close())
    assert [type(error) for error in results] == [EngineClosedError] * 6
    wait_until(lambda: not driver_threads())


def test_an_engine_that_sleeps_says_so(llm: LLM) -> None:
    llm.sleep()
    with pytest.raises(EngineStateError, match="this engine sleeps; call wake_up first"):
        run_all(generate(llm, [1]))
    wait_until(lambda: not driver_threads())
    llm.wake_up()
    assert len(run_all(generate(llm, [1]))[0][0]) == 6


def test_two_ranks_serve_tasks_and_cancel_them(llm: LLM, random_checkpoint: Checkpoint) -> None:
    expected = ids_of(llm.generate(PROMPTS[:20], SHORT, use_tqdm=False))
    with LLM(random_checkpoint(), device="cpu", tensor_parallel_size=2) as two_ranks:

        async def cancel_one() -> list[Any]:
            task = asyncio.create_task(generate(two_ranks, [1], LONG))
            results = await asyncio.gather(*(generate(two_ranks, prompt) for prompt in PROMPTS[:20]))
            task.cancel()
            return results

        assert [ids for [ids] in run_all(cancel_one())[0]] == expected
        wait_until_idle(two_ranks)


def test_agenerate_has_the_arguments_of_generate_but_for_hidden_states() -> None:
    of_hidden_states = {"hidden_states", "hidden_state_positions", "on_hidden_states"}
    expected = {
        name: parameter
        for name, parameter in inspect.signature(inspect.unwrap(LLM.generate)).parameters.items()
        if name not in of_hidden_states
    }
    expected["use_tqdm"] = expected["use_tqdm"].replace(default=False)
    assert inspect.signature(LLM.agenerate).parameters == expected
