"""The specification of all attention kernels against attention as one writes it down, in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanoinfer.caches.kv_cache_layout import LayerPlace
from nanoinfer.errors import ConfigError
from nanoinfer.layers.attention.backend import TorchBackend
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.attention.chunked import ChunkedBackend
from nanoinfer.layers.attention.cpu import CpuBackend
from nanoinfer.layers.attention.metadata import DecodeMetadata, PrefillMetadata
from nanoinfer.ops.decode_attention import spec as decode_attention
from nanoinfer.ops.kv_cache.spec import LayerCache
from nanoinfer.ops.prefill_attention import spec as prefill_attention
from tests.attention_cases import (
    DECODE_CASES,
    FP8,
    INT8,
    PREFILL_CASES,
    SEVERAL_TOKENS_CASES,
    Case,
    Layer,
    Step,
    assert_close,
    random_step,
)

CASES = DECODE_CASES | SEVERAL_TOKENS_CASES | {f"prefill, {name}": case for name, case in PREFILL_CASES.items()}


def naive_attention(step: Step) -> Tensor:
    """The result of a step, one sequence at a time; rows without context are zero."""
    metadata, spec = step.metadata, step.spec
    if isinstance(metadata, PrefillMetadata):
        query_lens, context_lens = list(metadata.query_lens), list(metadata.context_lens)
        num_real = query_lens
    else:
        num_rows = len(metadata.context_lens)
        query_lens = [metadata.num_tokens] * num_rows
        num_real = [1] * num_rows if metadata.num_row_tokens is None else metadata.num_row_tokens.tolist()
        firsts = zip(metadata.context_lens.tolist(), num_real, strict=True)
        context_lens = [first + count - 1 if first else 0 for first, count in firsts]
    results = []
    for q, table, length, count in zip(
        step.q.split(query_lens), metadata.block_tables, context_lens, num_real, strict=True
    ):
        positions = length - count + torch.arange(len(q)).clamp(max=count - 1)  # padding is where the last token is
        k, v = (context(step.cache, side, table, length) for side in "kv")
        k, v = (x.repeat_interleave(spec.group_size, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
        distance = positions[:, None] - torch.arange(length)  # of each key to a query
        if not spec.causal:
            distance = distance.abs()
        scores[:, (distance < 0) | (distance >= (spec.window or math.inf))] = -torch.inf
        if spec.chunk is not None:
            chunks = torch.arange(length) // spec.chunk
            scores[:, chunks[positions, None] != chunks] = -torch.inf
        if step.sinks is not None:
            scores = torch.cat((step.sinks.double()[:, None, None].expand(-1, len(q), 1), scores), dim=2)
            v = torch.cat((torch.zeros_like(v[:1]), v))
        results.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=2), v))
    return torch.cat(results)


def context(cache: LayerCache, side: str, block_table: Tensor, length: int) -> Tensor:
    """The keys or values of a sequence, times their scales: (length, num_kv_heads, head_dim) float64."""
    x = getattr(cache, side)[block_table].double()  # (num_blocks, num_kv_heads, block_size, head_dim)
    if (scales := getattr(cache, f"{side}_scales")) is not None:
        x = x * scales[block_table].unsqueeze(3)
    return x.transpose(1, 2).flatten(0, 1)[:length]


@pytest.mark.parametrize("backend", [TorchBackend, CpuBackend])
@pytest.mark.parametrize("max_elements", [decode_attention.MAX_GATHERED, 1])
@pytest.mark.parametrize("name", CASES)
def test_windows_scales_and_caches_in_8_bits_are_as_written_down(
    name: str, max_elements: int, backend: type[TorchBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a decode step gathered together, and one row at a time; of capped scores, one query at a time."""
    monkeypatch.setattr(decode_attention, "MAX_GATHERED", max_elements)
    monkeypatch.setattr(prefill_attention, "MAX_SCORES", max_elements)
    case = CASES[name]
    step = case.step()
    has_context: Tensor | slice = slice(None)
    if isinstance(step.metadata, DecodeMetadata):
        has_context = (step.metadata.context_lens > 0).repeat_interleave(step.metadata.num_tokens)
    actual, expected = step.run(backend(step.spec)), naive_attention(step)
    assert_close(actual[has_context], expected[has_context])


@pytest.mark.parametrize("backend", [TorchBackend, CpuBackend])
@pytest.mark.parametrize("lens", [(5, 5, 5), (5, 9, 1)], ids=["equal", "mixed"])
def test_whole_prompts_equal_those_computed_one_by_one(backend: type[TorchBackend], lens: tuple[int, ...]) -> None:
    """A CPU computes prompts of equal lengths as a batch."""
    step = random_step(Layer(), lens, lens)
    assert_close(step.run(backend(step.spec)), naive_attention(step).float())


def test_what_others_left_behind_the_end_of_a_context_is_not_read_on_a_cpu() -> None:
    """It may be NaN: here all of the cache but the tokens of two rows."""
    step = random_step(Layer(), [5, 20])
    assert step.cache.k.isnan().any()
    assert not step.run(CpuBackend(step.spec)).isnan().any()


def test_a_window_of_3_is_a_token_and_the_two_before_it() -> None:
    """With queries of 0 each token gets the mean of the values that it sees: those of 1, 2, 4, 8 and 16."""
    step = random_step(Layer(group_size=1, num_kv_heads=1, window=3), [5], [5])
    step.q.zero_()
    step.v[:] = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]).view(5, 1, 1)
    out = step.run(TorchBackend(step.spec))[:, 0, 0]
    torch.testing.assert_close(out, torch.tensor([1, 3 / 2, 7 / 3, 14 / 3, 28 / 3]))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("cache_dtype", [None, INT8, FP8])
def test_the_end_of_a_chunk_gets_the_same_as_a_chunk_after_a_prefix(
    window: int | None, cache_dtype: torch.dtype | None
) -> None:
    """So a cache in 8 bits must be read for a fresh chunk too: its keys and values before rounding are NaN here."""
    whole = random_step(Layer(window=window, cache_dtype=cache_dtype), [40], [40])
    metadata = whole.metadata
    assert isinstance(metadata, PrefillMetadata)
    last = replace(metadata, query_lens=(5,), cu_query_lens=torch.tensor([0, 5]).int())
    end = replace(whole, q=whole.q[-5:], k=whole.k[-5:], v=whole.v[-5:], metadata=last)
    backend = TorchBackend(whole.spec)
    assert_close(end.run(backend), whole.run(backend)[-5:])


def test_a_decode_step_gets_the_same_as_a_chunk_of_one_token() -> None:
    lens, layer = (1, 20, 33), Layer(window=9, cache_dtype=INT8)
    decode, prefill = Case(layer, lens).step(), Case(layer, lens, (1, 1, 1)).step()
    backend = TorchBackend(layer.spec)
    assert_close(decode.run(backend), prefill.run(backend))


def test_a_row_of_several_tokens_gets_the_same_as_single_tokens_one_after_the_other() -> None:
    """Three tokens of a row that attends to 15, 16 and 17 tokens; the other row has two, and padding."""
    step = random_step(Layer(window=9), [15, 30], num_row_tokens=[3, 2])
    metadata = step.metadata
    assert isinstance(metadata, DecodeMetadata)
    assert metadata.with_a_row_for_each_token().context_lens.tolist() == [15, 16, 17, 30, 31, 31]
    out = step.run(TorchBackend(step.spec))
    for token in range(3):
        lens = (metadata.context_lens + token).clamp(max=31)
        single = DecodeMetadata(metadata.slot_mapping[token::3], lens, metadata.block_tables)
        assert_close(replace(step, q=step.q[token::3], metadata=single).run(TorchBackend(step.spec)), out[token::3])


@pytest.mark.parametrize(
    ("query_lens", "num_row_tokens"),
    [(None, None), (None, [3, 3, 3, 1, 3, 2, 3]), ([1, 32, 33, 1, 20, 70, 3], None)],
    ids=["decode", "several tokens a row", "prefill"],
)
@pytest.mark.parametrize("cache_dtype", [None, INT8], ids=["", "8 bits"])
def test_attention_within_chunks_is_as_written_down(
    query_lens: list[int] | None, num_row_tokens: list[int] | None, cache_dtype: torch.dtype | None
) -> None:
    """Of 32 tokens, two blocks: texts that end before, at and behind their ends, and parts that lie in several."""
    layer = Layer(cache_dtype=cache_dtype, head_dim=16)
    step = random_step(layer, [1, 32, 33, 63, 65, 95, 97], query_lens, num_row_tokens=num_row_tokens)
    step.spec = replace(step.spec, chunk=32)
    backend = AttentionBackends("torch", torch.device("cpu"), torch.float32, 16, cache_dtype is not None)
    assert_close(step.run(backend.for_layer(step.spec, LayerPlace())), naive_attention(step).float())


def test_a_padding_row_of_a_decode_step_has_no_chunk() -> None:
    step = random_step(Layer(head_dim=16), [40, 70])
    whole = replace(step.spec, chunk=32)
    backend = ChunkedBackend(whole, 32, TorchBackend(step.spec), 16)
    metadata = step.metadata
    assert isinstance(metadata, DecodeMetadata)
    step.metadata = replace(metadata, context_lens=torch.tensor([0, 70], dtype=torch.int32))
    cut = backend.plan(step.metadata, step.cache).plans[whole]
    assert cut.context_lens.tolist() == [0, 6]


def test_blocks_that_do_not_divide_a_chunk_are_refused() -> None:
    spec = replace(Layer(head_dim=16).spec, chunk=24)
    with pytest.raises(ConfigError, match="kvcache_block_size=16 does not divide the 24 tokens of a chunk"):
        ChunkedBackend(spec, 24, TorchBackend(spec), 16)
