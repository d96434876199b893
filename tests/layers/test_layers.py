"""The layers against transformers, against a naive attention, and cut over two ranks against the whole."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from nanoinfer.caches.block_layout import BlockLayout
from nanoinfer.caches.kv_cache import KVCache
from nanoinfer.caches.kv_cache_layout import KVCacheLayout, LayerKind, LayerPlace
from nanoinfer.device import import_error
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ConfigError
from nanoinfer.layers.attention import backend_selection
from nanoinfer.layers.attention.attention_layer import Attention
from nanoinfer.layers.attention.backend import AttentionBackend, AttentionSpec, Backend, TorchBackend
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.attention.cpu import CpuBackend
from nanoinfer.layers.attention.metadata import DecodeMetadata, PrefillMetadata, ragged_indices
from nanoinfer.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    PartialSum,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanoinfer.ops.activations.spec import silu_and_mul
from nanoinfer.ops.decode_attention import spec as decode_attention
from nanoinfer.ops.kv_cache.spec import LayerCache, store_keys_values

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- norms and the activation ---


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_equals_that_of_transformers(dtype: torch.dtype, scale: float) -> None:
    """To the last bit: the weight is applied after rounding, as there."""
    ours, theirs = RMSNorm(96, eps=1e-5).to(dtype), Qwen3RMSNorm(96, eps=1e-5).to(dtype)
    weight = 1 + 0.3 * randn(96, seed=1)
    ours.weight.copy_(weight)
    theirs.weight.data.copy_(weight)
    x, residual = (scale * randn(5, 3, 96)).to(dtype), (scale * randn(5, 3, 96, seed=2)).to(dtype)
    unchanged = x.clone(), residual.clone()
    out, _ = ours(None, x)
    assert torch.equal(out, theirs(x))
    out, total = ours(PartialSum(x.unsqueeze(0)), residual)
    assert out.dtype == dtype
    assert torch.equal(total, x + residual)
    assert torch.equal(out, theirs(x + residual))
    assert torch.equal(x, unchanged[0])
    assert torch.equal(residual, unchanged[1])


def test_rms_norm_of_3_and_4_has_a_mean_square_of_1_and_zeros_stay_zeros() -> None:
    norm = RMSNorm(2, eps=1e-6)
    norm.weight.copy_(torch.tensor([1.0, 10.0]))
    root_mean_square = 12.5**0.5  # of 3 and 4
    expected = torch.tensor([[3 / root_mean_square, 40 / root_mean_square], [0.0, 0.0]])
    torch.testing.assert_close(norm(None, torch.tensor([[3.0, 4.0], [0.0, 0.0]]))[0], expected)


def test_silu_and_mul_gates_the_second_half_by_the_first() -> None:
    gate_up = torch.tensor([[0.0, 1.0, -1.0, 2.0, 3.0, 10.0]])  # gates 0, 1, -1; ups 2, 3, 10
    silu_of_1 = 1 / (1 + torch.e**-1)
    expected = torch.tensor([[0.0, 3 * silu_of_1, -10 * (1 - silu_of_1)]])
    torch.testing.assert_close(silu_and_mul(gate_up), expected)
    assert gate_up.tolist() == [[0.0, 1.0, -1.0, 2.0, 3.0, 10.0]]


class CudaTensor(Tensor):
    """A tensor that only says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(("capability", "overlaps"), [((9, 0), True), ((12, 0), True), ((8, 9), False)])
def test_launches_overlap_from_compute_capability_9_on(
    capability: tuple[int, int], overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = pytest.importorskip("nanoinfer.ops.common.programmatic_launch")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert launch.overlap_options.__wrapped__(CUDA)["OVERLAP"] is overlaps
    assert launch.overlap_options(torch.device("cpu")) == {"OVERLAP": False}


@pytest.mark.parametrize(("dtype", "num_splits"), [(torch.bfloat16, 4), (torch.float16, 1), (torch.float32, 1)])
def test_on_a_gpu_a_product_of_few_tokens_is_split_over_k(dtype: torch.dtype, num_splits: int) -> None:
    layer = RowParallelLinear(64, 5, bias=False, tp=TensorParallel())
    layer.weight.data = randn(5, 64).to(dtype)
    x = randn(3, 64, seed=1).to(dtype)
    terms = layer(x.as_subclass(CudaTensor)).terms.as_subclass(Tensor)
    assert terms.shape == (num_splits, 3, 5)
    torch.testing.assert_close(terms.float().sum(0), x.float() @ layer.weight.float().t(), rtol=0.05, atol=0.1)
    assert layer(randn(257, 64).to(dtype).as_subclass(CudaTensor)).terms.shape == (1, 257, 5)


def test_on_a_gpu_queries_keys_and_values_of_few_heads_are_split_over_k() -> None:
    layer = QKVParallelLinear(64, head_dim=2, num_heads=4, num_kv_heads=1, bias=False, tp=TensorParallel())
    layer.weight.data = randn(12, 64).bfloat16()
    x = randn(3, 64, seed=1).bfloat16()
    sums = layer(x.as_subclass(CudaTensor)).as_subclass(Tensor)
    assert sums.shape == (4, 3, 12)
    torch.testing.assert_close(sums.float().sum(0), x.float() @ layer.weight.float().t(), rtol=0.05, atol=0.1)
    assert layer(randn(257, 64).bfloat16().as_subclass(CudaTensor)).shape == (257, 12)
    many = QKVParallelLinear(64, head_dim=128, num_heads=16, num_kv_heads=8, bias=False, tp=TensorParallel())
    many.weight.data = randn(4096, 64).bfloat16()
    assert many(x.as_subclass(CudaTensor)).shape == (3, 4096)


# --- linear layers and the two ends, whole and cut over two ranks ---

RANKS = [TensorParallel(rank, size=2) for rank in range(2)]
WHOLE = TensorParallel()


@pytest.fixture
def partial_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank return its own summand: the test adds them up."""
    monkeypatch.setattr(TensorParallel, "all_reduce", lambda self, x: x)


def test_column_parallel_outputs_side_by_side_are_the_whole() -> None:
    x, weights, biases = randn(3, 8), {"a": randn(6, 8), "b": randn(4, 8)}, {"a": randn(6), "b": randn(4)}

    def run(tp: TensorParallel) -> tuple[Tensor, Tensor]:
        layer = ColumnParallelLinear(8, {"a": 6, "b": 4}, bias=True, tp=tp)
        assert layer.shards == ("a", "b")
        for name in ("b", "a"):  # the order of loading does not matter
            layer.weight_loader(layer.weight, weights[name], name)
            layer.weight_loader(layer.bias, biases[name], name)
        a, b = layer(x).split([6 // tp.size, 4 // tp.size], dim=-1)
        return a, b

    (a0, b0), (a1, b1) = run(RANKS[0]), run(RANKS[1])
    whole_a, whole_b = run(WHOLE)
    torch.testing.assert_close(whole_a, x @ weights["a"].T + biases["a"])
    torch.testing.assert_close(whole_b, x @ weights["b"].T + biases["b"])
    torch.testing.assert_close(torch.cat([a0, a1], dim=-1), whole_a)
    torch.testing.assert_close(torch.cat([b0, b1], dim=-1), whole_b)


def test_qkv_is_cut_by_heads_and_gate_and_up_together() -> None:
    """Four query heads of two dimensions over two KV heads: rank 1 has query heads 2 and 3, KV head 1."""
    q, k, v = torch.arange(8.0), 10 + torch.arange(4.0), 20 + torch.arange(4.0)
    qkv = QKVParallelLinear(1, head_dim=2, num_heads=4, num_kv_heads=2, bias=False, tp=RANKS[1])
    for name, rows in (("q", q), ("k", k), ("v", v)):
        qkv.weight_loader(qkv.weight, rows.unsqueeze(1), name)
    assert qkv(torch.ones(1)).tolist() == [4, 5, 6, 7, 12, 13, 22, 23]
    gate_up = MergedColumnParallelLinear(1, intermediate_size=2, bias=False, tp=RANKS[1])
    gate_up.weight_loader(gate_up.weight, torch.tensor([[1.0], [2.0]]), "gate")
    gate_up.weight_loader(gate_up.weight, torch.tensor([[3.0], [4.0]]), "up")
    assert gate_up(torch.ones(1)).tolist() == [2.0, 4.0]


@pytest.mark.usefixtures("partial_sums")
@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_outputs_add_up_to_the_whole_with_the_bias_once(bias: bool) -> None:
    x, weight, offset = randn(3, 8), randn(5, 8), 100 * randn(5)

    def run(tp: TensorParallel) -> Tensor:
        layer = RowParallelLinear(8, 5, bias=bias, tp=tp)
        layer.weight_loader(layer.weight, weight)
        if bias:
            layer.weight_loader(layer.bias, offset)
        return layer(tp.shard(x, dim=1)).terms.sum(0)

    expected = x @ weight.T + (offset if bias else 0)
    torch.testing.assert_close(run(WHOLE), expected)
    torch.testing.assert_close(run(RANKS[0]) + run(RANKS[1]), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_products_of_few_tokens_go_to_the_symmetric_memory_with_or_without_a_bias(bias: bool) -> None:
    """With a bias too: all sums of a forward pass must be of the same kind."""
    x, weight, offset = randn(3, 8), randn(5, 8), 100 * randn(5)
    parts = []
    for tp in RANKS:
        buffers = object()
        memory: Any = SimpleNamespace(serves=lambda _: True, next_buffers=lambda _, buffers=buffers: buffers)
        layer = RowParallelLinear(8, 5, bias=bias, tp=replace(tp, symmetric_memory=memory))
        layer.weight_loader(layer.weight, weight)
        if bias:
            layer.weight_loader(layer.bias, offset)
        out = layer(tp.shard(x, dim=1))
        assert out.buffers is buffers
        parts.append(out.terms.sum(0))
    torch.testing.assert_close(parts[0] + parts[1], x @ weight.T + (offset if bias else 0))


def test_ranks_that_share_a_kv_head_hold_it_whole() -> None:
    """Four query heads of one dimension over two KV heads: ranks 2 and 3 have a query head each, and KV head 1."""
    q, k, v = torch.arange(4.0), 10 + torch.arange(2.0), 20 + torch.arange(2.0)
    outputs = []
    for rank in range(4):
        tp = TensorParallel(rank, size=4)
        layer = QKVParallelLinear(1, head_dim=1, num_heads=4, num_kv_heads=2, bias=True, tp=tp)
        for name, rows in (("q", q), ("k", k), ("v", v)):
            layer.weight_loader(layer.weight, rows.unsqueeze(1), name)
            layer.weight_loader(layer.bias, 100 * rows, name)
        outputs.append((layer(torch.ones(1)) / 101).tolist())
    assert outputs == [[0, 10, 20], [1, 10, 20], [2, 11, 21], [3, 11, 21]]


@pytest.mark.usefixtures("partial_sums")
def test_embeddings_of_two_ranks_add_up_to_the_whole() -> None:
    weight, token_ids = randn(100, 4), torch.tensor([0, 63, 64, 99, 99])  # the ranks hold 64 ids, and 36

    def run(tp: TensorParallel, weight: Tensor) -> Tensor:
        layer = VocabParallelEmbedding(100, 4, tp)
        layer.weight_loader(layer.weight, weight)
        return layer(token_ids)

    assert torch.equal(run(WHOLE, weight), weight[token_ids])
    first, second = run(RANKS[0], weight), run(RANKS[1], weight)
    assert torch.equal(first + second, weight[token_ids])
    assert second[:2].eq(0).all(), "ids 0 and 63 are none of rank 1's"
    assert first[2:].eq(0).all(), "ids 64 and 99 are none of rank 0's"
    of_nan = run(RANKS[0], torch.full((100, 4), torch.nan))
    assert of_nan.isnan().all(dim=1).tolist() == [True, True, False, False, False], "NaN stays with its own tokens"


def test_logits_of_two_ranks_side_by_side_are_the_whole() -> None:
    weight, hidden = randn(100, 4), randn(3, 4, seed=1)

    def run(tp: TensorParallel) -> Tensor:
        layer = ParallelLMHead(100, 4, tp)
        layer.weight_loader(layer.weight, weight)
        return layer(hidden)

    torch.testing.assert_close(run(WHOLE), hidden @ weight.T)
    torch.testing.assert_close(torch.cat([run(RANKS[0]), run(RANKS[1])], dim=1), hidden @ weight.T)


@pytest.mark.parametrize(("vocab_size", "size"), [(151936, 4), (151936, 8), (500, 2), (512, 8), (129, 3), (65, 2)])
def test_shards_of_a_vocabulary_begin_at_multiples_of_64_and_cover_it(vocab_size: int, size: int) -> None:
    shards = [TensorParallel(rank, size).vocab_shard(vocab_size) for rank in range(size)]
    ends = [shard.start + shard.size for shard in shards]
    assert [shard.start for shard in shards] == [0, *ends[:-1]]
    assert ends[-1] == vocab_size
    assert all(shard.start % 64 == 0 and shard.size > 0 for shard in shards)


def test_a_vocabulary_too_small_for_two_ranks_is_refused() -> None:
    message = "vocab_size=64 is too small for tensor_parallel_size=2: in shards of 64 ids it is enough for 1"
    with pytest.raises(ConfigError, match=message):
        VocabParallelEmbedding(64, 4, RANKS[0])


# --- attention ---


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence, one token and one head at a time, in float64: the last len(q) of len(k) tokens attend."""
    out = torch.empty(q.shape, dtype=torch.float64)
    num_cached, heads_per_kv_head = len(k) - len(q), q.shape[1] // k.shape[1]
    for token in range(len(q)):
        for head in range(q.shape[1]):
            seen = slice(0, num_cached + token + 1)
            keys, values = (x[seen, head // heads_per_kv_head].double() for x in (k, v))
            scores = keys @ q[token, head].double() / q.shape[2] ** 0.5
            out[token, head] = scores.softmax(dim=0) @ values
    return out


@dataclass
class PagedSequences:
    """Sequences of random keys and values, and an empty cache with a place for each of their tokens."""

    k: list[Tensor]  # of each sequence: (context_len, num_kv_heads, head_dim)
    v: list[Tensor]
    slots: list[Tensor]  # of each sequence: (context_len,) int64
    block_tables: Tensor
    cache: LayerCache

    def store_all_but(self, lens: list[int]) -> None:
        """Store what earlier steps computed: all keys and values but those of so many last tokens."""
        for k, v, slots, length in zip(self.k, self.v, self.slots, lens, strict=True):
            store_keys_values(k[:-length], v[:-length], self.cache, slots[:-length])

    def newest(self, lens: list[int]) -> tuple[Tensor, Tensor]:
        k, v = (torch.cat([x[-n:] for x, n in zip(side, lens, strict=True)]) for side in (self.k, self.v))
        return k, v

    def assert_attended(self, out: Tensor, q: Tensor, lens: list[int]) -> None:
        chunks = zip(q.split(lens), self.k, self.v, strict=True)
        expected = torch.cat([naive_attention(*chunk) for chunk in chunks])
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def page(context_lens: list[int], block_size: int, num_kv_heads: int, head_dim: int = 8) -> PagedSequences:
    """Blocks are given out from a shuffled list, so that a sequence's blocks lie anywhere in the cache."""
    num_blocks = [-(-length // block_size) for length in context_lens]
    generator = torch.Generator().manual_seed(0)
    free = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    block_tables = torch.zeros(len(context_lens), max(num_blocks), dtype=torch.int32)
    slots = []
    for row, (length, count) in enumerate(zip(context_lens, num_blocks, strict=True)):
        block_ids = [free.pop() for _ in range(count)]
        block_tables[row, :count] = torch.tensor(block_ids)
        positions = torch.arange(length)
        slots.append(torch.tensor(block_ids)[positions // block_size] * block_size + positions % block_size)
    shape = (sum(num_blocks) + 3, num_kv_heads, block_size, head_dim)
    k, v = ([torch.randn(n, num_kv_heads, head_dim, generator=generator) for n in context_lens] for _ in range(2))
    return PagedSequences(k, v, slots, block_tables, LayerCache(torch.zeros(shape), torch.zeros(shape)))


def cumulated(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


def prefill_metadata(sequences: PagedSequences, query_lens: list[int], context_lens: list[int]) -> PrefillMetadata:
    chunks = [slots[-length:] for slots, length in zip(sequences.slots, query_lens, strict=True)]
    return PrefillMetadata(
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        cu_query_lens=cumulated(query_lens),
        cu_context_lens=cumulated(context_lens),
        slot_mapping=torch.cat(chunks),
        block_tables=sequences.block_tables,
    )


def spec_of(q: Tensor, k: Tensor) -> AttentionSpec:
    return AttentionSpec(q.shape[1], k.shape[1], q.shape[2], scale=q.shape[2] ** -0.5)


def attend(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: PrefillMetadata | DecodeMetadata) -> Tensor:
    """The layer, on heads of 8 dimensions that are neither normalised nor turned."""
    no_turn = SimpleNamespace(cos_sin_cache=torch.tensor([[1.0] * 4 + [0.0] * 4]), is_interleaved=False)
    qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    layer = Attention(no_turn, norm_eps=1e-6, backend=TorchBackend(spec_of(q, k)))
    return layer(qkv, None, torch.zeros(len(q), dtype=torch.int64), cache, metadata)


def test_store_puts_each_head_of_a_token_into_its_slot_and_skips_slot_minus_one() -> None:
    cache = LayerCache(torch.zeros(2, 2, 3, 1), torch.zeros(2, 2, 3, 1))  # 2 blocks of 2 heads, 3 tokens, 1 dimension
    k = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]]).unsqueeze(2)  # (token, head, dimension)
    store_keys_values(k, -k, cache, torch.tensor([4, -1, 0, 2]))
    assert cache.k.squeeze(3).tolist() == [[[3, 0, 4], [30, 0, 40]], [[0, 1, 0], [0, 10, 0]]]
    assert torch.equal(cache.v, -cache.k)


MIXED = [1, 15, 16, 17, 50, 60]  # contexts around the edges of blocks of 16 and 48


@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (2, 48), (4, 16)])
def test_prefill_of_mixed_chunks_equals_naive_attention(group: int, block_size: int) -> None:
    """Whole prompts, chunks after a cached prefix, and a chunk of one token in one step."""
    query_lens = [1, 15, 4, 1, 30, 60]
    sequences = page(MIXED, block_size, num_kv_heads=2)
    sequences.store_all_but(query_lens)
    q = randn(sum(query_lens), 2 * group, 8)
    metadata = prefill_metadata(sequences, query_lens, MIXED)
    assert metadata.reads_cache
    sequences.assert_attended(attend(q, *sequences.newest(query_lens), sequences.cache, metadata), q, query_lens)


def test_prefill_of_whole_prompts_needs_no_cache() -> None:
    sequences = page([3, 5], block_size=16, num_kv_heads=1)
    metadata = prefill_metadata(sequences, [3, 5], [3, 5])
    assert not metadata.reads_cache
    q = randn(8, 2, 8)
    newest_k, newest_v = sequences.newest([3, 5])
    out = TorchBackend(spec_of(q, newest_k)).prefill(q, newest_k, newest_v, sequences.cache, metadata)
    sequences.assert_attended(out, q, [3, 5])


@pytest.mark.parametrize("max_gathered", [decode_attention.MAX_GATHERED, 1])
@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (2, 48), (4, 16)])
def test_decode_of_mixed_contexts_equals_naive_attention(
    group: int, block_size: int, max_gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows gathered together, and (with room for one element) one row at a time."""
    monkeypatch.setattr(decode_attention, "MAX_GATHERED", max_gathered)
    sequences, ones = page(MIXED, block_size, num_kv_heads=2), [1] * len(MIXED)
    sequences.store_all_but(ones)
    metadata = DecodeMetadata(
        slot_mapping=torch.stack([slots[-1] for slots in sequences.slots]),
        context_lens=torch.tensor(MIXED, dtype=torch.int32),
        block_tables=sequences.block_tables,
    )
    q = randn(len(MIXED), 2 * group, 8)
    sequences.assert_attended(attend(q, *sequences.newest(ones), sequences.cache, metadata), q, ones)


def test_padding_rows_of_a_decode_write_nothing_and_disturb_nobody() -> None:
    sequences = page([5], block_size=16, num_kv_heads=1)
    sequences.store_all_but([1])
    padded = DecodeMetadata(
        slot_mapping=torch.tensor([-1, int(sequences.slots[0][-1]), -1]),
        context_lens=torch.tensor([0, 5, 0], dtype=torch.int32),
        block_tables=sequences.block_tables.repeat(3, 1),
    )
    newest_k, newest_v = (x[0][-1:].repeat(3, 1, 1) for x in (sequences.k, sequences.v))
    q = randn(3, 2, 8)
    out = attend(q, newest_k, newest_v, sequences.cache, padded)
    expected = naive_attention(q[1:2], sequences.k[0], sequences.v[0])
    torch.testing.assert_close(out[1:2].double(), expected, rtol=1e-5, atol=1e-5)
    assert sequences.cache.k.any(dim=-1).sum() == 5, "five tokens are stored"
    alone = DecodeMetadata(*(column[:1] for column in (padded.slot_mapping, padded.context_lens, padded.block_tables)))
    assert attend(q[:1], newest_k[:1], newest_v[:1], sequences.cache, alone).shape == (1, 2, 8)


def test_ragged_indices_number_segments_and_the_places_within_them() -> None:
    segments, offsets = ragged_indices(torch.tensor([0, 2, 2, 5], dtype=torch.int32), total=5)
    assert segments.tolist() == [0, 0, 2, 2, 2]
    assert offsets.tolist() == [0, 1, 0, 1, 2]


# --- the choice of a backend ---

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FULL = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, scale=1.0)


def pretend_installed(monkeypatch: pytest.MonkeyPatch, *packages: str, flash_attn_lacks: str | None = None) -> None:
    def import_error(module: str) -> ImportError | None:
        return None if module.rpartition(".")[2] in packages else ImportError("not there")

    monkeypatch.setattr(backend_selection, "import_error", import_error)
    monkeypatch.setattr(backend_selection, "_flash_attn_lacks", lambda spec, device, dtype: flash_attn_lacks)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old GPU")


TRITON, BOTH = ("triton",), ("flash_attn", "triton")
SIXTEEN = torch.bfloat16


@pytest.mark.parametrize(
    ("requested", "installed", "device", "dtype", "spec", "reason"),
    [
        ("flash_attn", BOTH, "cuda", torch.float32, FULL, "computes in 16 bits, and dtype is 'float32'; use dtype"),
        ("flash_attn", BOTH, "cuda", SIXTEEN, replace(FULL, head_dim=100), "of 8 up to 256, and the model has 100"),
        ("flash_attn", BOTH, "cuda", SIXTEEN, replace(FULL, head_dim=512), "of 8 up to 256, and the model has 512"),
        ("triton", BOTH, "cuda", torch.float32, FULL, "computes in 16 bits, and dtype is 'float32'; use dtype="),
        ("triton", BOTH, "cuda", SIXTEEN, replace(FULL, head_dim=100), "of 8 up to 512, and the model has 100"),
        ("triton", BOTH, "cuda", SIXTEEN, replace(FULL, head_dim=520), "of 8 up to 512, and the model has 520"),
        (
            "triton",
            BOTH,
            "cuda",
            SIXTEEN,
            replace(FULL, head_dim=512, num_heads=33 * 8),
            "at most 32 query heads for a",
        ),
        ("triton", BOTH, "cuda", SIXTEEN, replace(FULL, num_kv_heads=1, num_heads=65), "at most 64 query heads for a"),
        ("flash_attn", TRITON, "cuda", SIXTEEN, FULL, "the package flash-attn, which cannot be imported"),
        ("flash_attn", ("flash_attn",), "cuda", SIXTEEN, FULL, "the package triton, which cannot be imported"),
        ("triton", (), "cuda", SIXTEEN, FULL, "triton, which cannot be imported (not there); install it"),
        (
            "flash_attn",
            BOTH,
            "cuda",
            SIXTEEN,
            replace(FULL, has_sinks=True),
            "has no attention sinks, and the model has",
        ),
        (
            "flash_attn",
            BOTH,
            "cuda",
            SIXTEEN,
            replace(FULL, soft_cap=50.0),
            "caps no scores, and attn_logit_softcapping",
        ),
        ("flash_attn", BOTH, "cpu", SIXTEEN, FULL, "runs on CUDA, and device is 'cpu'; use a GPU"),
        ("triton", BOTH, "cpu", SIXTEEN, FULL, "runs on CUDA, and device is 'cpu'; use a GPU"),
    ],
)
def test_a_backend_that_cannot_serve_the_model_says_why(
    requested: str,
    installed: tuple[str, ...],
    device: str,
    dtype: torch.dtype,
    spec: AttentionSpec,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_installed(monkeypatch, *installed)
    assert_refused(requested, torch.device(device), dtype, spec, 256, reason)


def assert_refused(
    requested: str, device: torch.device, dtype: torch.dtype, spec: AttentionSpec, block_size: int, reason: str
) -> None:
    with pytest.raises(ConfigError) as error:
        AttentionBackends(requested, device, dtype, block_size).select(spec)
    assert str(error.value).startswith(f"attention_backend='{requested}' ")
    assert reason in str(error.value)
    assert str(error.value).endswith(", or use attention_backend='auto'")


def test_flash_attn_asks_for_blocks_of_256_and_for_a_build_that_has_what_the_model_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_installed(monkeypatch, *BOTH, flash_attn_lacks="This build has no local attention.")
    assert_refused("flash_attn", CUDA, SIXTEEN, FULL, 16, "kvcache_block_size to be a multiple of 256, not 16; use 256")
    reason = "is a build of flash-attn that lacks what the model needs (This build has no local attention.); install"
    assert_refused("flash_attn", CUDA, SIXTEEN, replace(FULL, window=7), 256, reason)


def test_flash_attn_cannot_read_a_cache_in_8_bits_and_auto_takes_what_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before Hopper, where prefill is by flash-attn else."""
    pytest.importorskip("triton")
    pretend_installed(monkeypatch, *BOTH)
    with pytest.raises(ConfigError) as error:
        AttentionBackends("flash_attn", CUDA, SIXTEEN, 256, in_8_bits=True).select(FULL)
    assert str(error.value) == (
        "attention_backend='flash_attn' reads a KV cache in 16 bits alone, and kv_cache_dtype asks for 8; leave "
        "kv_cache_dtype out, or use attention_backend='auto'"
    )
    for dtype, chosen in ((SIXTEEN, "triton"), (torch.float32, "torch")):
        assert AttentionBackends("auto", CUDA, dtype, 256, in_8_bits=True).select(FULL).name == chosen
    assert AttentionBackends("auto", CPU, SIXTEEN, 256, in_8_bits=True).select(FULL).name == "torch"
    pretend_gpu(monkeypatch, (8, 9))
    assert AttentionBackends("auto", CUDA, SIXTEEN, 256, in_8_bits=True).select(FULL).name == "triton"


@pytest.mark.parametrize("requested", ["flash_attn", "triton"])
def test_a_gpu_before_ampere_is_refused_by_name(requested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, *BOTH)
    pretend_gpu(monkeypatch, (7, 5))
    assert_refused(requested, CUDA, torch.float16, FULL, 256, "capability 8.0 or more, and an old GPU has less")
    assert AttentionBackends("auto", CUDA, torch.float16, 256).select(FULL).name == "torch"


@pytest.mark.parametrize(
    ("requested", "device", "dtype", "head_dim", "chosen"),
    [
        ("auto", "cpu", torch.bfloat16, 128, "torch"),
        ("torch", "cpu", torch.float32, 128, "torch"),
        ("torch", "cuda", torch.bfloat16, 128, "torch"),
        *(
            ("auto", "cuda", torch.bfloat16, head_dim, "triton")
            for head_dim in (8, 64, 80, 96, 128, 200, 256, 264, 512)
        ),
        ("auto", "cuda", torch.float16, 64, "triton"),
        ("triton", "cuda", torch.float16, 64, "triton"),
        ("auto", "cuda", torch.float32, 128, "torch"),
        ("auto", "cuda", torch.bfloat16, 100, "torch"),
        ("auto", "cuda", torch.bfloat16, 520, "torch"),
    ],
)
@pytest.mark.parametrize("window", [None, 7])
def test_auto_takes_our_kernels_for_all_head_sizes_up_to_512_and_pytorch_for_the_rest(
    requested: str,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    chosen: str,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    pretend_installed(monkeypatch, "triton")
    spec = replace(FULL, head_dim=head_dim, window=window)
    assert AttentionBackends(requested, torch.device(device), dtype, block_size=16).select(spec).name == chosen


@pytest.mark.parametrize(
    ("capability", "installed", "lacks", "chosen"),
    [
        ((8, 0), BOTH, None, "triton, flash_attn in prefill"),
        ((8, 9), BOTH, None, "triton, flash_attn in prefill"),
        ((8, 0), BOTH, "no local attention", "triton"),
        ((8, 0), TRITON, None, "triton"),
        ((9, 0), BOTH, None, "triton"),
        ((10, 0), BOTH, None, "triton"),
    ],
)
def test_only_before_hopper_prefill_is_by_flash_attn_where_its_build_serves(
    capability: tuple[int, int],
    installed: tuple[str, ...],
    lacks: str | None,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    stand_in: Any = ModuleType(backend_selection.FLASH_ATTN)
    stand_in.FlashAttentionBackend = lambda spec: SimpleNamespace(name="flash_attn", spec=spec)
    monkeypatch.setitem(sys.modules, backend_selection.FLASH_ATTN, stand_in)
    pretend_installed(monkeypatch, *installed, flash_attn_lacks=lacks)
    pretend_gpu(monkeypatch, capability)
    for requested in ("auto", "triton"):
        assert AttentionBackends(requested, CUDA, SIXTEEN, block_size=256).select(FULL).name == chosen
    for spec in (replace(FULL, has_sinks=True), replace(FULL, soft_cap=50.0)):  # which it lacks in every build
        assert AttentionBackends("auto", CUDA, SIXTEEN, block_size=256).select(spec).name == "triton"
    if installed == BOTH and lacks is None:
        assert AttentionBackends("flash_attn", CUDA, SIXTEEN, block_size=256).select(FULL).name == "flash_attn"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"window": 7}, False), ({"has_sinks": True}, False), ({"soft_cap": 50.0}, False)],
    ids=str,
)
def test_hoppers_own_prefill_kernel_serves_plain_layers_alone(
    changes: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", minversion="3.6")
    monkeypatch.setattr("nanoinfer.ops.common.device_properties.has_hopper_kernels", lambda _device: True)
    spec = replace(FULL, head_dim=128, **changes)
    assert AttentionBackends("auto", CUDA, SIXTEEN, 256).has_hopper_kernel(spec) == expected


def test_layers_of_the_same_kind_share_a_backend_and_a_model_has_one_for_each_kind() -> None:
    backends = AttentionBackends("auto", CPU, torch.float32, block_size=16)
    windowed = replace(FULL, window=7)
    place = LayerPlace()
    assert backends.for_layer(FULL, place) is backends.for_layer(replace(FULL), place)
    assert backends.for_layer(windowed, place) is not backends.for_layer(FULL, place)
    assert backends.for_layer(windowed, place).spec == windowed
    assert (backends.name, backends.needs_host, backends.max_prefix_sharers) == ("torch", True, 0)
    assert backends.max_row_tokens is None


def test_attention_of_another_kind_has_a_say_in_what_steps_may_do() -> None:
    class OtherBackend(Backend):
        name, needs_host, max_row_tokens, max_prefix_sharers = "other", False, 4, 0

    backends = AttentionBackends("auto", CPU, torch.float32, block_size=16)
    other = backends.shared("a spec of another class", LayerPlace(), OtherBackend)
    assert backends.shared("a spec of another class", LayerPlace(0, 1), OtherBackend) is other
    assert (backends.name, backends.needs_host, backends.max_row_tokens) == ("other", False, 4)
    backends.for_layer(FULL, LayerPlace(0, 2))
    assert (backends.name, backends.needs_host, backends.max_row_tokens) == ("other and torch", True, 4)


def test_backends_of_several_kinds_plan_each_its_own_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full attention reads a prefix of 32 rows at once; windows and larger heads do not stand in its way.

    A tile of 64 queries holds two heads of 32 tokens.
    """
    pytest.importorskip("triton")
    pretend_installed(monkeypatch, "triton")
    backends = AttentionBackends("auto", CUDA, torch.bfloat16, block_size=16)
    for spec in (FULL, replace(FULL, window=7), replace(FULL, window=9), replace(FULL, head_dim=520)):
        backends.for_layer(spec, LayerPlace())
    assert (backends.name, backends.needs_host, backends.max_prefix_sharers) == ("torch and triton", True, 32)
    assert backends.max_row_tokens == 32
    metadata = PrefillMetadata((3,), (3,), *cumulated([3]).repeat(2, 1), torch.arange(3), torch.zeros(1, 1).int())
    layout = KVCacheLayout.arrange([LayerKind(None, BlockLayout.of_kv(8, 128))])
    kv_cache = KVCache(layout, 1, 16, torch.bfloat16, CPU)
    planned = backends.plan(metadata, kv_cache, table=0)
    assert {spec.window: plan.tiles.tolist() for spec, plan in planned.plans.items()} == {
        window: [[0, 3, 0, 0]] for window in (None, 7, 9)
    }
    assert not metadata.plans


def test_backends_plan_for_the_layers_of_a_block_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one kind may lie in several tables, and two kinds in one."""
    backends = AttentionBackends("auto", CPU, torch.float32, block_size=16)
    windowed, capped = replace(FULL, window=7), replace(FULL, window=7, soft_cap=9.0)
    places = LayerPlace(0, 0), LayerPlace(1, 0), LayerPlace(2, 0), LayerPlace(2, 1)
    layers = [*zip((FULL, windowed, windowed, capped), places, strict=True)]
    for spec, place in layers:
        backends.for_layer(spec, place)
    planned: list[tuple[AttentionSpec, LayerPlace]] = []

    def plan(backend: AttentionBackend, metadata: str, cache: LayerPlace) -> str:
        planned.append((backend.spec, cache))
        return metadata

    monkeypatch.setattr(CpuBackend, "plan", plan)
    cache: Any = SimpleNamespace(layer=lambda place: place)
    metadata: Any = "metadata"
    assert [backends.plan(metadata, cache, table) for table in range(3)] == [metadata] * 3
    assert planned == layers


def test_a_package_that_is_broken_counts_as_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert str(import_error("broken_package")) == "undefined symbol"
    assert import_error("json") is None
    (tmp_path / "left_over").mkdir()
    assert str(import_error("left_over")) == "left_over is an empty folder"
