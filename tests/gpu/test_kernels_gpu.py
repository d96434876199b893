"""Each Triton kernel, compiled for the GPU, against its PyTorch specification."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.device import host_array
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.prefix_sharers import PrefixSharers
from nanoinfer.engine.token_masks import RowMasks
from nanoinfer.layers.attention.backend import AttentionBackend, AttentionSpec
from nanoinfer.layers.attention.metadata import DecodeMetadata, SharedPrefixes
from nanoinfer.layers.linear import RowParallelLinear
from nanoinfer.ops.activations.spec import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from nanoinfer.ops.block_tables.spec import copy_tokens, read_rows
from nanoinfer.ops.filter_threshold.spec import thresholds
from nanoinfer.ops.gumbel_max.spec import (
    best_candidates,
    enter_counted,
    line_tables,
    sample,
    sample_and_append,
    sample_at,
)
from nanoinfer.ops.kv_cache.spec import LayerCache, norm_rope_store
from nanoinfer.ops.logits.spec import cap_logits, forbid_tokens, logit_statistics
from nanoinfer.ops.norms.spec import add_layer_norm, add_rms_norm, rms_norm
from nanoinfer.sampling.mask_processors import MaskSender
from tests.attention_cases import (
    DECODE_CASES,
    FP8,
    INT8,
    PREFILL_CASES,
    SEVERAL_TOKENS_CASES,
    SHARED_CASES,
    Layer,
    Step,
    assert_close,
    random_step,
    shared_prefixes,
)

pytestmark = pytest.mark.gpu


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def random_cache(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> LayerCache:
    return LayerCache(*(randn(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype) for _ in "kv"))


def random_draws(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Temperatures, every fourth 0, seeds and positions."""
    temperatures = torch.rand(num_rows, device="cuda") * 2
    temperatures[::4] = 0
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), device="cuda")
    return temperatures, seeds, torch.randint(0, 40000, (num_rows,), dtype=torch.int32, device="cuda")


def assert_nearly_equal(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the last bit of a few elements: sums are taken in another order, and quotients rounded."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    expected = expected.cuda()
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=4 * eps, atol=16 * eps)
    if actual.dtype != torch.float32 and actual.numel() > 10_000:
        assert (actual != expected).float().mean() < 0.01


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = [1, 7, 2048]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", [96, 1000, 1024, 2560, 4096, 5120, 8192])
def test_rms_norm_equals_its_specification_on_the_cpu(size: int, num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = (randn(num_rows, size + 8, dtype=dtype)[:, :size] for _ in range(2))
    weight = randn(size, dtype=dtype)
    unchanged = x.clone(), residual.clone()
    on_cpu = x.cpu(), residual.cpu()
    assert_nearly_equal(rms_norm(x, weight, 1e-6), rms_norm(on_cpu[0], weight.cpu(), 1e-6))
    in_place = torch.cat([x, residual], dim=1)  # as the queries lie beside the keys
    rms_norm(in_place[:, :size], weight, 1e-6, out=in_place[:, :size])
    assert torch.equal(in_place, torch.cat([rms_norm(x, weight, 1e-6), residual], dim=1))
    out, total = add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_total = add_rms_norm(*on_cpu, weight.cpu(), 1e-6)
    assert_nearly_equal(out, expected)
    assert torch.equal(total, expected_total.cuda())
    assert torch.equal(x, unchanged[0])
    assert torch.equal(residual, unchanged[1])


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", [96, 768, 1000, 4096])
def test_add_layer_norm_equals_its_specification(size: int, num_rows: int, dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, residual = randn(num_rows, size, dtype=dtype), randn(num_rows, size, dtype=dtype)
    weight, bias = randn(size, dtype=dtype), randn(size, dtype=dtype) if has_bias else None
    expected_total = torch.empty_like(x)
    expected = add_layer_norm.__wrapped__(x, residual, weight, bias, 1e-5, expected_total)
    assert_nearly_equal(add_layer_norm(x, residual, weight, bias, 1e-5), expected)
    assert_nearly_equal(add_layer_norm(x, residual, weight, bias, 1e-5, total=x), expected)
    assert torch.equal(x, expected_total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "num_terms"), [(1000, 1), (4096, 2), (12288, 5)])
def test_a_norm_that_subtracts_the_mean_equals_its_specification(size: int, num_terms: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    terms, residual, weight = randn(num_terms, 300, size, dtype=dtype), randn(300, size, dtype=dtype), randn(size)
    out, total = add_rms_norm(terms, residual, weight, 1e-5, centres=True)
    expected, expected_total = add_rms_norm(terms.cpu(), residual.cpu(), weight.cpu(), 1e-5, centres=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(total, expected_total.cuda(), rtol=2 * eps, atol=4 * eps)
    torch.testing.assert_close(out, expected.cuda(), rtol=4 * eps, atol=16 * eps)
    torch.testing.assert_close(rms_norm(total, weight, 1e-5, centres=True), out, rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize(
    ("num_tokens", "num_splits", "dtype"),
    [*((n, 4, torch.bfloat16) for n in (1, 7, 256)), (257, 1, torch.bfloat16), (7, 1, torch.float16)],
)
def test_a_row_parallel_product_of_few_tokens_is_split_over_k(
    num_tokens: int, num_splits: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = RowParallelLinear(3072, 1024, bias=False, tp=TensorParallel()).to("cuda", dtype)
    layer.weight.data = randn(1024, 3072, dtype=dtype) * 0.02
    x, residual = randn(num_tokens, 3072, dtype=dtype), randn(num_tokens, 1024, dtype=dtype)
    weight = randn(1024, dtype=dtype)
    terms = layer(x).terms
    assert len(terms) == num_splits
    whole = x.float() @ layer.weight.float().t() + residual.float()
    out, total = add_rms_norm(terms, residual, weight, 1e-6)
    torch.testing.assert_close(total.float(), whole, rtol=2 * torch.finfo(dtype).eps, atol=0.02)
    assert_nearly_equal(out, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", [640, 1152, 5376])
def test_norms_with_float32_weights_also_of_the_sum_equal_their_specifications_on_the_cpu(
    size: int, num_rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    terms, residual = randn(4, num_rows, size, dtype=dtype), randn(num_rows, size, dtype=dtype)
    weight, sum_weight = 1 + 0.3 * randn(size), 1 + 0.3 * randn(size)
    on_cpu = terms.cpu(), residual.cpu(), weight.cpu()
    assert_nearly_equal(rms_norm(residual, weight, 1e-6), rms_norm(*on_cpu[1:], 1e-6))
    out, total = add_rms_norm(terms, residual, weight, 1e-6, sum_weight)
    _, expected_total = add_rms_norm(*on_cpu, 1e-6, sum_weight.cpu())
    assert_nearly_equal(total, expected_total)
    assert_nearly_equal(out, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", ROWS)
@pytest.mark.parametrize("size", [160, 1001, 3072, 12288])
def test_gated_activations_equal_their_specifications_on_the_cpu(
    size: int, num_tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    gate_up = 3 * randn(num_tokens, 2 * size, dtype=dtype)
    assert_nearly_equal(silu_and_mul(gate_up), silu_and_mul(gate_up.cpu()))
    # PyTorch's GELU loses digits where the gate is nearly closed, and the logistic function loses none.
    gate, up = gate_up.cpu().chunk(2, dim=-1)
    wide = gate.double()
    exact = wide * torch.sigmoid((8 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    torch.testing.assert_close(exact, F.gelu(wide, approximate="tanh"), rtol=1e-3, atol=1e-12)
    assert_nearly_equal(gelu_tanh_and_mul(gate_up), exact.to(dtype) * up)
    # Of the error function both lose digits there.
    found, specification = gelu_and_mul(gate_up).cpu(), gelu_and_mul(gate_up.cpu())
    torch.testing.assert_close(found, specification, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", ROWS)
@pytest.mark.parametrize("norms", [None, "in the dtype of the heads", "in float32"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [
        (16, 8, 128, 128),
        (32, 8, 128, 128),
        (24, 8, 128, 96),
        (8, 2, 64, 64),
        (10, 5, 96, 72),
        (9, 3, 80, 80),
        (3, 1, 256, 256),
        (2, 1, 100, 100),
    ],
)
def test_norm_rope_store_equals_its_specification_on_the_cpu(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    norms: str | None,
    num_tokens: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    qkv = 3 * randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    weights = weights_on_cpu = None
    if norms:
        weight_dtype = torch.float32 if norms == "in float32" else dtype
        weights = tuple(1 + 0.3 * randn(head_dim, dtype=weight_dtype) for _ in "qk")
        weights_on_cpu = tuple(weight.cpu() for weight in weights)
    angles = torch.randn(5000, rotary_dim // 2, device="cuda")
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(0, 5000, (num_tokens,), device="cuda")
    slots = torch.randperm(320 * 16, device="cuda")[:num_tokens]
    slots[::7] = -1
    expected_cache = random_cache(320, num_kv_heads, 16, head_dim, dtype)
    cache = LayerCache(expected_cache.k.clone(), expected_cache.v.clone())
    expected_cache = LayerCache(expected_cache.k.cpu(), expected_cache.v.cpu())
    on_cpu = qkv.cpu(), weights_on_cpu, 1e-6, positions.cpu(), table.cpu()
    expected = norm_rope_store(*on_cpu, expected_cache, slots.cpu())
    actual = norm_rope_store(qkv, weights, 1e-6, positions, table, cache, slots)
    written, expected_written = (cache.k, cache.v), (expected_cache.k, expected_cache.v)
    for ours, specification in zip((*actual, *written), (*expected, *expected_written), strict=True):
        assert_nearly_equal(ours, specification)
    q, k, v = actual
    assert torch.equal(v, expected[2].cuda())
    kept = slots >= 0
    blocks, offsets = slots[kept] // 16, slots[kept] % 16
    assert torch.equal(cache.k[blocks, :, offsets], k[kept])
    assert torch.equal(cache.v[blocks, :, offsets], v[kept])
    assert q.data_ptr() == qkv.data_ptr(), "in place"


@pytest.mark.parametrize("num_splits", [2, 4])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 128), (3, 1, 256), (9, 3, 80)])
def test_partial_sums_of_queries_keys_and_values_are_added_up_as_by_the_specification(
    num_heads: int, num_kv_heads: int, head_dim: int, num_splits: int
) -> None:
    torch.manual_seed(0)
    qkv = 3 * randn(num_splits, 200, (num_heads + 2 * num_kv_heads) * head_dim, dtype=torch.bfloat16)
    weights = randn(head_dim, dtype=torch.bfloat16), randn(head_dim, dtype=torch.bfloat16)
    angles = torch.randn(200, head_dim // 2)
    table, positions, slots = (
        torch.cat([angles.cos(), angles.sin()], dim=1),
        torch.arange(200),
        torch.randperm(208)[:200],
    )
    cache = random_cache(13, num_kv_heads, 16, head_dim, torch.bfloat16)
    on_cpu = LayerCache(cache.k.cpu(), cache.v.cpu())
    weights_on_cpu = weights[0].cpu(), weights[1].cpu()
    expected = norm_rope_store(qkv.cpu(), weights_on_cpu, 1e-6, positions, table, on_cpu, slots)
    inputs = qkv, weights, 1e-6, positions.cuda(), table.cuda(), cache, slots.cuda()
    actual = norm_rope_store(*inputs)
    for ours, specification in zip((*actual, cache.k, cache.v), (*expected, on_cpu.k, on_cpu.v), strict=True):
        assert_nearly_equal(ours, specification)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (80, 80), (256, 96)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbouring_dimensions_are_rotated_together_as_by_the_specification(
    head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    qkv, angles = 3 * randn(200, 12 * head_dim, dtype=dtype), torch.randn(200, rotary_dim // 2)
    table, positions = torch.cat([angles.cos(), angles.sin()], dim=1), torch.arange(200)
    cache = random_cache(13, 2, 16, head_dim, dtype)
    on_cpu = LayerCache(cache.k.cpu(), cache.v.cpu())
    inputs = qkv.cpu(), None, 1e-6, positions, table, on_cpu, positions
    expected = norm_rope_store(*inputs, interleaved=True)
    inputs = qkv, None, 1e-6, positions.cuda(), table.cuda(), cache, positions.cuda()
    actual = norm_rope_store(*inputs, interleaved=True)
    for ours, specification in zip((*actual, cache.k, cache.v), (*expected, on_cpu.k, on_cpu.v), strict=True):
        assert_nearly_equal(ours, specification)


def test_norm_rope_store_reaches_slots_past_two_to_the_31_elements() -> None:
    num_blocks = 2**31 // (256 * 8 * 128) + 8  # 4 GiB of keys and as many of values
    cache = LayerCache(*(torch.zeros(num_blocks, 8, 256, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)))
    qkv, table = randn(1, 32 * 128, dtype=torch.bfloat16), torch.ones(1, 128, device="cuda")
    position, slot = torch.tensor([0], device="cuda"), torch.tensor([num_blocks * 256 - 1], device="cuda")
    _, k, v = norm_rope_store(qkv, None, 1e-6, position, table, cache, slot)
    assert torch.equal(cache.k[-1, :, -1], k[0])
    assert torch.equal(cache.v[-1, :, -1], v[0])
    assert cache.k.count_nonzero() == k.count_nonzero()


# --- attention ---

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="needs a GPU of compute capability 8.9")
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SIXTEEN_BITS = [torch.bfloat16, torch.float16]
KINDS = {
    "prefill": PREFILL_CASES,
    "decode": DECODE_CASES,
    "shared": SHARED_CASES,
    "several tokens a row": SEVERAL_TOKENS_CASES,
}
ATTENTION_CASES = {f"{kind}, {name}": case for kind, cases in KINDS.items() for name, case in cases.items()}


def triton_backend(spec: AttentionSpec) -> AttentionBackend:
    from nanoinfer.layers.attention.triton import TritonBackend

    return TritonBackend(spec)


def assert_attention_equals_its_specification(step: Step) -> Tensor:
    """The kernels' result; rows without a context are zero."""
    out = step.assert_equals_specification(triton_backend(step.spec))
    if isinstance(step.metadata, DecodeMetadata):
        assert not out.unflatten(0, (-1, step.metadata.num_tokens))[step.metadata.context_lens == 0].any()
    return out


def on_gpu(group_size: int, head_dim: int = 128, num_kv_heads: int = 8, block_size: int = 256) -> Layer:
    return Layer(group_size, head_dim, num_kv_heads, block_size, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention_equals_its_specification(name: str, dtype: torch.dtype) -> None:
    assert_attention_equals_its_specification(ATTENTION_CASES[name].step(device="cuda", dtype=dtype))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize(
    ("head_dim", "group_size"),
    [(128, 1), (128, 2), (128, 5), (128, 16), (64, 2), (64, 8), (80, 64), (96, 4), (256, 2), (256, 8)],
)
@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_decode_and_prefill_of_any_sizes_equal_their_specification(
    dtype: torch.dtype, head_dim: int, group_size: int, block_size: int
) -> None:
    layer = replace(on_gpu(group_size, head_dim, 2, block_size), dtype=dtype)
    lens = [0, 1, 15, 16, 17, block_size - 1, block_size, block_size + 1, 700]
    assert_attention_equals_its_specification(random_step(layer, lens))
    query_lens = [max(1, length // 3) for length in lens[1:]]
    assert_attention_equals_its_specification(random_step(layer, lens[1:], query_lens))


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("group_size", [2, 5])
def test_a_long_prefill_equals_its_specification(group_size: int, window: int | None) -> None:
    layer = replace(on_gpu(group_size), window=window)
    assert_attention_equals_its_specification(random_step(layer, [3000, 5000, 4096], [3000, 700, 1]))


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group_size", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("block_size", [128, 256])
def test_hoppers_own_prefill_equals_its_specification(
    group_size: int, head_dim: int, block_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also tiles of which one half is empty, and NaN past the contexts; twice, since the kernel resets its counters."""
    from nanoinfer.layers.attention import triton

    monkeypatch.setattr(triton, "LONG_CONTEXT", 0)
    layer = replace(on_gpu(group_size, head_dim, 2, block_size), dtype=dtype)
    backend = triton.TritonBackend(layer.spec, has_hopper_kernel=True)
    for context_lens, query_lens in [
        ([1], [1]),
        ([1, 127, 128, 129, 255, 256, 257], [1, 127, 1, 129, 2, 256, 3]),
        ([3000, 5000, 4096, 640], [3000, 700, 1, 65]),
        ([40] * 300, [40] * 300),
    ]:
        step = random_step(layer, context_lens, query_lens)
        assert torch.equal(step.assert_equals_specification(backend), step.run(backend)), "equal steps give equal bits"


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
def test_a_prompt_of_nan_spoils_no_other_on_hopper() -> None:
    from nanoinfer.layers.attention import triton

    step = random_step(on_gpu(4), [2000] * 4, [2000] * 4)
    backend = triton.TritonBackend(step.spec, has_hopper_kernel=True)
    expected = step.run(backend)
    step.q[2000:4000] = float("nan")
    actual = step.run(backend)
    assert actual[2000:4000].isnan().all()
    assert torch.equal(actual[:2000], expected[:2000])
    assert torch.equal(actual[4000:], expected[4000:])


@pytest.mark.parametrize("group_size", [2, 5])
@pytest.mark.parametrize(
    ("num_rows", "longest"), [(1, 32_000), (1, 1), (3, 9000), (8, 2048), (40, 1024), (200, 600), (600, 300)]
)
def test_contexts_cut_between_programs_equal_their_specification(num_rows: int, longest: int, group_size: int) -> None:
    context_lens = torch.randint(0, longest, (num_rows,), generator=torch.Generator().manual_seed(0)).tolist()
    step = random_step(on_gpu(group_size), [*context_lens[:-1], longest])
    actual, backend = assert_attention_equals_its_specification(step), triton_backend(step.spec)
    for _ in range(20):
        assert torch.equal(step.run(backend), actual), "equal steps give equal bits"


SEVERAL_TOKENS = pytest.mark.parametrize(
    ("group_size", "num_tokens"), [(1, 2), (1, 8), (2, 3), (4, 2), (4, 8), (5, 3), (8, 5), (8, 8), (4, 16)]
)


@pytest.mark.parametrize("cache_dtype", [None, INT8, pytest.param(FP8, marks=needs_fp8)], ids=["16", "int8", "fp8"])
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize(("num_rows", "longest"), [(1, 32_000), (3, 9000), (40, 1024), (200, 600)])
@SEVERAL_TOKENS
def test_rows_of_several_tokens_cut_between_programs_equal_their_specification(
    group_size: int,
    num_tokens: int,
    num_rows: int,
    longest: int,
    window: int | None,
    cache_dtype: torch.dtype | None,
) -> None:
    generator = torch.Generator().manual_seed(0)
    context_lens = [*torch.randint(0, longest, (num_rows - 1,), generator=generator).tolist(), longest]
    row_tokens = [*torch.randint(1, num_tokens + 1, (num_rows - 1,), generator=generator).tolist(), num_tokens]
    layer = replace(on_gpu(group_size), window=window, cache_dtype=cache_dtype)
    step = random_step(layer, context_lens, num_row_tokens=row_tokens)
    actual, backend = assert_attention_equals_its_specification(step), triton_backend(step.spec)
    for _ in range(5):
        assert torch.equal(step.run(backend), actual), "equal steps give equal bits"


def relative_error(step: Step) -> float:
    """The error against float32 arithmetic on the same inputs."""
    actual, expected = step.run(triton_backend(step.spec)).float(), step.run_specification()
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("cache_dtype", [None, INT8, pytest.param(FP8, marks=needs_fp8)], ids=["16", "int8", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@SEVERAL_TOKENS
def test_several_tokens_a_row_are_as_exact_as_one(
    group_size: int, num_tokens: int, head_dim: int, cache_dtype: torch.dtype | None
) -> None:
    layer = replace(on_gpu(group_size, head_dim), scale=head_dim**-0.5, cache_dtype=cache_dtype)
    # No short contexts: a token that attends to itself alone is exact, and only single steps would have such tokens.
    lens = torch.randint(200, 2000, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    error = relative_error(random_step(layer, lens, num_row_tokens=[num_tokens] * len(lens)))
    assert error < min(4e-3, 1.2 * relative_error(random_step(layer, lens)))


@pytest.mark.parametrize(("group_size", "head_dim"), [(2, 128), (4, 128), (7, 64), (2, 256), (8, 256)])
@pytest.mark.parametrize("num_tokens", [2, 4, 8])
def test_rows_of_several_tokens_that_share_2048_get_what_each_gets_alone(
    group_size: int, head_dim: int, num_tokens: int
) -> None:
    """As `test_256_rows_that_share_2048_tokens_get_what_each_gets_alone`, with fewer rows a group."""
    num_rows, most = 64, 64 // (group_size * num_tokens)
    groups = [PrefixSharers(first, min(most, 60 - first), 8) for first in range(0, 60, most)]
    own_lens = torch.randint(1, 600, (num_rows,), generator=torch.Generator().manual_seed(0))
    context_lens = [2048 * (row < 60) + length for row, length in enumerate(own_lens.tolist())]
    row_tokens = [num_tokens, 1, *[num_tokens] * (num_rows - 2)]
    one_prefix = [PrefixSharers(0, 60, 8)]
    step = random_step(on_gpu(group_size, head_dim), context_lens, None, one_prefix, num_row_tokens=row_tokens)
    step.metadata = replace(step.metadata, shared_prefixes=shared_prefixes(groups, num_rows, "cuda"))
    assert_attention_equals_its_specification(step)


def test_a_row_of_nan_spoils_no_other() -> None:
    context_lens = torch.randint(513, 2048, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    for groups in ([], [PrefixSharers(0, 32, 2), PrefixSharers(32, 20, 1)]):
        step = random_step(on_gpu(2), context_lens, prefix_sharers=groups)
        backend = triton_backend(step.spec)
        expected = step.run(backend)
        step.q[::2] = float("nan")
        actual = step.run(backend)
        assert actual[::2].isnan().all()
        assert torch.equal(actual[1::2], expected[1::2])


@pytest.mark.parametrize("one_prefix", [True, False], ids=["one prefix for all", "a prefix for each group"])
@pytest.mark.parametrize(("group_size", "head_dim"), [(2, 128), (4, 128), (7, 64), (2, 256), (8, 256)])
def test_256_rows_that_share_2048_tokens_get_what_each_gets_alone(
    group_size: int, head_dim: int, one_prefix: bool
) -> None:
    """Eight blocks are shared by as many rows as a group may have, and the last rows share nothing."""
    layer = on_gpu(group_size, head_dim)
    num_rows, backend = 256, triton_backend(layer.spec)
    most = backend.max_prefix_sharers
    assert most == 64 // group_size
    groups = [PrefixSharers(first, min(most, 250 - first), 8) for first in range(0, 250, most)]
    own_lens = torch.randint(1, 600, (num_rows,), generator=torch.Generator().manual_seed(0))
    context_lens = [2048 * (row < 250) + length for row, length in enumerate(own_lens.tolist())]
    step = random_step(layer, context_lens, prefix_sharers=[PrefixSharers(0, 250, 8)] if one_prefix else groups)
    shared = shared_prefixes(groups, num_rows, "cuda")
    step.metadata = replace(step.metadata, shared_prefixes=shared)
    actual = assert_attention_equals_its_specification(step)
    for _ in range(20):
        assert torch.equal(step.run(backend), actual), "equal steps give equal bits"


def tensors_of(step: Step) -> list[Tensor]:
    """What a captured decode step reads."""
    metadata = step.metadata
    assert isinstance(metadata, DecodeMetadata)
    assert metadata.shared_prefixes is not None
    tables = metadata.context_lens, metadata.block_tables, *metadata.shared_prefixes
    return [step.q, step.cache.k, step.cache.v, *tables]


@pytest.mark.parametrize("group_size", [2, 7])
def test_a_captured_step_reads_other_groups_when_it_is_replayed(group_size: int) -> None:
    """Captured on padding alone, as the engine does; the third step has no groups, and the fourth half its rows."""
    num_rows, layer, longest = 32, on_gpu(group_size), 900
    some = torch.randint(520, longest, (4, num_rows), generator=torch.Generator().manual_seed(0)).tolist()
    kinds = [
        (some[0], [PrefixSharers(0, 9, 2), PrefixSharers(9, 8, 1)]),
        (some[1], [PrefixSharers(0, 4, 1), PrefixSharers(4, 9, 2), PrefixSharers(13, 2, 2)]),
        (some[2], []),
        ([*some[3][:16], *[0] * 16], [PrefixSharers(0, 8, 2), PrefixSharers(8, 2, 1)]),
    ]
    steps = []
    for seed, (lens, groups) in enumerate(kinds):
        step = random_step(layer, [longest, *lens[1:]], prefix_sharers=groups, seed=seed)
        shared = shared_prefixes(groups, num_rows, "cuda")
        step.metadata = replace(step.metadata, shared_prefixes=shared)
        steps.append(step)

    sizes = (max(len(step.cache.k) for step in steps), *steps[0].cache.k.shape[1:])
    cache = LayerCache(*(torch.zeros(sizes, dtype=layer.dtype, device="cuda") for _ in "kv"))
    none = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    tables = torch.zeros_like(steps[0].metadata.block_tables)
    padding = DecodeMetadata(none.long() - 1, none.clone(), tables, SharedPrefixes(none.clone(), none.clone()))
    static = replace(steps[0], q=torch.zeros_like(steps[0].q), cache=cache, metadata=padding)
    backend = triton_backend(layer.spec)
    static.run(backend)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static.run(backend)
    for step in [*steps, steps[0]]:
        for target, origin in zip(tensors_of(static), tensors_of(step), strict=True):
            target[: len(origin)].copy_(origin)
        graph.replay()
        has_context = step.metadata.context_lens > 0
        assert_close(out[has_context], step.run_specification()[has_context])
        assert not out[~has_context].any()


def sample_by_kernel(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The kernel's ids, from tables of as many rows, in which they must be found."""
    rows = torch.arange(len(logits), device="cuda")
    token_ids = torch.zeros(len(rows), int(positions.max()) + 1, dtype=torch.int32, device="cuda")
    context_lens = positions.int().clone()
    ids = sample_and_append(logits, None, rows, temperatures, seeds, token_ids, context_lens)
    assert torch.equal(context_lens, positions.int() + 1)
    assert torch.equal(token_ids[rows, positions.long()], ids.clamp(min=0))
    return ids


@pytest.mark.parametrize("vocab_size", [1000, 1003, 4096, 151936])
def test_sampling_equals_its_specification(vocab_size: int) -> None:
    torch.manual_seed(0)
    logits, arguments = 3 * randn(64, vocab_size), random_draws(64)
    for dtype in (torch.float32, torch.bfloat16):
        actual = sample_by_kernel(logits.to(dtype), *arguments)
        expected = sample(logits.to(dtype), *arguments)
        assert torch.equal(actual[::4], logits.to(dtype)[::4].argmax(1).int())
        assert (actual == expected).float().mean() > 0.98  # logarithms differ in the last bit: near ties may flip


@pytest.mark.parametrize("num_tokens", [2, 3, 8])
def test_lines_are_drawn_at_their_positions_and_counted_as_the_specification_says(num_tokens: int) -> None:
    torch.manual_seed(0)
    temperatures, seeds, lens = random_draws(100)
    lens = lens.int()
    rows, counts = torch.randperm(100, device="cuda")[:64], torch.randint(1, num_tokens + 1, (64,), device="cuda").int()
    arguments = rows, counts, num_tokens, temperatures, seeds, lens
    tables, expected = line_tables(*arguments), line_tables.__wrapped__(*arguments)
    for mine, theirs in zip(tables, expected, strict=True):
        assert torch.equal(mine, theirs)
    logits = (3 * randn(64 * num_tokens, 151936)).bfloat16()
    logits[num_tokens + 1] = torch.nan
    ids = sample_at(logits, None, *tables)
    drawn = tables.rows >= 0
    assert torch.equal((ids >= 0), drawn & logits.isfinite().all(1))
    single = sample_by_kernel(logits[drawn], *(part[drawn] for part in tables[1:]))
    assert torch.equal(ids[drawn], single), "a line is drawn as a row of its own is"
    drawn_ids = ids.view(64, num_tokens)
    proposals = drawn_ids[:, :-1].clamp(min=0)
    proposals[::2, torch.randint(0, num_tokens - 1, (32,))] += 1
    results = []
    for function in (enter_counted, enter_counted.__wrapped__):
        token_ids, context_lens = torch.zeros(100, 1000 + num_tokens, device="cuda").int(), lens % 1000
        num_counted = torch.zeros(100, device="cuda").int()
        counted = function(drawn_ids, proposals, counts, rows, token_ids, context_lens, num_counted)
        results.append((counted, token_ids, context_lens, num_counted))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
    assert 1 < results[0][3][rows].float().mean() < num_tokens


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_best_of_all_shards_is_what_one_rank_draws(size: int) -> None:
    torch.manual_seed(0)
    logits, arguments = randn(256, 151936, dtype=torch.bfloat16) * 3, random_draws(256)
    rows, candidates = torch.arange(256, device="cuda"), []
    for rank in range(size):
        start, length = TensorParallel(rank, size).vocab_shard(151936)
        shard = logits[:, start : start + length].contiguous()
        candidates.append(best_candidates(shard, start, rows, *arguments))
    scores, ids = (torch.stack(column) for column in zip(*candidates, strict=True))
    together = ids.gather(0, scores.argmax(0, keepdim=True)).squeeze(0)
    alone = sample_by_kernel(logits, *arguments)
    assert torch.equal(together[::4], alone[::4])
    assert (together == alone).float().mean() > 0.98  # scores are rounded: near ties may flip


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_gives_no_token_for_a_row_without_a_finite_best(value: float, temperature: float) -> None:
    logits = torch.zeros(4, 151936, dtype=torch.bfloat16, device="cuda")
    logits[1, 151935] = value
    logits[2] = value
    temperatures, numbers = torch.full((4,), temperature, device="cuda"), torch.arange(4, device="cuda")
    ids = sample_by_kernel(logits, temperatures, numbers, numbers)
    assert (ids >= 0).tolist() == [True, False, False, True]
    assert int(ids.max()) < 151936


@pytest.mark.parametrize("places", [[0, 1, 2, 3], [0, 17, 5000, 9000], [15, 16, 31, 4096]])
def test_sampling_draws_from_the_softmax(places: list[int]) -> None:
    logits = torch.full((10_000,), -torch.inf, device="cuda")
    logits[places] = torch.tensor([2.0, 1.0, 0.0, -1.0], device="cuda")
    ones, seeds = torch.ones(100_000, device="cuda"), torch.arange(100_000, device="cuda")
    drawn = sample_by_kernel(logits.expand(100_000, -1), ones, seeds, seeds % 100)
    observed = drawn.bincount(minlength=10_000)[places].double().cpu()
    expected = torch.softmax(logits[places].double(), 0).cpu() * 100_000
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 21.1  # 3 degrees of freedom, p = 0.0001


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab_size", "first_id", "num_ids"),
    [(151936, 0, 151936), (151936, 75968, 75968), (49152, 0, 49152), (1003, 0, 1003), (1003, 512, 491)],
)
def test_forbidding_tokens_equals_its_specification(
    vocab_size: int, first_id: int, num_ids: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits, words = randn(64, num_ids, dtype=dtype), -(-vocab_size // 32)
    logits[3, ::7], logits[5, ::11] = torch.nan, torch.inf
    bits = torch.randint(-(2**31), 2**31, (40, words), device="cuda").int()
    bits[:10], bits[10:20, ::2], bits[20:30, ::3] = 0, -1, 0
    rows = torch.randperm(64, device="cuda")[:40]
    expected = logits.clone()
    forbid_tokens.__wrapped__(expected, rows, bits, first_id)
    forbid_tokens(logits, rows, bits, first_id)
    assert torch.equal(logits.view(torch.uint8), expected.view(torch.uint8))


def test_masks_reach_the_device_while_it_is_busy_and_are_not_overwritten_by_those_of_the_next_step() -> None:
    sender = MaskSender(151936, torch.device("cuda"), TensorParallel())
    words, rows = 4748, [*range(256)]
    sent = [np.full((256, words), value, np.int32) for value in range(1, 7)]
    weight, received = randn(4096, 4096), []
    for bits in sent:
        for _ in range(20):
            weight = weight @ weight * 1e-4
        received.append(sender.send(RowMasks(rows, bits)).sum(dim=1))
        bits[:] = -1  # the host goes on with its own array
    for value, sums in enumerate(received, start=1):
        assert (sums == value * words).all()


def test_masks_in_pinned_memory_are_copied_before_it_is_used_again() -> None:
    device, words, rows = torch.device("cuda"), 4748, [*range(256)]
    sender, received = MaskSender(151936, device, TensorParallel()), []
    for value in range(1, 7):
        bits = host_array((256, words), device)
        assert torch.from_numpy(bits).is_pinned()
        bits[:] = value
        with torch.cuda.stream(sender._stream):
            torch.cuda._sleep(20_000_000)  # cycles: the copy is late
        received.append(sender.send(RowMasks(rows, bits)).sum(dim=1))
        del bits  # PyTorch may hand its memory out again
    for value, sums in enumerate(received, start=1):
        assert (sums == value * words).all()


def test_a_row_of_which_a_mask_leaves_few_tokens_is_filtered_to_them() -> None:
    torch.manual_seed(0)
    logits, rows = randn(16, 151936, dtype=torch.bfloat16), torch.arange(16, device="cuda")
    bits = torch.zeros(16, 4748, dtype=torch.int32, device="cuda")
    bits[:, [0, 2000, 4747]] = torch.tensor([1, 8, -(2**31)], dtype=torch.int32, device="cuda")
    forbid_tokens(logits, rows, bits)
    limits = torch.tensor([[0.6, 20, 0.95, 0], [1, 2, 1, 0], [1, 0, 0.9, 0], [1, 0, 0.9, 0.1]], device="cuda")
    limits = limits.repeat(4, 1)
    found, expected = thresholds(logits, limits), thresholds.__wrapped__(logits, limits)
    allowed = logits.isfinite()
    assert allowed.sum(dim=1).tolist() == [3] * 16
    assert torch.equal(allowed & (logits >= found.unsqueeze(1)), allowed & (logits >= expected.unsqueeze(1)))


LIMITS = [  # temperature, top_k, top_p, min_p
    (0.6, 20, 0.95, 0.0),
    (1.0, 50, 1.0, 0.0),
    (1.0, 5000, 0.9, 0.01),
    (0.7, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
    (2.0, 0, 0.8, 0.02),
    (0.0, 20, 0.5, 0.0),
    (1.0, 0, 1.0, 0.0),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("vocab_size", [1, 1003, 32000, 151936])
def test_thresholds_allow_what_their_specification_allows(vocab_size: int, spread: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(64, vocab_size, device="cuda") * spread).to(dtype)
    limits = torch.tensor(LIMITS, device="cuda").repeat(8, 1)
    actual, expected = thresholds(logits, limits), thresholds.__wrapped__(logits, limits)
    scores = logits.float()
    different = (scores >= actual.unsqueeze(1)) != (scores >= expected.unsqueeze(1))
    by_kind = different.sum(dim=1).view(8, 8)
    assert by_kind[:, [1, 4, 6, 7]].sum() == 0, "top_k and min_p alone are exact"
    # A token at the cut-off of top_p, and its equals, may be in or out: their sums are rounded in another way.
    for row in different.any(dim=1).nonzero().flatten().tolist():
        temperature, top_k, _, min_p = LIMITS[row % 8]
        probabilities = (scores[row] / temperature).double().softmax(dim=0)
        if min_p:
            probabilities[scores[row] < scores[row].max() + temperature * math.log(min_p)] = 0
        if top_k:
            probabilities[scores[row] < scores[row].topk(min(top_k, vocab_size)).values[-1]] = 0
        probabilities /= probabilities.sum()
        low, high = sorted((actual[row].item(), expected[row].item()))
        between = probabilities[(scores[row] >= low) & (scores[row] < high)]
        kept = probabilities[scores[row] >= high].sum()
        assert scores[row][(scores[row] >= low) & (scores[row] < high)].unique().numel() <= 4, between
        assert abs(kept.item() - LIMITS[row % 8][2]) < 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_has_no_token_under_a_threshold_either(value: float) -> None:
    logits = torch.randn(8, 151936, device="cuda").bfloat16()
    logits[:, 151935 if value > 0 or value != value else slice(None)] = value
    limits, rows = torch.tensor(LIMITS, device="cuda"), torch.arange(8, device="cuda")
    token_ids, lens = torch.zeros(8, 3, device="cuda").int(), torch.ones(8, device="cuda").int()
    ids = sample_and_append(logits, thresholds(logits, limits), rows, limits[:, 0].contiguous(), rows, token_ids, lens)
    assert ids.tolist() == [-1] * 8


def test_a_draw_above_thresholds_is_that_of_its_specification() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(64, 151936, device="cuda") * 3).bfloat16()
    rows, temperatures = torch.arange(64, device="cuda"), torch.rand(64, device="cuda") * 2
    rows[5], temperatures[::4] = -1, 0
    seeds, lens = torch.randint(-(2**62), 2**62, (64,), device="cuda"), torch.arange(64, device="cuda").int()

    def draw(function: Callable[..., Tensor], bounds: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        token_ids, context_lens = torch.zeros(65, 70, device="cuda").int(), torch.cat((lens, lens[:1]))
        more = torch.cat((temperatures, temperatures[:1])), torch.cat((seeds, seeds[:1]))
        return function(logits, bounds, rows, *more, token_ids, context_lens), token_ids, context_lens

    ids, token_ids, context_lens = draw(sample_and_append, None)
    assert torch.equal(draw(sample_and_append, torch.full((64,), -torch.inf, device="cuda"))[0], ids)
    ids, token_ids, context_lens = draw(sample_and_append, torch.full((64,), 6.0, device="cuda"))
    drawn = rows >= 0
    assert torch.equal(context_lens[:64], lens + drawn)
    assert torch.equal(token_ids[rows[drawn], lens[rows[drawn]].long()], ids[drawn])
    assert (logits.float()[drawn].gather(1, ids[drawn].long().unsqueeze(1)) >= 6.0).all()
    expected, _, _ = draw(sample_and_append.__wrapped__, torch.full((64,), 6.0, device="cuda"))
    assert (ids == expected).float().mean() > 0.95  # logarithms differ in the last bit: near ties may flip


def test_draws_under_qwens_settings_follow_the_truncated_softmax() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(1, 151936, device="cuda") * 2).bfloat16()
    bound = thresholds(logits, torch.tensor([[0.6, 20.0, 0.95, 0.0]], device="cuda"))
    allowed = (logits.float() >= bound).squeeze(0).nonzero().flatten()
    assert 5 < len(allowed) < 30
    num_draws = 100_000
    seeds, lens = torch.arange(num_draws, device="cuda"), torch.ones(num_draws, device="cuda").int()
    temperatures, token_ids = lens * 0.6, torch.zeros(num_draws, 2, device="cuda").int()
    many, bounds = logits.expand(num_draws, -1), bound.expand(num_draws).contiguous()
    ids = sample_and_append(many, bounds, seeds, temperatures, seeds, token_ids, lens)
    observed = ids.bincount(minlength=151936)[allowed].double()
    assert observed.sum() == num_draws
    expected = (logits[0, allowed].double() / 0.6).softmax(dim=0) * num_draws
    assert ((observed - expected) ** 2 / expected).sum() < 65  # at most 28 degrees of freedom, p = 0.0001


@pytest.mark.parametrize("num_rows", [1, 16, 512])
@pytest.mark.parametrize("max_blocks", [1, 160, 3000])
def test_rows_of_the_tables_are_read_as_their_specification_reads_them(max_blocks: int, num_rows: int) -> None:
    torch.manual_seed(0)
    token_ids = torch.randint(0, 150000, (513, 256 * max_blocks + 1), dtype=torch.int32, device="cuda")
    block_tables = torch.randint(0, 2**31 // 256, (513, max_blocks), dtype=torch.int32, device="cuda")
    context_lens = torch.randint(0, 256 * max_blocks + 1, (513,), dtype=torch.int32, device="cuda")
    context_lens[-1] = 0
    rows = torch.randint(-1, 512, (num_rows, 4), dtype=torch.int32, device="cuda")[:, 1]
    arguments = rows, token_ids, context_lens, block_tables, 256
    row_tokens = torch.randint(1, 9, (num_rows,), dtype=torch.int32, device="cuda")
    several = rows, token_ids, (context_lens - 8).clamp(min=0), block_tables, 256, 8, row_tokens
    for given in (arguments, several):
        for actual, expected in zip(read_rows(*given), read_rows.__wrapped__(*given), strict=True):
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)


@pytest.mark.parametrize(("sizes", "dtype"), [((128,), torch.bfloat16), ((256,), torch.int8), ((), torch.float32)])
def test_the_first_tokens_of_blocks_are_copied_as_by_the_specification(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    cache = torch.randn(28, 100, 8, 256, *sizes, device="cuda").mul(50).to(dtype)
    copies = torch.tensor([[i, 50 + i, 7 * i] for i in range(36)], dtype=torch.int32, device="cuda")
    actual, expected = cache.clone(), cache.clone()
    copy_tokens(actual, copies)
    copy_tokens.__wrapped__(expected, copies)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, cache)


@pytest.mark.parametrize(("size", "dtype"), [(256000, torch.bfloat16), (32003, torch.float16), (1000, torch.float32)])
def test_a_soft_cap_of_logits_equals_its_specification(size: int, dtype: torch.dtype) -> None:
    logits = 40 * randn(300, size, dtype=dtype)
    logits[0, 0], logits[1, 0], logits[2, 0] = torch.nan, torch.inf, -torch.inf
    expected = cap_logits.__wrapped__(logits.clone(), 30.0)
    capped = cap_logits(logits, 30.0)
    assert capped.data_ptr() == logits.data_ptr()
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(capped, expected, rtol=tolerance, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("num_best", [0, 1, 5, 20])
@pytest.mark.parametrize(("size", "dtype"), [(151936, torch.bfloat16), (49152, torch.float16), (32003, torch.float32)])
def test_statistics_of_logits_are_those_of_the_specification(size: int, dtype: torch.dtype, num_best: int) -> None:
    logits, first_id = 4 * randn(300, size, dtype=dtype), 1024
    logits[1, 3:] = -torch.inf
    logits[3, ::2] = 1.5
    chosen_ids = torch.randint(0, size + 2048, (300,), device="cuda", dtype=torch.int32)
    chosen_logits = logits.float().gather(1, (chosen_ids.long() - first_id).clamp(0, size - 1)[:, None])[:, 0]
    arguments = logits, chosen_logits, chosen_ids, first_id, num_best
    actual, expected = logit_statistics(*arguments), logit_statistics.__wrapped__(*arguments)
    largest, sums, *exact = zip(actual, expected, strict=True)
    assert torch.equal(*largest)
    torch.testing.assert_close(*sums, rtol=1e-4, atol=0)
    assert all(torch.equal(*pair) for pair in exact)
    logits[5, size - 1] = torch.nan
    _, sums_with_nan, _, best_ids, _ = logit_statistics(*arguments)
    assert sums_with_nan.isnan().nonzero().flatten().tolist() == [5]
    assert ((best_ids >= first_id) & (best_ids < first_id + size)).all()
