"""Decode steps as CUDA graphs: hundreds of small kernels, launched as one.

A graph goes from the tables to the logits. It is captured for each of a few batch sizes; a batch runs in the smallest
that holds it, padded. Steps whose rows share prefixes run other kernels, and so do steps of several tokens a row. They
have graphs of their own, which are captured when they are first needed.
"""

import logging
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nanoinfer.device import capturing
from nanoinfer.layers.attention.metadata import SharedPrefixes
from nanoinfer.runner.step_tables import PADDING_ROW

logger = logging.getLogger("nanoinfer")


class Forward(Protocol):
    """Computes a decode step; for the arguments, see `StepTables.decode_step`."""

    def __call__(
        self,
        rows: Tensor,
        shared_prefixes: SharedPrefixes | None,
        num_tokens: int = 1,
        num_row_tokens: Tensor | None = None,
    ) -> None: ...


class GraphKey(NamedTuple):
    """Says which steps run in a graph."""

    size: int  # rows, with padding
    shares_prefixes: bool
    num_tokens: int = 1  # of each row


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, and max_num_seqs itself: the larger a batch, the less a few more rows cost."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs + 1, 32), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


def sharing_graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes for steps whose rows share prefixes: fewer, as they are captured while requests wait."""
    sizes = several_tokens_graph_sizes(graph_sizes(max_num_seqs))
    return [size for size in sizes if size >= 4 or size == sizes[-1]]


def several_tokens_graph_sizes(sizes: list[int]) -> list[int]:
    """Return those batch sizes that steps of several tokens a row have, whose graphs are captured late, too."""
    return [size for size in sizes if size in (1, 2, 4, 8, 16) or size % 32 == 0 or size == max(sizes)]


class DecodeGraphs:
    """Captures `forward` in one CUDA graph for each batch size; all graphs share one memory pool.

    `forward` writes to memory that its caller owns. All tensors that it reads or writes must keep their addresses.

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
        # What the graphs read, a line for each tensor: the rows, the two of SharedPrefixes, tokens of each row.
        padding = torch.tensor([[PADDING_ROW], [0], [0], [1]], dtype=torch.int32, device=device)
        self._padding = padding.repeat(1, max(sizes))
        self._inputs = self._padding.clone()
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._size_for = {False: _next_sizes(sizes), True: _next_sizes(sharing_sizes)}
        self._size_of_several_tokens = _next_sizes(several_tokens_graph_sizes(sizes))
        self._pool: Any = None  # the handle of their memory pool
        # The largest first: the smaller ones then fit into its memory.
        for size in sorted(sizes, reverse=True):
            key = GraphKey(size, shares_prefixes=False)
            self._graphs[key] = self._capture(key, is_warm)

    def replay(
        self,
        rows: Tensor,
        shared_prefixes: SharedPrefixes | None,
        num_tokens: int = 1,
        num_row_tokens: Tensor | None = None,
    ) -> None:
        """Run `forward` for these rows (num_rows,) int32, and for padding after them."""
        shares_prefixes = shared_prefixes is not None
        sizes = self._size_of_several_tokens if num_tokens > 1 else self._size_for[shares_prefixes]
        key = GraphKey(sizes[len(rows)], shares_prefixes, num_tokens)
        if key not in self._graphs:
            logger.info(
                "capturing the CUDA graph of decode steps of up to %d rows%s%s",
                key.size,
                " that share prefixes" if shares_prefixes else "",
                f", with {num_tokens} tokens each" if num_tokens > 1 else "",
            )
            self._graphs[key] = self._capture(key)
        self._enter(0, rows, key.size)
        if shared_prefixes is not None:
            self._enter(1, shared_prefixes.num_shared_blocks, key.size)
            self._enter(2, shared_prefixes.num_sharers, key.size)
        if num_row_tokens is not None:
            self._enter(3, num_row_tokens, key.size)
        self._graphs[key].replay()

    def _enter(self, line: int, numbers: Tensor, size: int) -> None:
        """Copy what a step has of each row to where the graphs read it, and padding after it."""
        torch.cat((numbers, self._padding[line, len(numbers) : size]), out=self._inputs[line, :size])

    def _capture(self, key: GraphKey, is_warm: bool = False) -> torch.cuda.CUDAGraph:
        self._inputs.copy_(self._padding)
        rows, *shared, num_row_tokens = self._inputs[:, : key.size]
        step = (
            rows,
            SharedPrefixes(*shared) if key.shares_prefixes else None,
            key.num_tokens,
            num_row_tokens if key.num_tokens > 1 else None,
        )
        if not is_warm:
            self._forward(*step)  # compiles and warms up outside the capture
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool):
            self._forward(*step)
        self._pool = self._pool or graph.pool()
        return graph


def _next_sizes(sizes: list[int]) -> list[int]:
    """Return the smallest size that holds a batch, for each number of rows from 0 on."""
    return [min(size for size in sizes if size >= count) for count in range(max(sizes, default=-1) + 1)]
