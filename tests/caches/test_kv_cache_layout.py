"""Which layers share a block table, and what the pages of a pool hold for each table."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer.caches.block_layout import BlockLayout
from nanoinfer.caches.kv_cache import KVCache, page_bytes
from nanoinfer.caches.kv_cache_layout import MAX_EMPTY_SHARE, MAX_TABLES, KVCacheLayout, LayerKind, LayerPlace
from nanoinfer.caches.routing_table import RoutingTable
from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.cache_groups.specs import FullAttentionSpec, SlidingWindowSpec
from nanoinfer.models.native_config import read_native_config
from nanoinfer.ops.decode_attention.spec import decode_attention
from nanoinfer.ops.kv_cache.spec import LayerCache, store_keys_values

CPU = torch.device("cpu")
SMALL = BlockLayout.of_kv(num_heads=2, head_dim=8)


def config_of(architecture: str, **fields: Any) -> ModelConfig:
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_attention_heads": 4, "head_dim": 16}
    return read_native_config({"architectures": [architecture], "num_key_value_heads": 2, **sizes, **fields})


def layout_of(config: ModelConfig, longest: int) -> KVCacheLayout:
    return KVCacheLayout.of(config, longest, TensorParallel())


def arrange(windows: Sequence[int | None], layout: BlockLayout = SMALL) -> KVCacheLayout:
    return KVCacheLayout.arrange([LayerKind(window, layout) for window in windows])


@pytest.mark.parametrize(
    ("num_layers", "num_full", "num_tables"), [(26, 4, 7), (34, 5, 7), (48, 8, 6), (62, 10, 7)], ids=str
)
def test_gemma_3_has_a_table_of_full_layers_and_as_large_ones_of_windowed_layers(
    num_layers: int, num_full: int, num_tables: int
) -> None:
    fields = {"num_hidden_layers": num_layers, "sliding_window": 1024, "sliding_window_pattern": 6}
    layout = layout_of(config_of("Gemma3ForCausalLM", max_position_embeddings=32768, **fields), 32768)
    assert layout.cache_specs == (FullAttentionSpec(), SlidingWindowSpec(1024, num_tables - 1))
    assert {len(table.layers) for table in layout.tables} == {num_full}
    assert len({*layout.places}) == num_layers, "no two layers share a place"
    assert layout.places[5] == LayerPlace(0, 0)
    alone = layout_of(config_of("Gemma3ForCausalLM", **fields), 1024)
    assert alone.cache_specs == (FullAttentionSpec(),), "no sequence outgrows the window"


def test_gemma_3_27b_holds_more_sequences_of_32k_tokens() -> None:
    fields = {"num_hidden_layers": 62, "sliding_window": 1024, "sliding_window_pattern": 6}
    layout = layout_of(config_of("Gemma3ForCausalLM", max_position_embeddings=65536, **fields), 65536)
    # In steady state: all blocks of one table, and of six others those that a window of 1,024 tokens can lie in.
    steady = 10 * (128 + 6 * (1024 // 256 + 1))
    assert 62 * 128 / steady > 4.5
    chunk = layout.num_pages(32768, 256, max_chunk_tokens=16384)
    assert chunk == 128 + 6 * 69, "while a chunk of 16,384 tokens is computed, it holds 69 blocks by six tables"


def test_models_of_one_kind_have_one_table() -> None:
    plain = config_of("Qwen3ForCausalLM", num_hidden_layers=3)
    for config in (plain, config_of("MistralForCausalLM", num_hidden_layers=3, sliding_window=16)):
        layout = layout_of(config, 4096)
        assert layout.cache_specs == (FullAttentionSpec(),)
        assert len(layout.tables[0].layers) == config.num_hidden_layers
        assert layout.max_tokens(num_pages=7, block_size=16, max_chunk_tokens=4) == 7 * 16
        assert layout.describe(7, 16, 4) == ""


def test_windows_of_several_sizes_are_a_group_each_and_the_longest_comes_first() -> None:
    layout = arrange([None, 16, 64, 64, None, 16, 64, 64])
    assert layout.cache_specs == (FullAttentionSpec(), SlidingWindowSpec(64, num_tables=2), SlidingWindowSpec(16))
    assert layout.places == ((0, 0), (3, 0), (1, 0), (1, 1), (0, 1), (3, 1), (2, 0), (2, 1))
    assert layout.num_pages(1000, 8, max_chunk_tokens=1) == 125 + 2 * 9 + 3
    assert layout.describe(1001, 8, 1) == (
        "of 2 layers (one sequence of up to 7832 tokens, or the windows of 55 sequences, 16 or 64 tokens each) "
    )


def test_a_mix_without_a_layer_that_attends_to_all_tokens_keeps_the_windows_alone() -> None:
    layout = arrange([16, 64, 64, 64])
    assert layout.cache_specs == (SlidingWindowSpec(64, num_tables=3), SlidingWindowSpec(16))
    assert layout.num_pages(10**6, 8, max_chunk_tokens=1) == 3 * 9 + 3, "however long a sequence is"
    assert layout.max_tokens(31, 8, 1) >= 10**9
    assert layout.max_tokens(30, 8, 1) == 8 * 8, "one page too few: page 0 is nobody's"
    assert layout.describe(31, 8, 1) == "of 1 layers (the windows of 1 sequences, 16 or 64 tokens each) "


@pytest.mark.parametrize(
    ("windows", "why"),
    [
        ([None, 16] * 1 + [None] * 2, "more layers attend to all tokens than to a window"),
        ([None] + [16] * 9, "ten tables"),
        ([None] * 3 + [16] * 4, "two of nine places are empty"),
        ([16] * 4, "all attend to the same window"),
    ],
)
def test_where_tables_do_not_pay_all_layers_share_one(windows: list[int | None], why: str) -> None:
    layout = arrange(windows)
    assert layout.cache_specs == (FullAttentionSpec(),), why
    assert layout.places == tuple((0, index) for index in range(len(windows)))


# --- layers of several sizes ---

LOCAL, GLOBAL = (
    BlockLayout.of_kv(num_heads=8, head_dim=4),
    BlockLayout.of_kv(num_heads=2, head_dim=8),
)


def test_layers_of_two_sizes_have_pages_of_the_same_bytes() -> None:
    """As Gemma 4's: 25 layers with a window, and 5 with larger heads, of which a page holds twice as many."""
    local, wide = (
        BlockLayout.of_kv(num_heads=8, head_dim=256),
        BlockLayout.of_kv(2, 512),
    )
    layout = KVCacheLayout.arrange(
        [LayerKind(None if index % 6 == 5 else 1024, wide if index % 6 == 5 else local) for index in range(30)]
    )
    assert layout.cache_specs == (FullAttentionSpec(), SlidingWindowSpec(1024, num_tables=5))
    assert [(len(table.layers), table.id_stride) for table in layout.tables] == [(10, 2), *[(5, 1)] * 5]
    size = page_bytes(layout, 16, torch.bfloat16)
    assert size == 5 * local.num_bytes(16, torch.bfloat16) == 10 * wide.num_bytes(16, torch.bfloat16)
    in_8_bits = page_bytes(layout, 16, torch.int8)
    # The scales of ten wide layers would take half as much as those of five local ones: they have memory of their own.
    assert in_8_bits == 5 * local.num_bytes(16, torch.int8) + 10 * 2 * 2 * 16 * 4
    assert in_8_bits < 1.01 * 5 * local.num_bytes(16, torch.int8)


def test_layers_whose_sizes_are_no_multiples_share_one_table_with_pages_of_both() -> None:
    odd = BlockLayout(((3, 8), (3, 4)))
    layout = KVCacheLayout.arrange([LayerKind(None, odd), LayerKind(32, LOCAL), LayerKind(32, LOCAL)])
    assert layout.cache_specs == (FullAttentionSpec(),)
    for dtype in (torch.float32, torch.int8):
        assert page_bytes(layout, 16, dtype) == odd.num_bytes(16, dtype) + 2 * LOCAL.num_bytes(16, dtype)
    keys = [KVCache(layout, 3, 16, torch.float32, CPU).layer(place).k for place in layout.places]
    assert [tuple(k.shape) for k in keys] == [(3, 3, 16, 8), (3, 8, 16, 4), (3, 8, 16, 4)]


@dataclass(frozen=True, slots=True)
class LatentLayout(BlockLayout):
    """One vector a token, whose first numbers are its value too."""

    value_size: int

    def layer_cache(self, *tensors: Tensor) -> LayerCache:
        [latent] = tensors
        return LayerCache(latent, latent[..., : self.value_size])


def test_a_latent_is_one_more_layout() -> None:
    layout = arrange([None] * 3, LatentLayout(vectors=((1, 576),), value_size=512))
    assert page_bytes(layout, 64, torch.bfloat16) == 3 * 64 * 576 * 2
    layer = KVCache(layout, 4, 64, torch.bfloat16, CPU).layer(layout.places[1])
    layer.k.fill_(1)
    assert layer.v.shape == (4, 1, 64, 512)
    assert layer.v.eq(1).all(), "it is the same memory"


def test_experts_of_tokens_are_found_by_block_though_layers_see_several_blocks_in_a_page() -> None:
    moe = MoEConfig(
        num_experts=8, num_experts_per_tok=1, intermediate_size=1, norm_topk_prob=True, has_experts=(True, False)
    )
    kv_cache: Any = SimpleNamespace(num_blocks=4, block_size=16, device=CPU, id_strides=[3, 1])
    table = RoutingTable(moe, kv_cache)
    slots = torch.tensor([3 * 2 * 16 + 5, -1, 0])  # token 5 of block 2, no token, token 0 of block 0
    table.write(slots, [torch.tensor([[7], [6], [4]])])
    assert table.read([0, 2], 0, 32).to_array()[:, 0, 0].tolist() == [4, *[0] * 20, 7, *[0] * 10]


# --- random mixes ---

LAYOUTS: tuple[BlockLayout, ...] = (
    LOCAL,
    GLOBAL,
    SMALL,
    BlockLayout(((4, 4), (4, 12))),
    BlockLayout(((1, 8), (1, 24))),
)


def random_layers(rng: random.Random) -> list[LayerKind]:
    layouts = rng.sample(LAYOUTS[: rng.choice((3, 5))], rng.choice((1, 2)))
    windows = rng.sample((None, 16, 64, 256), rng.choice((1, 2, 2, 3)))
    kinds = [LayerKind(window, rng.choice(layouts)) for window in windows]
    return rng.sample(kinds, len(kinds)) + rng.choices(kinds, weights=range(1, len(kinds) + 1), k=rng.randint(0, 30))


@pytest.mark.parametrize("seed", range(200))
def test_whatever_the_mix_each_layer_has_a_place_and_little_is_empty(seed: int) -> None:
    layers = random_layers(random.Random(seed))
    layout = KVCacheLayout.arrange(layers)
    assert len({*layout.places}) == len(layers)
    for (window, block), place in zip(layers, layout.places, strict=True):
        table = layout.tables[place.table]
        assert table.layers[place.layer] == block
        assert table.window in (window, None), "a table keeps what its layers attend to"
    if len(layout.tables) == 1:
        assert page_bytes(layout, 4, torch.int8) == sum(kind.layout.num_bytes(4, torch.int8) for kind in layers)
        return
    assert len(layout.tables) <= MAX_TABLES
    assert [table.window for table in layout.tables].count(None) <= 1
    needed = sum(kind.layout.num_bytes(4, torch.float32) for kind in layers)
    size = page_bytes(layout, 4, torch.float32)
    assert needed <= size * len(layout.tables) <= (1 + MAX_EMPTY_SHARE) * needed
    for num_pages in (9, 50, 1000):
        longest = layout.max_tokens(num_pages, 4, max_chunk_tokens=8)
        assert layout.num_pages(longest, 4, 8) < num_pages, "page 0 is nobody's"
        if longest < 10**9:
            assert layout.num_pages(longest + 1, 4, 8) >= num_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_mix_pages_of_all_tables_lie_apart(seed: int, dtype: torch.dtype) -> None:
    """Each page is written by one table's layers, as the pool gives it out; then each has what was written last."""
    rng = random.Random(seed)
    layout = KVCacheLayout.arrange(random_layers(rng))
    while seed % 2 and len({table.layers for table in layout.tables}) == 1:  # every other mix has pages of two kinds
        layout = KVCacheLayout.arrange(random_layers(rng))
    num_pages = 6
    cache = KVCache(layout, num_pages, 4, dtype, CPU)
    owners = [rng.randrange(len(layout.tables)) for _ in range(num_pages)]

    def tensors(page: int) -> list[Tensor]:
        table = owners[page]
        index = page * cache.id_strides[table]
        caches = [cache.layer(place) for place in layout.places if place.table == table]
        sides = [(one.k, one.v, one.k_scales, one.v_scales) for one in caches]
        return [side[index] for layer in sides for side in layer if side is not None]

    order = rng.sample(range(num_pages), num_pages)
    for page in order:
        for number, tensor in enumerate(tensors(page)):
            assert tensor.is_contiguous()
            tensor.fill_(page * 17 + number % 17)
    for page in order:
        for number, tensor in enumerate(tensors(page)):
            assert (tensor == page * 17 + number % 17).all(), (page, number)
    source, target = order[0], order[1]
    owners[target] = owners[source]
    cache.copy_blocks(torch.tensor([[source, target, 3]], dtype=torch.int32))
    for one, other in zip(tensors(source), tensors(target), strict=True):
        assert torch.equal(one[:, :3], other[:, :3])
    for page in order[2:]:
        assert all((tensor == page * 17 + number % 17).all() for number, tensor in enumerate(tensors(page)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_attention_reads_what_was_stored_for_the_smaller_of_two_sizes(dtype: torch.dtype) -> None:
    """The second of two layers in a place sees every other block; in a cache of its own it would see all."""
    layers = [LayerKind(None, GLOBAL)] * 4 + [LayerKind(32, LOCAL)] * 4
    layout, alone = KVCacheLayout.arrange(layers), KVCacheLayout.arrange(layers[:1])
    assert (layout.places[1], layout.tables[0].id_stride) == (LayerPlace(0, 1), 2)
    caches = KVCache(layout, 8, 16, dtype, CPU), KVCache(alone, 8, 16, dtype, CPU)
    places, strides = (layout.places[1], alone.places[0]), (2, 1)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 20, 2, 8, generator=generator)
    q = torch.randn(1, 4, 8, generator=generator)
    results = []
    for cache, place, stride in zip(caches, places, strides, strict=True):
        table = torch.tensor([[5, 3]], dtype=torch.int32) * stride
        positions = torch.arange(20)
        slots = table[0, positions // 16].long() * 16 + positions % 16
        store_keys_values(k, v, cache.layer(place), slots)
        lens = torch.tensor([20], dtype=torch.int32)
        results.append(decode_attention(q, cache.layer(place), table, lens, 0.5))
    assert torch.equal(*results)
