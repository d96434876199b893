"""Describes what a layer keeps of a block of tokens: the tensors that attention writes and reads, and their bytes."""

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


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Says what one rank keeps of each token in one layer: some vectors, in a tensor for each of its operands.

    vectors: the heads and the size of the vectors of each tensor. In 8 bits each vector also has a scale. Layers that
    read their tensors otherwise than as keys and values need a subclass with a `layer_cache` of its own.
    """

    vectors: tuple[tuple[int, int], ...]

    @classmethod
    def of_kv(cls, num_heads: int, head_dim: int) -> "BlockLayout":
        """Return the layout of a key and a value for each KV head."""
        return cls(((num_heads, head_dim), (num_heads, head_dim)))

    @classmethod
    def of(cls, config: BaseModelConfig, tp: TensorParallel) -> "BlockLayout":
        """Return the layout of a model's layers with attention."""
        if (latent := config.latent_attention) is not None:
            return LatentLayout(((1, latent.vector_size),), latent.latent_size)
        return cls.of_kv(num_local_kv_heads(config, tp), config.head_dim)

    def layer_cache(self, *tensors: Tensor) -> LayerCache:
        """Return the cache that a layer's operations take. tensors: as `tensors` lists them, with blocks first."""
        return LayerCache(*tensors)

    def tensors(self, block_size: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each tensor of a block: the vectors, and in 8 bits then their scales."""
        shapes = [(num_heads, block_size, size) for num_heads, size in self.vectors]
        scales = [(shape[:-1], torch.float32) for shape in shapes] if is_8_bit(dtype) else []
        return [*((shape, dtype) for shape in shapes), *scales]

    def num_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of a block, scales included."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.tensors(block_size, dtype))

    @property
    def num_values(self) -> tuple[int, ...]:
        """How many numbers a token has in each tensor."""
        return tuple(prod(sizes) for sizes in self.vectors)

    def times(self, other: "BlockLayout") -> int:
        """Return how often all tensors of `other` fit into these; 0 if something would be left over."""
        factor = self.num_values[0] // other.num_values[0]
        return factor if self.num_values == tuple(factor * size for size in other.num_values) else 0


@dataclass(frozen=True, slots=True)
class LatentLayout(BlockLayout):
    """Holds one vector of each token for all heads, on every rank. Its first numbers, the latent, are the value."""

    latent_size: int

    def layer_cache(self, *tensors: Tensor) -> LayerCache:
        vectors, *scales = tensors
        return LayerCache(vectors, vectors[..., : self.latent_size], *scales, *scales)


def num_local_kv_heads(config: BaseModelConfig, tp: TensorParallel) -> int:
    """Return how many KV heads a rank has; ranks may share one."""
    num_heads = config.num_key_value_heads
    return tp.split_of_kv_heads(num_heads).shard_size(num_heads, "KV heads")


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
