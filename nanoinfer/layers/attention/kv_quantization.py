"""The numbers of a KV cache in 8 bits: how keys and values are rounded. Plain PyTorch; kernels compute the same.

Each vector, the key or the value of one token in one KV head, has a scale of its own: its largest absolute value over
the largest one of the format (448 in e4m3, 127 in int8). So nothing has to be calibrated and nothing overflows, and
since no rank has a part of a vector, the scales do not depend on the number of ranks. They are float32: with a
head_dim of 128 they take 4 bytes beside 128, and no vector is too small or too large for them.
"""

from math import prod

import torch
from torch import Tensor

from nanoinfer.device import compute_capability
from nanoinfer.errors import ConfigError
from nanoinfer.kernels.kv_cache_format import LARGEST
from nanoinfer.ops.common.fp8_format import FP8, TINY


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


def quantize_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round vectors, (..., head_dim), to `dtype`; return them and their scales, (...) float32.

    Zeros stay zeros. A vector with NaN or infinity becomes NaN as a whole, by its scale: int8 has no value for that.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1)
    scales = torch.where(largest < torch.inf, largest * (1 / LARGEST[dtype]), torch.nan)
    has_reciprocal = (scales >= TINY).unsqueeze(-1)
    x = torch.where(has_reciprocal, x * (1.0 / scales).unsqueeze(-1), 0.0).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (x if dtype.is_floating_point else (x + 0.5).floor()).to(dtype), scales


def tensors_of_cache(shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of the keys, of the values and, in 8 bits, of their scales. shape: that of the keys."""
    scales = [(shape[:-1], torch.float32)] * 2 if is_8_bit(dtype) else []
    return [(shape, dtype)] * 2 + scales


def num_cache_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return what a cache takes, its scales included. shape: that of the keys."""
    return sum(prod(sizes) * dtype.itemsize for sizes, dtype in tensors_of_cache(shape, dtype))
