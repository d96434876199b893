"""Says which layers with attention share a block table, and what a page of the pool holds for each table.

In most models all layers attend to all tokens. They share one table, and a page holds a block of tokens for all layers.

In other models, layers that remember the same tokens, all or those of one window, are a cache group. The block manager
gets a record of each group (`cache_specs`), and knows neither layers nor bytes. All tables take blocks from one pool,
where a page is the memory of a block, so their pages have equal bytes. A page holds as many layers as attend to all
tokens, and these have one table. A group of more layers has several tables; its last may leave a part of its pages
empty. Where a table for each group does not pay, all layers share one, whose blocks keep all tokens.

For example, 10 layers of Gemma 3 27B attend to all tokens, and 52 have a window. So a page holds 10 layers. The first
group has one table, and the second has six: five for 10 layers each, and one for the other 2.
"""

from collections.abc import Sequence
from itertools import groupby
from math import ceil
from sys import maxsize
from typing import NamedTuple

from nanoinfer.caches.block_layout import BlockLayout
from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.cache_groups.specs import FullAttentionSpec, SlidingWindowSpec
from nanoinfer.integers import ceil_div

MAX_TABLES = 9  # more take each step too long
MAX_EMPTY_SHARE = 0.15  # of the memory that a token takes while it is within all windows
ENDLESS = 2**40  # tokens, more than any sequence has


class LayerPlace(NamedTuple):
    """Says by which block table a layer with attention finds its blocks, and which of a page's layers it is."""

    table: int = 0
    layer: int = 0


class LayerKind(NamedTuple):
    """Tells layers with attention apart. window: how many tokens they attend to; None for all."""

    window: int | None
    layout: BlockLayout


class TableLayout(NamedTuple):
    """Says what a block table is for, and what a page holds for its layers.

    window: how many tokens they attend to; None for all. id_stride: how far apart neighbouring pages are in a layer's
    view of the pool. It is 1 for the largest layers, which see the blocks of all pages. Where smaller layers see
    several blocks in the place of a large one, only one of them is that of a page. So on the device the table has block
    ids times `id_stride`.
    """

    window: int | None
    layers: tuple[BlockLayout, ...]
    id_stride: int = 1


class KVCacheLayout(NamedTuple):
    """Says how the layers with attention share the pool of pages.

    tables: those of the first cache group, then those of the next. places: of each layer with attention, in the order
    of the model.
    """

    tables: tuple[TableLayout, ...]
    places: tuple[LayerPlace, ...]

    @classmethod
    def of(cls, config: BaseModelConfig, max_positions: int, tp: TensorParallel) -> "KVCacheLayout":
        """Return the layout for a model whose sequences have so many tokens at most."""
        if config.is_encoder:  # nothing is kept when a layer is computed, so all layers share the memory of one
            layout = BlockLayout.of(config, tp)
            return cls((TableLayout(None, (layout,)),), (LayerPlace(),) * len(config.windows))
        kinds = {
            index: LayerKind(window, BlockLayout.of(config.of_layer(index), tp))
            for index, window in enumerate(config.windows_within(max_positions))
            if not config.is_linear(index)
        }
        owners = [index for index in kinds if config.cache_layer(index) == index]
        arranged = cls.arrange([kinds[index] for index in owners])
        places = dict(zip(owners, arranged.places, strict=True))
        return arranged._replace(places=tuple(places[config.cache_layer(index)] for index in kinds))

    @classmethod
    def arrange(cls, layers: Sequence[LayerKind]) -> "KVCacheLayout":
        """Return the layout for layers of these kinds; one table for all where more do not pay."""
        by_kind = _tables_by_kind(layers)
        if by_kind is None:
            only_table = TableLayout(None, tuple(layout for _, layout in layers))
            return cls((only_table,), tuple(LayerPlace(0, index) for index in range(len(layers))))
        tables: list[TableLayout] = []
        places: dict[LayerKind, list[LayerPlace]] = {}
        for kind, table in by_kind.items():
            first, num_layers, per_page = len(tables), layers.count(kind), len(table.layers)
            tables += [table] * ceil_div(num_layers, per_page)
            places[kind] = [LayerPlace(first + index // per_page, index % per_page) for index in range(num_layers)]
        return cls(tuple(tables), tuple(places[kind].pop(0) for kind in layers))

    @property
    def cache_specs(self) -> tuple[FullAttentionSpec | SlidingWindowSpec, ...]:
        """The cache groups with tables as the block manager sees them: by windows and numbers of tables alone."""
        counted = ((window, len(list(tables))) for window, tables in groupby(table.window for table in self.tables))
        return tuple(
            FullAttentionSpec(count) if window is None else SlidingWindowSpec(window, count)
            for window, count in counted
        )

    def num_pages_of(self, num_blocks: int) -> int:
        """Return how many pages take the place of so many blocks of all layers. They hold as many tokens, or more."""
        return num_blocks * len(self.tables) + self._num_unused

    def num_pages(self, num_tokens: int, block_size: int, max_chunk_tokens: int) -> int:
        """Return how many pages a sequence of so many tokens takes at most, if its chunks have no more than that."""
        return sum(spec.max_pages(num_tokens, block_size, max_chunk_tokens) for spec in self.cache_specs)

    def max_tokens(self, num_pages: int, block_size: int, max_chunk_tokens: int) -> int:
        """Return the longest sequence that a pool of so many pages holds, a multiple of the block size."""
        num_pages -= self._num_unused
        # In blocks. Where all tables have windows, there is no longest sequence.
        least, most = 0, num_pages if self.tables[0].window is None else ENDLESS // block_size
        while least < most:
            middle = (least + most + 1) // 2
            fits = self.num_pages(middle * block_size, block_size, max_chunk_tokens) <= num_pages
            least, most = (middle, most) if fits else (least, middle - 1)
        return least * block_size

    def describe(self, num_pages: int, block_size: int, max_chunk_tokens: int) -> str:
        """Say for the log how many layers a page holds, and how long sequences can be; "" if it holds all layers."""
        windows = [table.window for table in self.tables if table.window is not None]
        if not windows:
            return ""
        within = sum(ceil_div(window, block_size) for window in windows)
        layers, sizes = (
            " or ".join(str(number) for number in sorted({*numbers}))
            for numbers in ([len(table.layers) for table in self.tables], windows)
        )
        longest = self.max_tokens(num_pages, block_size, max_chunk_tokens)
        of_all = f"one sequence of up to {longest} tokens, or " if self.tables[0].window is None else ""
        return f"of {layers} layers ({of_all}the windows of {num_pages // within} sequences, {sizes} tokens each) "

    @property
    def _num_unused(self) -> int:
        """How many pages no sequence gets: entries of tables point to one where a window has left their blocks."""
        return int(any(table.window is not None for table in self.tables))


def _tables_by_kind(layers: Sequence[LayerKind]) -> dict[LayerKind, TableLayout] | None:
    """Return a table for each kind of layers; None where one table for all layers is better.

    Sizes of pages are counted in places, each of which has room for one of the largest layers. Where several sizes of
    layers, or windows alone, leave a choice, the smallest page that pays is taken.

    Where all layers have one size, each place holds one layer, and strides are 1. Gemma 4's have two sizes.
    """
    kinds = sorted(dict.fromkeys(layers), key=lambda kind: -(kind.window or maxsize))  # the longest window first
    largest = max((kind.layout for kind in kinds), key=lambda layout: sum(layout.num_values))
    strides = {kind: largest.times(kind.layout) for kind in kinds}  # how many layers a place holds
    num_full = sum(kind.window is None for kind in kinds)
    if len(kinds) == 1 or num_full > 1 or not all(strides.values()):
        return None
    needed = [layers.count(kind) / strides[kind] for kind in kinds]  # places
    in_all, least = sum(needed), ceil(needed[0] if num_full else min(needed))
    if num_full and 2 * least > in_all:
        return None
    most = least if num_full and max(strides.values()) == 1 else ceil(in_all)
    for num_places in range(least, most + 1):
        num_tables = sum(ceil(count / num_places) for count in needed)
        if num_tables <= MAX_TABLES and num_tables * num_places - in_all <= MAX_EMPTY_SHARE * in_all:
            return {
                kind: TableLayout(kind.window, (kind.layout,) * (num_places * strides[kind]), strides[kind])
                for kind in kinds
            }
    return None
