"""Products by weights in 4 bits, in Triton's interpreter, against the numbers that the weights stand for."""

import pytest
import torch
from torch import Tensor

from nanoinfer.ops.experts.spec import ExpertWeights, expert_mlp
from nanoinfer.ops.int4 import spec
from nanoinfer.ops.int4.spec import PackedWeight, block_size, dequantize, num_splits, pack

pytest.importorskip("triton")

from nanoinfer.ops.experts import triton as expert_kernels
from nanoinfer.ops.int4 import triton as kernels
from tests.kernels.helpers import exact_bfloat16, loops_are_interpreted

__all__ = ["exact_bfloat16"]

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's NumPy warns of NaN
]


def random_weight(num_outputs: int, num_inputs: int, group_size: int | None, has_zeros: bool) -> PackedWeight:
    """group_size: None for a scale for each output."""
    generator = torch.Generator().manual_seed(num_outputs + num_inputs)
    shape = (num_outputs, num_inputs // group_size) if group_size else (num_outputs,)
    numbers = torch.randint(0, 16, (num_outputs, num_inputs), generator=generator)
    scales = torch.rand(shape, generator=generator) * 0.02 + 0.01
    zeros = torch.randint(0, 17, shape, generator=generator).to(torch.uint8) if has_zeros else None
    return PackedWeight(pack(numbers, block_size(num_inputs)), scales, zeros)


@loops_are_interpreted
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, None])
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "num_parts"), [(1, 64, 256, 1), (3, 100, 768, 2), (40, 130, 512, 3)]
)
def test_a_product_of_few_rows_is_that_of_the_numbers(
    num_rows: int, num_outputs: int, num_inputs: int, num_parts: int, group_size: int | None, has_zeros: bool
) -> None:
    weight = random_weight(num_outputs, num_inputs, group_size, has_zeros)
    x = torch.randn(num_rows, num_inputs + 8, generator=torch.Generator().manual_seed(0)).half()[:, :num_inputs]
    sums = kernels.int4_product(x, weight, num_parts)
    assert sums.shape == (num_parts, num_rows, num_outputs)
    expected = x.float() @ dequantize(weight).T
    torch.testing.assert_close(sums.float().sum(0), expected, rtol=2e-3, atol=1e-2)
    parts = spec.int4_product.__wrapped__(x, weight, num_parts)  # type: ignore[attr-defined]
    torch.testing.assert_close(sums, parts, rtol=1e-2, atol=3e-2)


@loops_are_interpreted
def test_bad_scales_and_rows_spoil_their_own_results() -> None:
    weight, x = random_weight(64, 256, 128, True), torch.ones(3, 256).half()
    weight.scales[5, 1], x[1, 3] = torch.nan, torch.inf
    out = kernels.int4_product(x, weight, 1)[0]
    assert out[:, 5].isnan().all()
    assert not out[1].isfinite().any()
    assert out[[0, 2]][:, torch.arange(64) != 5].isfinite().all()


@loops_are_interpreted
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "group_size"),
    [(40, 256, 32), (3, 64, None), (33, 24, 8), (33, 192, 32), (5, 320, 160), (3, 96, 48)],
)
def test_a_widened_weight_is_the_specified_one(
    num_outputs: int, num_inputs: int, group_size: int | None, has_zeros: bool
) -> None:
    weight = random_weight(num_outputs, num_inputs, group_size, has_zeros)
    wide: Tensor = kernels.widen(*weight[:3], torch.float16)
    assert torch.equal(wide, spec.widen.__wrapped__(*weight[:3], torch.float16))  # type: ignore[attr-defined]
    assert torch.equal(wide, dequantize(weight).half())


def test_few_outputs_are_summed_in_parts() -> None:
    assert num_splits(1, 4096, 24576, True, 132) == 2
    assert num_splits(1, 4096, 24576, False, 132) == 1
    assert num_splits(128, 4096, 24576, True, 132) == 1
    assert num_splits(1, 4096, 4096, True, 132) == 4
    assert num_splits(16, 12288, 4096, True, 132) == 8
    assert num_splits(1, 1024, 64, True, 132) == 1, "a part has eight blocks or more"
    assert num_splits(256, 4096, 24576, True, 132) == 2, "three rounds of halves, not two of wholes"
    assert num_splits(256, 4096, 6144, True, 132) == 2, "one round"
    assert num_splits(1024, 12288, 4096, True, 132) == 1


@loops_are_interpreted
@pytest.mark.parametrize(
    ("num_tokens", "group_size", "has_zeros"), [(1, 128, False), (5, 32, True), (70, None, False), (150, 64, True)]
)
def test_experts_in_4_bits_equal_their_specification(num_tokens: int, group_size: int | None, has_zeros: bool) -> None:
    num_experts, hidden_size, inner_size, generator = 4, 128, 128, torch.Generator().manual_seed(0)
    packed = [
        [random_weight(num_outputs, num_inputs, group_size, has_zeros) for _ in range(num_experts)]
        for num_outputs, num_inputs in ((2 * inner_size, hidden_size), (hidden_size, inner_size))
    ]
    packed[0][2].scales[3] *= -2  # so that experts differ
    packed[1][1].numbers.bitwise_xor_(0x1234)
    both = []
    for experts in packed:
        numbers, scales = (
            torch.stack([each.numbers for each in experts]),
            torch.stack([each.scales for each in experts]),
        )
        zeros = torch.stack([each.zeros for each in experts if each.zeros is not None]) if has_zeros else None
        both.append(PackedWeight(numbers, scales, zeros))
    x = torch.randn(num_tokens, hidden_size, generator=generator).half() * 0.1
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(num_tokens)]).int()
    if num_tokens > 1:
        ids[1] = num_experts  # a row without a token
    weights = torch.rand(num_tokens, 2, generator=generator)
    arguments = x, *(ExpertWeights(*each[:3]) for each in both), ids, weights
    actual = expert_kernels.expert_mlp(*arguments)
    torch.testing.assert_close(actual, expert_mlp(*arguments), rtol=1e-2, atol=1e-2)
    wide = (ExpertWeights(dequantize(each).half()) for each in both)
    assert torch.equal(expert_mlp(*arguments), expert_mlp(x, *wide, ids, weights))


@loops_are_interpreted
@pytest.mark.usefixtures("exact_bfloat16")
def test_values_of_e2m1_equal_their_specification() -> None:
    for num_inputs in (192, 256):  # blocks of 64 inputs, and of 128
        weight = random_weight(48, num_inputs, 32, False)._replace(is_e2m1=True)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            wide = kernels.widen(*weight[:3], dtype, is_e2m1=True)
            assert torch.equal(wide, dequantize(weight).to(dtype))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).half()
    sums = kernels.int4_product(x, weight, 2)
    torch.testing.assert_close(sums.float().sum(0), x.float() @ dequantize(weight).T, rtol=2e-3, atol=1e-2)
