"""Captures the CUDA graphs of decode steps, which share memory; late ones only where a GPU has enough of it left.

The memory of late graphs is estimated when the engine loads. If there are more of them, or another program has taken
memory meanwhile, then graphs would take what the largest step needs.
"""

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

from nanoinfer.device import capturing
from nanoinfer.runner.memory import GIB, free_bytes

logger = logging.getLogger("nanoinfer")

USUAL_BYTES = 2**26  # of a late graph; one that needs more memory for its tensors is the last to be captured


class Launches:
    """Takes the place of a graph: launches what the graph would have replayed, on as many rows.

    So the ranks of an engine compute the same shapes, whichever of them has a graph.
    """

    def __init__(self, launch: Callable[[], None]) -> None:
        self.replay = launch


class GraphPool:
    """Captures graphs in one memory pool. least_free: bytes that late ones leave free, for the largest step."""

    def __init__(self, device: torch.device, least_free: int) -> None:
        self._device, self._least_free = device, least_free
        self._pool: Any = None  # the handle of the memory pool

    def capture(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return the graph of `launch`, which has run before."""
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._pool):
            launch()
        self._pool = self._pool or graph.pool()
        return graph

    def capture_late(self, launch: Callable[[], None], name: Hashable) -> torch.cuda.CUDAGraph | Launches:
        """Return the graph of `launch`; if memory is short, a stand-in that calls `launch` each time."""
        logger.info("capturing the CUDA graph of decode steps of %s", name)
        try:
            self._check_memory()
            return self.capture(launch)
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            logger.warning("decode steps of %s go on without a CUDA graph: %s", name, error)
            return Launches(launch)

    def _check_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            free = free_bytes(self._device)
            if free < self._least_free + USUAL_BYTES:
                raise torch.OutOfMemoryError(
                    f"out of memory: {free / GIB:.2f} GiB are free, of which steps need {self._least_free / GIB:.2f}; "
                    "lower gpu_memory_utilization or max_num_seqs, or free the memory that other programs hold"
                )
