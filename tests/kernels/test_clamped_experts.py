"""The kernels of gpt-oss's experts in Triton's interpreter against their specification. On a GPU: tests/gpu."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer.ops.int4.spec import BLOCK, PackedWeight, dequantize, pack_e2m1
from nanoinfer.quantization.int4.formats import mxfp4_numbers

pytest.importorskip("triton")

from nanoinfer.ops.experts import triton as kernels
from nanoinfer.ops.experts.spec import ExpertWeights, expert_mlp
from nanoinfer.ops.routing.triton import TilePlan
from tests.kernels.helpers import loops_are_interpreted
from tests.kernels.test_moe import CASES, randn, random_ids, weights_of

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"),
    loops_are_interpreted,
]

CLAMPS = (1.5, 1.702)


def biases_of(num_experts: int, hidden_size: int, inner_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return randn(num_experts, 2 * inner_size, seed=3, dtype=dtype), randn(num_experts, hidden_size, seed=4, dtype=dtype)


def biased_weights_of(*sizes: Any) -> list[ExpertWeights]:
    parts = zip(weights_of(*sizes), biases_of(*sizes), strict=True)
    return [ExpertWeights(weight, bias=bias) for weight, bias in parts]


def assert_close(actual: Tensor, expected: Tensor, num_eps: int = 16) -> None:
    assert actual.dtype == expected.dtype
    tolerance = num_eps * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_choices", "hidden_size", "inner_size"), CASES)
def test_experts_with_biases_and_clamps_equal_their_specification(
    num_tokens: int, num_experts: int, num_choices: int, hidden_size: int, inner_size: int, dtype: torch.dtype
) -> None:
    x = 2 * randn(num_tokens, hidden_size, dtype=dtype)
    both = biased_weights_of(num_experts, hidden_size, inner_size, dtype)
    ids = random_ids(num_tokens, num_experts, num_choices, share_of_padding=0.2)
    options = ids, torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)), CLAMPS
    assert_close(kernels.expert_mlp(x, *both, *options), expert_mlp(x, *both, *options))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
def test_nan_and_infinities_are_clamped_as_specified() -> None:
    x = randn(6, 32)
    x[1, 3], x[2, 5], x[4, 0] = torch.nan, torch.inf, -torch.inf
    arguments = x, *biased_weights_of(4, 32, 24, x.dtype), random_ids(6, 4, 2), torch.ones(6, 2), CLAMPS
    actual = kernels.expert_mlp(*arguments)
    assert_close(actual, expert_mlp(*arguments))
    assert actual[:, 1].isnan().all()
    assert actual[:, [0, 3, 5]].isfinite().all()


def random_mxfp4(num_experts: int, num_outputs: int, num_inputs: int, seed: int) -> PackedWeight:
    """A weight whose rows are filled up to whole blocks."""
    generator = torch.Generator().manual_seed(seed)
    groups = num_experts, num_outputs, num_inputs // 32
    numbers = mxfp4_numbers(torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8))
    scales = torch.randint(122, 126, groups, generator=generator, dtype=torch.uint8)
    filling = -num_inputs % BLOCK
    numbers = torch.nn.functional.pad(numbers, (0, filling))
    return PackedWeight(pack_e2m1(numbers, BLOCK), torch.nn.functional.pad(scales, (0, filling // 32)), is_e2m1=True)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_choices", "hidden_size", "inner_size"),
    [(1, 4, 2, 160, 96), (5, 3, 2, 128, 32), (60, 2, 1, 96, 288)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])  # in float32 they are widened
def test_weights_in_mxfp4_whose_depth_is_no_whole_block_equal_the_specification(
    num_tokens: int, num_experts: int, num_choices: int, hidden_size: int, inner_size: int, dtype: torch.dtype
) -> None:
    x = randn(num_tokens, hidden_size + 8, dtype=dtype)[:, :hidden_size]
    x_rows = torch.full((num_tokens, hidden_size + 8), torch.nan, dtype=dtype)  # what lies behind a row is not read
    x_rows[:, :hidden_size] = x
    first = random_mxfp4(num_experts, 2 * inner_size, hidden_size, 1)
    second = random_mxfp4(num_experts, hidden_size, inner_size, 2)
    biases = biases_of(num_experts, hidden_size, inner_size, dtype)
    ids = random_ids(num_tokens, num_experts, num_choices, share_of_padding=0.2)
    routing = ids, torch.rand(ids.shape, generator=torch.Generator().manual_seed(0))
    both = list(zip((first, second), biases, strict=True))
    packed = [ExpertWeights(weight.numbers, weight.scales, bias=bias, is_e2m1=True) for weight, bias in both]
    actual = kernels.expert_mlp(x_rows[:, :hidden_size], *packed, *routing, CLAMPS)
    sizes = hidden_size, inner_size
    wide = [
        ExpertWeights(dequantize(weight)[..., :size].to(dtype), bias=bias)
        for (weight, bias), size in zip(both, sizes, strict=True)
    ]
    assert_close(actual, expert_mlp(x, *wide, *routing, CLAMPS), 16 if dtype == torch.float16 else 64)
    assert torch.equal(expert_mlp(x, *packed, *routing, CLAMPS), expert_mlp(x, *wide, *routing, CLAMPS))


@pytest.mark.parametrize(
    ("shape", "is_e2m1", "num_tiles", "expected"),
    [
        ((32, 2880, 368), True, 4, 2),  # down of gpt-oss-20b, one token
        ((32, 2880, 368), True, 16, 2),
        ((32, 2880, 368), True, 32, 1),
        ((128, 2048, 96), False, 16, 2),  # of Qwen3-30B-A3B in int4, two tokens
        ((128, 2048, 96), False, 32, 1),
        ((32, 2880, 48), True, 4, 1),  # three blocks
    ],
)
def test_down_sums_in_two_parts_where_few_programs_would_take_long(
    shape: tuple[int, int, int], is_e2m1: bool, num_tiles: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanoinfer.ops.experts import hopper_int4

    monkeypatch.setattr(hopper_int4, "num_multiprocessors", lambda device: 132)
    down = ExpertWeights(torch.empty(shape, dtype=torch.int32, device="meta"), is_e2m1=is_e2m1)
    plan = TilePlan(None, torch.zeros(num_tiles, dtype=torch.int32), None, tile_size=16)
    assert hopper_int4.num_parts(down, plan, torch.device("cpu")) == expected


def test_a_scale_of_255_is_nan() -> None:
    weight = random_mxfp4(1, 8, 32, 0)
    weight.scales[0, 3, 0] = 255
    assert dequantize(weight)[0, 3, :32].isnan().all()
    assert dequantize(weight)[0, :3].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_hopper_reads_mxfp4_below_its_limit_of_pairs_and_other_gpus_always(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [
        ExpertWeights(weight.numbers, weight.scales, is_e2m1=True)
        for weight in (random_mxfp4(2, 256, 128, 1), random_mxfp4(2, 128, 128, 2))
    ]
    limit = 2 * kernels.WIDE_PAIRS_MXFP4.get(dtype, 0)

    def reads_4_bits() -> list[bool]:
        x = randn(1, 128, dtype=dtype)
        return [kernels._reads_4_bits(x, *both, pairs, 128, False) for pairs in (limit - 1, limit)]

    monkeypatch.setattr(kernels, "has_hopper_kernels", lambda _: True)
    assert reads_4_bits() == [dtype != torch.float32, False]
    monkeypatch.setattr(kernels, "has_hopper_kernels", lambda _: False)
    assert reads_4_bits() == [dtype != torch.float32] * 2


@pytest.mark.parametrize(("on_hopper", "group_size", "limit"), [(True, 128, 500), (True, 64, 250), (False, 128, 250)])
def test_weights_in_int4_are_widened_from_as_many_pairs_on_as_pay_for_the_kernel_that_serves(
    on_hopper: bool, group_size: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "has_hopper_kernels", lambda _: on_hopper)
    words = (torch.zeros(2, lines, 16, dtype=torch.int32) for lines in (256, 128))  # of 128 inputs
    both = [ExpertWeights(numbers, torch.ones(*numbers.shape[:2], 128 // group_size)) for numbers in words]
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    has_own = kernels._has_hopper_int4_kernel(x, x, *both)
    assert has_own == (limit == 500)
    pairs_of_two = 2 * limit - 1, 2 * limit
    assert [kernels._reads_4_bits(x, *both, pairs, 128, has_own) for pairs in pairs_of_two] == [True, False]
