"""What layers with linear attention remember of a sequence: a matrix for each head, and the convolution's last inputs.

It has the same size however long a sequence is. Each row of the step tables has a place of its own here, so states need
no tables, and a CUDA graph finds them by the row alone. Behind them are places for states that are kept for other
sequences, which begin with a copy.
"""

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.device import zeros
from nanoinfer.distributed.tensor_parallel import TensorParallel

logger = logging.getLogger("nanoinfer")

MIN_SNAPSHOTS = 16  # where there are few rows
SNAPSHOT_SHARE = 0.1  # of the memory beside the weights, the most that snapshots take


@dataclass(frozen=True, slots=True)
class LayerStates:
    """Holds one layer's states, by place.

    matrices: (num_places, num_value_heads, key_head_dim, value_head_dim) float32. conv_inputs: (num_places, conv_width,
    conv_size), the inputs of the newest tokens; that of position p is at p % conv_width, so that a step writes none
    that it reads.
    """

    matrices: Tensor
    conv_inputs: Tensor


@dataclass(frozen=True, slots=True)
class RecurrentStates(LayerStates):
    """Holds all layers' states: those of LayerStates, by layer with linear attention.

    The places are the rows of the step tables, then those of snapshots, then the spare row that padding writes to. So
    -1 is the spare one.
    """

    @property
    def num_bytes(self) -> int:
        return self.matrices.nbytes + self.conv_inputs.nbytes

    def copy(self, copies: list[list[int]]) -> None:
        """Copy states from place to place, one after another. copies: sources and targets, as `StateCopy`."""
        for tensor in (self.matrices, self.conv_inputs):
            for source, target in copies:
                tensor[:, target].copy_(tensor[:, source])

    def layer(self, index: int) -> LayerStates:
        return LayerStates(self.matrices[index], self.conv_inputs[index])


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Says what one rank keeps of a sequence.

    matrices, conv_inputs: shapes of one place. dtype: that of conv_inputs.
    """

    num_layers: int
    matrices: tuple[int, ...]
    conv_inputs: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, config: BaseModelConfig, dtype: torch.dtype, tp: TensorParallel) -> "StateLayout | None":
        """Return the sizes of a model's states; None where it has none. dtype: that of the model."""
        linear = config.linear_attention
        if linear is None:
            return None
        num_heads = tp.shard_size(linear.num_value_heads, "value heads")
        matrices = (num_heads, linear.key_head_dim, linear.value_head_dim)
        conv_size = tp.shard_size(linear.conv_size, "channels of the convolution")
        return cls(linear.num_layers, matrices, (linear.conv_width, conv_size), dtype)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of one place, in all layers."""
        return self.num_layers * (4 * math.prod(self.matrices) + self.dtype.itemsize * math.prod(self.conv_inputs))

    def max_rows(self, requested: int, free_bytes: int) -> int:
        """Return how many rows get a state: `requested`, or as many as half of `free_bytes` holds, and at least one.

        The other half is left to keys and values, and to snapshots.
        """
        rows = max(1, min(requested, free_bytes // 2 // self.num_bytes))
        if rows < requested:
            logger.info(
                "max_num_seqs is lowered from %d to %d: the recurrent states of a sequence take %.1f MiB, and half of "
                "the memory that is left beside the weights holds no more",
                *(requested, rows, self.num_bytes / 2**20),
            )
        return rows

    def num_snapshots(self, num_rows: int, free_bytes: int) -> int:
        """Return how many states are kept for prefix hits: one per row, at least 16, but a tenth of memory at most."""
        return max(1, min(max(num_rows, MIN_SNAPSHOTS), int(free_bytes * SNAPSHOT_SHARE) // self.num_bytes))

    def allocate(self, num_states: int, device: torch.device) -> RecurrentStates:
        """Return states of zeros for rows and snapshots, so many together, and for the spare row."""
        places = self.num_layers, num_states + 1
        matrices = zeros((*places, *self.matrices), torch.float32, device)
        return RecurrentStates(matrices, zeros((*places, *self.conv_inputs), self.dtype, device))
