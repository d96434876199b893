"""Prefill in slices, on a CPU in one process, where sums need no exchange: the tokens of the common path."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nanoinfer.distributed.tensor_parallel import SLICE_TOKENS
from nanoinfer.models import REGISTRY, decoder, gemma3, sliced_prefill
from tests.models.test_architectures import checkpoint, draw_prompts, generate  # noqa: F401 (a fixture)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slices each step had; steps of ten tokens and more have slices of five and more."""
    found: list[int] = []

    def slice_steps_of(module: ModuleType) -> None:
        def sliced(model: Any, positions: torch.Tensor, residual: torch.Tensor, *rest: Any) -> torch.Tensor:
            found.append(len(residual) // 5)
            return sliced_prefill.sliced_prefill(model, positions, residual, *rest)

        monkeypatch.setattr(module, "suits_slices", lambda model, residual: len(residual) >= 10)
        monkeypatch.setattr(module, "sliced_prefill", sliced)

    monkeypatch.setattr(sliced_prefill, "SLICE_TOKENS", 5)
    slice_steps_of(decoder)
    slice_steps_of(gemma3)
    return found


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("architecture", sorted(REGISTRY))
def test_slices_give_the_tokens_of_whole_steps(
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],  # noqa: F811
    architecture: str,
    seed: int,
) -> None:
    """Prompts are cut into chunks, so that slices also attend to what is in the cache."""
    folder, prompts = checkpoint(architecture, seed), draw_prompts(seed, (61, 1, 29, 40, 7))
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "kvcache_block_size": 16, "max_model_len": 112}
    expected = generate(folder, prompts, **options)
    counts = request.getfixturevalue("counts")
    assert generate(folder, prompts, **options) == expected
    assert max(counts) == 48 // 5
    assert len(set(counts)) > 1


def test_one_process_has_no_slices() -> None:
    class Layer:
        class self_attn:  # noqa: N801
            class o_proj:  # noqa: N801
                class tp:  # noqa: N801
                    size = 1

    model = type("Model", (), {"layers": [Layer]})
    assert not sliced_prefill.suits_slices(model, torch.zeros(4 * SLICE_TOKENS, 1))
    Layer.self_attn.o_proj.tp.size = 2
    assert sliced_prefill.suits_slices(model, torch.zeros(2 * SLICE_TOKENS, 1))
    assert not sliced_prefill.suits_slices(model, torch.zeros(2 * SLICE_TOKENS - 1, 1))
