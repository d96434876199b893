"""The FP8 kernels in Triton's interpreter against their specifications. Compiled: tests/gpu/test_fp8_gpu.py."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanoinfer.ops.activations import spec as activations
from nanoinfer.ops.common.fp8_format import FP8, QuantizedRows, RowFormat
from nanoinfer.ops.experts import spec as expert_spec
from nanoinfer.ops.experts.spec import ExpertWeights
from nanoinfer.ops.fp8 import spec as fp8
from nanoinfer.ops.fp8.spec import dequantize_rows, quantize_weight
from nanoinfer.ops.norms import spec as norms

triton = pytest.importorskip("triton")

from nanoinfer.ops.activations import triton as gated_activation  # noqa: E402
from nanoinfer.ops.experts import triton as expert_kernels  # noqa: E402
from nanoinfer.ops.fp8 import triton as fp8_kernels  # noqa: E402
from nanoinfer.ops.norms import triton as norm_kernels  # noqa: E402
from tests.fp8_cases import assert_experts_are_as_good_as_specified, unrounded_expert_mlp  # noqa: E402
from tests.kernels.helpers import exact_fp8, loops_are_interpreted  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"),
    pytest.mark.usefixtures("exact_fp8"),
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning"),
]
__all__ = ["exact_fp8"]

NAN, INFINITY = float("nan"), float("inf")
FORMATS = {
    "token": RowFormat(),
    "group": RowFormat(group_size=128),
    "static": RowFormat(scale=torch.tensor(0.01)),
    "wide": RowFormat(keeps_wide=True),
}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- weights that are widened ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter cuts off bfloat16
@pytest.mark.parametrize("block_size", [None, 128])
@pytest.mark.parametrize("shape", [(200, 300), (3, 129, 128), (1, 16)], ids=str)
def test_a_weight_is_widened_to_the_last_bit(
    shape: tuple[int, ...], block_size: int | None, dtype: torch.dtype
) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)  # all there are: subnormal ones, -0 and NaN, too
    weight = numbers.view(torch.uint8).repeat(math.prod(shape) // 256 + 1)[: math.prod(shape)].view(FP8).view(shape)
    _, scales = quantize_weight(randn(*shape), block_size)
    actual, expected = fp8_kernels.widen_weight(weight, scales, dtype), fp8.widen_weight(weight, scales, dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.signbit(), expected.signbit())


# --- rows ---


def assert_equal_rows(actual: QuantizedRows, expected: QuantizedRows) -> None:
    """To the last bit, NaN included."""
    assert torch.equal(actual.values.view(torch.uint8), expected.values.view(torch.uint8))
    torch.testing.assert_close(actual.scales, expected.scales, rtol=0, atol=0, equal_nan=True)
    assert (actual.wide is None) == (expected.wide is None)
    if actual.wide is not None and expected.wide is not None:
        torch.testing.assert_close(actual.wide, expected.wide, rtol=0, atol=0, equal_nan=True)


def odd_rows(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows with an outlier, zeros, NaN, infinity, the tiniest numbers; the last one is like any other."""
    x = randn(7, size)
    x[0, 3] = 1000.0
    x[1] = 0.0
    x[2, 5] = NAN
    x[3, 6] = INFINITY
    x[4] = 1e-42
    x[5] *= 1e-30
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [1, 100, 128, 200, 1024, 1500])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_rounded_as_specified(name: str, size: int, dtype: torch.dtype) -> None:
    x = odd_rows(size + 8, dtype)[:, :size]  # rows out of wider ones
    assert_equal_rows(fp8_kernels.quantize_rows(x, FORMATS[name]), fp8.quantize_rows(x, FORMATS[name]))


@pytest.mark.parametrize("has_sum_weight", [False, True])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("size", [96, 128, 320])
@pytest.mark.parametrize("name", FORMATS)
def test_a_norm_in_fp8_is_the_norm_rounded(name: str, size: int, num_splits: int, has_sum_weight: bool) -> None:
    x, residual = randn(num_splits, 5, size), randn(5, size, seed=1)
    weight, sum_weight = randn(size, seed=2), randn(size, seed=3) if has_sum_weight else None
    others = randn(2, 5, size, seed=4) if num_splits == 3 else None
    residual[3, 7] = NAN
    arguments = x, residual, weight, 1e-6, sum_weight
    out, total = norm_kernels.add_rms_norm_to_fp8(*arguments, FORMATS[name], others)
    wide, expected_total = norm_kernels.add_rms_norm(*arguments, others)
    torch.testing.assert_close(total, expected_total, rtol=0, atol=0, equal_nan=True)
    assert_equal_rows(out, fp8.quantize_rows(wide, FORMATS[name]))
    specified, _ = norms.add_rms_norm_to_fp8(*arguments, FORMATS[name], others)
    torch.testing.assert_close(dequantize_rows(out), dequantize_rows(specified), rtol=0.13, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("size", [40, 128, 300, 1100])
@pytest.mark.parametrize("keeps_wide", [False, True])
@pytest.mark.parametrize("name", ["group", "static"])
@pytest.mark.parametrize("function", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations_in_fp8_are_rounded_as_specified(
    function: str, name: str, keeps_wide: bool, size: int
) -> None:
    gate_up, row_format = 3 * randn(5, 2 * size), replace(FORMATS[name], keeps_wide=keeps_wide)
    gate_up[2] = 0.0
    kernel, specified = getattr(gated_activation, function), getattr(activations, function)
    assert_equal_rows(kernel(gate_up, row_format), fp8.quantize_rows(kernel(gate_up), row_format))
    actual, expected = kernel(gate_up, row_format), specified(gate_up, row_format)
    torch.testing.assert_close(dequantize_rows(actual), dequantize_rows(expected), rtol=0.13, atol=1e-3)


@pytest.mark.parametrize("group_size", [256, 384, 2048, 1536])
def test_equal_shares_of_a_row_have_a_scale_each(group_size: int) -> None:
    shares = RowFormat(group_size=group_size)
    x = odd_rows(4 * group_size)
    assert_equal_rows(fp8_kernels.quantize_rows(x, shares), fp8.quantize_rows(x, shares))
    silu_and_mul = gated_activation.silu_and_mul
    gate_up = 3 * randn(3, 4 * group_size)
    rows = silu_and_mul(gate_up, shares)
    assert_equal_rows(rows, fp8.quantize_rows(silu_and_mul(gate_up), shares))
    assert rows.scales.shape == (3, 2)
    torch.testing.assert_close(dequantize_rows(rows), silu_and_mul(gate_up), rtol=0.07, atol=1e-2)


def test_no_rows_are_rounded_to_no_rows() -> None:
    assert fp8_kernels.quantize_rows(randn(0, 64), RowFormat()).values.shape == (0, 64)
    assert gated_activation.silu_and_mul(randn(0, 64), FORMATS["group"]).values.shape == (0, 32)


# --- products ---


def rounded_product(
    num_tokens: int, depth: int, num_outputs: int, row_format: RowFormat, block_size: int | None
) -> tuple[Tensor, ...]:
    rows = fp8.quantize_rows(randn(num_tokens, depth), row_format)
    return (rows.values, rows.scales, *quantize_weight(randn(num_outputs, depth, seed=1), block_size))


@loops_are_interpreted
@pytest.mark.parametrize("block_size", [None, 128])
@pytest.mark.parametrize("name", ["token", "group", "static"])
@pytest.mark.parametrize(
    ("num_tokens", "depth", "num_outputs"), [(1, 128, 64), (5, 200, 100), (20, 384, 130), (70, 256, 16), (300, 144, 72)]
)
def test_a_product_equals_its_specification(
    num_tokens: int, depth: int, num_outputs: int, name: str, block_size: int | None
) -> None:
    operands = rounded_product(num_tokens, depth, num_outputs, FORMATS[name], block_size)
    bias = randn(num_outputs, seed=2)
    actual = fp8_kernels.fp8_product(*operands, bias, torch.float32)
    expected = fp8.fp8_product(*operands, bias, torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@loops_are_interpreted
@pytest.mark.parametrize("block_size", [None, 128])
@pytest.mark.parametrize("name", ["token", "group"])
def test_partial_sums_add_up_to_the_product(name: str, block_size: int | None) -> None:
    operands = rounded_product(9, 512, 80, FORMATS[name], block_size)
    terms = fp8_kernels.fp8_product(*operands, None, torch.float32, 4)
    assert terms.shape == (4, 9, 80)
    torch.testing.assert_close(terms, fp8.fp8_product(*operands, None, torch.float32, 4), rtol=1e-5, atol=1e-4)
    whole = fp8.fp8_product(*operands, None, torch.float32)
    torch.testing.assert_close(terms.sum(0, keepdim=True), whole, rtol=1e-5, atol=1e-3)


@loops_are_interpreted
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("num_tokens", [3, 150])
@pytest.mark.parametrize("group_size", [256, 384])
def test_a_product_of_rows_with_scales_of_shares_equals_its_specification(
    group_size: int, num_tokens: int, num_splits: int
) -> None:
    operands = rounded_product(num_tokens, 4 * group_size, 140, RowFormat(group_size=group_size), None)
    actual = fp8_kernels.fp8_product(*operands, None, torch.float32, num_splits)
    expected = fp8.fp8_product(*operands, None, torch.float32, num_splits)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-3)


@loops_are_interpreted
def test_nan_and_infinity_spoil_their_own_rows_only() -> None:
    rows = fp8.quantize_rows(odd_rows(256), RowFormat())
    weight, scales = quantize_weight(odd_rows(256))
    out = fp8_kernels.fp8_product(rows.values, rows.scales, weight, scales, None, torch.float32)[0]
    spoiled = torch.zeros(7, 7, dtype=torch.bool)
    spoiled[2:4] = spoiled[:, 2:4] = True
    assert torch.equal(out.isfinite(), ~spoiled)
    assert (out[1][[0, 1, 4, 5, 6]] == 0).all()


@loops_are_interpreted
def test_bands_of_tiles_cover_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 tokens stand for those of 128."""
    tiling = fp8_kernels.Tiling(16, 64, True, 1, 1)
    monkeypatch.setattr(fp8_kernels, "choose_tiling", lambda num_tokens, device: tiling)
    monkeypatch.setattr(fp8_kernels, "TILES_IN_A_BAND", 3)
    for num_tokens in (16, 40, 48, 49, 130):
        operands = rounded_product(num_tokens, 128, 150, RowFormat(), None)
        actual = fp8_kernels.fp8_product(*operands, None, torch.float32)
        torch.testing.assert_close(actual, fp8.fp8_product(*operands, None, torch.float32), rtol=1e-5, atol=1e-4)


# --- experts ---


@loops_are_interpreted
@pytest.mark.parametrize("name", ["group", "static"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_choices", "hidden_size", "inner_size", "block_size"),
    [
        (1, 8, 2, 96, 80, None),
        (1, 4, 2, 256, 128, 128),
        (20, 6, 2, 200, 144, None),
        (40, 3, 2, 256, 256, 128),
        (150, 2, 1, 128, 128, None),
    ],
)
def test_experts_equal_their_specification(
    num_tokens: int,
    num_experts: int,
    num_choices: int,
    hidden_size: int,
    inner_size: int,
    block_size: int | None,
    name: str,
) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :num_choices].int().contiguous()
    ids[torch.rand(num_tokens, generator=generator) < 0.2] = num_experts
    weights = torch.rand(num_tokens, num_choices, generator=generator)
    rows = fp8.quantize_rows(randn(num_tokens, hidden_size), RowFormat(group_size=128 if block_size else None))
    gate_up = randn(num_experts, 2 * inner_size, hidden_size, seed=1) / hidden_size**0.5
    down = randn(num_experts, hidden_size, inner_size, seed=2) / inner_size**0.5
    both = (ExpertWeights(*quantize_weight(weight, block_size)) for weight in (gate_up, down))
    is_geglu = inner_size == 144  # of Gemma 4, with an inner size that is no multiple of 128
    arguments = (rows.values, rows.scales, *both, FORMATS[name], ids, weights, torch.float32, is_geglu)
    actual, expected = expert_kernels.fp8_expert_mlp(*arguments), expert_spec.fp8_expert_mlp(*arguments)
    # Where gate and up differ in their last bits, SwiGLU may be rounded to a neighbour in e4m3.
    torch.testing.assert_close(actual, expected, rtol=0.01, atol=0.01)
    assert (actual - expected).abs().mean() < 1e-4
    assert_experts_are_as_good_as_specified(actual, expected, unrounded_expert_mlp(*arguments))
    assert (actual[:, ids[:, 0] == num_experts] == 0).all()


def test_no_tokens_give_no_rows_of_experts() -> None:
    both = (ExpertWeights(*quantize_weight(randn(4, *shape))) for shape in ((48, 32), (32, 24)))
    rows = fp8.quantize_rows(randn(0, 32), RowFormat())
    ids, weights = torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, 2)
    out = expert_kernels.fp8_expert_mlp(rows.values, rows.scales, *both, FORMATS["group"], ids, weights, torch.float32)
    assert out.shape == (2, 0, 32)
    assert rows.values.dtype == FP8
