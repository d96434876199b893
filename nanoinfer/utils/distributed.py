"""A process's place among those that share one model, and how a dimension is split between them."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from nanoinfer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Rank `rank` of `size` processes. With size 1 nothing is communicated and no process group is needed."""

    rank: int = 0
    size: int = 1

    def shard_size(self, total: int, name: str) -> int:
        """This rank's share of a dimension. Raises ConfigError where it cannot be split evenly."""
        if total % self.size != 0:
            raise ConfigError(
                f"{name}={total} cannot be split over tensor_parallel_size={self.size}; use a divisor of {total}"
            )
        return total // self.size

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a full tensor, a view."""
        length = self.shard_size(tensor.shape[dim], f"dimension {dim} of a weight")
        return tensor.narrow(dim, self.rank * length, length)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`."""
        if self.size > 1:
            dist.all_reduce(x)
        return x
