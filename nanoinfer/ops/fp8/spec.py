"""The numbers of FP8: how weights and activations are rounded to e4m3, and what a product of them is.

The functions here define them in plain PyTorch; Triton kernels compute the same on a GPU. Scales and sums are float32.

- A scale is the largest absolute value / 448, so that nothing overflows. Zeros have the scale 0 and stay zeros. Weights
  that are rounded while they are loaded may have up to twice that, if it fits them better: `fit_weight`.
- NaN stays NaN and is left out of the largest value. Infinity makes NaN of its row. Neither reaches another row.
- A row of activations has one scale where every rank has all of the row: before QKV and gate-up. Where the ranks split
  the inputs, before the output and down projections, each eighth of a row has one, or each 128 values. No rank's share
  cuts such a group, so the scales do not depend on the number of ranks, and the ranks need not tell each other their
  largest values. (Three ranks, or six, cut eighths, and have groups of 128.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.common.fp8_format import (
    FP8,
    FP8_MAX,
    GROUP_SIZE,
    TINY,
    TO_SCALE,
    QuantizedRows,
    RowFormat,
    group_size_of,
)
from nanoinfer.ops.dispatch import op

NUM_SCALES = 8  # that are tried for a row of a weight
MAX_FITTED_ROWS = 1024  # at a time, to bound the memory that this takes


@op
def quantize_rows(x: Tensor, row_format: RowFormat) -> QuantizedRows:
    """Round rows to 8 bits. x: (num_rows, size), rows contiguous."""
    group_size = row_format.group_size or max(1, x.shape[1])
    padding = -x.shape[1] % group_size
    groups = F.pad(x.float(), (0, padding)).unflatten(1, (-1, group_size))  # (num_rows, num_groups, group_size)
    if row_format.scale is not None:
        scales = row_format.scale.expand(groups.shape[:2])
    else:
        scales = _largest(groups, dim=2) * TO_SCALE
    values = _round(groups, scales.unsqueeze(2)).flatten(1)[:, : x.shape[1]].contiguous()
    return QuantizedRows(values, scales, x if row_format.keeps_wide else None)


def quantize_weight(weight: Tensor, block_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Round a weight, (..., num_rows, depth), to 8 bits; return it and its scales.

    block_size: None for a scale for each row, (..., num_rows); else for each square block, (..., rows, columns), where
    the last ones may be smaller.
    """
    weight = weight.float()
    if block_size is None:
        scales = _largest(weight, dim=-1) * TO_SCALE
        return _round(weight, scales.unsqueeze(-1)), scales
    num_rows, depth = weight.shape[-2:]
    padded = F.pad(weight, (0, -depth % block_size, 0, -num_rows % block_size))
    blocks = padded.unflatten(-1, (-1, block_size)).unflatten(-3, (-1, block_size))
    scales = _largest(blocks, dim=(-3, -1)) * TO_SCALE
    return _round(weight, spread_blocks(scales, num_rows, depth)), scales


def fit_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight, (num_rows, depth), to 8 bits; return it and the scale that fits each row best.

    That is the one of `NUM_SCALES`, from largest / 448 to nearly twice that, with the least squared error. A larger
    scale adds no bits, but may move the most frequent values of a row to where e4m3 is finer.
    """
    parts = [_fit_rows(part.float()) for part in weight.split(MAX_FITTED_ROWS)]
    values, scales = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(scales)


def _fit_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    smallest = _largest(weight, dim=-1) * TO_SCALE
    scales, least = smallest, torch.full_like(smallest, torch.inf)
    for step in range(NUM_SCALES):
        tried = smallest * 2 ** (step / NUM_SCALES)
        error = (dequantize_weight(_round(weight, tried.unsqueeze(-1)), tried) - weight).square().sum(-1)
        is_better = error < least  # not where a row has NaN or infinity, which keeps the first one
        scales, least = torch.where(is_better, tried, scales), torch.where(is_better, error, least)
    return _round(weight, scales.unsqueeze(-1)), scales


def dequantize_weight(weight: Tensor, scales: Tensor) -> Tensor:
    """Return a weight in float32. weight: (..., num_rows, depth) e4m3. scales: of its rows, or of blocks of 128."""
    if scales.dim() < weight.dim():
        return weight.float() * scales.unsqueeze(-1)
    return weight.float() * spread_blocks(scales, *weight.shape[-2:])


@op
def widen_weight(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in `dtype`, contiguous. weight, scales: as `dequantize_weight` takes them, contiguous."""
    return dequantize_weight(weight, scales).to(dtype)


def dequantize_rows(rows: QuantizedRows) -> Tensor:
    """Return rows in float32."""
    size = rows.values.shape[1]
    group_size = group_size_of(size, rows.scales.shape[1])
    return rows.values.float() * rows.scales.repeat_interleave(group_size, dim=1)[:, :size]


def spread_blocks(scales: Tensor, num_rows: int, depth: int) -> Tensor:
    """Return the scale of each value, (..., num_rows, depth), from the scales of blocks of 128."""
    scales = scales.repeat_interleave(GROUP_SIZE, dim=-2).repeat_interleave(GROUP_SIZE, dim=-1)
    return scales[..., :num_rows, :depth]


@op
def fp8_product(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    num_splits: int = 1,
) -> Tensor:
    """Return x W^T + b as partial sums, (num_splits, num_tokens, num_outputs), rounded to `dtype`.

    x: (num_tokens, depth) e4m3. x_scales: (num_tokens, 1), or one for each group: 128 values, or an equal share of a
    row that is a multiple of 128. weight: (num_outputs, depth) e4m3, contiguous. weight_scales: of its rows,
    (num_outputs,), or of blocks of 128, 2-D. bias: (num_outputs,); None where there are several splits, each of as many
    groups.
    """
    wide, wide_weight = dequantize_rows(QuantizedRows(x, x_scales)), dequantize_weight(weight, weight_scales)
    wide = wide.unflatten(1, (num_splits, -1)).transpose(0, 1)
    sums = wide @ wide_weight.unflatten(1, (num_splits, -1)).permute(1, 2, 0)
    if bias is not None:
        sums = sums + bias.float()
    return sums.to(dtype)


def _largest(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    return torch.where(x.isnan(), 0.0, x.abs()).amax(dim)


def _round(x: Tensor, scales: Tensor) -> Tensor:
    """Return x / scales in e4m3; zero where the scale is zero."""
    inverse = torch.where(scales < TINY, 0.0, 1.0 / scales)
    return (x * inverse).clamp(-FP8_MAX, FP8_MAX).to(FP8)
