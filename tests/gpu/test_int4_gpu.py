"""Weights in 4 bits on a GPU: the compiled kernels against the numbers, and the engine over them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.quantization.int4.numbers import PackedWeight, block_size, dequantize, few_rows_product, pack, widen

pytestmark = pytest.mark.gpu


def random_weight(num_outputs: int, num_inputs: int, group_size: int | None, has_zeros: bool) -> PackedWeight:
    """group_size: None for a scale for each output."""
    shape = (num_outputs, num_inputs // group_size) if group_size else (num_outputs,)
    numbers = torch.randint(0, 16, (num_outputs, num_inputs), device="cuda")
    scales = torch.rand(shape, device="cuda") * 0.02 + 0.01
    zeros = torch.randint(0, 17, shape, device="cuda").to(torch.uint8) if has_zeros else None
    return PackedWeight(pack(numbers, block_size(num_inputs)), scales, zeros)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "num_parts"), [(6144, 4096, 2), (4096, 12288, 4), (1000, 640, 1)]
)
def test_a_product_of_few_rows_is_that_of_the_numbers(
    num_outputs: int, num_inputs: int, num_parts: int, group_size: int | None, has_zeros: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = random_weight(num_outputs, num_inputs, group_size, has_zeros)
    wide = dequantize(weight)
    for num_rows in (1, 2, 15, 16, 33, 64):
        x = torch.randn(num_rows, num_inputs, device="cuda").to(dtype)
        sums = few_rows_product(x, *weight[:3], num_parts)
        expected = x.float() @ wide.T
        eps = torch.finfo(dtype).eps
        error = (sums.float().sum(0) - expected).abs()
        assert (error <= 4 * eps * (expected.abs() + expected.square().mean().sqrt())).all()
        assert torch.equal(sums, few_rows_product(x, *weight[:3], num_parts)), "equal steps give equal bits"


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs", "group_size"), [(4096, 4096, 128), (1000, 640, 32), (33, 24, 8)])
def test_a_widened_weight_is_that_of_the_twin(
    num_outputs: int, num_inputs: int, group_size: int, has_zeros: bool
) -> None:
    weight = random_weight(num_outputs, num_inputs, group_size, has_zeros)
    assert torch.equal(widen(*weight[:3], torch.bfloat16), dequantize(weight).bfloat16())


def test_graphs_and_eager_give_the_same_tokens(random_checkpoint: Callable[..., Path]) -> None:
    folder = random_checkpoint(hidden_size=512, intermediate_size=1024, num_attention_heads=8, head_dim=64)
    prompts, params = [[1, 2, 3], [5] * 100], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    outputs = []
    for enforce_eager in (False, True):
        options = {"quantization": "int4", "dtype": "bfloat16", "gpu_memory_utilization": 0.3}
        with LLM(folder, enforce_eager=enforce_eager, **options) as llm:
            outputs.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert outputs[0] == outputs[1]
