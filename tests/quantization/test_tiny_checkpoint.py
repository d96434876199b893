"""The bundled checkpoint answers as well with weights and activations in FP8."""

from collections.abc import Iterator

import pytest

from nanoinfer import LLM, tiny_model_path
from nanoinfer.quantization import method_selection
from tests.checkpoint.test_tiny_checkpoint import share_right
from tests.tiny_checkpoint.tasks import TASKS, held_out_examples, held_out_sums


@pytest.fixture(scope="module", params=[True, False], ids=["fp8 products", "weights only"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method_selection, "has_fp8_products", lambda device: request.param)
        with LLM(tiny_model_path(), device="cpu", quantization="fp8") as llm:
            yield llm


@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_it_answers_every_kind_of_question(llm: LLM, count: int) -> None:
    share = share_right(llm, [example for task in TASKS for example in held_out_examples(task, count, seed=7)])
    print(f"{share:.2%} of all kinds are right")
    assert share >= 0.99


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_held_out_sums_are_right(llm: LLM, count: int) -> None:
    share = share_right(llm, held_out_sums(count, seed=11))
    print(f"{share:.2%} of {count} sums are right")
    assert share >= 0.99
