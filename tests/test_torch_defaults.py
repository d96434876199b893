"""What a program sets as PyTorch's defaults, as trainers do, changes no answer of an engine in it."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from nanoinfer import LLM, SamplingParams, StructuredOutputsParams, tiny_model_path

PROMPTS = ["What is 2", "Sort 31, 4, 15", "Spell"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1)
DRAWN = SamplingParams(
    temperature=0.77,
    top_p=0.93,
    top_k=37,
    min_p=0.013,
    seed=3,
    max_tokens=6,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.3,
    min_tokens=2,
    logit_bias={17: 1.3},
    bad_words=["never"],
)
FORMED = SamplingParams(
    temperature=0.77, seed=3, max_tokens=6, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}")
)
ALL = (GREEDY, DRAWN, FORMED) if find_spec("llguidance") else (GREEDY, DRAWN)


@pytest.fixture
def defaults() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def answers(**options: Any) -> list[Any]:
    with LLM(tiny_model_path(), device="cpu", max_model_len=256, **options) as llm:
        found: list[Any] = [
            (output.outputs[0], output.prompt_logprobs)
            for params in ALL
            for output in llm.generate(PROMPTS, params, use_tqdm=False)
        ]
        found += [output.outputs.embedding.tolist() for output in llm.embed(PROMPTS, use_tqdm=False)]
        return found + llm.score(PROMPTS, [" 3"] * 3, use_tqdm=False)


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_cache_dtype": "int8"}, *({"quantization": name} for name in ("int4", "int8", "fp8"))],
    ids=str,
)
def test_a_default_dtype_changes_no_answer(options: dict[str, Any], defaults: None) -> None:
    expected = answers(**options)
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        assert answers(**options) == expected


def test_a_default_device_changes_no_answer(defaults: None) -> None:
    expected = answers()
    torch.set_default_device("meta")  # whose tensors have no values
    assert answers() == expected


def test_autocasting_changes_no_answer() -> None:
    expected = answers()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert answers() == expected
