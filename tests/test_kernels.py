"""The Triton kernels in Triton's interpreter, on the CPU, against their PyTorch twins. On a GPU: tests/gpu."""

import math
from importlib import metadata

import pytest
import torch
from torch import Tensor

from nanoinfer.layers.attention import TorchBackend
from nanoinfer.layers.sampler import sample_torch
from nanoinfer.utils.context import DecodeMetadata, LayerCache

triton = pytest.importorskip("triton")

from nanoinfer.kernels import paged_attention  # noqa: E402
from nanoinfer.kernels.paged_attention import paged_decode_attention  # noqa: E402
from nanoinfer.kernels.sample import TILE, sample_triton  # noqa: E402
from nanoinfer.kernels.store_kvcache import store_kvcache  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here")

NAN = float("nan")


def version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in metadata.version(package).split(".")[:2])


# Its range over a loaded number makes a scalar of an array of one element, which NumPy has stopped to do.
loops_are_interpreted = pytest.mark.skipif(
    version("triton") < (3, 7) and version("numpy") >= (2, 4),
    reason="the interpreter of this Triton does not run loops with this NumPy",
)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_without_a_gpu_the_kernels_are_interpreted() -> None:
    assert triton.knobs.runtime.interpret


# --- store_kvcache ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 80), (5, 96), (2, 64), (1, 128)])
def test_store_writes_what_its_twin_writes(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Blocks of 16 tokens, slots out of order, and one token in three without a slot."""
    slots = torch.tensor([33, -1, 0, 15, -1, 16, 47, -1])
    k, v = (randn(len(slots), num_heads, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    shape = (3, num_heads, 16, head_dim)
    ours, twin = (LayerCache(*(torch.full(shape, -7.0, dtype=dtype) for _ in "kv")) for _ in range(2))
    store_kvcache(k, v, ours.k, ours.v, slots)
    TorchBackend().store(k, v, twin, slots)
    assert torch.equal(ours.k, twin.k)
    assert torch.equal(ours.v, twin.v)
    assert (ours.k != -7.0).any(dim=-1).sum() == 5 * num_heads  # five tokens are written, and nothing else


def test_store_reads_values_out_of_the_packed_projection() -> None:
    """Queries, keys and values of a token lie side by side: the values are strided, the rotated keys are not."""
    num_heads, head_dim, slots = 3, 80, torch.tensor([5, 2, -1, 20])
    qkv = randn(4, 6 * num_heads * head_dim)
    v = qkv.split([4 * num_heads * head_dim, num_heads * head_dim, num_heads * head_dim], dim=-1)[2]
    v = v.unflatten(-1, (num_heads, head_dim))
    assert not v.is_contiguous()
    k = randn(4, num_heads, head_dim, seed=1)
    ours, twin = (LayerCache(*(torch.zeros(2, 3, 16, 80) for _ in "kv")) for _ in range(2))
    store_kvcache(k, v, ours.k, ours.v, slots)
    TorchBackend().store(k, v, twin, slots)
    assert torch.equal(ours.k, twin.k)
    assert torch.equal(ours.v, twin.v)


def test_store_of_no_tokens_writes_nothing() -> None:
    cache = torch.zeros(1, 2, 16, 64)
    nothing = randn(0, 2, 64)
    store_kvcache(nothing, nothing, cache, cache, torch.tensor([], dtype=torch.int64))
    assert cache.count_nonzero() == 0


def test_store_refuses_what_it_would_misread() -> None:
    k, cache = randn(2, 4, 64), torch.zeros(1, 4, 16, 64)
    slots = torch.tensor([0, 1])
    with pytest.raises(AssertionError, match="heads must be contiguous"):
        store_kvcache(k[:, ::2], k[:, ::2], cache, cache, slots)
    with pytest.raises(AssertionError, match="keys of the cache must be contiguous"):
        store_kvcache(k, k, cache.transpose(1, 2), cache, slots)
    with pytest.raises(AssertionError, match="values of the cache must be contiguous"):
        store_kvcache(k, k, cache, cache.transpose(1, 2), slots)


# --- paged_decode_attention ---


def assert_decode_equals_its_twin(
    context_lens: list[int],
    block_size: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    strided: bool = False,
) -> None:
    """Compare on a cache that is NaN wherever no context lies; block 0 is NaN, and fills the rest of the tables."""
    num_blocks = [-(-length // block_size) for length in context_lens]
    free = (1 + torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(0))).tolist()
    block_tables = torch.zeros(len(context_lens), max(num_blocks) + 1, dtype=torch.int32)
    shape = (len(free) + 1, num_kv_heads, block_size, head_dim)
    cache = LayerCache(*(torch.full(shape, NAN, dtype=dtype) for _ in "kv"))
    for row, (length, count) in enumerate(zip(context_lens, num_blocks, strict=True)):
        for column in range(count):
            block_tables[row, column] = block = free.pop()
            num_tokens = min(block_size, length - column * block_size)
            for side, values in enumerate(cache):
                values[block, :, :num_tokens] = randn(
                    num_kv_heads, num_tokens, head_dim, seed=2 * block + side, dtype=dtype
                )
    q = randn(len(context_lens), 2 * num_kv_heads * group, head_dim, dtype=dtype)
    q = q[:, : num_kv_heads * group] if strided else q[:, : num_kv_heads * group].contiguous()
    lens = torch.tensor(context_lens, dtype=torch.int32)
    out = paged_decode_attention(q, cache.k, cache.v, block_tables, lens)

    # The twin computes in float32, and on zeros where the cache is NaN.
    twin_cache = LayerCache(*(side.float().nan_to_num(0.0) for side in cache))
    no_slots = torch.full_like(lens, -1).long()
    expected = TorchBackend().decode(q.float(), twin_cache, DecodeMetadata(no_slots, lens, block_tables))
    expected[lens == 0] = 0.0
    assert out.dtype == dtype
    assert out.shape == q.shape
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@loops_are_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
def test_decode_packs_any_group_of_query_heads(group: int, head_dim: int, dtype: torch.dtype) -> None:
    assert_decode_equals_its_twin([1, 40], 16, num_kv_heads=2, group=group, head_dim=head_dim, dtype=dtype)


@loops_are_interpreted
def test_decode_packs_a_group_larger_than_one_tile() -> None:
    assert_decode_equals_its_twin([20], 16, num_kv_heads=1, group=20, head_dim=64, dtype=torch.float32)


@loops_are_interpreted
@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_decode_at_the_edges_of_blocks_and_tiles(block_size: int) -> None:
    edges = [0, 1, 15, 16, 17, 127, 128, 129, block_size - 1, block_size, block_size + 1, 2 * block_size]
    assert_decode_equals_its_twin(edges, block_size, num_kv_heads=1, group=2, head_dim=64, dtype=torch.float16)


@loops_are_interpreted
def test_decode_reads_queries_out_of_wider_rows() -> None:
    assert_decode_equals_its_twin([5, 33], 16, num_kv_heads=2, group=2, head_dim=64, dtype=torch.float32, strided=True)


@loops_are_interpreted
def test_decode_of_padding_alone_is_zero() -> None:
    cache = torch.full((1, 2, 16, 64), NAN)
    tables, lens = (torch.zeros(*shape, dtype=torch.int32) for shape in ((3, 1), (3,)))
    out = paged_decode_attention(randn(3, 4, 64), cache, cache, tables, lens)
    assert out.count_nonzero() == 0


@loops_are_interpreted
def test_decode_survives_scores_that_overflow_a_naive_softmax() -> None:
    q = torch.full((1, 1, 64), 100.0)
    k, v = torch.zeros(1, 1, 16, 64), torch.zeros(1, 1, 16, 64)
    k[0, 0, :4] = torch.tensor([[-100.0], [100.0], [100.0], [99.0]])  # scores of 80,000 and so on
    v[0, 0, :4] = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    tables, lens = (torch.tensor(x, dtype=torch.int32) for x in ([[0]], [4]))
    out = paged_decode_attention(q, k, v, tables, lens)
    torch.testing.assert_close(out, torch.full_like(out, 3.0))  # the mean of the two best


@loops_are_interpreted
@pytest.mark.parametrize("num_programs", [1, 16, 1024])
def test_decode_does_not_depend_on_how_the_contexts_are_split(
    num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "NUM_PROGRAMS", num_programs)
    assert paged_attention.choose_splits(num_rows=4, num_kv_heads=2) == {1: 1, 16: 2, 1024: 64}[num_programs]
    cache = LayerCache(randn(8, 2, 32, 64, seed=1), randn(8, 2, 32, 64, seed=2))
    tables = torch.tensor([[3, 1, 7], [0, 5, 2], [4, 4, 4], [6, 0, 1]], dtype=torch.int32)
    lens = torch.tensor([96, 33, 0, 1], dtype=torch.int32)
    q = randn(4, 4, 64)
    expected = TorchBackend().decode(q, cache, DecodeMetadata(torch.empty(0), lens, tables))
    actual = paged_decode_attention(q, cache.k, cache.v, tables, lens)
    torch.testing.assert_close(actual[lens > 0], expected[lens > 0])
    assert not actual[2].any()


# --- sample ---

TEMPERATURES = [0.0, 1.0, 0.5, 2.0, 0.0, 100.0, 1e-3, 1.0]
SEEDS = [0, 1, -1, 2**40 + 3, 7, 2**63 - 1, -(2**63), 1]
POSITIONS = [0, 0, 5, 100, 1, 131071, 3, 1]


def sampling_arguments() -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.tensor(TEMPERATURES),
        torch.tensor(SEEDS),
        torch.tensor(POSITIONS, dtype=torch.int32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 3, 1001, TILE - 1, TILE, TILE + 1, 2 * TILE + 6])
def test_sample_draws_what_its_twin_draws(vocab_size: int, dtype: torch.dtype) -> None:
    logits = 3 * randn(len(SEEDS), vocab_size, dtype=dtype)
    ids = sample_triton(logits, *sampling_arguments())
    assert ids.dtype == torch.int32
    assert ids.tolist() == sample_torch(logits.clone(), *sampling_arguments()).tolist()


def test_sample_draws_what_its_twin_draws_from_flat_logits_with_many_seeds() -> None:
    """The noise alone decides: 64 draws from 1,500 ids that are all alike."""
    seeds = torch.arange(64)
    arguments = (torch.ones(64), seeds, (seeds * 3).int())
    logits = torch.zeros(64, 1500)
    ids = sample_triton(logits, *arguments).tolist()
    assert ids == sample_torch(logits.clone(), *arguments).tolist()
    assert len(set(ids)) > 50


def test_sample_reads_rows_of_a_padded_matrix() -> None:
    padded = randn(len(SEEDS), 600)
    padded[:, 500:] = 1e9
    logits = padded[:, :500]
    expected = sample_torch(logits.clone(), *sampling_arguments())
    assert torch.equal(sample_triton(logits, *sampling_arguments()), expected)


@pytest.mark.parametrize("best", [[2, 3], [TILE - 1, TILE], [5, 2 * TILE + 5], [0, TILE, 2 * TILE]])
def test_sample_gives_ties_to_the_lowest_id_within_and_across_tiles(best: list[int]) -> None:
    logits = torch.zeros(1, 3 * TILE)
    logits[0, best] = 1.0
    zero = torch.zeros(1)
    assert sample_triton(logits, zero, zero.long(), zero.int()).tolist() == [best[0]]


def test_sample_never_draws_a_logit_of_minus_infinity() -> None:
    logits = torch.full((len(SEEDS), TILE + 10), -math.inf)
    logits[:, TILE + 7] = -3.0  # the first tile has nothing to give
    assert sample_triton(logits, *sampling_arguments()).tolist() == [TILE + 7] * len(SEEDS)


def test_sample_leaves_the_logits_as_they_were() -> None:
    logits = randn(len(SEEDS), 100)
    unchanged = logits.clone()
    sample_triton(logits, *sampling_arguments())
    assert torch.equal(logits, unchanged)


def test_sample_of_no_rows_is_empty() -> None:
    nothing = torch.zeros(0)
    ids = sample_triton(torch.zeros(0, 10), nothing, nothing.long(), nothing.int())
    assert ids.tolist() == []
    assert ids.dtype == torch.int32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampling_kernel_gives_no_token_for_a_row_without_a_finite_best(value: float, temperature: float) -> None:
    from nanoinfer.kernels.sample import sample_triton

    logits = torch.zeros(3, 5000)
    logits[1, 4500] = value
    if value < 0:
        logits[1] = value
    ids = sample_triton(logits, torch.full((3,), temperature), torch.arange(3), torch.arange(3, dtype=torch.int32))
    assert (ids >= 0).tolist() == [True, False, True]
