"""Measures what steps and CUDA graphs take of a GPU's memory, and sizes the KV cache by what is left."""

import warnings
from collections.abc import Callable

import torch

from nanoinfer.caches.kv_cache import KVCache, page_bytes
from nanoinfer.caches.kv_cache_layout import KVCacheLayout
from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.config import EngineConfig
from nanoinfer.errors import ConfigError

CPU_CACHE_BYTES = 4 * 2**30  # the cache's size on a CPU unless num_kvcache_blocks says otherwise; taken as it is used
GIB = 2**30
MAX_FREE_SHARE = 0.98  # of what other programs leave free on a GPU, the most that is taken


def max_step_tokens(config: EngineConfig, model_config: BaseModelConfig, max_num_seqs: int) -> int:
    """Return the most tokens of a prefill step, which has at most one chunk of each row of the tables."""
    return min(config.max_num_batched_tokens, max_num_seqs * model_config.longest_sequence(config.max_model_len))


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


def grantable_bytes(share: float, free_at_start: int, device: torch.device) -> int:
    """Return how many more bytes of a GPU the engine may take, so that it takes at most `share` of all its memory.

    The engine also takes at most MAX_FREE_SHARE of `free_at_start`, the bytes that were free before it took any.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(min(total * share, free_at_start * MAX_FREE_SHARE)) - (free_at_start - free)


def num_blocks_in(free_bytes: int, page_bytes: int, least: int, block_size: int) -> int:
    """Return how many pages of so many bytes fit into `free_bytes`. Raises ConfigError where fewer than `least` do."""
    if free_bytes < page_bytes * least:
        raise ConfigError(
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

    capacity: the longest sequence that so many blocks hold. Raises ConfigError where more was asked for.
    """
    if requested is not None and requested > capacity:
        raise ConfigError(
            f"max_model_len={requested} is more than the KV cache holds: {num_blocks} blocks of {block_size} tokens, "
            f"{capacity} in all; lower max_model_len, or give the cache more memory"
        )
    if requested is None and model_limit > capacity:
        warnings.warn(
            f"max_model_len is lowered from the model's {model_limit} tokens to {capacity}, all that the cache holds",
            stacklevel=2,
        )
    return min(requested or model_limit, capacity)
