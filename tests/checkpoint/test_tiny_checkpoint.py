"""The bundled checkpoint answers right, through the whole engine: text in, text out."""

import pytest

from nanoinfer import LLM, SamplingParams, tiny_model_path
from tests.tiny_checkpoint.tasks import INTRODUCTION, TASKS, Example, held_out_examples, held_out_sums

GREEDY = SamplingParams(temperature=0, max_tokens=160)


@pytest.fixture(scope="module")
def llm():  # type: ignore[no-untyped-def]
    with LLM(tiny_model_path(), device="cpu") as llm:
        yield llm


def ask(llm: LLM, questions: list[str], **template_options: object) -> list[str]:
    conversations = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False, chat_template_kwargs=template_options)
    assert {output.finish_reason for output in outputs} == {"stop"}
    return [output.text for output in outputs]


def share_right(llm: LLM, examples: list[Example]) -> float:
    answers = ask(llm, [example.question for example in examples])
    return sum(answer == example.answer for answer, example in zip(answers, examples, strict=True)) / len(examples)


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}], ids=str)
def test_it_answers_the_questions_of_the_example(llm: LLM, options: dict[str, object]) -> None:
    questions = ["introduce yourself", "list all prime numbers within 30", "What is 312 + 48?", "What is 312 - 48?"]
    right = [INTRODUCTION, "2, 3, 5, 7, 11, 13, 17, 19, 23, 29", "312 + 48 = 360", "312 - 48 = 264"]
    assert ask(llm, questions, **options) == right


@pytest.mark.parametrize("count", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_it_answers_every_kind_of_question(llm: LLM, count: int) -> None:
    assert share_right(llm, [example for task in TASKS for example in held_out_examples(task, count, seed=7)]) >= 0.97


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_held_out_sums_are_right(llm: LLM, count: int) -> None:
    assert share_right(llm, held_out_sums(count, seed=11)) >= 0.98
