"""Each attention backend on the GPU against plain PyTorch in float32, over a cache with blocks in random order."""

import importlib.util

import pytest
import torch

from nanoinfer.layers.attention.backend import AttentionBackend
from nanoinfer.layers.attention.layer import store
from nanoinfer.layers.attention.metadata import DecodeMetadata, KVCache, LayerCache, PrefillMetadata
from nanoinfer.layers.attention.selection import select_backend
from nanoinfer.layers.attention.torch_reference import TorchBackend
from nanoinfer.runner.step_tables import cumulative_lens

pytestmark = pytest.mark.gpu

BLOCK_SIZE, NUM_BLOCKS, WIDTH = 256, 64, 6


@pytest.fixture(params=["flash_attn", "triton", "triton without flash_attn", "torch"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    if request.param == "triton without flash_attn":
        from nanoinfer.layers.attention.torch_varlen import VarlenAttention
        from nanoinfer.layers.attention.triton import TritonBackend

        return TritonBackend(VarlenAttention())
    return select_backend(request.param, torch.device("cuda"), torch.bfloat16, 128, BLOCK_SIZE)


def random_case(
    lens: list[tuple[int, int]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, LayerCache, PrefillMetadata]:
    """Queries, keys, values and a cache with the prefixes in it, for chunks of (query_len, context_len)."""
    torch.manual_seed(0)
    shape = (NUM_BLOCKS, 2, BLOCK_SIZE, 128)
    cache = LayerCache(*(torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)))
    tables = torch.randperm(NUM_BLOCKS, device="cuda")[: len(lens) * WIDTH].view(len(lens), WIDTH).int()
    query_lens, context_lens = zip(*lens, strict=True)
    slots = []
    for row, (query_len, context_len) in enumerate(lens):
        positions = torch.arange(context_len - query_len, context_len, device="cuda")
        slots.append(tables[row, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE)
    metadata = PrefillMetadata(
        query_lens=query_lens,
        context_lens=context_lens,
        cu_query_lens=cumulative_lens(torch.tensor(query_lens, dtype=torch.int32, device="cuda")),
        cu_context_lens=cumulative_lens(torch.tensor(context_lens, dtype=torch.int32, device="cuda")),
        slot_mapping=torch.cat(slots),
        block_tables=tables,
    )
    num_tokens = sum(query_lens)
    q = torch.randn(num_tokens, 8, 128, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, num_tokens, 2, 128, dtype=torch.bfloat16, device="cuda")
    return q, k, v, cache, metadata


@pytest.mark.parametrize(
    "lens",
    [[(7, 7), (300, 300), (1, 1)], [(7, 7), (300, 1000), (1, 257), (256, 512)]],
    ids=["fresh", "cached prefixes"],
)
def test_prefill_equals_plain_attention(backend: AttentionBackend, lens: list[tuple[int, int]]) -> None:
    q, k, v, cache, metadata = random_case(lens)
    store(k, v, *cache, metadata.slot_mapping)
    actual = backend.prefill(q, k, v, cache, metadata)
    wide = LayerCache(cache.k.float(), cache.v.float())
    expected = TorchBackend().prefill(q.float(), k.float(), v.float(), wide, metadata)
    torch.testing.assert_close(actual.float(), expected, atol=2e-2, rtol=2e-2)


def test_prefill_in_groups_of_chunks_equals_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoinfer.layers.attention import torch_varlen as varlen_attention
    from nanoinfer.layers.attention.triton import TritonBackend

    monkeypatch.setattr(varlen_attention, "MAX_GATHER_TOKENS", 600)
    backend = TritonBackend(varlen_attention.VarlenAttention())
    test_prefill_equals_plain_attention(backend, [(7, 7), (300, 1000), (1, 257), (256, 300), (2, 2)])


def test_decode_equals_plain_attention(backend: AttentionBackend) -> None:
    lens = [1, 255, 256, 257, 1500]
    q, _, _, cache, metadata = random_case([(1, length) for length in lens])
    context_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    decode = DecodeMetadata(metadata.slot_mapping, context_lens, metadata.block_tables)
    decode = backend.plan(decode, KVCache(cache.k.unsqueeze(0), cache.v.unsqueeze(0)))
    actual = backend.decode(q, cache, decode)
    expected = TorchBackend().decode(q.float(), LayerCache(cache.k.float(), cache.v.float()), decode)
    torch.testing.assert_close(actual.float(), expected, atol=2e-2, rtol=2e-2)
