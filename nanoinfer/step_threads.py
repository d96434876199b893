"""Chooses how many CPU threads the steps of a model have: as many as PyTorch, or fewer if that is faster.

All threads of a product wait for the last one. Where other programs have some of the cores, or a container may use
fewer than it sees, fewer threads are faster. Only a measurement tells.
"""

import logging
import os
import statistics
import time
from collections import Counter
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.device import cpu_threads

logger = logging.getLogger("nanoinfer")

MIN_THREADED_PARAMETERS = 2**24  # threads slow the steps of smaller models down
NUM_ROUNDS = 5
NUM_CANDIDATES = 4  # as many threads as there are, half of them, a quarter, an eighth
MEASURED_BYTES = 2**24  # of weights, more than caches near a core hold
MAX_SECONDS = 0.25
MIN_GAIN = 1.15  # how much faster fewer threads must be: what is noise changes nothing


def num_step_threads(model: Any, device: torch.device) -> int | None:
    """Return how many CPU threads the steps of a model have; None leaves the number as it is.

    The user's own number stays: that of OMP_NUM_THREADS, or of torch.set_num_threads.
    """
    if device.type != "cpu":
        return None
    params: list[Tensor] = [*model.parameters()]
    if sum(param.numel() for param in params) < MIN_THREADED_PARAMETERS:
        return 1
    most = torch.get_num_threads()
    if most == 1 or user_chose(most):
        return None
    sizes: Counter[tuple[int, int]] = Counter()
    for param in params:
        if param.dim() == 2:
            sizes[param.shape[0], param.shape[1]] += param.numel()
    dtype = next((param.dtype for param in params if param.is_floating_point()), torch.float32)
    fastest = fastest_num_threads(*max(sizes, key=sizes.__getitem__), dtype, most) if sizes else most
    if fastest == most:
        return None
    logger.info("Steps have %d of %d CPU threads, which is faster here; OMP_NUM_THREADS sets a number", fastest, most)
    return fastest


def user_chose(num_threads: int) -> bool:
    """Return whether the user has set PyTorch's number of threads. By itself it takes all cores, or half of them.

    Half of them are what it takes where two share a core's arithmetic.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    num_cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    is_set = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys()
    return bool(is_set) or num_threads not in (num_cores, num_cores // 2)


@lru_cache(maxsize=16)
def fastest_num_threads(num_outputs: int, num_inputs: int, dtype: torch.dtype, most: int) -> int:
    """Measure how many threads, at most `most`, multiply one row, and some, by weights of this size the fastest."""
    num_weights = max(1, MEASURED_BYTES // (num_outputs * num_inputs * dtype.itemsize))
    weights = [torch.zeros(num_outputs, num_inputs, dtype=dtype, device="cpu") for _ in range(num_weights)]
    inputs = [torch.zeros(num_rows, num_inputs, dtype=dtype, device="cpu") for num_rows in (1, 16)]
    candidates = [most >> halvings for halvings in range(NUM_CANDIDATES) if most >> halvings]

    def seconds(num_threads: int) -> float:
        with torch.inference_mode(), cpu_threads(num_threads):
            started = time.perf_counter()
            for x in inputs:
                for weight in weights:
                    F.linear(x, weight)
            return time.perf_counter() - started

    ends = time.perf_counter() + MAX_SECONDS
    seconds(most)  # starts the threads
    rounds: list[list[float]] = []
    while len(rounds) < NUM_ROUNDS and (not rounds or time.perf_counter() < ends):
        rounds.append([seconds(count) for count in candidates])
    medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
    best = min(range(len(candidates)), key=medians.__getitem__)
    return candidates[best] if medians[best] * MIN_GAIN < medians[0] else most
