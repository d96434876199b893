"""What a layer keeps of a block of tokens: the tensors that attention stores to and reads from, and their bytes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.device import compute_capability
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ConfigError
from nanoinfer.ops.common.fp8_format import FP8
from nanoinfer.ops.kv_cache.spec import LARGEST, LayerCache


class BlockLayout(ABC):
    """Says what one rank keeps of each token in one layer. What a layer keeps by another layout is a subclass."""

    __slots__ = ()

    @property
    @abstractmethod
    def vectors(self) -> tuple[tuple[int, int], ...]:
        """The heads and the size of the vectors of each tensor. In 8 bits each vector also has a scale."""

    @abstractmethod
    def layer_cache(self, *tensors: Tensor) -> LayerCache:
        """Return what the operations of a layer get. tensors: as `tensors` lists them, with a dimension of blocks."""

    def tensors(self, block_size: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of a block's tensors of vectors and, in 8 bits, of those of their scales."""
        shapes = [(num_heads, block_size, size) for num_heads, size in self.vectors]
        scales = [(shape[:-1], torch.float32) for shape in shapes] if is_8_bit(dtype) else []
        return [*((shape, dtype) for shape in shapes), *scales]

    def num_values(self) -> int:
        """Return how many numbers a token has."""
        return sum(prod(sizes) for sizes in self.vectors)

    def num_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return what a block takes, its scales included."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.tensors(block_size, dtype))

    def times(self, other: "BlockLayout") -> int:
        """Return how often all tensors of `other` fit into those here; 0 where something would be left."""
        mine, others = ([prod(sizes) for sizes in layout.vectors] for layout in (self, other))
        factor = mine[0] // others[0]
        return factor if mine == [factor * size for size in others] else 0


@dataclass(frozen=True, slots=True)
class KVLayout(BlockLayout):
    """A key and a value for each KV head of this rank."""

    num_heads: int
    key_size: int
    value_size: int

    @classmethod
    def of(cls, config: BaseModelConfig, tp: TensorParallel) -> "KVLayout":
        """Return that of a model's layers with attention."""
        num_heads = config.num_key_value_heads
        num_heads = tp.split_of_kv_heads(num_heads).shard_size(num_heads, "KV heads")
        return cls(num_heads, config.head_dim, config.head_dim)

    @property
    def vectors(self) -> tuple[tuple[int, int], ...]:
        return (self.num_heads, self.key_size), (self.num_heads, self.value_size)

    def layer_cache(self, *tensors: Tensor) -> LayerCache:
        return LayerCache(*tensors)


def select_layout(config: BaseModelConfig, tp: TensorParallel) -> BlockLayout:
    """Return what the layers with attention of a model keep of each token."""
    return KVLayout.of(config, tp)


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
