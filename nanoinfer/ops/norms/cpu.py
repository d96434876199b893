"""Norms on a CPU, in few operators."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from nanoinfer.ops.norms import spec


def rms_norm(x: Tensor, weight: Tensor, eps: float, centres: bool = False, out: Tensor | None = None) -> Tensor:
    if centres:
        return spec.rms_norm.__wrapped__(x, weight, eps, centres, out)  # type: ignore[attr-defined, no-any-return]
    floor, factor = _constants(eps, x.shape[-1])
    rms = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32).hypot_(floor).mul_(factor)
    normed = torch.div(x, rms)
    if normed.dtype != weight.dtype:
        normed = normed.to(weight.dtype)
    normed = normed.mul_(weight)
    if normed.dtype != x.dtype:
        normed = normed.to(x.dtype)
    return normed if out is None else out.copy_(normed)


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
    if x.dim() > residual.dim() and x.shape[0] == 1:
        x = x.squeeze(0)
    if x.shape != residual.shape or x.dtype != residual.dtype or other_terms is not None or sum_weight is not None:
        rest = sum_weight, other_terms, out, centres
        return spec.add_rms_norm.__wrapped__(x, residual, weight, eps, *rest)  # type: ignore[attr-defined, no-any-return]
    total = x + residual
    return rms_norm(total, weight, eps, centres, out), total


@lru_cache(maxsize=64)
def _constants(eps: float, size: int) -> tuple[Tensor, Tensor]:
    """Return sqrt(size * eps) and 1 / sqrt(size): the rms of a vector is hypot(its norm, the first) * the second."""
    return torch.tensor(math.sqrt(size * eps), device="cpu"), torch.tensor(size**-0.5, device="cpu")
