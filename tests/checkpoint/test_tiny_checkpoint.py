"""The bundled checkpoint answers right, through the whole engine: text in, text out."""

import pytest

from nanoinfer import LLM, SamplingParams, tiny_model_path
from tests.tiny_checkpoint.tasks import INTRODUCTION, TASKS, Example, held_out_examples, held_out_sums

GREEDY = SamplingParams(temperature=0, max_tokens=160)


@pytest.fixture(scope="module")
def llm():  # type: ignore[no-untyped-def]
    with LLM(tiny_model_path(), device="cpu") as llm:
        yield llm


def as_chat(llm: LLM, question: str, **options: object) -> str:
    messages = [{"role": "user", "content": question}]
    return llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def ask(llm: LLM, questions: list[str], **template_options: object) -> list[str]:
    outputs = llm.generate(
        [as_chat(llm, question, **template_options) for question in questions], GREEDY, use_tqdm=False
    )
    assert {output.finish_reason for output in outputs} == {"stop"}
    return [output.text for output in outputs]


def share_right(llm: LLM, examples: list[Example]) -> float:
    answers = ask(llm, [example.question for example in examples])
    return sum(answer == example.answer for answer, example in zip(answers, examples, strict=True)) / len(examples)


def test_it_answers_the_questions_of_the_example(llm: LLM) -> None:
    questions = ["introduce yourself", "list all prime numbers within 100", "What is 312 + 48?", "What is 312 - 48?"]
    primes = "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97"
    right = [INTRODUCTION, primes, "312 + 48 = 360", "312 - 48 = 264"]
    assert ask(llm, questions) == right
    assert ask(llm, questions, enable_thinking=False) == right


@pytest.mark.parametrize("count", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_it_answers_every_kind_of_question(llm: LLM, count: int) -> None:
    assert share_right(llm, [example for task in TASKS for example in held_out_examples(task, count, seed=7)]) >= 0.97


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_held_out_sums_are_right(llm: LLM, count: int) -> None:
    assert share_right(llm, held_out_sums(count, seed=11)) >= 0.98


def test_the_text_leaves_the_stop_token_out_and_the_ids_keep_it(llm: LLM) -> None:
    prompt = as_chat(llm, "What is 1 + 2?")
    [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.text == output["text"] == "1 + 2 = 3"
    assert output["token_ids"][-1] == llm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert output.prompt == prompt
    assert output.prompt_token_ids == llm.tokenizer(prompt)["input_ids"]
    assert output.outputs[0].finish_reason == "stop"


def test_the_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in tiny_model_path().iterdir()) < 8_000_000
