"""What runs on a CPU in the place of a specification computes the same."""

import pytest
import torch
from torch import Tensor

from nanoinfer.ops.decode_attention import cpu as decode_cpu
from nanoinfer.ops.decode_attention.cpu import plan_decode, planned_decode_attention
from nanoinfer.ops.decode_attention.spec import decode_attention
from nanoinfer.ops.gumbel_max.spec import best_candidates, sample_and_append, sample_at
from nanoinfer.ops.kv_cache import cpu
from nanoinfer.ops.kv_cache.cpu import plan_store
from nanoinfer.ops.kv_cache.spec import LayerCache, norm_rope_store
from nanoinfer.ops.norms.spec import rms_norm

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 8, 16


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def empty_cache(dtype: torch.dtype, num_blocks: int = 3) -> LayerCache:
    sides = [torch.zeros(num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype) for _ in range(2)]
    scales = [torch.zeros(num_blocks, NUM_KV_HEADS, BLOCK_SIZE) if dtype == torch.int8 else None for _ in range(2)]
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


def test_a_cpu_runs_what_is_beside_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    monkeypatch.setattr(cpu, "plan_store", lambda *step: planned.append(step) or plan_store(*step))
    arguments = randn(1, 10 * HEAD_DIM), None, 1e-6, torch.tensor([4]), randn(9, HEAD_DIM), empty_cache(torch.float32)
    norm_rope_store(*arguments, torch.tensor([4]))
    assert len(planned) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("shape", [(1, 96), (33, 576), (0, 64), (5, 3, 7)])
def test_norms_are_as_specified_to_the_last_bit(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, shape: tuple[int, ...]
) -> None:
    x, weight = randn(*shape).to(dtype), randn(shape[-1], seed=1).to(weight_dtype or dtype)
    for centres in (False, True):
        expected = rms_norm.__wrapped__(x, weight, 1e-5, centres)  # type: ignore[attr-defined]
        actual = rms_norm(x, weight, 1e-5, centres)
        assert actual.dtype == dtype
        assert torch.equal(actual, expected)
    if len(shape) == 2:
        out = x.clone()
        assert rms_norm(out, weight, 1e-5, out=out) is out
        assert torch.equal(out, rms_norm(x, weight, 1e-5))


TIED = randn(1, 128, seed=3).round()  # small whole numbers, so the largest comes several times


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [128, 100], ids=["whole groups", "no groups"])
@pytest.mark.parametrize("temperatures", [(0, 0, 0, 0, 0), (0, 1, 0, 1, 0)], ids=["greedy", "mixed"])
def test_draws_are_as_specified(dtype: torch.dtype, vocab_size: int, temperatures: tuple[float, ...]) -> None:
    """With equal logits, NaN, infinities and a row that is skipped."""
    logits = torch.cat((TIED, randn(4, 128)))[:, :vocab_size].to(dtype)
    logits[2, 70], logits[3, 71] = torch.nan, torch.inf
    rows = torch.tensor([3, 0, 1, 2, -1])
    tables = torch.tensor(temperatures, dtype=torch.float32), torch.arange(5), torch.tensor([2, 5, 3, 4, 0]).int()
    results = []
    for at, append, best in (
        (op.__wrapped__ for op in (sample_at, sample_and_append, best_candidates)),  # type: ignore[attr-defined]
        (sample_at, sample_and_append, best_candidates),
    ):
        token_ids, lens = torch.zeros(5, 9, dtype=torch.int32), tables[2].clone()
        drawn = append(logits, None, rows, *tables[:2], token_ids, lens)
        scores, ids = best(logits, 64, rows, *tables)
        found = scores.isfinite()
        results.append((at(logits, None, rows, *tables), drawn, token_ids, lens, found, scores[found], ids[found]))
        assert drawn.tolist()[2:] == [-1, -1, -1]
    for expected, actual in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


def test_contexts_in_a_block_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of equal lengths in blocks at equal distances in one call, others by a call each if it pays."""
    cache = empty_cache(torch.float32, num_blocks=12)
    tables = torch.tensor([[4, 9], [2, 9], [0, 9], [5, 9], [1, 9]]).int()

    def plan(*lens: int, window: int | None = None) -> tuple[list[int] | None, list[tuple[int, int, str]]]:
        order, _, parts = plan_decode(cache, tables[: len(lens)], torch.tensor(lens).int(), window)
        found = [(part.rows.start, part.rows.stop, type(part).__name__) for part in parts]
        return None if order is None else order.tolist(), found

    assert plan(7, 7, 7) == ([2, 1, 0], [(0, 3, "ViewedRows")])  # by blocks: 0, 2, 4
    assert plan(17, 7, 7) == ([2, 1, 0], [(0, 2, "ViewedRows"), (2, 3, "GatheredRows")])
    assert plan(7, 17, window=1) == (None, [(0, 2, "GatheredRows")])  # the second block of the second row
    assert plan(6, 7) == (None, [(0, 2, "GatheredRows")])  # so few vectors are gathered sooner
    assert plan() == (None, [])
    monkeypatch.setattr(decode_cpu, "VECTORS_PER_CALL", 1)
    assert plan(6, 7) == (None, [(0, 1, "ViewedRows"), (1, 2, "ViewedRows")])
    viewed = [(0, 3, "ViewedRows"), (3, 5, "ViewedRows")]  # blocks 0 to 2, 4 and 5
    assert plan(7, 7, 7, 7, 7) == ([2, 4, 1, 0, 3], viewed)


@pytest.mark.parametrize("lens", [(7, 3, 7, 20, 7), (31, 5, 5, 17, 1)])
@pytest.mark.parametrize("window", [None, 4])
def test_rows_of_all_lengths_are_attended_to_as_specified(
    lens: tuple[int, ...], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another order, partly where they lie and partly gathered."""
    monkeypatch.setattr(decode_cpu, "VECTORS_PER_CALL", 1)
    shape = 12, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM
    cache = LayerCache(randn(*shape), randn(*shape, seed=1))
    tables, context_lens = torch.tensor([[6, 7], [4, 9], [2, 10], [5, 8], [1, 11]]).int(), torch.tensor(lens).int()
    q = randn(5, NUM_HEADS, HEAD_DIM, seed=2)
    plan = plan_decode(cache, tables, context_lens, window)
    assert plan.order is not None
    expected = decode_attention(q, cache, tables, context_lens, 0.3, window)
    torch.testing.assert_close(planned_decode_attention(q, cache, plan, 0.3), expected)
