"""`logprobs_mode`, `max_logprobs`, `logprob_token_ids` and `flat_logprobs`, through the whole engine."""

import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoinfer import LLM, ConfigError, FlatLogprobs, RequestError, RequestOutput, SamplingParams, tiny_model_path
from tests.sampling.test_sampling import prompts

Checkpoint = Callable[..., Path]
PROMPTS = prompts(20, 3, 33, 16)
FREE = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3, seed=5)
# What is left of the logits by each: all options that processed log-probabilities are after.
PARAMS = [
    replace(FREE, temperature=0, logit_bias={7: 4.0, 300: -100.0}),
    replace(FREE, temperature=0.7, top_k=10, repetition_penalty=1.2),
    replace(FREE, temperature=1.5, top_p=0.5, presence_penalty=1.0, frequency_penalty=0.5),
    replace(FREE, temperature=2.0, min_p=0.2, allowed_token_ids=[*range(100)]),
]


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(
        folder, **{"device": "cpu", "kvcache_block_size": 16, "num_kvcache_blocks": 64, "max_model_len": 256, **options}
    )


def processed(logits: Tensor, params: SamplingParams, prompt: list[int], completion: list[int]) -> Tensor:
    """The logits (vocab_size,) that a token is drawn from, step by step as the documents say, in float64."""
    logits = logits.double().clone()
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += bias
    for token_id in {*prompt, *completion}:
        logits[token_id] *= params.repetition_penalty if logits[token_id] < 0 else 1 / params.repetition_penalty
    for token_id in {*completion}:
        logits[token_id] -= params.presence_penalty + params.frequency_penalty * completion.count(token_id)
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids)
        logits = torch.full_like(logits, -math.inf).index_copy(0, allowed, logits[allowed])
    if params.temperature == 0:
        return logits
    logits /= params.temperature
    logits[logits < logits.amax() + (math.log(params.min_p) if params.min_p else -math.inf)] = -math.inf
    if params.top_k:
        logits[logits < logits.topk(params.top_k).values[-1]] = -math.inf
    ordered = logits.softmax(0).sort(descending=True)
    logits[ordered.indices[ordered.values.cumsum(0) - ordered.values >= params.top_p]] = -math.inf
    return logits


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_each_mode_gives_the_numbers_that_it_names(
    random_checkpoint: Checkpoint, reference_model: Callable[[Path], torch.nn.Module], mode: str
) -> None:
    folder = random_checkpoint()
    with make_llm(folder, logprobs_mode=mode) as llm:
        outputs = llm.generate(PROMPTS, [replace(item, prompt_logprobs=1) for item in PARAMS], use_tqdm=False)
    for output, params in zip(outputs, PARAMS, strict=True):
        prompt, said = output.prompt_token_ids, output.token_ids
        with torch.inference_mode():
            logits = reference_model(folder)(torch.tensor([prompt + said])).logits[0].double()
        of_prompt = logits if mode.endswith("logits") else logits.log_softmax(dim=1)
        for place, found in list(enumerate(output.prompt_logprobs or []))[1:]:
            for token_id, entry in (found or {}).items():
                assert entry.logprob == pytest.approx(of_prompt[place - 1, token_id].item(), abs=1e-3)
        assert len(output.outputs[0].logprobs or []) == len(said) == 8
        for place, found in enumerate(output.outputs[0].logprobs or []):
            expected = logits[len(prompt) + place - 1]
            if mode.startswith("processed"):
                expected = processed(expected, params, prompt, said[:place])
            if mode.endswith("logprobs"):
                expected = expected.log_softmax(dim=0)
            assert {*found} >= {*expected.topk(3).indices[expected.topk(3).values > -math.inf].tolist()}
            for token_id, entry in found.items():
                assert entry.logprob == pytest.approx(expected[token_id].item(), abs=1e-3)
                if entry.logprob > -math.inf:
                    assert entry.rank == 1 + int((expected > expected[token_id]).sum())
        total = sum(
            found[token_id].logprob for found, token_id in zip(output.outputs[0].logprobs or [], said, strict=True)
        )
        assert output.outputs[0].cumulative_logprob == pytest.approx(total)


def test_the_mode_changes_no_token_and_neither_do_named_tokens_or_flat_logprobs(random_checkpoint: Checkpoint) -> None:
    said = []
    variants: list[tuple[str, dict[str, Any]]] = [("raw_logprobs", {}), ("processed_logprobs", {})]
    variants += [("processed_logits", {"logprobs": None, "logprob_token_ids": [1, 2], "flat_logprobs": True})]
    for mode, changes in variants:
        with make_llm(random_checkpoint(), logprobs_mode=mode) as llm:
            outputs = llm.generate(PROMPTS, [replace(item, **changes) for item in PARAMS], use_tqdm=False)
            said.append([output.token_ids for output in outputs])
    assert said[0] == said[1] == said[2]


def test_two_ranks_give_the_processed_logprobs_of_one(random_checkpoint: Checkpoint) -> None:
    params = [*PARAMS, replace(FREE, logprobs=None, logprob_token_ids=[400, 3], temperature=0.5)]
    found = []
    for size in (1, 2):
        with make_llm(random_checkpoint(), tensor_parallel_size=size, logprobs_mode="processed_logprobs") as llm:
            found.append(llm.generate([*PROMPTS, PROMPTS[0]], params, use_tqdm=False))
    for one, two in zip(*found, strict=True):
        assert one.token_ids == two.token_ids
        for mine, theirs in zip(one.outputs[0].logprobs or [], two.outputs[0].logprobs or [], strict=True):
            assert {*mine} == {*theirs}
            for token_id, entry in mine.items():
                assert entry.logprob == pytest.approx(theirs[token_id].logprob, abs=1e-4)


# --- named tokens ---


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu", kvcache_block_size=16, num_kvcache_blocks=64, max_model_len=256) as llm:
        yield llm


def test_named_tokens_come_after_the_sampled_one_which_alone_has_a_rank(tiny: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    wants_all = replace(params, logprobs=-1)
    named = replace(params, logprob_token_ids=[300, 5, 300])
    everything, some = (tiny.generate("Sort 3, 1", item, use_tqdm=False)[0].outputs[0] for item in (wants_all, named))
    assert some.token_ids == everything.token_ids
    for token_id, found, full in zip(some.token_ids, some.logprobs or [], everything.logprobs or [], strict=True):
        assert [*found] == [token_id, *[its_id for its_id in (300, 5) if its_id != token_id]]
        assert [entry.rank for entry in found.values()] == [1, None, None][: len(found)]
        for its_id, entry in found.items():
            assert entry.logprob == pytest.approx(full[its_id].logprob, abs=1e-5)
            assert entry.decoded_token == full[its_id].decoded_token
    assert some.cumulative_logprob == pytest.approx(everything.cumulative_logprob)


def test_a_sampled_token_that_is_named_keeps_its_rank(tiny: LLM) -> None:
    [plain] = tiny.generate("Sort 3, 1", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    named = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=[7, plain.token_ids[0]], logprobs=2)
    for flat in (False, True):
        [output] = tiny.generate("Sort 3, 1", replace(named, flat_logprobs=flat), use_tqdm=False)
        [found] = output.outputs[0].logprobs or []
        assert {its_id: entry.rank for its_id, entry in found.items()} == {plain.token_ids[0]: 1, 7: None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"logprob_token_ids": [3] * 129},
            "logprob_token_ids has 129 token ids, and at most 128 can be asked for; use",
        ),
        ({"logprob_token_ids": [3, 4], "logprobs": 1}, "logprobs=1 with 2 logprob_token_ids: .* leave logprobs out"),
        ({"logprob_token_ids": [], "logprobs": 1}, "logprobs=1 with 0 logprob_token_ids"),
        ({"logprob_token_ids": 5}, "logprob_token_ids=5 must be a list of token ids; use"),
        ({"flat_logprobs": 1}, "flat_logprobs=1 is not a bool; use True or False"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


def test_a_named_token_outside_the_vocabulary_is_refused(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="logprob_token_ids has token id 99999, outside the vocabulary"):
        tiny.generate("Sort", SamplingParams(logprob_token_ids=[99999]), use_tqdm=False)


# --- flat ---


def test_flat_logprobs_say_the_same_as_dicts(tiny: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=9, ignore_eos=True, seed=3, logprobs=2, prompt_logprobs=1)
    prompt = "Spell café 🦜"  # whose characters take several tokens
    outputs = []
    for is_flat in (False, True):
        tiny.reset_prefix_cache()  # else the prompt is computed in another shape, which rounds otherwise
        outputs += tiny.generate(prompt, replace(params, flat_logprobs=is_flat), use_tqdm=False)
    dicts, flat = outputs
    assert isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert list(flat.prompt_logprobs) == list(dicts.prompt_logprobs or [])
    assert flat.prompt_logprobs[0] is None
    for mine, theirs in zip(flat.outputs, dicts.outputs, strict=True):
        found = mine.logprobs
        assert isinstance(found, FlatLogprobs)
        assert mine.token_ids == theirs.token_ids
        assert list(found) == theirs.logprobs
        assert mine.cumulative_logprob == theirs.cumulative_logprob
        assert list(found[2:5]) == (theirs.logprobs or [])[2:5]
        assert found[-1] == (theirs.logprobs or [])[-1]
        assert len(found) == 9
        assert pickle.loads(pickle.dumps(found)) == found
        assert found.start_indices.tolist() == [*range(0, 27, 3)]
        assert found.end_indices.tolist() == [*range(3, 28, 3)]
        assert [found.token_ids[start] for start in found.start_indices] == mine.token_ids
        assert np.asarray(found.logprobs).dtype == np.float32
        assert len(found.decoded_tokens) == len(found.ranks) == len(found.logprobs) == 27
        with pytest.raises(IndexError):
            found[9]


def test_the_chunks_of_a_stream_are_flat_too(tiny: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    [whole] = tiny.generate("Sort 3, 1", params, use_tqdm=False)
    chunks = [*tiny.stream("Sort 3, 1", replace(params, flat_logprobs=True))]
    assert all(isinstance(chunk.logprobs, FlatLogprobs) for chunk in chunks)
    assert [place for chunk in chunks for place in chunk.logprobs or []] == whole.outputs[0].logprobs


# --- limits of the engine ---


def test_a_request_may_ask_for_max_logprobs_and_no_more(random_checkpoint: Checkpoint) -> None:
    with make_llm(random_checkpoint(), max_logprobs=4) as llm:

        def ask(**options: Any) -> RequestOutput:
            return llm.generate([[1, 2]], SamplingParams(max_tokens=1, **options), use_tqdm=False)[0]

        assert len((ask(logprobs=4).outputs[0].logprobs or [])[0]) >= 4
        assert len((ask(logprob_token_ids=[*range(9)]).outputs[0].logprobs or [])[0]) >= 9, "named ones do not count"
        for options in ({"logprobs": 5}, {"prompt_logprobs": 5}, {"logprobs": -1}):
            [(name, value)] = options.items()
            with pytest.raises(RequestError, match=f"{name}={value} is more than max_logprobs=4 of this LLM"):
                ask(**options)


@pytest.mark.parametrize("value", [-2, 1.5, True])
def test_max_logprobs_is_a_count_or_minus_one(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"max_logprobs={value!r} must be a whole number of at least -1; use -1"):
        LLM(tiny_model_path(), device="cpu", max_logprobs=value)


def test_there_is_no_score_of_logits() -> None:
    refused = pytest.raises(RequestError, match=r"score needs log-probabilities, .* logprobs_mode='raw_logits'")
    with make_llm(tiny_model_path(), logprobs_mode="raw_logits") as llm, refused:
        llm.score("Sort 3", " 1", use_tqdm=False)
    with pytest.raises(ConfigError, match="logprobs_mode='logits' is not known; use one of raw_logprobs, processed_"):
        LLM(tiny_model_path(), device="cpu", logprobs_mode="logits")  # type: ignore[arg-type]
