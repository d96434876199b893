"""The trainer of docs/reinforce.py: it runs, and it learns."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "docs" / "reinforce.py"


@pytest.fixture(scope="module")
def reinforce() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reinforce", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_steps_run(reinforce: ModuleType) -> None:
    assert len(reinforce.train(num_steps=2)) == 2


def test_the_log_likelihood_of_an_answer_leaves_prompt_and_padding_out(reinforce: ModuleType) -> None:
    class Uniform(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.logits = torch.zeros(*ids.shape, 4)
            return self

    found = reinforce.log_likelihoods(Uniform(), [[1, 2], [3]], [[1], [2, 3, 1]])
    torch.testing.assert_close(found, torch.tensor([1.0, 3.0]) * torch.tensor(0.25).log())


@pytest.mark.parametrize(("answer", "expected"), [("7 - 7 = 0", 1.0), ("7 - 7 = 1", 0.5), ("17 - 17 = 0", 0.0)])
def test_the_form_that_is_rewarded(reinforce: ModuleType, answer: str, expected: float) -> None:
    assert reinforce.reward(7, answer) == expected


@pytest.mark.slow
def test_the_reward_rises_from_nothing_to_nearly_all(reinforce: ModuleType) -> None:
    history = reinforce.train(num_steps=25)
    assert history[0] < 0.1
    assert sum(history[-5:]) / 5 > 0.95


def test_the_trainer_has_as_many_lines_as_its_page_says() -> None:
    num_lines = len(SCRIPT.read_text().splitlines())
    assert f"**A trainer in {num_lines} lines.**" in (SCRIPT.parent / "integrations.md").read_text()
