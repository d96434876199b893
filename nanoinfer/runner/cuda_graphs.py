"""Decode steps as CUDA graphs: hundreds of small kernels, launched as one.

A graph goes from the tables to the logits. It is captured for each of a few batch sizes; a batch runs in the smallest
that holds it, padded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nanoinfer.runner.step_tables import PADDING_ROW


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, and max_num_seqs itself: the larger a batch, the less a few more rows cost."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs + 1, 32), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


class DecodeGraphs:
    """Captures `forward`, a function of rows (num_rows,) int32 that writes its results to memory of its caller.

    Everything that `forward` reads or writes must stay where it is in memory. The graphs share one memory pool.
    """

    def __init__(self, forward: Callable[[Tensor], None], sizes: list[int], device: torch.device) -> None:
        self._padding = torch.full((max(sizes),), PADDING_ROW, dtype=torch.int32, device=device)
        self._rows = self._padding.clone()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._size_for = [min(size for size in sizes if size >= count) for count in range(max(sizes) + 1)]
        pool = None
        # The largest first: the smaller ones then fit into its memory.
        for size in sorted(sizes, reverse=True):
            rows = self._rows[:size]
            forward(rows)  # compiles and warms up outside the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                forward(rows)
            pool = pool or graph.pool()
            self._graphs[size] = graph

    def replay(self, rows: Tensor) -> None:
        """Run `forward` for these rows (num_rows,) int32, and for padding after them."""
        size = self._size_for[len(rows)]
        torch.cat((rows, self._padding[len(rows) : size]), out=self._rows[:size])
        self._graphs[size].replay()


def measure_graph_bytes(forward: Callable[[Tensor], None], sizes: list[int], device: torch.device) -> int:
    """Return the memory that graphs of these sizes will take.

    Captures the largest, which the others share, and one small one more.
    """
    used = []
    for trial in (sizes[-1:], [*sizes[-1:], *sizes[:1]]):
        torch.cuda.empty_cache()
        free_before, _ = torch.cuda.mem_get_info(device)
        graphs = DecodeGraphs(forward, trial, device)
        torch.cuda.empty_cache()
        used.append(free_before - torch.cuda.mem_get_info(device)[0])
        del graphs
    return used[0] + max(0, used[1] - used[0]) * (len(sizes) - 1)
