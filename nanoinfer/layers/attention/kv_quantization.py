"""The dtype of the KV cache, and the memory that it takes."""

from math import prod

import torch

from nanoinfer.device import compute_capability
from nanoinfer.errors import ConfigError
from nanoinfer.ops.common.fp8_format import FP8
from nanoinfer.ops.kv_cache.spec import LARGEST


def select_kv_cache_dtype(requested: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the cache that `requested` names; "auto" is the model's own, `dtype`. Raises ConfigError."""
    if requested == "auto":
        return dtype
    if requested == "int8":
        return torch.int8
    if device.type == "cuda" and compute_capability(device) < (8, 9):
        raise ConfigError(
            f"kv_cache_dtype={requested!r} needs a GPU of compute capability 8.9 or more, and "
            f"{torch.cuda.get_device_name(device)} has less; use kv_cache_dtype='int8'"
        )
    return FP8


def is_8_bit(dtype: torch.dtype) -> bool:
    """Return whether a cache of this dtype is in 8 bits, and has scales."""
    return dtype in LARGEST


def tensors_of_cache(shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of the keys, of the values and, in 8 bits, of their scales. shape: that of the keys."""
    scales = [(shape[:-1], torch.float32)] * 2 if is_8_bit(dtype) else []
    return [(shape, dtype)] * 2 + scales


def num_cache_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return what a cache takes, its scales included. shape: that of the keys."""
    return sum(prod(sizes) * dtype.itemsize for sizes, dtype in tensors_of_cache(shape, dtype))
