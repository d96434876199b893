"""Decode steps as CUDA graphs: hundreds of small kernels, launched as one.

A graph goes from the tables to the logits. It is captured for each of a few batch sizes; a batch runs in the smallest
that holds it, padded. Steps whose rows share prefixes run other kernels, and so do steps of several tokens a row. Both
have graphs of their own, which are captured when they are first needed, or later (`stand_ins.py`).
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.layers.attention.metadata import DecodeBatch, SharedPrefixes
from nanoinfer.runner.graph_pool import GraphPool, Launches
from nanoinfer.runner.stand_ins import GraphKey, StandIns, packed_graph_sizes
from nanoinfer.runner.step_tables import PADDING_ROW

Forward = Callable[[DecodeBatch], None]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, and max_num_seqs itself: the larger a batch, the less a few more rows cost."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs + 1, 32), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


def sharing_graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes for steps whose rows share prefixes: fewer, as they are captured while requests wait."""
    sizes = several_tokens_graph_sizes(graph_sizes(max_num_seqs))
    return [size for size in sizes if size >= 4 or size == sizes[-1]]


def several_tokens_graph_sizes(sizes: list[int]) -> list[int]:
    """Return the batch sizes for steps of several tokens a row, whose graphs are captured late, too."""
    return [size for size in sizes if size in (1, 2, 4, 8, 16) or size % 32 == 0 or size == max(sizes)]


class GraphInputs(NamedTuple):
    """Holds what graphs read of a batch, each (max_rows,) int32; see DecodeBatch and SharedPrefixes."""

    rows: Tensor
    num_shared_blocks: Tensor
    num_sharers: Tensor
    num_row_tokens: Tensor

    @classmethod
    def padding(cls, max_rows: int, device: torch.device, num_tokens: int) -> "GraphInputs":
        """Return padding rows, each of so many tokens: without a context, they share no prefix."""

        def full(number: int) -> Tensor:
            return torch.full((max_rows,), number, dtype=torch.int32, device=device)

        return cls(full(PADDING_ROW), num_shared_blocks=full(0), num_sharers=full(0), num_row_tokens=full(num_tokens))

    def fill(self, batch: DecodeBatch, padding: "GraphInputs", size: int) -> None:
        """Write a batch into the first rows, and padding after it up to row `size`."""

        def fill_one(inputs: Tensor, numbers: Tensor, padded_with: Tensor) -> None:
            torch.cat((numbers, padded_with[len(numbers) : size]), out=inputs[:size])

        fill_one(self.rows, batch.rows, padding.rows)
        if batch.shared_prefixes is not None:
            num_shared_blocks, num_sharers = batch.shared_prefixes
            fill_one(self.num_shared_blocks, num_shared_blocks, padding.num_shared_blocks)
            fill_one(self.num_sharers, num_sharers, padding.num_sharers)
        if batch.num_row_tokens is not None:
            fill_one(self.num_row_tokens, batch.num_row_tokens, padding.num_row_tokens)

    def batch(self, size: int, num_tokens: int, shares_prefixes: bool, num_packed: int) -> DecodeBatch:
        """Return the batch of the first rows, for a graph to read."""
        shared = SharedPrefixes(self.num_shared_blocks[:size], self.num_sharers[:size]) if shares_prefixes else None
        num_row_tokens = self.num_row_tokens[:size] if num_tokens > 1 else None
        return DecodeBatch(self.rows[:size], shared, num_tokens, num_row_tokens, num_packed)


class DecodeGraphs:
    """Captures `forward` in one CUDA graph for each batch size; all graphs share one memory pool.

    `forward` writes to memory that its caller owns. All tensors that it reads or writes must keep their addresses.

    sizes, sharing_sizes: the batch sizes of steps without and with shared prefixes, the second in ascending order.
    late: capture no graph before it is needed. Otherwise the graphs of `sizes` are captured by the constructor.
    is_warm: whether such graphs were captured before in this process, so that their kernels are compiled and loaded.
    least_free: bytes that graphs which are captured later leave free, for the largest step.
    """

    def __init__(
        self,
        forward: Forward,
        sizes: list[int],
        sharing_sizes: list[int],
        device: torch.device,
        is_warm: bool = False,
        late: bool = False,
        least_free: int = 0,
    ) -> None:
        self._forward = forward
        self._padding = [GraphInputs.padding(max(sizes), device, count) for count in (1, 0)]  # 0 with packed lines
        self._inputs = GraphInputs.padding(max(sizes), device, 1)
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph | Launches] = {}
        self._sizes, self._sharing_sizes = sorted(sizes), sharing_sizes
        self._several_tokens_sizes = several_tokens_graph_sizes(self._sizes)
        self._packed_sizes = packed_graph_sizes(self._sizes)
        self._stand_ins, self._pool = StandIns(), GraphPool(device, least_free)
        # The largest first: the smaller ones then fit into its memory.
        for size in () if late else reversed(self._sizes):
            self.capture(GraphKey(size, num_tokens=1, shares_prefixes=False, num_packed=0), is_warm)

    def replay(self, batch: DecodeBatch) -> None:
        """Run `forward` for the rows of a batch, and for padding after them."""
        sizes = self._sizes if batch.shared_prefixes is None else self._sharing_sizes
        if batch.num_tokens > 1:
            sizes = self._packed_sizes if batch.num_packed else self._several_tokens_sizes
        key = GraphKey.of(batch, sizes[bisect_left(sizes, len(batch.rows))])  # of the smallest that holds the batch
        key = key if key in self._graphs else self._stand_ins.choose(key, self._graphs.keys())
        if key not in self._graphs:
            self.capture(key, is_late=True)
        self._inputs.fill(batch, self._padding[key.num_packed > 0], key.num_rows)
        self._graphs[key].replay()

    def capture(self, key: GraphKey, is_warm: bool = False, is_late: bool = False) -> None:
        """Capture the graph of this key, with padding alone for inputs."""
        for inputs, padding in zip(self._inputs, self._padding[key.num_packed > 0], strict=True):
            inputs.copy_(padding)
        launch = partial(self._forward, self._inputs.batch(*key))
        if not is_warm:
            launch()  # compiles and warms up outside the capture
        self._graphs[key] = self._pool.capture_late(launch, key) if is_late else self._pool.capture(launch)
