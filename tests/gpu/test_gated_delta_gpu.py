"""The kernels of linear attention as compiled for a GPU, against their specifications; and hybrids in CUDA graphs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanoinfer import LLM
from tests.kernels.test_gated_delta import check_prefill, check_step, random_case
from tests.models.test_architectures import GREEDY, HYBRIDS, checkpoint, draw_prompts

__all__ = ["checkpoint"]
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(16, 2, 128, 128, 4), (2, 3, 24, 12, 2)], ids=["Qwen3.5 9B", "odd sizes"])
def test_a_step_of_the_delta_rule_equals_its_specification(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    check_step(random_case(*sizes, dtype, "cuda"), 1e-4 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lens", "starts", "sizes"),
    [((1, 300, 64, 2), (0, 0, 5, 3), (16, 2, 128, 128, 4)), ((3, 130), (2, 0), (1, 2, 24, 12, 2))],
    ids=["Qwen3.5 9B", "odd sizes"],
)
def test_a_prefill_step_of_the_delta_rule_equals_its_specification(
    lens: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    check_prefill(
        lens, starts, sizes, dtype, decay=0.5, tolerance=1e-3 if dtype == torch.float32 else 3e-2, device="cuda"
    )


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_graph_gives_the_tokens_of_steps_without_graphs(checkpoint: Callable[..., Path], architecture: str) -> None:
    folder, prompts = checkpoint(architecture, 0), draw_prompts(0)
    found = []
    for enforce_eager in (True, False):
        options = {"dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 3, "num_kvcache_blocks": 40}
        with LLM(folder, enforce_eager=enforce_eager, max_num_batched_tokens=100, **options) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)])
    assert found[0] == found[1]
