"""What a KV cache in 8 bits costs a real model, SmolLM2-135M-Instruct, on the CPU: perplexity and KL divergence.

A prompt attends to its keys and values as the cache holds them, so one prefill shows what rounding them does. 20,000
tokens, and the figures of docs/quantization.md: pytest tests/real/test_kv_cache.py -m slow -s
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer import LLM, SamplingParams
from tests.real.test_smollm2 import PIECE, folder

__all__ = ["folder"]
pytestmark = pytest.mark.real

FORMATS = ("auto", "int8", "fp8")
MOST_DIVERGENCE = {"int8": 0.002, "fp8": 0.01}  # nats a token


def logprobs_of_pieces(llm: LLM, token_ids: list[int]) -> Iterator[Tensor]:
    """Log-probabilities of the next token after each one of a piece, (num_tokens, vocab_size), piece by piece."""
    model: Any = llm.engine.runner.model  # type: ignore[union-attr]
    forward, hidden = model.forward, list[Tensor]()

    def recording(*args: Any) -> Tensor:
        hidden.append(forward(*args))
        return hidden[-1]

    model.forward = recording
    for start in range(0, len(token_ids), PIECE):
        hidden.clear()
        piece = token_ids[start : start + PIECE]
        llm.generate([piece], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        with torch.inference_mode():
            yield model.compute_logits(torch.cat(hidden)[: len(piece)]).log_softmax(dim=-1)


@pytest.mark.parametrize("num_tokens", [2000, pytest.param(20000, marks=pytest.mark.slow)])
def test_perplexity_with_a_cache_in_8_bits_is_within_one_percent(num_tokens: int, folder: Path) -> None:
    losses, divergence, num_same = dict.fromkeys(FORMATS, 0.0), dict.fromkeys(FORMATS, 0.0), dict.fromkeys(FORMATS, 0)
    with ExitStack() as stack:
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": PIECE}
        llms = [stack.enter_context(LLM(folder, kv_cache_dtype=name, **options)) for name in FORMATS]
        token_ids = llms[0].encode("\n".join(topics[name] for name in sorted(topics)))[:num_tokens]
        assert len(token_ids) == num_tokens
        pieces = (token_ids[start : start + PIECE] for start in range(0, num_tokens, PIECE))
        for piece, *all_logprobs in zip(pieces, *(logprobs_of_pieces(llm, token_ids) for llm in llms), strict=True):
            exact = all_logprobs[0]
            for name, logprobs in zip(FORMATS, all_logprobs, strict=True):
                losses[name] -= logprobs[:-1].gather(1, torch.tensor(piece[1:]).unsqueeze(1)).sum().item()
                divergence[name] += F.kl_div(logprobs, exact, log_target=True, reduction="sum").item()
                num_same[name] += int((logprobs.argmax(1) == exact.argmax(1)).sum())
    num_predicted = num_tokens - -(-num_tokens // PIECE)
    perplexity = {name: math.exp(loss / num_predicted) for name, loss in losses.items()}
    for name in FORMATS:
        print(
            f"\n{name}: perplexity of {num_tokens} tokens {perplexity[name]:.4f} "
            f"({perplexity[name] / perplexity['auto'] - 1:+.3%}), KL divergence {divergence[name] / num_tokens:.6f} "
            f"nats a token, the same likeliest token for {num_same[name] / num_tokens:.2%}"
        )
    for name, most in MOST_DIVERGENCE.items():
        assert perplexity[name] == pytest.approx(perplexity["auto"], rel=0.01)
        assert divergence[name] / num_tokens < most


@pytest.mark.parametrize("kv_cache_dtype", FORMATS[1:])
def test_it_still_knows_the_capital_of_france(kv_cache_dtype: str, folder: Path) -> None:
    with LLM(folder, device="cpu", dtype="float32", kv_cache_dtype=kv_cache_dtype) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        [answer] = llm.chat(question, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    assert answer.text == "The capital of France is Paris."
