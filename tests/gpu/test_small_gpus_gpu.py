"""Models on GPUs of 8 to 24 GiB, which a larger one stands for: PyTorch gets no more memory than such a GPU has."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer import LLM, ConfigError, SamplingParams
from nanoinfer.bench.workloads import write_config

pytestmark = pytest.mark.gpu

GIB = 2**30
Load = Callable[..., LLM]


@pytest.fixture
def load_on(tmp_path: Path) -> Iterator[Load]:
    """`load_on(gib, size, **options)`: an engine of a size of model, with random weights, on a GPU of so many GiB."""
    total = torch.cuda.get_device_properties(0).total_memory

    def load(gib: int, size: str, **options: Any) -> LLM:
        if gib * GIB > total:
            pytest.skip(f"this GPU has less than {gib} GiB")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(gib * GIB / total)
        write_config(size, tmp_path)
        return LLM(tmp_path, load_format="dummy", gpu_memory_utilization=0.9 * gib * GIB / total, **options)

    yield load
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.filterwarnings("ignore:max_model_len is lowered")
@pytest.mark.parametrize(
    ("gib", "size", "options"),
    [
        (8, "0.6B", {}),
        pytest.param(8, "8B", {"quantization": "int4", "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param(12, "8B", {"quantization": "fp8"}, marks=pytest.mark.slow),
        pytest.param(16, "gpt-oss-20b", {}, marks=pytest.mark.slow),
        pytest.param(24, "8B", {}, marks=pytest.mark.slow),
        pytest.param(24, "30B-A3B", {"quantization": "int4"}, marks=pytest.mark.slow),
        pytest.param(24, "qwen3.5-9B", {"quantization": "fp8"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_model_that_fits_runs_within_the_memory(load_on: Load, gib: int, size: str, options: dict[str, Any]) -> None:
    with load_on(gib, size, **options) as llm:
        limits: Any = llm.engine.runner.limits  # type: ignore[attr-defined]
        print(gib, size, options, limits, f"{torch.cuda.max_memory_allocated() / GIB:.2f} GiB")
        longest = min(3000, llm.max_model_len - 64)
        prompts = [[7] * (1 + longest * number // 63) for number in range(64)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)
        assert [len(output.token_ids) for output in outputs] == [64] * 64
        assert torch.cuda.max_memory_reserved() <= gib * GIB


def test_weights_that_do_not_fit_are_an_error_that_says_what_would(load_on: Load) -> None:
    message = (
        r"too little memory .* the weights take 15\.\d\d GiB\. What makes room: quantization='int4' "
        r".*weights of 5\.\d\d"
    )
    with pytest.raises(ConfigError, match=message):
        load_on(8, "8B")
