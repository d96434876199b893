"""Each Triton kernel, compiled for the GPU, against its PyTorch twin."""

import pytest
import torch

from nanoinfer.layers.attention import TorchBackend
from nanoinfer.layers.sampler import sample, sample_torch
from nanoinfer.utils.context import DecodeMetadata, LayerCache

pytestmark = pytest.mark.gpu


def random_cache(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> LayerCache:
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return LayerCache(*(torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2)))


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(8, 128), (2, 64), (3, 80), (5, 96)])
def test_store_writes_each_key_and_value_to_its_slot(num_kv_heads: int, head_dim: int) -> None:
    from nanoinfer.kernels.store_kvcache import store_kvcache

    torch.manual_seed(0)
    expected = random_cache(20, num_kv_heads, 16, head_dim, torch.bfloat16)
    actual = LayerCache(expected.k.clone(), expected.v.clone())
    qkv = torch.randn(50, 3, num_kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(320, device="cuda")[:50]
    slots[::7] = -1
    store_kvcache(qkv[:, 1], qkv[:, 2], actual.k, actual.v, slots)
    TorchBackend().store(qkv[:, 1], qkv[:, 2], expected, slots)
    assert torch.equal(actual.k, expected.k)
    assert torch.equal(actual.v, expected.v)


def test_store_reaches_slots_past_two_to_the_31_elements() -> None:
    from nanoinfer.kernels.store_kvcache import store_kvcache

    num_blocks = 2**31 // (256 * 8 * 128) + 8  # 4 GiB of keys and as many of values
    cache = LayerCache(*(torch.zeros(num_blocks, 8, 256, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)))
    k, v = torch.randn(2, 1, 8, 128, dtype=torch.bfloat16, device="cuda")
    store_kvcache(k, v, cache.k, cache.v, torch.tensor([num_blocks * 256 - 1], device="cuda"))
    assert torch.equal(cache.k[-1, :, -1], k[0])
    assert torch.equal(cache.v[-1, :, -1], v[0])
    assert cache.k.count_nonzero() == k.count_nonzero()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "group_size"), [(128, 1), (128, 2), (128, 5), (128, 16), (64, 2), (64, 8)])
@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_paged_decode_attention_equals_its_twin(
    dtype: torch.dtype, head_dim: int, group_size: int, block_size: int
) -> None:
    from nanoinfer.kernels.paged_attention import paged_decode_attention

    torch.manual_seed(0)
    lens = [0, 1, 15, 16, 17, block_size - 1, block_size, block_size + 1, 700]
    num_blocks, width = 500, -(-700 // block_size) + 2
    cache = random_cache(num_blocks, 2, block_size, head_dim, dtype)
    tables = torch.randint(0, num_blocks, (len(lens), width), dtype=torch.int32, device="cuda")
    context_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    q = torch.randn(len(lens), 2 * group_size, head_dim, dtype=dtype, device="cuda")

    actual = paged_decode_attention(q, cache.k, cache.v, tables, context_lens)
    wide = LayerCache(cache.k.float(), cache.v.float())
    metadata = DecodeMetadata(torch.empty(0), context_lens, tables)
    expected = TorchBackend().decode(q.float(), wide, metadata)
    assert torch.equal(actual[0], torch.zeros_like(actual[0]))  # no context
    torch.testing.assert_close(actual[1:].float(), expected[1:], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("num_rows", "longest"), [(1, 32_000), (3, 9000), (8, 2048), (40, 1024), (200, 600)])
def test_split_contexts_equal_their_twin(num_rows: int, longest: int) -> None:
    from nanoinfer.kernels.paged_attention import choose_splits, paged_decode_attention

    torch.manual_seed(0)
    cache = random_cache(200, 8, 256, 128, torch.bfloat16)
    context_lens = torch.randint(1, longest, (num_rows,), dtype=torch.int32, device="cuda")
    context_lens[-1] = longest
    tables = torch.randint(0, 200, (num_rows, -(-longest // 256)), dtype=torch.int32, device="cuda")
    q = torch.randn(num_rows, 16, 128, dtype=torch.bfloat16, device="cuda")
    assert (choose_splits(num_rows, 8) > 1) == (num_rows <= 64)
    actual = paged_decode_attention(q, cache.k, cache.v, tables, context_lens)
    wide = LayerCache(cache.k.float(), cache.v.float())
    expected = TorchBackend().decode(q.float(), wide, DecodeMetadata(torch.empty(0), context_lens, tables))
    torch.testing.assert_close(actual.float(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("vocab_size", [1000, 4096, 151936])
def test_sampling_equals_its_twin(vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, vocab_size, device="cuda") * 3
    temperatures = torch.rand(64, device="cuda") * 2
    temperatures[::4] = 0
    seeds = torch.randint(-(2**62), 2**62, (64,), device="cuda")
    positions = torch.randint(0, 40000, (64,), dtype=torch.int32, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        actual = sample(logits.to(dtype), temperatures, seeds, positions)
        expected = sample_torch(logits.to(dtype), temperatures, seeds, positions)
        greedy = temperatures == 0
        assert torch.equal(actual[greedy], logits.to(dtype)[greedy].argmax(1).int())
        assert (actual == expected).float().mean() > 0.98  # logarithms differ in the last bit: near ties may flip


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_gives_no_token_for_a_row_without_a_finite_best(value: float, temperature: float) -> None:
    logits = torch.zeros(4, 151936, dtype=torch.bfloat16, device="cuda")
    logits[1, 151935] = value
    logits[2] = value
    temperatures, numbers = torch.full((4,), temperature, device="cuda"), torch.arange(4, device="cuda")
    ids = sample(logits, temperatures, numbers, numbers.int())
    assert (ids >= 0).tolist() == [True, False, False, True]
    assert int(ids.max()) < 151936


def test_sampling_draws_from_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], device="cuda").expand(100_000, 4)
    ones = torch.ones(100_000, device="cuda")
    drawn = sample(logits, ones, torch.arange(100_000, device="cuda"), torch.arange(100_000, device="cuda").int())
    observed = drawn.bincount(minlength=4).double().cpu()
    expected = torch.softmax(logits[0].double(), 0).cpu() * 100_000
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 21.1  # 3 degrees of freedom, p = 0.0001
