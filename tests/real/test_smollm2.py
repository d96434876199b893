"""A real model, SmolLM2-135M-Instruct, against transformers, in float32 on the CPU.

Random weights cannot answer a question, follow a chat template or have a perplexity; this model can. The checkpoint is
made of Python packages (see make_smollm2.py), and the tests skip themselves without them.
"""

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from nanoinfer import LLM, RequestOutput, SamplingParams
from tests.constraints.random_schemas import check_answers, random_requests
from tests.real.make_smollm2 import save_smollm2

pytestmark = pytest.mark.real

GREEDY = SamplingParams(temperature=0, max_tokens=32)
NEAR_TIE = 1e-3  # in logits: what float32 may turn
PIECE = 1000  # tokens that are read at a time; the model reads 8,192 at most

ASKED = [
    "What is {}?",
    "Explain {} to a child.",
    "Write two sentences about {}.",
    "List three facts about {}.",
    "Translate '{}' into French.",
    "Why does {} matter?",
    "Write a short poem about {}.",
    "What is the opposite of {}?",
    "Name a book about {}.",
    "Write Python code that prints '{}'.",
]
SUBJECTS = [
    *("gravity", "a prime number", "the moon", "bread", "democracy", "the sea", "a compiler", "winter", "chess"),
    *("honey", "the Roman Empire", "a friend", "electricity", "jazz", "tea", "volcanoes", "a vaccine", "silence"),
    *("the colour blue", "crème brûlée 🍮"),
]
CHATS = [
    [{"role": "user", "content": asked.format(subject)}]
    for number, subject in enumerate(SUBJECTS)
    for asked in (ASKED[number % 10 :] + ASKED[: number % 10])
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("smollm2")
    save_smollm2(folder)
    yield folder
    shutil.rmtree(folder)  # or pytest would keep the last three


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="cpu", dtype="float32", max_num_batched_tokens=384) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(folder: Path, reference_model: Callable[[Path], Any]) -> Any:
    return reference_model(folder)


@torch.inference_mode()
def reference_logprobs(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities that transformers gives each token but the first: (num_tokens - 1,)."""
    logprobs = reference(torch.tensor([token_ids])).logits[0, :-1].log_softmax(dim=-1)
    return logprobs.gather(1, torch.tensor(token_ids[1:]).unsqueeze(1)).squeeze(1)


@torch.inference_mode()
def reference_tokens(reference: Any, token_ids: list[int], max_tokens: int) -> list[int]:
    prompt = torch.tensor([token_ids])
    whole = reference.generate(prompt, attention_mask=prompt.new_ones(prompt.shape), max_new_tokens=max_tokens)
    return whole[0, len(token_ids) :].tolist()


@torch.inference_mode()
def assert_equal_up_to_a_near_tie(reference: Any, prompt: list[int], mine: list[int], theirs: list[int]) -> None:
    """Where two greedy completions part, if they do, the logits of their tokens differ by less than rounding may."""
    same = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=False))])
    if mine != theirs:
        assert same < min(len(mine), len(theirs)), "one ends where the other goes on"
        logits = reference(torch.tensor([prompt + mine[:same]])).logits[0, -1]
        gap = abs(logits[mine[same]] - logits[theirs[same]]).item()
        assert gap < NEAR_TIE, f"token {same} of a prompt of {len(prompt)} differs, and the gap is {gap}"


def chat(llm: LLM, conversations: list[Any], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return llm.chat(conversations, params, use_tqdm=False)


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    [completed] = llm.generate("The capital of France is", GREEDY, use_tqdm=False)
    assert completed.text.startswith(" Paris")
    [answered] = chat(llm, [{"role": "user", "content": "What is the capital of France?"}])
    assert (answered.text, answered.finish_reason) == ("The capital of France is Paris.", "stop")


def test_chat_writes_the_models_own_template_with_its_system_message(llm: LLM) -> None:
    [output] = chat(llm, CHATS[:1])
    assert output.prompt == llm.tokenizer.apply_chat_template(CHATS[0], tokenize=False, add_generation_prompt=True)
    assert output.prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert output.prompt.endswith("What is gravity?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_greedy_answers_are_those_of_transformers_or_part_at_a_near_tie(llm: LLM, reference: Any, count: int) -> None:
    num_equal = 0
    for output in chat(llm, CHATS[:: len(CHATS) // count]):
        theirs = reference_tokens(reference, output.prompt_token_ids, 32)
        assert_equal_up_to_a_near_tie(reference, output.prompt_token_ids, output.token_ids, theirs)
        if output.token_ids == theirs:
            num_equal += 1
            assert output.text == llm.tokenizer.decode(theirs, skip_special_tokens=True)
    print(f"{num_equal} of {count} answers are equal")
    assert num_equal >= 0.95 * count


def test_streams_and_stop_strings_cut_the_same_text_that_generate_gives(llm: LLM) -> None:
    outputs = chat(llm, CHATS[4:6])
    prompts = [output.prompt_token_ids for output in outputs]
    assert_streams_are(llm, prompts, GREEDY, [output.text for output in outputs])
    for output in outputs:
        stop = output.text[len(output.text) // 3 :][:7]  # wherever its tokens begin and end
        params = SamplingParams(temperature=0, max_tokens=32, stop=["no such text", stop])
        [stopped] = llm.generate([output.prompt_token_ids], params, use_tqdm=False)
        assert stopped.text == output.text[: output.text.index(stop)]
        assert (stopped.finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
        assert_streams_are(llm, [output.prompt_token_ids], params, [stopped.text])


def assert_streams_are(llm: LLM, prompts: list[list[int]], params: SamplingParams, expected: list[str]) -> None:
    texts = [""] * len(prompts)
    for chunk in llm.stream(prompts, params):
        texts[chunk.index] += chunk.text
    assert texts == expected


@pytest.mark.parametrize("num_tokens", [2000, pytest.param(20000, marks=pytest.mark.slow)])
def test_the_perplexity_of_a_text_is_that_of_transformers(llm: LLM, reference: Any, num_tokens: int) -> None:
    """The text is Python's own documentation, a piece at a time; a step reads 384 tokens of it."""
    token_ids = llm.encode("\n".join(topics[name] for name in sorted(topics)))[:num_tokens]
    assert len(token_ids) == num_tokens
    pieces = [token_ids[start : start + PIECE] for start in range(0, num_tokens, PIECE)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    mine, theirs = [], []
    for output in llm.generate(pieces, params, use_tqdm=False):
        found = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        mine += [entry[token_id].logprob for token_id, entry in found if entry]
        theirs += reference_logprobs(reference, output.prompt_token_ids).tolist()
    assert mine == pytest.approx(theirs, rel=0, abs=1e-4)
    perplexities = [math.exp(-sum(logprobs) / len(logprobs)) for logprobs in (mine, theirs)]
    print(f"perplexity of {num_tokens} tokens: {perplexities[0]:.6f} here, {perplexities[1]:.6f} in transformers")
    assert perplexities[0] == pytest.approx(perplexities[1], rel=5e-5)


def test_a_score_is_the_sum_that_transformers_gives(llm: LLM, reference: Any) -> None:
    right, wrong = llm.score(["The capital of France is"] * 2, [" Paris.", " Berlin."], use_tqdm=False)
    prompt = llm.encode("The capital of France is")
    for score in (right, wrong):
        expected = reference_logprobs(reference, prompt + score.token_ids)[-len(score.token_ids) :]
        assert score.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert score.total == pytest.approx(expected.sum().item(), abs=1e-4)
    assert right.is_greedy
    assert right.total > wrong.total + 2


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_answers_of_random_schemas_finish_parse_and_validate(llm: LLM, count: int) -> None:
    pytest.importorskip("llguidance")
    pytest.importorskip("jsonschema")
    schemas, params = random_requests(count, 0, disable_any_whitespace=True, temperature=0.6)
    asked = [
        [{"role": "user", "content": f"Write an example of JSON of this schema: {json.dumps(schema)}"}]
        for schema in schemas
    ]
    share = check_answers(schemas, llm.chat(asked, params, use_tqdm=False))
    print(f"{share:.1%} of {count} answers are finished")
    assert share >= 0.8
