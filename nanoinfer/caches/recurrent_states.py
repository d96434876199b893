"""Holds the states of linear attention, by sequence: a matrix for each head, and the convolution's last inputs.

It has the same size however long a sequence is. Each row of the step tables has a place of its own here, so states need
no tables, and a CUDA graph finds them by the row alone. Behind them are places for states that are kept for other
sequences, which begin with a copy.

If decode steps may compute several tokens of a row, the newest ones are pending: they enter the states when it is known
which of them count. `ops/delta_rule_lines/spec.py` explains it.
"""

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.device import to_device, zeros
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.ops.delta_rule_lines.spec import PendingTokens, flush_pending

logger = logging.getLogger("nanoinfer")

MIN_SNAPSHOTS = 16  # where there are few rows
SNAPSHOT_SHARE = 0.1  # of the memory beside the weights, the most that snapshots take


@dataclass(frozen=True, slots=True)
class LayerStates:
    """Holds one layer's states, by place.

    matrices: (num_places, num_value_heads, key_head_dim, value_head_dim) float32. conv_inputs: (num_places, conv_width,
    conv_size), the inputs of the newest tokens; that of position p is at p % conv_width, so that a step writes none
    that it reads. pending: the tokens of rows that are in neither yet; None where no step computes several of a row.
    """

    matrices: Tensor
    conv_inputs: Tensor
    pending: PendingTokens | None = None


@dataclass(frozen=True, slots=True)
class RecurrentStates(LayerStates):
    """Holds the states of all layers with linear attention: their tensors begin with a dimension of layers.

    The places are the rows of the step tables, then those of snapshots, then the spare row that padding writes to. So
    -1 is the spare one.
    """

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.matrices, self.conv_inputs, *(self.pending or ())))

    def layer(self, index: int) -> LayerStates:
        pending = None if self.pending is None else self.pending.layer(index)
        return LayerStates(self.matrices[index], self.conv_inputs[index], pending)

    def copy(self, copies: list[list[int]]) -> None:
        """Copy states from place to place, one after another. copies: sources and targets, as `StateCopy`.

        Sources are flushed before, and nothing is pending in targets.
        """
        if self.pending is not None:
            num_rows = len(self.pending.num_counted) - 1
            sources, targets = ({place for place in places if place < num_rows} for places in zip(*copies, strict=True))
            self.flush(self._rows(sources))
            self.begin(self._rows(targets))
        for tensor in (self.matrices, self.conv_inputs):
            for source, target in copies:
                tensor[:, target].copy_(tensor[:, source])

    def flush(self, rows: Tensor) -> None:
        """Bring the states of rows up to date with their pending tokens that count. rows: (num_flushed,) int32.

        States are then as steps of one token leave them, which may go on from there.
        """
        if self.pending is not None:
            flush_pending(self.matrices, self.conv_inputs, rows.contiguous(), self.pending)

    def begin(self, rows: Tensor) -> None:
        """Forget the pending tokens of rows that other sequences get. rows: (num_rows,) int32."""
        if self.pending is not None:
            self.pending.num_counted[rows.long()] = 0

    def _rows(self, rows: set[int]) -> Tensor:
        return to_device(torch.tensor(sorted(rows), dtype=torch.int32, device="cpu"), self.matrices.device)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Says what one rank keeps of a sequence.

    matrices, conv_inputs: shapes of one place. dtype: that of conv_inputs.
    max_row_tokens: the most tokens of a row that a decode step computes; if it is 1, nothing is ever pending.
    """

    num_layers: int
    matrices: tuple[int, ...]
    conv_inputs: tuple[int, ...]
    dtype: torch.dtype
    max_row_tokens: int = 1

    @classmethod
    def of(
        cls, config: BaseModelConfig, dtype: torch.dtype, tp: TensorParallel, max_row_tokens: int = 1
    ) -> "StateLayout | None":
        """Return the sizes of a model's states; None where it has none. dtype: of the model."""
        linear = config.linear_attention
        if linear is None:
            return None
        num_heads = tp.shard_size(linear.num_value_heads, "value heads")
        matrices = (num_heads, linear.key_head_dim, linear.value_head_dim)
        conv_size = tp.shard_size(linear.conv_size, "channels of the convolution")
        return cls(linear.num_layers, matrices, (linear.conv_width, conv_size), dtype, max_row_tokens)

    @property
    def snapshot_bytes(self) -> int:
        """Return the bytes of one place, in all layers."""
        return self.num_layers * (4 * math.prod(self.matrices) + self.dtype.itemsize * math.prod(self.conv_inputs))

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row, in all layers: its place, and room for its pending tokens."""
        pending = (dtype.itemsize * math.prod(shape) for shape, dtype in self._pending_tensors())
        return self.snapshot_bytes + self.num_layers * sum(pending)

    def max_rows(self, requested: int, free_bytes: int) -> int:
        """Return how many rows get a state: `requested`, or as many as half of `free_bytes` holds, and at least one.

        The other half is left to keys and values, and to snapshots.
        """
        rows = max(1, min(requested, free_bytes // 2 // self.row_bytes))
        if rows < requested:
            logger.info(
                "max_num_seqs is lowered from %d to %d: the recurrent states of a sequence take %.1f MiB, and half of "
                "the memory that is left beside the weights holds no more",
                *(requested, rows, self.row_bytes / 2**20),
            )
        return rows

    def num_snapshots(self, num_rows: int, free_bytes: int) -> int:
        """Return how many states are kept for prefix hits: one per row, at least 16, but a tenth of memory at most."""
        return max(1, min(max(num_rows, MIN_SNAPSHOTS), int(free_bytes * SNAPSHOT_SHARE) // self.snapshot_bytes))

    def allocate(self, num_rows: int, num_snapshots: int, device: torch.device) -> RecurrentStates:
        """Return states of zeros for rows, for snapshots and for the spare row, and nothing pending."""
        places, rows = (self.num_layers, num_rows + num_snapshots + 1), (self.num_layers, num_rows + 1)
        matrices = zeros((*places, *self.matrices), torch.float32, device)
        conv_inputs = zeros((*places, *self.conv_inputs), self.dtype, device)
        pending = None
        if self.max_row_tokens > 1:
            of_rows = (zeros((num_rows + 1,), dtype, device) for dtype in (torch.int32, torch.int64))
            of_layers = (zeros((*rows, *shape), dtype, device) for shape, dtype in self._pending_tensors())
            pending = PendingTokens(*of_rows, *of_layers)
        return RecurrentStates(matrices, conv_inputs, pending)

    def _pending_tensors(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and dtypes of a row's pending tokens in one layer: the last four of `PendingTokens`."""
        if self.max_row_tokens == 1:
            return []
        (num_heads, key_dim, value_dim), (width, conv_size) = self.matrices, self.conv_inputs
        lines = self.max_row_tokens
        return [
            ((width - 1 + lines, conv_size), self.dtype),
            ((lines, num_heads, key_dim), self.dtype),
            ((lines, num_heads, value_dim), torch.float32),
            ((lines, num_heads), torch.float32),
        ]
