"""Random mixes of requests, options and events answer with proposals as they do without, each alone in an idle engine.

A seed decides everything but times: a random number takes the place of the controller's choice in each step.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nanoinfer import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from nanoinfer.engine.sequence import Sequence
from nanoinfer.speculation.controller import Controller, Size
from nanoinfer.speculation.speculator import Speculator
from tests.engine.test_rows_of_several_tokens import MODELS, PARAMS, folders
from tests.proposers import assert_same_answers, engine_of

__all__ = ["folders"]  # a fixture
NUM_REQUESTS = 10
MAX_MODEL_LEN = 112
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}


def halved(token_ids: list[int], logits: Any) -> Any:
    return logits * 0.5


OF_TOKENS = [*PARAMS, replace(PARAMS[1], logits_processors=[halved]), replace(PARAMS[0], bad_words=None, min_tokens=9)]
OF_TEXT = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.8, max_tokens=40, stop=["3", "ab"], min_tokens=3, n=2),
    SamplingParams(temperature=1.0, max_tokens=40, stop=["12, 1"], include_stop_str_in_output=True),
    SamplingParams(temperature=1.0, max_tokens=30, bad_words=["1", "cat"]),
    SamplingParams(max_tokens=50, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    SamplingParams(temperature=0, max_tokens=50, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    SamplingParams(max_tokens=30, structured_outputs=StructuredOutputsParams(regex="(12, ){3,9}[0-9]{1,5}"), n=2),
    SamplingParams(max_tokens=30, structured_outputs=StructuredOutputsParams(choice=["category", "catalogue"])),
    SamplingParams(temperature=0.7, max_tokens=30, logits_processors=[halved], repetition_penalty=1.2),
    SamplingParams(temperature=0.7, max_tokens=30, thinking_token_budget=3),
    SamplingParams(max_tokens=40, thinking_token_budget=2, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
]


def draw_prompt(rng: Random, before: list[list[int]]) -> list[int]:
    """A prompt that repeats itself; some are equal to earlier ones, or begin as they do."""
    if before and rng.random() < 0.4:
        return rng.choice(before)[: rng.choice((20, 200))] + [rng.randrange(60) for _ in range(rng.randint(0, 3))]
    word = [rng.randrange(60) for _ in range(rng.randint(2, 12))]
    return (word * 20)[: rng.randint(len(word), 60)]


def draw_options(rng: Random) -> dict[str, Any]:
    method = rng.choice(("ngram", "suffix"))
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": rng.choice((1, 3, 4, 8))}
    config |= {"prompt_lookup_min": rng.choice((1, 2))} if method == "ngram" else {}
    config |= {"suffix_decoding_max_cached_requests": rng.choice((0, 3, 100))} if method == "suffix" else {}
    return {
        "speculative_config": config,
        "kvcache_block_size": 16,
        "num_kvcache_blocks": rng.choice((8, 12, 200)),
        "max_num_seqs": rng.choice((2, 4, 16)),
        "max_num_batched_tokens": rng.choice((9, 24, 500)),
        "enable_prefix_caching": rng.random() < 0.7,
        "overlap": rng.random() < 0.7,
    }


@pytest.fixture(scope="module")
def plain(folders: Callable[[str], Path]) -> Iterator[Callable[[str], LLM]]:
    """Engines without proposals."""
    made: dict[str, LLM] = {}

    def load(model: str) -> LLM:
        if model not in made:
            folder = "tiny" if model == "tiny" else folders(model)
            made[model] = LLM(folder, device="cpu", dtype="float32", max_model_len=MAX_MODEL_LEN)
        return made[model]

    yield load
    for llm in made.values():
        llm.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_mixes_answer_as_without_proposals(
    seed: int, plain: Callable[[str], LLM], folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(100 + seed)
    model = (*MODELS, "tiny")[seed % 6]
    prompts: list[list[int]] = []
    for _ in range(NUM_REQUESTS):
        prompts.append(draw_prompt(rng, prompts))
    kinds = OF_TEXT if model == "tiny" else OF_TOKENS
    params = [replace(rng.choice(kinds), seed=rng.randrange(100)) for _ in prompts]
    expected = plain(model).generate(prompts, params, use_tqdm=False)

    def choose(_controller: Controller, _num_rows: int, sizes: list[Size], has_waited: bool = False) -> Size | None:
        return rng.choice((None, *sizes))

    monkeypatch.setattr(Controller, "choose", choose)
    monkeypatch.setattr(Controller, "plain_seconds", lambda *_: 1e-3)
    monkeypatch.setattr(Speculator, "propose", checked(Speculator.propose, expected, rng))
    options = {"device": "cpu", "dtype": "float32", "max_model_len": MAX_MODEL_LEN, **draw_options(rng)}
    with LLM("tiny" if model == "tiny" else folders(model), **options) as llm:
        engine_of(llm).scheduler.reserved_tokens = rng.choice((0, 128))
        aborted, outputs = answer(llm, prompts, params, rng)
        metrics = llm.get_metrics()
    whole = [index for index in range(NUM_REQUESTS) if index not in aborted]
    # What is computed again, or in other chunks, is rounded otherwise; a state is a sum, in another order.
    tolerance = 1e-4 if model.startswith("Qwen3") and model != "Qwen3ForCausalLM" else 5e-5
    assert_same_answers([outputs[index] for index in whole], [expected[index] for index in whole], tolerance, 0.05)
    assert metrics.num_accepted_tokens == sum(metrics.num_accepted_tokens_per_pos) > 0
    assert metrics.num_used_blocks == 0


def checked(
    propose: Callable[..., list[list[int]]], expected: list[RequestOutput], rng: Random
) -> Callable[..., list[list[int]]]:
    """`propose`, held against what it promises; half of its drafts are replaced by right ones, which are rare."""

    def call(speculator: Speculator, seqs: list[Sequence]) -> list[list[int]]:
        proposed = propose(speculator, seqs)
        assert len(proposed) in (0, len(seqs))
        for place, (seq, token_ids) in enumerate(zip(seqs, proposed, strict=False)):
            assert len(token_ids) <= speculator.max_num_tokens
            if token_ids:
                assert not seq.sampling_params.logits_processors, "a user's function would see a proposal"
                assert seq.num_pending_tokens == 0, "proposed after a token that is not known"
                if rng.random() < 0.5:
                    answer = expected[seq.request_id].outputs[seq.sample].token_ids
                    proposed[place] = answer[len(seq.completion_token_ids) :][: speculator.max_num_tokens]
        return proposed

    return call


def answer(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], rng: Random
) -> tuple[set[int], dict[int, RequestOutput]]:
    """Have requests come, pause and be aborted between steps. Return which were aborted, and the others' outputs."""
    waiting, paused, aborted = [*range(len(prompts))], set[int](), set[int]()
    outputs: dict[int, RequestOutput] = {}
    while waiting or paused or not llm.is_finished():
        while waiting and rng.random() < 0.4:
            index = waiting.pop(0)
            assert llm.add_request(prompts[index], params[index], priority=rng.choice((0, 0, 1))) == index
        running = [index for index in range(len(prompts)) if index not in {*waiting, *aborted, *outputs}]
        if running and rng.random() < 0.1:
            index = rng.choice(running)
            if index in paused:
                llm.resume(index)
                paused.remove(index)
            elif rng.random() < 0.3:
                llm.abort(index)
                aborted.add(index)
            else:
                llm.pause(index)
                paused.add(index)
        elif paused and rng.random() < 0.3:
            llm.resume(paused.pop())
        for output in llm.step():
            outputs[output.request_id] = output
            paused.discard(output.request_id)
    return aborted, outputs
