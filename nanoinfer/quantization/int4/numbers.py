"""The numbers of 4 bits: how weights are packed, rounded and widened, in plain PyTorch. Kernels compute the same.

A weight is (..., num_outputs, num_inputs) numbers from 0 to 15. Eight inputs of an output are packed in an int32, the
first in the lowest bits. The inputs of an output are in groups, each with a scale and, in some formats, a zero point:
weight = (number - zero) * scale, in float32. Without zero points the zero is 8.
"""

from typing import NamedTuple

import torch
from torch import Tensor

PACKED = 8  # numbers in an int32
ZERO = 8  # the number that means 0 where there are no zero points
GROUP_SIZE = 128  # inputs that share a scale, where we choose
SHARES_OF_LARGEST = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # scales that are tried, by what becomes the largest number
MAX_FITTED_ROWS = 1024  # at a time, to bound the memory that this takes


class PackedWeight(NamedTuple):
    """A weight in 4 bits.

    scales: float32, (..., num_outputs, num_groups), or (..., num_outputs), one for all inputs of an output. zeros: the
    same shape, uint8; None: 8. groups: (..., num_inputs) int32, the group of each input; None: they are in order.
    """

    numbers: Tensor  # (..., num_outputs, num_inputs / 8) int32
    scales: Tensor
    zeros: Tensor | None = None
    groups: Tensor | None = None


def pack(numbers: Tensor) -> Tensor:
    """Pack numbers from 0 to 15, (..., size), in int32, (..., size / 8)."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int64, device=numbers.device)
    words = (numbers.to(torch.int64).unflatten(-1, (-1, PACKED)) << shifts).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """Return the numbers from 0 to 15 of int32 words, (..., size / 8) -> (..., size) uint8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(-2)


def dequantize(weight: PackedWeight) -> Tensor:
    """Return a weight in float32."""
    numbers = unpack(weight.numbers).float()
    scales, zeros = _of_inputs(weight.scales, numbers, weight.groups), float(ZERO)
    if weight.zeros is None:
        return (numbers - zeros) * scales
    return (numbers - _of_inputs(weight.zeros.float(), numbers, weight.groups)) * scales


def _of_inputs(x: Tensor, numbers: Tensor, groups: Tensor | None) -> Tensor:
    """Return for each input what its group has; one that is the same for all inputs of an output has a size of 1."""
    if x.dim() < numbers.dim():
        return x.unsqueeze(-1)
    if groups is not None:
        return x.gather(-1, groups.long().unsqueeze(-2).expand(numbers.shape))
    return x.repeat_interleave(numbers.shape[-1] // x.shape[-1], dim=-1)


def quantize(weight: Tensor, group_size: int) -> PackedWeight:
    """Round a weight, (..., num_outputs, num_inputs), to 4 bits without zero points.

    Of a few scales each group has the one with the smallest squared error. NaN and infinity make NaN of their group.
    """
    rows = weight.float().reshape(-1, weight.shape[-1])
    parts = [_quantize_rows(part, group_size) for part in rows.split(MAX_FITTED_ROWS)]
    numbers, scales = (torch.cat(side) for side in zip(*parts, strict=True))
    shape = weight.shape[:-1]
    return PackedWeight(numbers.view(*shape, -1), scales.view(*shape, -1))


def _quantize_rows(rows: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    groups = rows.unflatten(1, (-1, group_size))  # (num_rows, num_groups, group_size)
    largest = groups.abs().amax(dim=2, keepdim=True)
    best = best_scale = least = None
    for share in SHARES_OF_LARGEST:
        scale = largest * (share / 7)
        numbers = (groups / scale.where(scale > 0, torch.ones_like(scale))).round().clamp(-8, 7)
        error = (groups - numbers * scale).square().sum(dim=2, keepdim=True)
        if best is None or best_scale is None or least is None:
            best, best_scale, least = numbers, scale, error
            continue
        is_better = error < least
        best, best_scale = torch.where(is_better, numbers, best), torch.where(is_better, scale, best_scale)
        least = torch.minimum(error, least)
    assert best is not None, "at least one scale is tried"
    assert best_scale is not None, "at least one scale is tried"
    best_scale = torch.where(largest < torch.inf, best_scale, torch.nan)
    return pack((best.nan_to_num(0.0) + ZERO).flatten(1)), best_scale.squeeze(2)
