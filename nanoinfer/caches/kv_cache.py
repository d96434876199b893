"""The KV cache on a device: a pool of pages, and what each layer sees of them."""

from collections import Counter
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from nanoinfer.caches.cache_groups import CacheGroups, LayerPlace, PageLayout
from nanoinfer.device import zeros
from nanoinfer.ops.block_tables.spec import copy_tokens
from nanoinfer.ops.kv_cache.spec import LayerCache


class KVCache:
    """Holds the pages that all block tables share, as zeros: unwritten memory must not be NaN, since 0 x NaN is NaN.

    A page is not contiguous: each layer's tensors of all pages lie together, as kernels read them. Where tables have
    layers of several sizes, a page that holds one large layer in a place holds `PageLayout.id_stride` small ones there.
    """

    def __init__(
        self, groups: CacheGroups, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size, self.dtype, self.device = num_blocks, block_size, dtype, device
        self.id_strides = [table.page.id_stride for table in groups.tables]
        self._tensors: list[Tensor] = []  # (layers, num_blocks, heads, block_size), or with vectors behind that
        views: dict[PageLayout, list[LayerCache]] = {}
        for page in sorted({table.page for table in groups.tables}, key=lambda page: page.id_stride):
            views[page] = self._lay_out(page)
        self._has_unlike_pages = len(views) > 1
        self._layers = [views[table.page] for table in groups.tables]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def layer(self, place: LayerPlace) -> LayerCache:
        """Return what a layer sees of the pages."""
        return self._layers[place.table][place.layer]

    def copy_blocks(self, copies: Tensor) -> None:
        """Copy a block's first tokens to other blocks, where a prompt parts from a cached one.

        copies: (num_copies, 3), as `BlockCopy`.
        """
        if self._has_unlike_pages:  # where a page has its first tokens depends on the table that it is in
            copies = copies.clone()
            copies[:, 2] = self.block_size
        for tensor in self._tensors:
            copy_tokens(tensor, copies)

    def _lay_out(self, page: PageLayout) -> list[LayerCache]:
        """Return what each layer of a page sees.

        After the first call, layers have memory of their own only for tensors that do not fit into those of the first.
        """
        shared, of_layout = list(self._tensors), {}
        for layout, num_layers in Counter(page.layers).items():
            sides = []
            for index, (shape, dtype) in enumerate(layout.tensors(self.block_size, self.dtype)):
                place = num_layers // page.id_stride, self.num_blocks, page.id_stride * shape[0], *shape[1:]
                tensor = shared[index] if shared else None
                if tensor is None or tensor[0, 0].numel() != prod(place[2:]):
                    tensor = zeros(place, dtype, self.device)
                    self._tensors.append(tensor)
                sides.append(_views(tensor, page.id_stride, shape))
            of_layout[layout] = map(layout.layer_cache, *sides)
        return [next(of_layout[layout]) for layout in page.layers]


def page_bytes(groups: CacheGroups, block_size: int, dtype: torch.dtype) -> int:
    """Return what a page takes, scales included."""
    return KVCache(groups, 1, block_size, dtype, torch.device("meta")).num_bytes


def _views(tensor: Tensor, id_stride: int, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield each layer's blocks, (its number of blocks, *shape), contiguous; every `id_stride`-th is that of a page."""
    size, num_blocks = prod(shape), (tensor.shape[1] - 1) * id_stride + 1
    for memory in tensor.flatten(1):
        for start in range(0, id_stride * size, size):
            yield memory[start : start + num_blocks * size].view(num_blocks, *shape)
