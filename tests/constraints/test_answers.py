"""Answers under constraints, against what transformers' logits, `re` and jsonschema say of them."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer import LLM, SamplingParams, StructuredOutputsParams, tiny_model_path
from tests.constraints.random_schemas import check_answers, random_requests

ReferenceModel = Callable[[Path], Any]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = ["Sort 3, 1, 2:", "What is 312 + 48?", "Spell eagle", "1, 2, 3,"]
BIAS = {220: -2.5, 23: 1.25, 300: 6.0, 17: -100.0}
ALLOWED = [*range(10, 60), *range(220, 400, 3)]


OPTIONS: dict[str, Any] = {"kvcache_block_size": 16, "max_num_seqs": 128, "num_kvcache_blocks": 4096}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu", max_model_len=512, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def processed() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu", max_model_len=512, logprobs_mode="processed_logprobs", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def next_logits(reference_model: ReferenceModel) -> Callable[[list[int]], Tensor]:
    """`next_logits(token_ids)`: those of transformers for the token after them, (vocab_size,) float32."""
    model = reference_model(Path(tiny_model_path()))

    @torch.no_grad()
    def compute(token_ids: list[int]) -> Tensor:
        return model(torch.tensor([token_ids])).logits[0, -1].clone()

    return compute


# --- against logits of transformers ---


def add_bias(bias: dict[int, float]) -> Callable[[list[int], Tensor], Tensor]:
    def add(_: list[int], logits: Tensor) -> Tensor:
        for token_id, value in bias.items():
            logits[token_id] += value
        return logits

    return add


def allow(ids: list[int]) -> Callable[[list[int], Tensor], Tensor]:
    def keep(_: list[int], logits: Tensor) -> Tensor:
        return torch.full_like(logits, -torch.inf).index_copy(0, torch.tensor(ids), logits[ids])

    return keep


def forbid(words: list[list[int]]) -> Callable[[list[int], Tensor], Tensor]:
    def remove(token_ids: list[int], logits: Tensor) -> Tensor:
        for *before, last in words:
            if token_ids[len(token_ids) - len(before) :] == before:
                logits[last] = -torch.inf
        return logits

    return remove


def discourage(token_ids: list[int], logits: Tensor) -> Tensor:
    """A function as users write them: what was said is less likely, most of all the newest."""
    for age, token_id in enumerate(reversed(token_ids)):
        logits[token_id] -= 5.0 / (age + 1)
    return logits


@pytest.mark.parametrize("kind", ["bias", "allowed ids", "bad words", "function", "together"])
def test_greedy_tokens_are_those_of_transformers_logits_changed_by_hand(
    llm: LLM, next_logits: Callable[[list[int]], Tensor], kind: str
) -> None:
    said = [output.token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    # Words of one token and of several that would be said: the first four tokens of a completion, and pairs of it.
    texts = [llm.decode(ids[start : start + 2]).strip() for ids in said for start in (1, 3)] + ["8", "3, 3", "eagle"]
    words = [llm.encode(before + text) for text in texts if text for before in ("", " ")]
    words = [ids for ids in words if llm.decode(ids[:1]).strip()]  # a space of its own is not counted
    options: dict[str, dict[str, Any]] = {
        "bias": {"logit_bias": BIAS},
        "allowed ids": {"allowed_token_ids": ALLOWED},
        "bad words": {"bad_words": [text for text in texts if text]},
        "function": {"logits_processors": [discourage]},
    }
    functions = {
        "bias": [add_bias(BIAS)],
        "allowed ids": [allow(ALLOWED)],
        "bad words": [forbid(words)],
        "function": [discourage],
    }
    if kind == "together":
        options[kind] = {name: value for one in [*options.values()] for name, value in one.items()}
        functions[kind] = [one for name in ("bias", "function", "allowed ids", "bad words") for one in functions[name]]
    outputs = llm.generate(PROMPTS, replace(GREEDY, **options[kind]), use_tqdm=False)
    assert [output.token_ids for output in outputs] != said
    for output in outputs:
        expected: list[int] = []
        for _ in range(20):
            logits = next_logits(output.prompt_token_ids + expected)
            for function in functions[kind]:
                logits = function(expected, logits)
            expected.append(int(logits.argmax()))
        assert output.token_ids == expected


def allowed_in(llm: LLM, pattern: str) -> list[int]:
    """Tokens whose text the pattern matches, found one by one."""
    return [token_id for token_id in range(1024) if re.fullmatch(pattern, llm.decode(token_id))]


def test_processed_logprobs_under_a_mask_are_the_log_softmax_of_what_it_allows(
    processed: LLM, next_logits: Callable[[list[int]], Tensor]
) -> None:
    pytest.importorskip("llguidance")
    form = StructuredOutputsParams(regex="[a-z]{12}")
    params = replace(GREEDY, temperature=1.0, seed=3, logprobs=4, logit_bias={300: 2.0}, structured_outputs=form)
    llm = processed
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        token_ids, num_left, total = output.prompt_token_ids, 12, 0.0
        for token_id, place in zip(output.token_ids, output.outputs[0].logprobs or [], strict=True):
            logits = add_bias({300: 2.0})([], next_logits(token_ids))
            ids = allowed_in(llm, f"[a-z]{{1,{num_left}}}")
            expected = allow(ids)([], logits).log_softmax(dim=0)
            assert {*expected.topk(4).indices.tolist()} <= {*place}
            for its_id, entry in place.items():
                assert entry.logprob == pytest.approx(expected[its_id].item(), abs=1e-4)
                assert its_id in ids or its_id != token_id
            token_ids, num_left = [*token_ids, token_id], num_left - len(llm.decode(token_id))
            total += expected[token_id].item()
        assert num_left == 0
        assert output.outputs[0].cumulative_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9}], ids=str)
def test_samples_under_a_mask_follow_the_softmax_of_what_it_allows(
    llm: LLM, next_logits: Callable[[list[int]], Tensor], filters: dict[str, Any]
) -> None:
    """Two digits, as 1,500 samples of one prompt: of the first tokens, and of the second after each of them."""
    pytest.importorskip("llguidance")
    num_samples, temperature = 1500, 2.0
    form = StructuredOutputsParams(regex="[0-9]{2}")
    params = SamplingParams(temperature=temperature, n=num_samples, seed=1, structured_outputs=form, **filters)
    [output] = llm.generate("Sort 3, 1, 2:", params, use_tqdm=False)
    texts = [sample.text for sample in output.outputs]
    assert all(re.fullmatch("[0-9]{2}", text) for text in texts)
    assert {sample.finish_reason for sample in output.outputs} == {"stop"}
    digits = allowed_in(llm, "[0-9]")
    assert allowed_in(llm, "[0-9]+") == digits, "a digit is a token"

    def probabilities(token_ids: list[int]) -> Tensor:
        scores = next_logits(token_ids)[digits].double() / temperature
        if filters:
            scores[scores < scores.topk(5).values[-1]] = -torch.inf
            ordered = scores.softmax(dim=0).sort(descending=True)
            scores[ordered.indices[ordered.values.cumsum(dim=0) - ordered.values >= 0.9]] = -torch.inf
        return scores.softmax(dim=0)

    first = probabilities(output.prompt_token_ids)
    both = torch.stack([p * probabilities([*output.prompt_token_ids, i]) for p, i in zip(first, digits, strict=True)])
    names = [llm.decode(token_id) for token_id in digits]
    observed = torch.tensor([[float(texts.count(one + other)) for other in names] for one in names])
    expected = num_samples * both
    assert observed[expected == 0].sum() == 0
    frequent = expected >= 5
    counts = torch.cat([observed[frequent], observed[~frequent].sum()[None]])
    wanted = torch.cat([expected[frequent], expected[~frequent].sum()[None]]).clamp(min=1e-9)
    chi_square, freedom = ((counts - wanted) ** 2 / wanted).sum().item(), int(frequent.sum())
    print(f"chi-square {chi_square:.1f} of {freedom} degrees of freedom")
    assert freedom > 5
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


# --- against re and jsonschema ---


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z]{2,8}( [0-9]{1,3}){1,9}",
        r"\d{3}-\d{4}",
        r"(yes|no)(, (really|never mind))?",
        r"[A-Z][a-z]{0,9} is [1-9]\d{0,3}\.",
        r"(\([0-9]\)|\[[a-f]{1,9}\]){2}",
        r"[äöü日本]{1,4}",
        r"[^a-z \n]{1,12}",
        r"(?i:select) [*] from [a-z_]{1,12};",
    ],
)
def test_finished_answers_match_their_regular_expression_as_a_whole(llm: LLM, pattern: str) -> None:
    pytest.importorskip("llguidance")
    form = StructuredOutputsParams(regex=pattern)
    params = SamplingParams(temperature=1.5, max_tokens=100, n=8, seed=1, structured_outputs=form)
    outputs = llm.generate(PROMPTS, [params, replace(params, temperature=0, n=1)] * 2, use_tqdm=False)
    for sample in [sample for output in outputs for sample in output.outputs]:
        assert sample.finish_reason == "stop"
        assert re.fullmatch(pattern, sample.text)


def test_an_answer_is_one_of_its_choices_and_each_may_come(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    choices = ["yes", "no", "3", "33", "never mind", " no", 'a "quote"', "日本"]
    params = SamplingParams(
        temperature=8.0, n=400, seed=1, structured_outputs=StructuredOutputsParams(choice=choices), max_tokens=40
    )
    [output] = llm.generate("Sort 3", params, use_tqdm=False)
    assert {sample.text for sample in output.outputs} == {*choices}
    assert {sample.finish_reason for sample in output.outputs} == {"stop"}


@pytest.mark.parametrize(
    ("num_schemas", "disable_any_whitespace"),
    [
        (50, True),
        pytest.param(1000, True, marks=pytest.mark.slow),
        pytest.param(1000, False, marks=pytest.mark.slow),
    ],
)
def test_answers_of_random_schemas_finish_parse_and_validate(
    llm: LLM, num_schemas: int, disable_any_whitespace: bool
) -> None:
    """The tiny model repeats itself for ever where a schema lets it; a frequency penalty is what helps against that."""
    pytest.importorskip("llguidance")
    pytest.importorskip("jsonschema")
    schemas, params = random_requests(num_schemas, 0, disable_any_whitespace, temperature=1.0, frequency_penalty=2.0)
    share = check_answers(schemas, llm.generate(["Sort 3"] * num_schemas, params, use_tqdm=False))
    print(f"{share:.1%} of {num_schemas} answers are finished")
    assert share >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("disable_any_whitespace", [True, False])
def test_without_a_penalty_answers_of_random_schemas_are_cut_or_right(llm: LLM, disable_any_whitespace: bool) -> None:
    pytest.importorskip("llguidance")
    pytest.importorskip("jsonschema")
    schemas, params = random_requests(200, 0, disable_any_whitespace, temperature=1.0)
    share = check_answers(schemas, llm.generate(["Sort 3"] * 200, params, use_tqdm=False))
    print(f"{share:.1%} of 200 answers are finished")
    assert share >= (0.6 if disable_any_whitespace else 0)
