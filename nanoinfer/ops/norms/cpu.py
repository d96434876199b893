"""Norms on a CPU: the specification's numbers to the last bit, by fewer and cheaper calls."""

from functools import lru_cache

import torch
from torch import Tensor

from nanoinfer.ops.norms import spec


def rms_norm(x: Tensor, weight: Tensor, eps: float, centres: bool = False, out: Tensor | None = None) -> Tensor:
    if centres:
        return spec.rms_norm.__wrapped__(x, weight, eps, centres, out)  # type: ignore[attr-defined]
    wide = x if x.dtype == torch.float32 else x.float()
    size, floor = _constants(x.shape[-1], eps)
    normed = wide * wide.square().sum(-1, True).div_(size).add_(floor).rsqrt_()
    if normed.dtype != weight.dtype:
        normed = normed.to(weight.dtype)
    normed = normed.mul_(weight)
    if normed.dtype != x.dtype:
        normed = normed.to(x.dtype)
    return normed if out is None else out.copy_(normed)


@lru_cache(maxsize=64)
def _constants(size: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return both as tensors: an operator takes twice as long with a Python number."""
    return torch.tensor(size, dtype=torch.float32, device="cpu"), torch.tensor(eps, dtype=torch.float32, device="cpu")
