"""The kernels that Gemma 4 alone launches, in Triton's interpreter, against their specifications."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer.ops.activations.spec import gelu_tanh_times
from nanoinfer.ops.experts.spec import ExpertWeights, expert_mlp
from nanoinfer.ops.kv_cache import spec
from nanoinfer.ops.norms.spec import add_rms_norms, add_scaled_rms_norm
from tests.attention_cases import FP8, INT8

pytest.importorskip("triton")

from nanoinfer.ops.activations import triton as activation_kernels
from nanoinfer.ops.experts import triton as expert_kernels
from nanoinfer.ops.kv_cache import triton as cache_kernels
from nanoinfer.ops.norms import triton as norm_kernels
from tests.kernels.helpers import exact_bfloat16, exact_fp8, loops_are_interpreted

__all__ = ["exact_bfloat16", "exact_fp8"]
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"),
    pytest.mark.usefixtures("exact_fp8", "exact_bfloat16"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's NumPy warns of NaN
]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(store: Any, parts: str, dtype: torch.dtype, cache_dtype: torch.dtype, num_splits: int) -> list[Tensor]:
    """Return what a step of five tokens computes and stores. parts: of queries, keys and values, which qkv holds."""
    num_heads, num_kv_heads, head_dim, block_size = 3, 2, 48, 16
    num_all_heads = {"q": 3, "qk": 5, "qkv": 7}[parts]
    qkv = randn(num_splits, 5, num_all_heads * head_dim, dtype=dtype)
    qkv = qkv if num_splits > 1 else qkv[0]
    sizes = 3, num_kv_heads, block_size, head_dim
    tensors = [torch.full(sizes, -7.0).to(cache_dtype) for _ in "kv"]
    tensors += [torch.full(sizes[:-1], -7.0) for _ in "kv"] if cache_dtype.itemsize == 1 else []
    weights = 1 + 0.2 * randn(2, head_dim, seed=1)
    slots, positions = torch.tensor([33, -1, 0, 15, 47]), torch.tensor([0, 7, 31, 2, 1])
    table = torch.arange(32 * head_dim).view(32, head_dim).float().sin()
    k_weight = weights[1] if "k" in parts else None
    cache = spec.LayerCache(*tensors)
    results = store(qkv, num_heads, weights[0], k_weight, 1e-6, positions, table, cache, slots)
    return [*(result for result in results if result is not None), *tensors]


@pytest.mark.parametrize(("num_splits", "tokens_at_once"), [(1, 1), (2, 1), (1, 4)])
@pytest.mark.parametrize("cache_dtype", [None, INT8, FP8])
@pytest.mark.parametrize("parts", ["q", "qk", "qkv"])
def test_queries_keys_and_values_are_normalised_and_stored_as_by_the_specification(
    parts: str, cache_dtype: torch.dtype | None, num_splits: int, tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_kernels, "MANY_TOKENS", 5)
    monkeypatch.setattr(cache_kernels, "TOKENS_AT_ONCE", tokens_at_once)
    dtype = torch.bfloat16 if cache_dtype is None else torch.float32
    options = parts, dtype, cache_dtype or dtype, num_splits
    expected = stored(spec.qkv_norm_rope_store.__wrapped__, *options)
    actual = stored(cache_kernels.qkv_norm_rope_store, *options)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        if ours.dtype in (INT8, FP8):  # rounding may decide otherwise where a number lies between two
            assert (ours.float() - theirs.float()).abs().max() <= (1 if ours.dtype == INT8 else 32)
            assert (ours.float() == theirs.float()).float().mean() > 0.99
        else:
            torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(ours.dtype).eps, atol=1e-6)
    if parts == "q":
        assert (actual[1].float() == -7.0).all(), "nothing is stored"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_sum_weight", [False, True])
def test_a_sum_that_is_scaled_and_normalised_equals_its_specification(dtype: torch.dtype, has_sum_weight: bool) -> None:
    x, residual = randn(2, 5, 100, dtype=dtype), randn(5, 120, seed=1, dtype=dtype)[:, :100]
    weight, sum_weight = 1 + 0.2 * randn(2, 100, seed=2)
    arguments = x, residual, weight, 1e-5, sum_weight if has_sum_weight else None, torch.tensor([0.37], dtype=dtype)
    actual, expected = norm_kernels.add_scaled_rms_norm(*arguments), add_scaled_rms_norm.__wrapped__(*arguments)
    tolerance = 4 * torch.finfo(dtype).eps
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert [len(part) for part in norm_kernels.add_scaled_rms_norm(x[:, :0], residual[:0], *arguments[2:])] == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_scale", [False, True])
def test_two_sums_that_are_normalised_and_added_equal_their_specification(dtype: torch.dtype, has_scale: bool) -> None:
    """Sums of two parts and of three, as the MLP and the experts leave them."""
    x, other = randn(2, 5, 100, dtype=dtype), randn(3, 5, 100, seed=4, dtype=dtype)
    residual = randn(5, 120, seed=1, dtype=dtype)[:, :100]
    weight, sum_weight, x_weight, other_weight = 1 + 0.2 * randn(4, 100, seed=2)
    scale = torch.tensor([0.37], dtype=dtype) if has_scale else None
    arguments = x, residual, weight, 1e-5, sum_weight, scale, other, (x_weight, other_weight)
    actual, expected = norm_kernels.add_scaled_rms_norm(*arguments), add_scaled_rms_norm.__wrapped__(*arguments)
    tolerance = 4 * torch.finfo(dtype).eps
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    turned = norm_kernels.add_scaled_rms_norm(*arguments[:-1], (other_weight, x_weight))
    assert not torch.allclose(turned[1], expected[1], atol=0.01), "each part has a weight of its own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_three_norms_of_a_sum_equal_their_specification(dtype: torch.dtype, num_splits: int) -> None:
    x, residual = randn(num_splits, 5, 100, dtype=dtype), randn(5, 120, seed=1, dtype=dtype)[:, :100]
    *weights, sum_weight = 1 + 0.2 * randn(4, 100, seed=2)
    arguments = x, residual, tuple(weights), 1e-5, sum_weight
    actual, expected = norm_kernels.add_rms_norms(*arguments), add_rms_norms.__wrapped__(*arguments)
    tolerance = 4 * torch.finfo(dtype).eps
    for ours, theirs in zip((*actual[0], actual[1]), (*expected[0], expected[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert norm_kernels.add_rms_norms(x[:, :0], residual[:0], *arguments[2:])[1].shape == (0, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_times_factors_equals_its_specification(dtype: torch.dtype) -> None:
    """With the factors of one layer among those of others, as tokens have them."""
    gate, factors = randn(5, 24, dtype=dtype), randn(5, 3, 24, seed=1, dtype=dtype)[:, 1]
    found, expected = activation_kernels.gelu_tanh_times(gate, factors), gelu_tanh_times.__wrapped__(gate, factors)
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    assert activation_kernels.gelu_tanh_times(gate[:0], factors[:0]).shape == (0, 24)


@loops_are_interpreted
@pytest.mark.parametrize(("num_tokens", "dtype"), [(3, torch.float16), (40, torch.float16), (20, torch.float32)])
def test_experts_with_geglu_equal_their_specification(num_tokens: int, dtype: torch.dtype) -> None:
    gate_up, down = randn(4, 2 * 24, 32, seed=1, dtype=dtype) / 4, randn(4, 32, 24, seed=2, dtype=dtype) / 4
    x, ids = randn(num_tokens, 32, dtype=dtype), torch.randint(0, 5, (num_tokens, 2), dtype=torch.int32)
    arguments = x, ExpertWeights(gate_up), ExpertWeights(down), ids, torch.rand(num_tokens, 2), None
    actual, expected = expert_kernels.expert_mlp(*arguments, True), expert_mlp.__wrapped__(*arguments, True)
    torch.testing.assert_close(actual, expected, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
    assert not torch.allclose(actual, expert_mlp.__wrapped__(*arguments, False), atol=1e-2), "SwiGLU differs"
