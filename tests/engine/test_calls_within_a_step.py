"""Users' functions that call the engine while it works: what is refused and what is not; others do not notice."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer import LLM, EngineStateError, RequestOutput, SamplingParams, StepEvent

Checkpoint = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5], [6] * 20]
PARAMS = [GREEDY, replace(GREEDY, temperature=1.0, seed=1), replace(GREEDY, logits_processors=[lambda ids, x: x / 2])]
SHORT = replace(GREEDY, max_tokens=2)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def shared(request: pytest.FixtureRequest, random_checkpoint: Checkpoint) -> Iterator[LLM]:
    if request.param > 1 and sys.platform != "linux":
        pytest.skip("several ranks need Linux")
    with LLM(random_checkpoint(), device="cpu", max_num_seqs=8, tensor_parallel_size=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def second(random_checkpoint: Checkpoint) -> Iterator[LLM]:
    with LLM(random_checkpoint(), device="cpu", max_num_seqs=8) as llm:
        yield llm


def said(outputs: list[RequestOutput]) -> list[tuple[list[int], str | None]]:
    return [(output.token_ids, output.finish_reason) for output in outputs]


def beside_others(
    llm: LLM, call: Callable[[], Any] = lambda: None, change: Callable[[Tensor], Tensor] = lambda logits: logits
) -> RequestOutput:
    """Run four requests; the last one calls, and changes its logits, for its fourth token. Others must not notice."""
    llm.reset_prefix_cache()
    alone = said(llm.generate(PROMPTS, PARAMS, use_tqdm=False))

    def call_the_engine(token_ids: list[int], logits: Tensor) -> Tensor:
        if len(token_ids) == 3:
            call()
            return change(logits)
        return logits

    llm.reset_prefix_cache()
    params = [*PARAMS, replace(GREEDY, logits_processors=[call_the_engine])]
    outputs = llm.generate([*PROMPTS, [7, 8, 9]], params, use_tqdm=False)
    assert said(outputs[:3]) == alone
    assert said(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone, "nor do those that come after it"
    return outputs[3]


async def first_chunk(llm: LLM) -> Any:
    return await anext(llm.astream([9], SHORT))


REFUSED: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate([[9], [8]], SHORT, use_tqdm=False),
    "score": lambda llm: llm.score([[9]], [[8]], use_tqdm=False),
    "stream": lambda llm: next(llm.stream([9], SHORT)),
    "add_request": lambda llm: llm.add_request([9], SHORT),
    "step": lambda llm: llm.step(),
    "agenerate": lambda llm: asyncio.run(llm.agenerate([9], SHORT)),
    "astream": lambda llm: asyncio.run(first_chunk(llm)),
    "update_weights": lambda llm: llm.update_weights({}),
    "sleep": lambda llm: llm.sleep(),
    "wake_up": lambda llm: llm.wake_up(),
    "close": lambda llm: llm.close(),
}


@pytest.mark.parametrize("call", REFUSED)
def test_a_processor_that_calls_its_own_engine_ends_its_request_and_no_other(llm: LLM, call: str) -> None:
    [sample] = beside_others(llm, lambda: REFUSED[call](llm)).outputs
    assert (len(sample.token_ids), sample.finish_reason) == (3, "error")
    assert sample.error == (
        "logits processor call_the_engine failed with EngineStateError: the engine was called from within its own "
        "step, where logits processors run; call it between two steps, or use a second LLM"
    )


def test_a_processor_that_catches_the_error_goes_on(llm: LLM) -> None:
    def call() -> None:
        with pytest.raises(EngineStateError):
            llm.generate([9], SHORT, use_tqdm=False)

    assert beside_others(llm, call).finish_reason == "length"


def test_a_processor_gets_no_outputs_that_wait_for_step(llm: LLM) -> None:
    expected = llm.add_request([5, 6], SHORT)
    assert beside_others(llm, llm.step).finish_reason == "error"
    assert [output.request_id for output in llm.step()] == [expected]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda logits: logits.to_sparse(),
            "ValueError: it returned a tensor that has the layout torch.sparse_coo; return",
        ),
        (
            lambda logits: logits.to("meta"),
            "ValueError: it returned a tensor that has no values (it is on the device meta",
        ),
    ],
    ids=["sparse", "meta"],
)
def test_a_processor_that_returns_no_plain_tensor_ends_its_request_and_no_other(
    llm: LLM, change: Callable[[Tensor], Tensor], message: str
) -> None:
    [sample] = beside_others(llm, change=change).outputs
    assert (len(sample.token_ids), sample.finish_reason) == (3, "error")
    assert message in str(sample.error)


def test_under_asyncio_the_same_call_is_refused(llm: LLM) -> None:
    def call_the_engine(token_ids: list[int], logits: Tensor) -> Tensor:
        return torch.tensor(llm.score([[9]], [[8]], use_tqdm=False)[0].logprobs)

    async def run() -> list[list[RequestOutput]]:
        params = [replace(GREEDY, logits_processors=[call_the_engine]), GREEDY]
        return await asyncio.gather(*(llm.agenerate([1, 2, 3], one) for one in params))

    [[failed], [fine]] = asyncio.run(run())
    assert "EngineStateError" in str(failed.outputs[0].error)
    assert (len(fine.token_ids), fine.finish_reason) == (8, "length")


ALLOWED: dict[str, Callable[[LLM], Any]] = {
    "abort": lambda llm: llm.abort(10**6),
    "pause and resume": lambda llm: (llm.pause(10**6), llm.resume(10**6)),
    "get_metrics": lambda llm: llm.get_metrics(),
    "is_finished": lambda llm: llm.is_finished(),
    "on_step": lambda llm: llm.on_step(lambda event: None)(),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
}


@pytest.mark.parametrize("call", ALLOWED)
def test_what_acts_between_two_steps_may_be_called_by_a_processor(llm: LLM, call: str) -> None:
    assert beside_others(llm, lambda: ALLOWED[call](llm)).finish_reason == "length"


def test_a_processor_may_abort_its_own_request(llm: LLM) -> None:
    ids: list[int] = []
    aborts = replace(GREEDY, logits_processors=[lambda token_ids, logits: (llm.abort(ids), logits)[1]])
    ids.append(llm.add_request([1, 2], aborts))
    outputs: list[RequestOutput] = []
    while not llm.is_finished():
        outputs += llm.step()
    assert [output.finish_reason for output in outputs] == ["abort"]


def test_a_processor_may_ask_a_second_engine(llm: LLM, second: LLM) -> None:
    """Contrastive decoding: the log-probability that another model gives each token counts against it."""
    expected = second.generate([[7, 8, 9]], SHORT, use_tqdm=False)[0].token_ids

    def call() -> None:
        assert second.generate([[7, 8, 9]], SHORT, use_tqdm=False)[0].token_ids == expected
        assert len(second.score([[1]], [[2, 3]], use_tqdm=False)[0].logprobs) == 2

    assert beside_others(llm, call).finish_reason == "length"


def test_a_function_of_on_step_may_generate_and_score(llm: LLM) -> None:
    expected = said(llm.generate([[9]], SHORT, use_tqdm=False))
    heard: list[list[tuple[list[int], str | None]]] = []

    def ask(event: StepEvent) -> None:
        if not heard:
            heard.append([])  # its own steps call it again
            heard.append(said(llm.generate([[9]], SHORT, use_tqdm=False)))
            llm.score([[9]], [[8]], use_tqdm=False)

    end = llm.on_step(ask)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    end()
    assert said(outputs) == said(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert heard == [[], expected]
