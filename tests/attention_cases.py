"""Steps over a paged cache for the tests of attention on any device: the cases, and what their specification says.

Blocks lie in the cache in random order. The cache is NaN wherever no context lies, and queries are cut out of wider
rows, as those of a packed QKV product are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanoinfer.engine.prefix_sharers import PrefixSharers
from nanoinfer.layers.attention.backend import AttentionBackend, AttentionSpec, TorchBackend
from nanoinfer.layers.attention.metadata import DecodeMetadata, PrefillMetadata, SharedPrefixes, cumulative_lens
from nanoinfer.ops.kv_cache.spec import LayerCache

NAN = float("nan")
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Layer:
    """What a layer and its cache are like."""

    group_size: int = 2
    head_dim: int = 64
    num_kv_heads: int = 2
    block_size: int = 16
    window: int | None = None
    causal: bool = True
    scale: float = 0.1
    has_sinks: bool = False
    soft_cap: float | None = None
    cache_dtype: torch.dtype | None = None  # of 8 bits; None for a cache in the layer's dtype
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def spec(self) -> AttentionSpec:
        num_heads = self.num_kv_heads * self.group_size
        sizes = num_heads, self.num_kv_heads, self.head_dim
        return AttentionSpec(*sizes, self.scale, self.window, self.has_sinks, self.causal, self.soft_cap)


@dataclass
class Step:
    """What a backend is given."""

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    cache: LayerCache
    metadata: PrefillMetadata | DecodeMetadata
    sinks: Tensor | None = None

    def run(self, backend: AttentionBackend) -> Tensor:
        cache = self.cache
        metadata = backend.plan(self.metadata, cache)
        torch.empty(1, device=self.q.device).zero_()  # as in a model, another kernel comes between the two
        if isinstance(metadata, PrefillMetadata):
            return backend.prefill(self.q, self.k, self.v, cache, metadata, self.sinks)
        return backend.decode(self.q, cache, metadata, self.sinks)

    def run_specification(self) -> Tensor:
        """What plain PyTorch says in float32. It reads all keys for each row, whatever rows share."""
        cache = self.cache
        if not cache.in_8_bits:
            cache = LayerCache(cache.k.float(), cache.v.float())
        wide = replace(self, q=self.q.float(), k=self.k.float(), v=self.v.float(), cache=cache)
        return wide.run(TorchBackend(self.spec))

    def assert_equals_specification(self, backend: AttentionBackend) -> Tensor:
        """Compare all rows that have a context, with the lines that pad them; return the backend's result."""
        actual, expected = self.run(backend), self.run_specification()
        assert actual.dtype == self.q.dtype
        assert actual.shape == self.q.shape
        if isinstance(self.metadata, DecodeMetadata):
            has_context = (self.metadata.context_lens > 0).repeat_interleave(self.metadata.num_tokens)
            assert_close(actual[has_context], expected[has_context])
        else:
            assert_close(actual, expected)
        return actual


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the rounding of `actual`, whose sums are taken in another order."""
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def random_step(
    layer: Layer,
    context_lens: Sequence[int],
    query_lens: Sequence[int] | None = None,
    prefix_sharers: Sequence[PrefixSharers] = (),
    seed: int = 0,
    num_row_tokens: Sequence[int] | None = None,
) -> Step:
    """A prefill step of chunks of `query_lens` tokens; without these, a decode step.

    prefix_sharers: rows of a decode step that begin with the same blocks. num_row_tokens: of a decode step, how many
    tokens each row has, if these are several; the longest row has no padding. context_lens are those of the first.
    """
    device, block_size = layer.device, layer.block_size
    generator = torch.Generator(device).manual_seed(seed)
    row_tokens = num_row_tokens or [1] * len(context_lens)
    ends = [length and length + count - 1 for length, count in zip(context_lens, row_tokens, strict=True)]
    block_tables = _random_block_tables(ends, block_size, prefix_sharers, generator).to(device)
    slots = [_slots(row, end, block_size) for row, end in zip(block_tables, ends, strict=True)]
    cache = _random_cache(layer, int(block_tables.max()) + 1, torch.cat(slots), generator)
    num_lines = len(context_lens) * max(row_tokens) if query_lens is None else sum(query_lens)
    spec = layer.spec
    qkv = torch.randn(
        num_lines, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, generator=generator, device=device
    ).to(layer.dtype)
    q = qkv[:, : spec.num_heads]
    sinks = None
    if layer.has_sinks:  # some outweigh all else
        sinks = (4 * torch.randn(spec.num_heads, generator=generator, device=device)).to(layer.dtype)
    if query_lens is None:
        nothing = q[:0, : spec.num_kv_heads]
        decode = _decode_metadata(context_lens, block_tables, prefix_sharers, num_row_tokens)
        return Step(spec, q, nothing, nothing, cache, decode, sinks)
    chunks = [seq_slots[-length:] for seq_slots, length in zip(slots, query_lens, strict=True)]
    metadata = _prefill_metadata(query_lens, context_lens, torch.cat(chunks), block_tables)
    if layer.cache_dtype:  # those before they were rounded, which nobody may attend to
        k = v = torch.full_like(qkv[:, : spec.num_kv_heads], NAN)
    else:
        blocks, offsets = metadata.slot_mapping // block_size, metadata.slot_mapping % block_size
        k, v = cache.k[blocks, :, offsets], cache.v[blocks, :, offsets]
    return Step(spec, q, k, v, cache, metadata, sinks)


def shared_prefixes(groups: Sequence[PrefixSharers], num_rows: int, device: str) -> SharedPrefixes:
    num_blocks, num_sharers = torch.zeros(2, num_rows, dtype=torch.int32)
    for first_row, count, blocks in groups:
        num_blocks[first_row : first_row + count] = blocks
        num_sharers[first_row] = count
    return SharedPrefixes(num_blocks.to(device), num_sharers.to(device))


def _random_block_tables(
    context_lens: Sequence[int], block_size: int, prefix_sharers: Sequence[PrefixSharers], generator: torch.Generator
) -> Tensor:
    """Block 0, which belongs to nobody, fills the ends of the tables."""
    num_blocks = [-(-length // block_size) for length in context_lens]
    free = (1 + torch.randperm(sum(num_blocks), generator=generator, device=generator.device)).tolist()
    tables = [[free.pop() for _ in range(count)] for count in num_blocks]
    for first_row, num_rows, count in prefix_sharers:
        for row in range(first_row, first_row + num_rows):
            assert context_lens[row] > count * block_size, "the newest token is never in a shared block"
            tables[row][:count] = tables[first_row][:count]
    width = max(num_blocks) + 1
    return torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)


def _slots(block_table: Tensor, length: int, block_size: int) -> Tensor:
    positions = torch.arange(length, device=block_table.device)
    return block_table[positions // block_size].long() * block_size + positions % block_size


def _random_cache(layer: Layer, num_blocks: int, known_slots: Tensor, generator: torch.Generator) -> LayerCache:
    shape = (num_blocks, layer.num_kv_heads, layer.block_size, layer.head_dim)
    options: dict[str, Any] = {"generator": generator, "device": layer.device}
    unknown = torch.ones(num_blocks, layer.block_size, dtype=torch.bool, device=layer.device)
    unknown.view(-1)[known_slots] = False
    unknown = unknown.unsqueeze(1)  # (num_blocks, 1, block_size), for all KV heads
    if layer.cache_dtype:
        k, v = (torch.randint(-127, 128, shape, **options).to(layer.cache_dtype) for _ in "kv")
        k_scales, v_scales = ((torch.rand(shape[:3], **options) / 50).masked_fill(unknown, NAN) for _ in "kv")
        return LayerCache(k, v, k_scales, v_scales)
    k, v = (torch.randn(shape, **options).masked_fill(unknown.unsqueeze(3), NAN).to(layer.dtype) for _ in "kv")
    return LayerCache(k, v)


def _prefill_metadata(
    query_lens: Sequence[int], context_lens: Sequence[int], slots: Tensor, block_tables: Tensor
) -> PrefillMetadata:
    cu_query_lens, cu_context_lens = (
        cumulative_lens(torch.tensor(lens, dtype=torch.int32, device=slots.device))
        for lens in (query_lens, context_lens)
    )
    lens = tuple(query_lens), tuple(context_lens)
    num_blocks = len(block_tables.unique())
    return PrefillMetadata(*lens, cu_query_lens, cu_context_lens, slots, block_tables, num_blocks)


def _decode_metadata(
    context_lens: Sequence[int],
    block_tables: Tensor,
    prefix_sharers: Sequence[PrefixSharers],
    num_row_tokens: Sequence[int] | None,
) -> DecodeMetadata:
    device = block_tables.device
    num_tokens = max(num_row_tokens or [1])
    return DecodeMetadata(
        slot_mapping=torch.full((len(context_lens) * num_tokens,), -1, device=device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_tables=block_tables,
        shared_prefixes=shared_prefixes(prefix_sharers, len(context_lens), str(device)) if prefix_sharers else None,
        num_tokens=num_tokens,
        num_row_tokens=torch.tensor(num_row_tokens, dtype=torch.int32, device=device) if num_row_tokens else None,
    )


@dataclass(frozen=True)
class Case:
    """The arguments of `random_step`."""

    layer: Layer
    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...] | None = None
    prefix_sharers: tuple[PrefixSharers, ...] = ()
    num_row_tokens: tuple[int, ...] | None = None

    def step(self, **changes: Any) -> Step:
        """The step, over another dtype or device."""
        layer = replace(self.layer, **changes)
        return random_step(
            layer, self.context_lens, self.query_lens, self.prefix_sharers, num_row_tokens=self.num_row_tokens
        )


INT8, FP8 = torch.int8, torch.float8_e4m3fn
IN_8_BITS = [("int8", INT8, 1), ("int8", INT8, 7), ("fp8", FP8, 2), ("fp8", FP8, 4)]  # with query heads for a KV head
HEADS = [(1, 64), (2, 80), (3, 96), (4, 128), (7, 256)]  # query heads for a KV head, head_dim

DECODE_CASES = {
    **{f"groups of {n}, head_dim {dim}": Case(Layer(n, dim), (1, 20, 0, 33)) for n, dim in HEADS},
    "heads of 512": Case(Layer(4, 512, num_kv_heads=1), (1, 20, 0, 33)),
    "heads of 512, groups of 20, blocks of 256": Case(Layer(20, 512, num_kv_heads=1, block_size=256), (1, 300)),
    "heads of 320, int8": Case(Layer(2, 320, num_kv_heads=1, cache_dtype=INT8), (1, 0, 33)),
    "groups of 20, more than the smallest tile": Case(Layer(group_size=20), (1, 20)),
    **{
        f"edges of blocks of {size}": Case(
            Layer(num_kv_heads=1, block_size=size), (0, 1, 15, 16, 17, size - 1, size, size + 1)
        )
        for size in (16, 48, 256)
    },
    **{  # in tiles of 16 tokens
        f"a window of {window}": Case(Layer(num_kv_heads=1, block_size=48, window=window), (1, 6, 7, 8, 50, 100, 0, 97))
        for window in (1, 7, 16, 1000)
    },
    **{f"{kind}, groups of {n}": Case(Layer(n, cache_dtype=dtype), (1, 20, 0, 33)) for kind, dtype, n in IN_8_BITS},
    **{
        f"{kind}, head_dim {dim}": Case(Layer(head_dim=dim, num_kv_heads=1, cache_dtype=dtype), (1, 0, 33))
        for kind, dtype, dim in [("int8", INT8, 128), ("fp8", FP8, 256)]
    },
    **{
        f"{kind}, a window of 20, head_dim 80": Case(
            Layer(head_dim=80, window=20, cache_dtype=dtype), (1, 20, 21, 0, 70)
        )
        for kind, dtype, _ in IN_8_BITS[::2]
    },
    "sinks": Case(Layer(3, has_sinks=True), (1, 20, 0, 33)),
    "sinks, a window of 7": Case(Layer(8, num_kv_heads=1, window=7, has_sinks=True), (1, 6, 8, 50, 100, 97)),
    "sinks, int8": Case(Layer(8, cache_dtype=INT8, has_sinks=True), (1, 20, 33)),
    # Scores are of about 0.8 here: caps of 0.5 and 2 change all of them.
    "a soft cap": Case(Layer(3, soft_cap=0.5), (1, 20, 0, 33)),
    "a soft cap, a window of 7, head_dim 256": Case(
        Layer(2, 256, num_kv_heads=1, window=7, soft_cap=2.0), (1, 6, 8, 50, 100, 97)
    ),
    "a soft cap, sinks, int8": Case(Layer(8, cache_dtype=INT8, has_sinks=True, soft_cap=0.5), (1, 20, 33)),
}

MIXED = {"context_lens": (1, 40, 50, 64, 3), "query_lens": (1, 40, 1, 17, 3)}  # fresh, and after 49 and 47 tokens

PREFILL_CASES = {
    **{f"groups of {n}, head_dim {dim}": Case(Layer(n, dim), **MIXED) for n, dim in HEADS},
    "heads of 512": Case(Layer(4, 512, num_kv_heads=1), **MIXED),
    "heads of 512, groups of 16, blocks of 256": Case(
        Layer(16, 512, num_kv_heads=1, block_size=256), (300, 257), (70, 1)
    ),
    "heads of 320, fp8": Case(Layer(2, 320, num_kv_heads=1, cache_dtype=FP8), **MIXED),
    "fresh chunks alone": Case(Layer(), (1, 16, 33), (1, 16, 33)),
    "blocks of 256": Case(Layer(num_kv_heads=1, block_size=256), (300, 257, 600, 256), (300, 1, 70, 256)),
    **{  # in tiles of 128 keys, and of 16
        f"a window of {window}, blocks of {size}": Case(
            Layer(num_kv_heads=1, block_size=size, window=window), (100, 400, 300, 260), (100, 70, 1, 130)
        )
        for window, size in [(1, 256), (100, 256), (150, 256), (1000, 256), (7, 16), (40, 16)]
    },
    **{f"{kind}, groups of {n}": Case(Layer(n, cache_dtype=dtype), **MIXED) for kind, dtype, n in IN_8_BITS},
    **{
        f"{kind}, head_dim {dim}": Case(Layer(head_dim=dim, num_kv_heads=1, cache_dtype=dtype), **MIXED)
        for kind, dtype, dim in [("int8", INT8, 256), ("fp8", FP8, 128)]
    },
    **{
        f"{kind}, a window of 20, head_dim 96": Case(Layer(head_dim=96, window=20, cache_dtype=dtype), **MIXED)
        for kind, dtype, _ in IN_8_BITS[::2]
    },
    "sinks": Case(Layer(3, has_sinks=True), **MIXED),
    "sinks, a window of 7": Case(Layer(8, num_kv_heads=1, window=7, has_sinks=True), **MIXED),
    "sinks, int8": Case(Layer(8, cache_dtype=INT8, has_sinks=True), **MIXED),
    "a soft cap": Case(Layer(3, soft_cap=0.5), **MIXED),
    "a soft cap, blocks of 256": Case(
        Layer(num_kv_heads=1, block_size=256, soft_cap=0.5), (300, 257, 600, 256), (300, 1, 70, 256)
    ),
    "a soft cap, a window of 100, head_dim 256": Case(
        Layer(2, 256, num_kv_heads=1, block_size=256, window=100, soft_cap=2.0), (100, 400, 300), (100, 70, 1)
    ),
    "a soft cap, sinks, a window of 7, int8": Case(
        Layer(8, window=7, cache_dtype=INT8, has_sinks=True, soft_cap=0.5), **MIXED
    ),
}

WHOLE = {"context_lens": (1, 40, 128, 17, 300), "query_lens": (1, 40, 128, 17, 300)}
# Attention to both sides, of whole texts: in tiles of 128 keys, and of 16.
PREFILL_CASES |= {
    f"both sides, a window of {window}, blocks of {size}": Case(
        Layer(1, 64, num_kv_heads=1, block_size=size, window=window, causal=False), **WHOLE
    )
    for window, size in [(None, 256), (None, 16), (1, 16), (9, 16), (65, 256), (65, 16), (150, 256), (1000, 16)]
}
PREFILL_CASES["both sides, groups of 2, head_dim 80"] = Case(Layer(2, 80, window=20, causal=False), **WHOLE)
PREFILL_CASES["both sides, int8"] = Case(Layer(2, window=20, causal=False, cache_dtype=INT8), **WHOLE)

SHARED_CASES = {
    # Row 1 has one token of its own, rows 5 and 6 are in no group, the last two are padding.
    **{
        f"two groups of rows, {name}": Case(
            layer, (40, 33, 50, 64, 49, 70, 20, 0, 0), prefix_sharers=(PrefixSharers(0, 2, 2), PrefixSharers(2, 3, 3))
        )
        for name, layer in {
            "groups of 2": Layer(num_kv_heads=1),
            "groups of 3, head_dim 96": Layer(3, 96, num_kv_heads=1),
            "head_dim 256": Layer(1, 256, num_kv_heads=1),
            "heads of 512": Layer(8, 512, num_kv_heads=1),
            "int8": Layer(2, 80, cache_dtype=INT8),
            "fp8": Layer(2, 80, cache_dtype=FP8),
            "sinks": Layer(4, num_kv_heads=1, has_sinks=True),
            "a soft cap": Layer(4, num_kv_heads=1, soft_cap=0.5),
            "a soft cap, int8": Layer(2, 80, cache_dtype=INT8, soft_cap=0.5),
        }.items()
    },
    "blocks of 256": Case(
        Layer(4, 128, num_kv_heads=1, block_size=256),
        (257, 300, 600, 513),
        prefix_sharers=(PrefixSharers(0, 2, 1), PrefixSharers(2, 2, 2)),
    ),
    "63 of 64 queries": Case(  # as many rows as a group may have
        Layer(7, num_kv_heads=1), tuple(range(17, 26)), prefix_sharers=(PrefixSharers(0, 9, 1),)
    ),
    "64 of 64 queries, and a row after them": Case(
        Layer(16, 128), (40, 33, 41, 50, 20), prefix_sharers=(PrefixSharers(0, 4, 2),)
    ),
}

EDGES = (1, 0, 13, 14, 15, 16, 17, 30, 47, 48)  # contexts of first tokens, at the ends of tiles and blocks of 16


def row_tokens(most: int, num_rows: int) -> tuple[int, ...]:
    """How many tokens each row has: `most`, then 1, then `most` again, then other numbers."""
    return tuple((most, 1, most, 1 + row % most)[row % 4] for row in range(num_rows))


# Rows of several tokens. Tiles have 16 tokens, and also 32 in 8 bits; rows begin and end anywhere in them.
SEVERAL_TOKENS_CASES = {
    **{
        f"{most} tokens, groups of {n}, head_dim {dim}": Case(
            Layer(n, dim), EDGES, num_row_tokens=row_tokens(most, len(EDGES))
        )
        for most, n, dim in [(2, 1, 64), (2, 7, 256), (3, 2, 80), (5, 3, 96), (8, 1, 64), (8, 4, 128), (8, 8, 64)]
    },
    **{
        f"{most} tokens, a window of {window}": Case(
            Layer(num_kv_heads=1, block_size=48, window=window),
            (1, 3, 6, 7, 8, 15, 47, 0, 50, 97),
            num_row_tokens=row_tokens(most, 10),
        )
        for most, window in [(2, 1), (3, 7), (5, 7), (8, 7), (5, 16), (8, 20), (3, 1000)]
    },
    **{
        f"{most} tokens, {kind}, groups of {n}": Case(
            Layer(n, cache_dtype=dtype), EDGES, num_row_tokens=row_tokens(most, len(EDGES))
        )
        for most, (kind, dtype, n) in zip((2, 8, 3, 5), IN_8_BITS, strict=True)
    },
    "8 tokens, int8, 64 queries": Case(
        Layer(8, num_kv_heads=1, cache_dtype=INT8, block_size=48), EDGES, num_row_tokens=row_tokens(8, len(EDGES))
    ),
    "3 tokens, fp8, a window of 20, head_dim 80": Case(
        Layer(head_dim=80, window=20, cache_dtype=FP8), (1, 18, 20, 21, 0, 70), num_row_tokens=(3, 3, 2, 3, 1, 3)
    ),
    "5 tokens, sinks": Case(Layer(3, has_sinks=True), EDGES, num_row_tokens=row_tokens(5, len(EDGES))),
    "8 tokens, sinks, a window of 7, int8": Case(
        Layer(8, num_kv_heads=1, window=7, has_sinks=True, cache_dtype=INT8),
        (1, 6, 8, 0, 50, 97),
        num_row_tokens=(8, 8, 8, 8, 3, 8),
    ),
    "3 tokens, a soft cap": Case(Layer(3, soft_cap=0.5), EDGES, num_row_tokens=row_tokens(3, len(EDGES))),
    "5 tokens, a soft cap, a window of 7, head_dim 256": Case(
        Layer(2, 256, num_kv_heads=1, window=7, soft_cap=2.0), (1, 6, 8, 50, 97), num_row_tokens=(5, 4, 5, 1, 5)
    ),
    "4 tokens in each row, blocks of 256": Case(
        Layer(4, 128, num_kv_heads=1, block_size=256), (253, 254, 256, 257, 600), num_row_tokens=(4,) * 5
    ),
    # Row 1 has a token of its own, or some; rows 5 and 6 are in no group, the last two are padding.
    **{
        f"{most} tokens, two groups of rows, {name}": Case(
            layer,
            (40, 33, 50, 64, 49, 70, 20, 0, 0),
            prefix_sharers=(PrefixSharers(0, 2, 2), PrefixSharers(2, 3, 3)),
            num_row_tokens=row_tokens(most, 9),
        )
        for most, name, layer in [
            (2, "groups of 2", Layer(num_kv_heads=1)),
            (3, "groups of 3, head_dim 96", Layer(3, 96, num_kv_heads=1)),
            (5, "head_dim 256", Layer(1, 256, num_kv_heads=1)),
            (8, "int8", Layer(2, 80, cache_dtype=INT8)),
            (5, "fp8", Layer(2, 80, cache_dtype=FP8)),
            (3, "sinks", Layer(4, num_kv_heads=1, has_sinks=True)),
            (5, "a soft cap", Layer(4, num_kv_heads=1, soft_cap=0.5)),
        ]
    },
    "2 tokens, 64 of 64 queries, and a row after them": Case(
        Layer(8, 128),
        (40, 33, 41, 50, 20),
        prefix_sharers=(PrefixSharers(0, 4, 2),),
        num_row_tokens=(2, 2, 1, 2, 2),
    ),
}
