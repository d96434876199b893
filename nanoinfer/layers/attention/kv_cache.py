"""The KV cache: its tensors, its dtype, and the memory that it takes."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from nanoinfer.device import compute_capability
from nanoinfer.errors import ConfigError
from nanoinfer.ops.block_tables.spec import copy_tokens
from nanoinfer.ops.common.fp8_format import FP8
from nanoinfer.ops.kv_cache.spec import LARGEST, LayerCache


@dataclass(frozen=True, slots=True)
class KVCache(LayerCache):
    """Holds all layers' keys and values, and the scales of a cache in 8 bits: those of LayerCache, by layer."""

    @property
    def num_blocks(self) -> int:
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        return self.k.shape[3]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.k, self.v, self.k_scales, self.v_scales) if x is not None)

    def layer(self, index: int) -> LayerCache:
        k_scales = None if self.k_scales is None else self.k_scales[index]
        v_scales = None if self.v_scales is None else self.v_scales[index]
        return LayerCache(self.k[index], self.v[index], k_scales, v_scales)

    def copy_blocks(self, copies: Tensor) -> None:
        """Copy the keys and values of a block's first tokens to other blocks, where a prompt parts from a cached one.

        copies: (num_copies, 3), as `BlockCopy`.
        """
        for tensor in (self.k, self.v, self.k_scales, self.v_scales):
            if tensor is not None:
                copy_tokens(tensor, copies)


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
