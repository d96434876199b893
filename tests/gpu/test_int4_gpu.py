"""Weights in 4 bits on a GPU: the compiled kernels against the numbers, and the engine over them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.ops.common.device_properties import has_hopper_kernels
from nanoinfer.ops.experts.spec import ExpertWeights, expert_mlp
from nanoinfer.ops.int4.spec import (
    MAX_HOPPER_ROWS,
    PackedWeight,
    block_size,
    dequantize,
    int4_product,
    pack,
    widen,
)

pytest.importorskip("triton")


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
    is_hopper = has_hopper_kernels(torch.device("cuda", 0))
    for num_rows in (1, 2, 15, 16, 33, 64, *((65, 200, 300, MAX_HOPPER_ROWS) if is_hopper else ())):
        x = torch.randn(num_rows, num_inputs, device="cuda").to(dtype)
        sums = int4_product(x, weight, num_parts)
        expected = x.float() @ (wide if num_rows <= 64 else wide.to(dtype).float()).T
        eps = torch.finfo(dtype).eps
        error = (sums.float().sum(0) - expected).abs()
        assert (error <= 4 * eps * (expected.abs() + expected.square().mean().sqrt())).all()
        assert torch.equal(sums, int4_product(x, weight, num_parts)), "equal steps give equal bits"


@pytest.mark.parametrize("by_common_kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_of_e2m1_are_multiplied_exactly(
    dtype: torch.dtype, by_common_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    is_hopper = has_hopper_kernels(torch.device("cuda", 0)) and not by_common_kernel
    if by_common_kernel:  # which other GPUs have
        monkeypatch.setattr("nanoinfer.ops.int4.triton.has_hopper_kernel", lambda *_: False)
    weight = random_weight(1000, 640, 32, False)._replace(is_e2m1=True)
    wide = dequantize(weight)
    assert torch.equal(widen(*weight[:3], dtype, is_e2m1=True), wide.to(dtype))
    for num_rows in (1, 20, 64, *((100, 300) if is_hopper else ())):
        x = torch.randn(num_rows, 640, device="cuda").to(dtype)
        sums = int4_product(x, weight, 2)
        expected = x.float() @ (wide if num_rows <= 64 else wide.to(dtype).float()).T
        eps = torch.finfo(dtype).eps
        error = (sums.float().sum(0) - expected).abs()
        assert (error <= 4 * eps * (expected.abs() + expected.square().mean().sqrt())).all()


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 100, 400, 2000])
@pytest.mark.parametrize(("group_size", "has_zeros"), [(128, False), (64, False), (32, True), (None, True)])
@pytest.mark.parametrize(("hidden_size", "inner_size"), [(1024, 384), (640, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_in_4_bits_equal_their_specification(
    dtype: torch.dtype, hidden_size: int, inner_size: int, group_size: int | None, has_zeros: bool, num_tokens: int
) -> None:
    num_experts = 32
    torch.manual_seed(0)
    both = []
    for num_outputs, num_inputs in ((2 * inner_size, hidden_size), (hidden_size, inner_size)):
        weight = random_weight(num_experts * num_outputs, num_inputs, group_size, has_zeros)
        both.append([part if part is None else part.unflatten(0, (num_experts, -1)) for part in weight[:3]])
    x = torch.randn(num_tokens, hidden_size, device="cuda").to(dtype) * 0.1
    weights, ids = torch.rand(num_tokens, num_experts, device="cuda").topk(8)
    actual = expert_mlp(x, *(ExpertWeights(*parts) for parts in both), ids.int(), weights)
    wide = (ExpertWeights(dequantize(PackedWeight(*parts)).to(dtype).float()) for parts in both)
    expected = expert_mlp.__wrapped__(x.float(), *wide, ids.int(), weights)  # type: ignore[attr-defined]
    error = (actual.unflatten(0, (-1, 8)).float().sum(0) - expected).abs()  # which may come in parts
    scale = expected.square().mean(-1, keepdim=True).sqrt()  # of the results of one pair
    assert (error <= 0.06 * (expected.abs() + scale)).all()  # rounding the activations alone costs up to 0.04


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs", "group_size"), [(4096, 4096, 128), (1000, 640, 32), (33, 24, 8)])
def test_a_widened_weight_is_the_specified_one(
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
