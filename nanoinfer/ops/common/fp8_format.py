"""Describes 8-bit activations to the kernels that make and use them, and to specifications. Needs no Triton."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.integers import ceil_div

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest value of e4m3, which has no infinity
GROUP_SIZE = 128  # neighbouring values of a row: those that share a scale have one group or several
MAX_SMALL_STEP = 128  # tokens; larger steps are multiplied in other tiles
TO_SCALE = 1 / FP8_MAX  # a product, since PyTorch divides by a number in one way on a CPU and in another on a GPU
TINY = 1.2e-38  # a scale below it has no reciprocal in float32; what it would scale is rounded to zero


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Holds rows of activations in 8 bits: a value times the scale of its group is about what it was before.

    values: (num_rows, size) e4m3. scales: (num_rows, num_groups) float32; rows may share them by a stride of 0.
    wide: (num_rows, size), the rows before they were rounded, where somebody needs them as well.
    """

    values: Tensor
    scales: Tensor
    wide: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> "QuantizedRows":
        return QuantizedRows(self.values[rows], self.scales[rows], None if self.wide is None else self.wide[rows])


def group_size_of(size: int, num_groups: int) -> int:
    """Return how many values of a row share each of its scales. Only of groups of 128 the last one may have fewer."""
    return GROUP_SIZE if num_groups == ceil_div(size, GROUP_SIZE) else size // num_groups


Activations = Tensor | QuantizedRows  # (num_tokens, size), in the model's dtype or in 8 bits


@dataclass(frozen=True, slots=True, eq=False)
class RowFormat:
    """Says how rows of activations are rounded to 8 bits.

    group_size: how many neighbouring values share a scale, a multiple of 128; None: all of a row.
    scale: () float32, that of all rows (static); None: the largest absolute value of each group / 448 (dynamic).
    keeps_wide: whether the rows are needed as they were, too.
    """

    group_size: int | None = None
    scale: Tensor | None = None
    keeps_wide: bool = False

    def empty_rows(self, like: Tensor, size: int, wide: Tensor | None = None) -> QuantizedRows:
        """Return memory for as many rows as `like` has; a static scale is already in its place.

        wide: the rows before they are rounded, if somebody has them already.
        """
        num_rows = len(like)
        num_groups = 1 if self.group_size is None else ceil_div(size, self.group_size)
        values = like.new_empty(num_rows, size, dtype=FP8)
        if self.scale is not None:
            scales = self.scale.expand(num_rows, num_groups)
        else:
            scales = like.new_empty(num_rows, num_groups, dtype=torch.float32)
        if self.keeps_wide and wide is None:
            wide = like.new_empty(num_rows, size)
        return QuantizedRows(values, scales, wide if self.keeps_wide else None)
