"""Root-mean-square normalisation (Zhang and Sennrich 2019), alone or after the residual stream's addition."""

import torch
from torch import Tensor, nn

from nanoinfer.distributed.symmetric_memory import SymmetricBuffers
from nanoinfer.kernels.dispatch import triton_on_cuda


@triton_on_cuda("nanoinfer.kernels.rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32 inside; shape and dtype of `x`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


@triton_on_cuda("nanoinfer.kernels.rms_norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and x + residual itself; an `x` with a dimension more is summed over it first."""
    if x.dim() > residual.dim():
        x = x.sum(0)
    total = (x + residual).to(residual.dtype)
    return rms_norm(total, weight, eps), total


@triton_on_cuda("nanoinfer.kernels.all_reduce_rms_norm")
def all_reduce_add_rms_norm(
    residual: Tensor, buffers: SymmetricBuffers, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """All-reduce the ranks' partial sums, then `add_rms_norm`. All ranks must call it: they wait for each other.

    In two-shot x + residual holds only the rows that this rank owns, which are all that its next all-reduce needs.
    """
    inputs = [partial[: len(residual)] for partial in buffers.inputs if isinstance(partial, Tensor)]
    return add_rms_norm(torch.stack(inputs).float(), residual, weight, eps)


class RMSNorm(nn.Module):
    """`norm(x)` normalises; `norm.add(x, residual)` adds first, partial sums too. Neither changes its inputs."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor | SymmetricBuffers, residual: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(x, SymmetricBuffers):
            return all_reduce_add_rms_norm(residual, x, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)
