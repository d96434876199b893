"""Root-mean-square normalisation (Zhang and Sennrich 2019) and layer normalisation (Ba et al. 2016).

Alone, or after the residual stream's addition, whose sum is rounded to its dtype before it is normalised.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.common.fp8_format import QuantizedRows, RowFormat
from nanoinfer.ops.dispatch import op
from nanoinfer.ops.fp8.spec import quantize_rows


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float, centres: bool = False, out: Tensor | None = None) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, computed in float32; shape and dtype of `x`.

    x: (..., size), the last dimension contiguous. weight: (size,) in the dtype of `x` or in float32. x / rms(x) is
    rounded to that dtype, so with a float32 weight only the product is rounded. centres: whether the mean of x is
    subtracted first, as layer normalisation does. out: where the norm is written, which may be `x`; both then have two
    dimensions.
    """
    wide = x.float()
    wide = wide - wide.mean(dim=-1, keepdim=True) if centres else wide
    # In place where it can be: to a CPU, new memory costs more than the arithmetic.
    wide = wide * wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    normed = wide.to(weight.dtype).mul_(weight).to(x.dtype)
    return normed if out is None else out.copy_(normed)


@op
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    sum_weight: Tensor | None = None,
    other_terms: Tensor | None = None,
    out: Tensor | None = None,
    centres: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and x + residual; an `x` with one dimension more is summed over it first.

    x: (..., size) like residual, or (num_splits, ..., size), the partial sums of a split-K product, in any dtype. The
    last dimension is contiguous. residual: (..., size), in the dtype of the results. weight: (size,), of that dtype or
    float32. sum_weight: like weight, of a norm of `x` by itself before the residual is added; None for no such norm.
    other_terms: (num_terms, ..., size), to be added to `x`; each is contiguous. out: where the norm is written,
    contiguous. centres: whether the mean of the sum is subtracted before it is normalised.
    """
    if x.dim() > residual.dim():
        x = x[0] if len(x) == 1 else x.sum(0)
    if other_terms is not None:
        x = x.float() + other_terms.sum(0, dtype=torch.float32)
    if sum_weight is not None:
        x = rms_norm(x.to(residual.dtype), sum_weight, eps)
    total = (x + residual).to(residual.dtype)
    normed = rms_norm(total, weight, eps, centres)
    return normed if out is None else out.copy_(normed), total


@op
def add_scaled_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    sum_weight: Tensor | None,
    total_scale: Tensor | None,
    other_terms: Tensor | None = None,
    part_weights: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm of (x + residual) * total_scale, and this product, which is rounded after each of the two steps.

    x: (num_splits, num_rows, size). residual: (num_rows, size). total_scale: (1,); None for 1. other_terms: like x, of
    any number; None for none. part_weights: with other terms alone. The sum of x is normalised by the first weight, and
    the sum of the other terms by the second, before the two are added up. The rest: see `add_rms_norm`.
    """
    assert (other_terms is None) == (part_weights is None), "other terms come with the weights of both norms"
    x = x[0] if len(x) == 1 else x.sum(0)
    if other_terms is not None and part_weights is not None:
        other = other_terms[0] if len(other_terms) == 1 else other_terms.sum(0)
        parts = (part.to(residual.dtype) for part in (x, other))
        x, other = (rms_norm(part, weight, eps) for part, weight in zip(parts, part_weights, strict=True))
        x = x + other
    if sum_weight is not None:
        x = rms_norm(x.to(residual.dtype), sum_weight, eps)
    total = (x + residual).to(residual.dtype)
    if total_scale is not None:
        total = total * total_scale.to(residual.dtype)
    return rms_norm(total, weight, eps), total


@op
def add_rms_norms(
    x: Tensor, residual: Tensor, weights: tuple[Tensor, Tensor, Tensor], eps: float, sum_weight: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return three norms of residual + norm(x), each by a weight of its own, and this sum: (num_rows, size) each.

    x: (num_splits, num_rows, size), partial sums. residual: (num_rows, size). weights, sum_weight: (size,), in float32
    or the dtype of the residual.
    """
    x = x[0] if len(x) == 1 else x.sum(0)
    total = rms_norm(x.to(residual.dtype), sum_weight, eps) + residual
    first, second, third = (rms_norm(total, weight, eps) for weight in weights)
    return (first, second, third), total


@op
def add_rms_norm_to_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    sum_weight: Tensor | None,
    out_format: RowFormat,
    other_terms: Tensor | None = None,
) -> tuple[QuantizedRows, Tensor]:
    """Return what `add_rms_norm` does, with the norm rounded to 8 bits. residual: (num_rows, size)."""
    out, total = add_rms_norm(x, residual, weight, eps, sum_weight, other_terms)
    return quantize_rows(out, out_format), total


@op
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, total: Tensor | None = None
) -> Tensor:
    """Return the layer norm of x + residual, in float32.

    x, residual: (num_rows, size). weight, bias: (size,). All have one dtype and are contiguous. total: where the sum is
    written, (num_rows, size), which may be x; None: nowhere.
    """
    added = x + residual
    if total is not None:
        total.copy_(added)
    return F.layer_norm(added, weight.shape, weight, bias, eps)
