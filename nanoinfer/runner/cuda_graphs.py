"""Decode steps as CUDA graphs: hundreds of small kernels, launched as one.

A graph is captured for each of a few batch sizes; a batch runs in the smallest that holds it, padded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nanoinfer.runner.step_tables import PADDING_ROW


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, then every 8 to 64, then every 16, and max_num_seqs itself."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_seqs + 1, 16), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


class DecodeGraphs:
    """Captures `decode`, a function of rows (num_rows,) int32 that returns their sampled ids (num_rows,) int32.

    Everything else that `decode` reads or writes must stay where it is in memory. The graphs share a pool of memory:
    what one works with, the logits first of all, lies where the others' does. Only the ids are kept for each size.
    """

    def __init__(self, decode: Callable[[Tensor], Tensor], sizes: list[int], device: torch.device) -> None:
        self._padding = torch.full((max(sizes),), PADDING_ROW, dtype=torch.int32, device=device)
        self._rows = self._padding.clone()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._token_ids: dict[int, Tensor] = {}
        self._size_for = [min(size for size in sizes if size >= count) for count in range(max(sizes) + 1)]
        pool = None
        # The largest first: the smaller ones then fit into its memory.
        for size in sorted(sizes, reverse=True):
            rows = self._rows[:size]
            decode(rows)  # compile and warm up outside the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._token_ids[size] = decode(rows)
            pool = pool or graph.pool()
            self._graphs[size] = graph

    def replay(self, rows: Tensor) -> Tensor:
        """The ids sampled for these rows (num_rows,) int32: (num_rows,) int32, valid until the next replay."""
        size = self._size_for[len(rows)]
        torch.cat((rows, self._padding[len(rows) : size]), out=self._rows[:size])
        self._graphs[size].replay()
        return self._token_ids[size][: len(rows)]
