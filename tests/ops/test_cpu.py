"""What runs on a CPU in the place of a specification computes the same."""

import pytest
import torch
from torch import Tensor

from nanoinfer.ops.kv_cache import cpu
from nanoinfer.ops.kv_cache.spec import LayerCache, norm_rope_store

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 8, 16


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def empty_cache(dtype: torch.dtype) -> LayerCache:
    sides = [torch.zeros(3, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype) for _ in range(2)]
    scales = [torch.zeros(3, NUM_KV_HEADS, BLOCK_SIZE) if dtype == torch.int8 else None for _ in range(2)]
    return LayerCache(*sides, *scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=["", "8 bits"])
@pytest.mark.parametrize("slots", [[7, 40, 8, 0], [7, -1, 8, 0], [-1] * 4, []], ids=["all", "three", "none", "empty"])
@pytest.mark.parametrize("norm_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, 4])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_splits", [None, 2])
def test_keys_are_rotated_and_stored_as_specified(
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    slots: list[int],
    norm_dtype: torch.dtype | None,
    rotary_dim: int,
    interleaved: bool,
    num_splits: int | None,
) -> None:
    sizes = len(slots), (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    qkv = randn(*sizes if num_splits is None else (num_splits, *sizes)).to(dtype)
    weights = None if norm_dtype is None else tuple(1 + randn(2, HEAD_DIM, seed=1).to(norm_dtype))
    positions, cos_sin = torch.tensor([3, 0, 6, 6])[: len(slots)], randn(9, rotary_dim, seed=2)
    results = []
    for compute in (norm_rope_store.__wrapped__, norm_rope_store):  # type: ignore[attr-defined]
        cache = empty_cache(cache_dtype or dtype)
        options = positions, cos_sin, cache, torch.tensor(slots, dtype=torch.int64), interleaved
        q, k, v = compute(qkv.clone(), weights, 1e-6, *options)
        assert q.dtype == k.dtype == v.dtype == dtype
        scales = [] if cache.k_scales is None or cache.v_scales is None else [cache.k_scales, cache.v_scales]
        results.append([q, k, v, *(cache.k.float(), cache.v.float()), *scales])
    for index, (expected, actual) in enumerate(zip(*results, strict=True)):
        is_8_bit = cache_dtype is not None and index in (3, 4)
        tolerance = (
            1.0 if is_8_bit else 1e-5 if dtype == torch.float32 else 0.02
        )  # a number of 8 bits may round otherwise
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_each_step_has_its_own_positions_and_slots() -> None:
    """The layers of a step pass the same tensors; what is found out by them is not taken for another step's."""
    qkv, cos_sin = randn(1, 10 * HEAD_DIM), randn(9, HEAD_DIM, seed=2)
    cache = empty_cache(torch.float32)
    keys = {}
    for position in (4, 4, 5):
        keys[position] = norm_rope_store(
            qkv, None, 1e-6, torch.tensor([position]), cos_sin, cache, torch.tensor([position])
        )[1]
    assert cache.k.abs().sum(dim=(1, 3)).nonzero().tolist() == [[0, 4], [0, 5]]
    assert not torch.equal(keys[4], keys[5])


def test_a_cpu_runs_what_is_beside_the_specification() -> None:
    assert cpu.norm_rope_store is not norm_rope_store
    arguments = randn(1, 10 * HEAD_DIM), None, 1e-6, torch.tensor([4]), randn(9, HEAD_DIM), empty_cache(torch.float32)
    cpu._factors.cache_clear()
    norm_rope_store(*arguments, torch.tensor([4]))
    assert cpu._factors.cache_info().currsize == 1
