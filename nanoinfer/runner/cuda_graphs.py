"""Decode steps as CUDA graphs: hundreds of small kernels, launched as one.

A graph goes from the tables to the logits. It is captured for each of a few batch sizes; a batch runs in the smallest
that holds it, padded. Steps whose rows share prefixes run other kernels, so they have graphs of their own, which are
captured when they are first needed.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanoinfer.device import capturing
from nanoinfer.layers.attention.metadata import SharedPrefixes
from nanoinfer.runner.step_tables import PADDING_ROW

logger = logging.getLogger("nanoinfer")

Forward = Callable[[Tensor, SharedPrefixes | None], None]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, and max_num_seqs itself: the larger a batch, the less a few more rows cost."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs + 1, 32), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


def sharing_graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes for steps whose rows share prefixes: fewer, as they are captured while requests wait."""
    sizes = graph_sizes(max_num_seqs)
    return [size for size in sizes if size in (4, 8, 16) or size % 32 == 0 or size == sizes[-1]]


class DecodeGraphs:
    """Captures `forward` in one CUDA graph for each batch size; all graphs share one memory pool.

    `forward` takes rows, (num_rows,) int32, and which of them share prefixes, and writes to memory that its caller
    owns. All tensors that it reads or writes must keep their addresses.

    sizes, sharing_sizes: the batch sizes of steps without and with shared prefixes; only `sizes` are captured here.
    is_warm: whether such graphs were captured before in this process, so that their kernels are compiled and loaded.
    """

    def __init__(
        self,
        forward: Forward,
        sizes: list[int],
        sharing_sizes: list[int],
        device: torch.device,
        is_warm: bool = False,
    ) -> None:
        self._forward = forward
        # What the graphs read: a column for the rows, and those of SharedPrefixes.
        self._padding = torch.tensor([[PADDING_ROW], [0], [0]], dtype=torch.int32, device=device).repeat(1, max(sizes))
        self._inputs = self._padding.clone()
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._size_for = {False: _next_sizes(sizes), True: _next_sizes(sharing_sizes)}
        self._pool: Any = None  # the handle of their memory pool
        # The largest first: the smaller ones then fit into its memory.
        for size in sorted(sizes, reverse=True):
            self._graphs[size, False] = self._capture(size, shares_prefixes=False, is_warm=is_warm)

    def replay(self, rows: Tensor, shared_prefixes: SharedPrefixes | None) -> None:
        """Run `forward` for these rows (num_rows,) int32, and for padding after them."""
        shares_prefixes = shared_prefixes is not None
        size = self._size_for[shares_prefixes][len(rows)]
        key = size, shares_prefixes
        if key not in self._graphs:
            logger.info("capturing the CUDA graph of decode steps of up to %d rows that share prefixes", size)
            self._graphs[key] = self._capture(size, shares_prefixes)
        columns = rows, *(shared_prefixes or ())
        for column, inputs, padding in zip(columns, self._inputs, self._padding, strict=False):
            torch.cat((column, padding[len(rows) : size]), out=inputs[:size])
        self._graphs[key].replay()

    def _capture(self, size: int, shares_prefixes: bool, is_warm: bool = False) -> torch.cuda.CUDAGraph:
        self._inputs.copy_(self._padding)
        rows, *shared = self._inputs[:, :size]
        shared_prefixes = SharedPrefixes(*shared) if shares_prefixes else None
        if not is_warm:
            self._forward(rows, shared_prefixes)  # compiles and warms up outside the capture
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool):
            self._forward(rows, shared_prefixes)
        self._pool = self._pool or graph.pool()
        return graph


def _next_sizes(sizes: list[int]) -> list[int]:
    """Return the smallest size that holds a batch, for each number of rows from 0 on."""
    return [min(size for size in sizes if size >= count) for count in range(max(sizes, default=-1) + 1)]
