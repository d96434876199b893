"""What weights in 4 bits and in integers of 8 cost a real model, SmolLM2-135M-Instruct, on the CPU.

Perplexity and KL divergence of 20,000 tokens, the figures of docs/quantization.md:
pytest tests/real/test_int4.py -m slow -s
"""

from pathlib import Path

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.quantization.int4 import int4_linear
from tests.real.test_fp8 import measure_loss
from tests.real.test_smollm2 import folder

__all__ = ["folder"]
pytestmark = pytest.mark.real


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_perplexity_with_weights_in_4_bits(group_size: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SmolLM2's sizes, 576 and 1,536 inputs, 128 divides the second alone; the first then has groups of 64."""
    monkeypatch.setattr(int4_linear, "GROUP_SIZE", group_size)
    assert 0 < measure_loss(folder, 20000, "int4").rise < 0.5


@pytest.mark.slow
def test_perplexity_with_weights_in_integers_of_8_bits(folder: Path) -> None:
    loss = measure_loss(folder, 20000, "int8")
    assert abs(loss.rise) < 0.01
    assert 0 < loss.divergence < 0.01


def test_it_still_answers(folder: Path) -> None:
    with LLM(folder, device="cpu", dtype="float32", quantization="int4") as llm:
        question = [{"role": "user", "content": "What is gravity?"}]
        [answer] = llm.chat(question, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert "ravity" in answer.text
