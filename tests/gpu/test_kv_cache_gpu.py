"""A KV cache in 8 bits on the GPU: kernels at realistic sizes against specifications, and the engine over them."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, ConfigError, SamplingParams, tiny_model_path
from nanoinfer.device import import_error
from nanoinfer.engine.prefix_sharers import PrefixSharers
from nanoinfer.layers.attention.backend_selection import FLASH_ATTN
from nanoinfer.layers.attention.metadata import DecodeMetadata
from nanoinfer.ops.kv_cache.spec import LayerCache, norm_rope_store, quantize_vectors
from tests.attention_cases import FP8, INT8, Layer, Step, random_step, shared_prefixes
from tests.gpu.test_engine_gpu import assert_answers_right, assert_part_at_near_ties, num_equal, tokens

pytestmark = pytest.mark.gpu

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="needs a GPU of compute capability 8.9")
CACHE_DTYPES = pytest.mark.parametrize("cache_dtype", [INT8, pytest.param(FP8, marks=needs_fp8)], ids=["int8", "fp8"])
FORMATS = pytest.mark.parametrize("kv_cache_dtype", ["int8", pytest.param("fp8", marks=needs_fp8)])
SIXTEEN_BITS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def on_gpu(cache_dtype: torch.dtype, group_size: int = 2, head_dim: int = 128, num_kv_heads: int = 8) -> Layer:
    return Layer(group_size, head_dim, num_kv_heads, 256, cache_dtype=cache_dtype, dtype=torch.bfloat16, device="cuda")


def assert_equals_specification(step: Step) -> None:
    from nanoinfer.layers.attention.triton import TritonBackend

    backend = TritonBackend(step.spec)
    out = step.assert_equals_specification(backend)
    assert torch.equal(step.run(backend), out), "equal steps give equal bits"
    if isinstance(step.metadata, DecodeMetadata):
        assert not out[step.metadata.context_lens == 0].any()


# --- writing ---


@CACHE_DTYPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 7, 2048])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(16, 8, 128, 128), (32, 8, 128, 96), (8, 2, 64, 64), (9, 3, 80, 80), (3, 1, 256, 256), (2, 1, 100, 100)],
)
def test_keys_and_values_are_written_as_the_specification_rounds_them(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    num_tokens: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    """Bit by bit, given the kernel's own keys and values. Some vectors are zeros, have an outlier, NaN or infinity."""
    torch.manual_seed(0)
    heads = 3 * torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device="cuda")
    heads[1::9, num_heads:] = 0
    heads[2::9, num_heads:, 5] = 3000
    heads[3::9, -1, 3] = torch.nan
    heads[4::9, -1, 3] = -torch.inf
    weights = (torch.ones(head_dim, device="cuda", dtype=dtype),) * 2
    angles = torch.randn(5000, rotary_dim // 2, device="cuda")
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(0, 5000, (num_tokens,), device="cuda")
    slots = torch.randperm(320 * 16, device="cuda")[:num_tokens]
    slots[::7] = -1
    shape = (320, num_kv_heads, 16, head_dim)
    k_cache, v_cache = (torch.zeros(shape, dtype=torch.int8, device="cuda").to(cache_dtype) for _ in "kv")
    k_scales, v_scales = (torch.full(shape[:-1], -7.0, device="cuda") for _ in "kv")
    qkv = heads.to(dtype).flatten(1)
    layer = LayerCache(k_cache, v_cache, k_scales, v_scales)
    _, k, v = norm_rope_store(qkv, weights, 1e-6, positions, table, layer, slots)
    kept = slots >= 0
    blocks, offsets = slots[kept] // 16, slots[kept] % 16
    for x, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        values, expected_scales = quantize_vectors(x[kept], cache_dtype)
        torch.testing.assert_close(scales[blocks, :, offsets], expected_scales, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(cache[blocks, :, offsets].float(), values.float())
        assert (scales == -7).sum() == (320 * 16 - kept.sum()) * num_kv_heads, "nothing else is written"


@CACHE_DTYPES
def test_slots_past_two_to_the_31_elements_are_reached(cache_dtype: torch.dtype) -> None:
    num_blocks = 2**31 // (256 * 8 * 128) + 8  # 2 GiB of keys and as many of values
    k_cache, v_cache = (
        torch.zeros(num_blocks, 8, 256, 128, dtype=torch.int8, device="cuda").view(cache_dtype) for _ in "kv"
    )
    k_scales, v_scales = (torch.zeros(num_blocks, 8, 256, device="cuda") for _ in "kv")
    qkv, table = torch.randn(1, 32 * 128, device="cuda").bfloat16(), torch.ones(1, 128, device="cuda")
    position, slot = torch.tensor([0], device="cuda"), torch.tensor([num_blocks * 256 - 1], device="cuda")
    layer = LayerCache(k_cache, v_cache, k_scales, v_scales)
    _, k, v = norm_rope_store(qkv, None, 1e-6, position, table, layer, slot)
    for x, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        values, expected = quantize_vectors(x[0], cache_dtype)
        assert torch.equal(cache[-1, :, -1].float(), values.float())
        assert torch.equal(scales[-1, :, -1], expected)
        assert scales.count_nonzero() == 8


# --- reading ---


@CACHE_DTYPES
@SIXTEEN_BITS
@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize(
    ("head_dim", "group_size"),
    [
        *((128, 1), (128, 2), (128, 4), (128, 5), (128, 16), (128, 32), (128, 64), (64, 2), (64, 8), (64, 64)),
        *((80, 64), (96, 4), (256, 2), (256, 8), (256, 32), (256, 64)),
    ],
)
def test_decode_and_prefill_of_any_sizes_equal_their_specification(
    cache_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, group_size: int, window: int | None
) -> None:
    layer = replace(on_gpu(cache_dtype, group_size, head_dim, 2), dtype=dtype, window=window)
    for block_size in (16, 48, 256):
        lens = [0, 1, 15, 17, block_size - 1, block_size, block_size + 1, 129, 2100]
        sized = replace(layer, block_size=block_size)
        assert_equals_specification(random_step(sized, lens))
        assert_equals_specification(random_step(sized, lens[1:], [max(1, length // 3) for length in lens[1:]]))


@CACHE_DTYPES
@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize(("num_rows", "longest"), [(1, 32_000), (16, 4096), (256, 2048)])
def test_contexts_cut_between_programs_equal_their_specification(
    cache_dtype: torch.dtype, num_rows: int, longest: int, group_size: int
) -> None:
    context_lens = torch.randint(0, longest, (num_rows,), generator=torch.Generator().manual_seed(0)).tolist()
    assert_equals_specification(random_step(on_gpu(cache_dtype, group_size), [*context_lens[:-1], longest]))


@CACHE_DTYPES
@pytest.mark.parametrize(
    ("group_size", "head_dim"), [(1, 128), (2, 128), (4, 128), (7, 64), (2, 96), (2, 256), (8, 256)]
)
def test_256_rows_that_share_2048_tokens_get_what_each_gets_alone(
    cache_dtype: torch.dtype, group_size: int, head_dim: int
) -> None:
    layer = on_gpu(cache_dtype, group_size, head_dim)
    most = 64 // group_size
    groups = [PrefixSharers(first, min(most, 250 - first), 8) for first in range(0, 250, most)]
    own_lens = torch.randint(1, 600, (256,), generator=torch.Generator().manual_seed(0))
    context_lens = [2048 * (row < 250) + length for row, length in enumerate(own_lens.tolist())]
    step = random_step(layer, context_lens, prefix_sharers=[PrefixSharers(0, 250, 8)])
    assert isinstance(step.metadata, DecodeMetadata)
    step.metadata = replace(step.metadata, shared_prefixes=shared_prefixes(groups, 256, "cuda"))
    assert_equals_specification(step)


@CACHE_DTYPES
@pytest.mark.parametrize("group_size", [2, 5])
def test_a_long_prefill_equals_its_specification(cache_dtype: torch.dtype, group_size: int) -> None:
    assert_equals_specification(random_step(on_gpu(cache_dtype, group_size), [3000, 5000, 4096], [3000, 700, 1]))


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@CACHE_DTYPES
@SIXTEEN_BITS
@pytest.mark.parametrize(("group_size", "head_dim"), [(1, 64), (2, 128), (8, 128)])
def test_prefill_over_widened_blocks_equals_its_specification(
    cache_dtype: torch.dtype, dtype: torch.dtype, group_size: int, head_dim: int
) -> None:
    from nanoinfer.layers.attention.triton import TritonBackend

    layer = replace(on_gpu(cache_dtype, group_size, head_dim), dtype=dtype)
    step = random_step(layer, [3000, 5000, 4096], [3000, 700, 1])
    backend = TritonBackend(step.spec, has_hopper_kernel=True)
    out = step.assert_equals_specification(backend)
    assert torch.equal(step.run(backend), out), "equal steps give equal bits"


# --- the engine ---


@FORMATS
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_tiny_checkpoint_answers_right(kv_cache_dtype: str, backend: str, enforce_eager: bool) -> None:
    options: dict[str, Any] = {"attention_backend": backend, "enforce_eager": enforce_eager}
    with LLM(tiny_model_path(), kv_cache_dtype=kv_cache_dtype, **options) as llm:
        assert_answers_right(llm)


@pytest.fixture(scope="module")
def folder(random_checkpoint: Callable[..., Path]) -> Path:
    return random_checkpoint(num_attention_heads=8, num_key_value_heads=2, head_dim=128)


def prompts_and_params() -> tuple[list[list[int]], SamplingParams]:
    generator = torch.Generator().manual_seed(0)
    lens = (1, 5, 16, 100, 255, 256, 257, 511, 700)
    prompts = [torch.randint(0, 512, (length,), generator=generator).tolist() for length in lens]
    prompts += [[*prompts[-1], 3, 4], prompts[-2]] + [[i, i + 1] * 20 for i in range(20)]
    return prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@lru_cache
def tokens_of_a_cpu(folder: Path, kv_cache_dtype: str) -> list[list[int]]:
    return tokens(folder, *prompts_and_params(), device="cpu", kv_cache_dtype=kv_cache_dtype)


def num_agreeing(mine: list[int], theirs: list[int]) -> int:
    """Return how many tokens come before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=True)))


@FORMATS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 100},
        {"max_num_seqs": 13, "overlap": False},
        {"kvcache_block_size": 16, "num_kvcache_blocks": 120, "max_model_len": 1000},
        {"attention_backend": "torch"},
    ],
    ids=str,
)
def test_most_greedy_tokens_are_those_of_a_cpu(folder: Path, kv_cache_dtype: str, options: dict[str, Any]) -> None:
    """In bf16 a near tie may flip, and so may the rounding of a key or a value."""
    prompts, params = prompts_and_params()
    expected = tokens_of_a_cpu(folder, kv_cache_dtype)
    actual = tokens(folder, prompts, params, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, **options)
    firsts = sum(mine[0] == theirs[0] for mine, theirs in zip(actual, expected, strict=True))
    assert firsts >= 0.9 * len(prompts), f"{firsts} of {len(prompts)} first tokens agree"
    agreeing = [num_agreeing(*pair) for pair in zip(actual, expected, strict=True)]
    assert sum(agreeing) >= 12 * len(prompts), f"answers agree on their first {agreeing} tokens of 40"


@FORMATS
def test_equal_runs_give_equal_tokens_also_from_cached_prefixes(folder: Path, kv_cache_dtype: str) -> None:
    prompts, params = prompts_and_params()
    with LLM(folder, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype) as llm:
        runs = []
        for _ in range(5):
            llm.reset_prefix_cache()
            runs.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        warm = llm.generate(prompts, params, use_tqdm=False)
    assert all(run == runs[0] for run in runs)
    assert sum(output.num_cached_tokens for output in warm) > 1000
    assert num_equal([output.token_ids for output in warm], runs[0]) >= 0.8 * len(prompts)


@FORMATS
def test_nearly_twice_the_blocks_fit_into_the_same_memory(folder: Path, kv_cache_dtype: str) -> None:
    num_blocks = {}
    for name in ("auto", kv_cache_dtype):
        with LLM(folder, dtype="bfloat16", gpu_memory_utilization=0.3, kv_cache_dtype=name) as llm:
            num_blocks[name] = llm.get_metrics().num_blocks
    assert num_blocks[kv_cache_dtype] / num_blocks["auto"] == pytest.approx(256 / 132, rel=0.01)


@FORMATS
def test_a_request_of_nan_ends_in_an_error_and_harms_no_other(
    folder: Path, tmp_path: Path, kv_cache_dtype: str
) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    good, bad = [[11] * 20, [12] * 40, [13] * 3], [[7] * 300, [12] * 35 + [7]]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)
    with LLM(tmp_path, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, kvcache_block_size=16) as llm:
        expected = llm.generate(good, params, use_tqdm=False)
        for _ in range(3):
            outputs = llm.generate([bad[0], *good, bad[1]], params, use_tqdm=False)
            assert [output.finish_reason for output in outputs] == ["error", *["length"] * 3, "error"]
            for one, other in zip(expected, outputs[1:4], strict=True):
                assert_part_at_near_ties(one, other)


def test_flash_attn_is_refused_by_name(folder: Path) -> None:
    if error := import_error(FLASH_ATTN):
        pytest.skip(f"flash-attn cannot be imported: {error}")
    with pytest.raises(ConfigError, match="attention_backend='flash_attn' reads a KV cache in 16 bits alone"):
        LLM(folder, dtype="bfloat16", kv_cache_dtype="int8", attention_backend="flash_attn")


@pytest.mark.multi_gpu
@FORMATS
def test_two_gpus_part_from_one_at_near_ties(folder: Path, kv_cache_dtype: str) -> None:
    """About half of the answers are equal: one GPU and two add up in other orders."""
    prompts, params = prompts_and_params()
    results = []
    for size in (1, 2):
        with LLM(folder, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, tensor_parallel_size=size) as llm:
            results.append(llm.generate(prompts, replace(params, logprobs=5), use_tqdm=False))
    same = sum(assert_part_at_near_ties(one, two) for one, two in zip(*results, strict=True))
    assert same >= 0.25 * len(prompts)
