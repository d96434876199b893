"""Holds the KV cache on a device: a pool of pages, and each layer's view of it."""

from collections import Counter
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from nanoinfer.caches.kv_cache_layout import KVCacheLayout, LayerPlace, TableLayout
from nanoinfer.device import zeros
from nanoinfer.ops.block_tables.spec import copy_tokens
from nanoinfer.ops.kv_cache.spec import LayerCache


class KVCache:
    """Holds the pages that all block tables share, as zeros: unwritten memory must not be NaN, since 0 x NaN is NaN.

    A page is not contiguous: each layer's tensors of all pages lie together, as kernels read them. Where tables have
    layers of several sizes, a page that holds one large layer in a place holds `id_stride` small ones there.
    """

    def __init__(
        self, layout: KVCacheLayout, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size, self.dtype, self.device = num_blocks, block_size, dtype, device
        self.id_strides = [table.id_stride for table in layout.tables]
        self._tensors: list[Tensor] = []  # (layers, num_blocks, heads, block_size), or with vectors behind that
        # Tables that differ in their windows alone have the same pages. Small layers lie in the memory of large ones.
        pages = {table._replace(window=None) for table in layout.tables}
        views = {page: self._lay_out(page) for page in sorted(pages, key=lambda page: page.id_stride)}
        self._has_unlike_pages = len(views) > 1
        self._layers = [views[table._replace(window=None)] for table in layout.tables]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def layer(self, place: LayerPlace) -> LayerCache:
        """Return a layer's view of the pages."""
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

    def _lay_out(self, page: TableLayout) -> list[LayerCache]:
        """Return what each layer of a table sees of the pages.

        After the first call, layers have memory of their own only for tensors that do not fit into those of the first.
        """
        first, by_layout = list(self._tensors), {}
        for layout, num_layers in Counter(page.layers).items():
            views: list[Iterator[Tensor]] = []  # of each tensor, layer by layer
            for index, (shape, dtype) in enumerate(layout.tensors(self.block_size, self.dtype)):
                of_layers = num_layers // page.id_stride, self.num_blocks, page.id_stride * shape[0], *shape[1:]
                tensor = first[index] if first else None
                if tensor is None or tensor[0, 0].numel() != prod(of_layers[2:]):
                    tensor = zeros(of_layers, dtype, self.device)
                    self._tensors.append(tensor)
                views.append(_views(tensor, page.id_stride, shape))
            by_layout[layout] = map(layout.layer_cache, *views)
        return [next(by_layout[layout]) for layout in page.layers]


def page_bytes(layout: KVCacheLayout, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page, scales included."""
    return KVCache(layout, 1, block_size, dtype, torch.device("meta")).num_bytes


def _views(tensor: Tensor, id_stride: int, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield each layer's blocks, (num_blocks, *shape), contiguous. Block page * id_stride is the layer's in a page."""
    size, num_blocks = prod(shape), (tensor.shape[1] - 1) * id_stride + 1
    for memory in tensor.flatten(1):
        for start in range(0, id_stride * size, size):
            yield memory[start : start + num_blocks * size].view(num_blocks, *shape)
