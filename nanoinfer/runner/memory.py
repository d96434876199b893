"""Measures what steps and CUDA graphs take of a GPU's memory, and sizes the KV cache by what is left."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from nanoinfer.caches.kv_cache import KVCache, page_bytes
from nanoinfer.caches.kv_cache_layout import KVCacheLayout
from nanoinfer.config import DEFAULT_ROWS, DEFAULT_STEP_TOKENS, EngineConfig
from nanoinfer.engine.interfaces import RunnerLimits
from nanoinfer.errors import ConfigError

logger = logging.getLogger("nanoinfer")

CPU_CACHE_BYTES = 4 * 2**30  # the cache's size on a CPU unless num_kvcache_blocks says otherwise; taken as it is used
GIB = 2**30
MAX_FREE_SHARE = 0.98  # of what other programs leave free on a GPU, the most that is taken
USUAL_TOKENS = 4096  # of one sequence; a cache that does not hold it gets more memory, from the largest step
LEAST_STEP_TOKENS, LEAST_ROWS = 1024, 32  # steps do not shrink below, since they would take longer for each token


class TooLittleMemoryError(ConfigError):
    """The memory that is left on a device does not hold the cache that is needed."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Says how many bytes of a GPU's memory are taken beside the KV cache."""

    granted: int  # what the engine may take in all
    loaded: int  # weights, and what steps need whatever their size: tables, logits, libraries
    step: int  # the largest step, beyond that
    graphs: int

    @property
    def free(self) -> int:
        """What is left for the cache; negative if the rest already takes too much."""
        return self.granted - self.loaded - self.step - self.graphs


def max_step_tokens(max_num_batched_tokens: int, max_num_seqs: int, longest_sequence: int) -> int:
    """Return the most tokens of a prefill step, which has at most one chunk of each row of the tables."""
    return min(max_num_batched_tokens, max_num_seqs * longest_sequence)


def smaller_steps(limits: RunnerLimits, config: EngineConfig) -> RunnerLimits | None:
    """Return limits with half the tokens of a step, or with half the rows if steps are small; None if neither may be.

    What the user has chosen stays, and so do the steps of encoders, which compute whole prompts.
    """
    if limits.whole_prompts:
        return None
    # An image that is computed in one step has fewer tokens than twice the least.
    least = 2 * LEAST_STEP_TOKENS if limits.whole_images else LEAST_STEP_TOKENS
    if config.max_num_batched_tokens == DEFAULT_STEP_TOKENS and limits.max_num_batched_tokens > least:
        return replace(limits, max_num_batched_tokens=limits.max_num_batched_tokens // 2)
    if config.max_num_seqs == DEFAULT_ROWS and limits.max_num_seqs > LEAST_ROWS:
        return replace(limits, max_num_seqs=max(LEAST_ROWS, limits.max_num_seqs // 2))
    return None


def log_smaller_steps(before: RunnerLimits, now: RunnerLimits) -> None:
    """Log which limits of steps were lowered."""
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        if getattr(now, name) < getattr(before, name):
            logger.info(
                "%s is lowered from %d to %d, since larger steps leave too little memory to the KV cache",
                *(name, getattr(before, name), getattr(now, name)),
            )


def free_bytes(device: torch.device) -> int:
    """Return how much of a GPU's memory nobody has taken."""
    return torch.cuda.mem_get_info(device)[0]


def measure_peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Run a step on a GPU and return the memory that it takes at most, beyond what is allocated before."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def measure_graph_bytes(
    capture: Callable[[list[int]], object], sizes: list[int], num_graphs: int, device: torch.device
) -> int:
    """Return the memory that `num_graphs` graphs will take, estimated by capturing the largest and the smallest.

    capture: captures graphs of the given sizes, and returns what holds them. It is called for the largest size alone,
    whose memory all others share, then for the largest and the smallest. The difference is the cost of each further
    graph. sizes: in ascending order.
    """
    used = []
    for trial in (sizes[-1:], [*sizes[-1:], *sizes[:1]]):
        torch.cuda.empty_cache()
        free_before, _ = torch.cuda.mem_get_info(device)
        graphs = capture(trial)
        torch.cuda.empty_cache()
        used.append(free_before - torch.cuda.mem_get_info(device)[0])
        del graphs
    return used[0] + max(0, used[1] - used[0]) * (num_graphs - 1)


def memory_use(share: float, free_at_start: int, device: torch.device) -> MemoryUse:
    """Return what a GPU grants to the engine, at most `share` of all its memory, and what is taken of that.

    The engine also takes at most MAX_FREE_SHARE of `free_at_start`, the bytes that were free before it took any.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    granted = int(min(total * share, free_at_start * MAX_FREE_SHARE))
    return MemoryUse(granted, loaded=free_at_start - free, step=0, graphs=0)


def num_blocks_in(free_bytes: int, page_bytes: int, least: int, block_size: int) -> int:
    """Return how many pages of so many bytes fit into `free_bytes`.

    Raises TooLittleMemoryError where fewer than `least` do.
    """
    if free_bytes < page_bytes * least:
        raise TooLittleMemoryError(
            f"{max(free_bytes, 0) / GIB:.2f} GiB are left for the KV cache, and blocks of {block_size} tokens take "
            f"at least {page_bytes * least / GIB:.2g} GiB; raise gpu_memory_utilization, lower max_num_batched_tokens "
            "or max_num_seqs, free the memory that other programs hold (and if one is just starting, wait for it), or "
            "use a smaller model or kvcache_block_size"
        )
    return free_bytes // page_bytes


def allocate_kv_cache(
    layout: KVCacheLayout, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Return a cache of so many pages. Raises ConfigError where the device has too little memory."""
    try:
        return KVCache(layout, num_blocks, block_size, dtype, device)
    except (torch.OutOfMemoryError, MemoryError, ValueError, OverflowError):  # the last two: sizes beyond any address
        num_bytes = num_blocks * page_bytes(layout, block_size, dtype)
        raise ConfigError(
            f"num_kvcache_blocks={num_blocks} needs {num_bytes / GIB:.1f} GiB, more than {device} has free; set it "
            "lower, or free the memory that other programs hold"
        ) from None


def resolve_max_model_len(
    requested: int | None, model_limit: int, capacity: int, num_blocks: int, block_size: int
) -> int:
    """Return the longest sequence: what was asked for, or the model's limit lowered to what the cache holds.

    capacity: the longest sequence that so many blocks hold. Raises TooLittleMemoryError where more was asked for.
    """
    if requested is not None and requested > capacity:
        raise TooLittleMemoryError(
            f"max_model_len={requested} is more than the KV cache holds: {num_blocks} blocks of {block_size} tokens, "
            f"{capacity} in all; lower max_model_len, or give the cache more memory"
        )
    if requested is None and model_limit > capacity:
        warnings.warn(
            f"max_model_len is lowered from the model's {model_limit} tokens to {capacity}, all that the cache holds",
            stacklevel=2,
        )
    return min(requested or model_limit, capacity)
