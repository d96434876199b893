"""What FP8 weights cost a real model, SmolLM2-135M-Instruct, on the CPU: perplexity and KL divergence.

The products are those of the FP8 kernels' specifications (W8A8), or of widened weights. 20,000 tokens, and the figures
of docs/quantization.md: pytest tests/real/test_fp8.py -m slow -s
"""

import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer import LLM, SamplingParams
from nanoinfer.quantization import method_selection
from tests.real.test_smollm2 import PIECE, folder

__all__ = ["folder"]
pytestmark = pytest.mark.real


def text_pieces(llm: LLM, num_tokens: int) -> list[list[int]]:
    """Python's own documentation, a piece at a time."""
    token_ids = llm.encode("\n".join(topics[name] for name in sorted(topics)))[:num_tokens]
    assert len(token_ids) == num_tokens
    return [token_ids[start : start + PIECE] for start in range(0, num_tokens, PIECE)]


class Distributions:
    """Keeps the hidden states of all prompt tokens that a model computes, to make their logits from."""

    def __init__(self, llm: LLM) -> None:
        runner: Any = llm.engine.runner
        self.model, self.hidden = runner.model, list[Tensor]()
        forward = self.model.forward

        def recording(*args: Any) -> Tensor:
            self.hidden.append(forward(*args))
            return self.hidden[-1]

        self.model.forward = recording

    @torch.inference_mode()
    def take(self) -> Tensor:
        """Log-probabilities of the next token after each one so far, (num_tokens, vocab_size)."""
        logprobs = self.model.compute_logits(torch.cat(self.hidden)).log_softmax(dim=-1)
        self.hidden.clear()
        return logprobs


class Loss(NamedTuple):
    """What fewer bits cost a model."""

    rise: float  # of the perplexity, as a share of it
    divergence: float  # KL, in nats a token


def measure_loss(folder: Path, num_tokens: int, quantization: str) -> Loss:
    """Compare a model with itself in fewer bits, and print the figures."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": PIECE}
    params = SamplingParams(temperature=0, max_tokens=1)
    losses, divergence, num_same = {"wide": 0.0, "narrow": 0.0}, 0.0, 0
    with LLM(folder, **options) as wide, LLM(folder, quantization=quantization, **options) as narrow:
        models = {"wide": (wide, Distributions(wide)), "narrow": (narrow, Distributions(narrow))}
        for piece in text_pieces(wide, num_tokens):
            logprobs = {}
            for name, (llm, distributions) in models.items():
                llm.generate([piece], params, use_tqdm=False)
                logprobs[name] = distributions.take()[: len(piece)]
                losses[name] -= logprobs[name][:-1].gather(1, torch.tensor(piece[1:]).unsqueeze(1)).sum().item()
            pair = logprobs["narrow"], logprobs["wide"]
            divergence += F.kl_div(*pair, log_target=True, reduction="sum").item()
            num_same += int((pair[0].argmax(1) == pair[1].argmax(1)).sum())
    num_predicted = num_tokens - -(-num_tokens // PIECE)
    before, after = (math.exp(losses[name] / num_predicted) for name in ("wide", "narrow"))
    print(
        f"\nperplexity of {num_tokens} tokens: {before:.4f} in float32, {after:.4f} in {quantization}, "
        f"{after / before - 1:+.2%}; KL divergence {divergence / num_tokens:.5f} nats a token; the likeliest token is "
        f"the same for {num_same / num_tokens:.2%}"
    )
    return Loss(after / before - 1, divergence / num_tokens)


@pytest.mark.parametrize("num_tokens", [2000, pytest.param(20000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("multiplies_fp8", [True, False], ids=["fp8 products", "weights only"])
def test_perplexity_with_fp8_weights_is_within_three_percent(
    multiplies_fp8: bool, num_tokens: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(method_selection, "has_fp8_products", lambda device: multiplies_fp8)
    loss = measure_loss(folder, num_tokens, "fp8")
    assert abs(loss.rise) < 0.03
    assert loss.divergence < 0.05


def test_it_still_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_selection, "has_fp8_products", lambda device: True)
    with LLM(folder, device="cpu", dtype="float32", quantization="fp8") as llm:
        question = [{"role": "user", "content": "What is gravity?"}]
        [answer] = llm.chat(question, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert answer.text.startswith("Gravity is a fundamental concept in physics")
