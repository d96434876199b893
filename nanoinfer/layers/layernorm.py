"""Root-mean-square normalisation (Zhang and Sennrich 2019), alone or after the residual stream's addition."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nanoinfer import kernels
from nanoinfer.kernels.fp8_format import QuantizedRows, RowFormat
from nanoinfer.kernels.symmetric_buffers import SymmetricBuffers
from nanoinfer.kernels.triton_twins import triton_on_cuda
from nanoinfer.layers.linear import PartialSum
from nanoinfer.quantization.fp8_numbers import quantize_rows


@triton_on_cuda(lambda: kernels.rms_norm.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, eps: float, centres: bool = False, out: Tensor | None = None) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, computed in float32; shape and dtype of `x`.

    The weight is in the dtype of `x` or in float32. x / rms(x) is rounded to that dtype, so with a float32 weight only
    the product is rounded. centres: whether the mean of x is subtracted first, as layer normalisation does. out: where
    the norm is written, which may be `x`; both then have two dimensions.
    """
    wide = x.float()
    wide = wide - wide.mean(dim=-1, keepdim=True) if centres else wide
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    normed = (wide.to(weight.dtype) * weight).to(x.dtype)
    return normed if out is None else out.copy_(normed)


@triton_on_cuda(lambda: kernels.rms_norm.add_rms_norm)
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

    sum_weight: (size,), of a norm of `x` by itself before the residual is added; None for no such norm. other_terms:
    (num_terms, ..., size), to be added to `x`. out: where the norm is written. centres: whether the mean of the sum is
    subtracted before it is normalised.
    """
    if x.dim() > residual.dim():
        x = x.sum(0)
    if other_terms is not None:
        x = x.float() + other_terms.sum(0, dtype=torch.float32)
    if sum_weight is not None:
        x = rms_norm(x.to(residual.dtype), sum_weight, eps)
    total = (x + residual).to(residual.dtype)
    normed = rms_norm(total, weight, eps, centres)
    return normed if out is None else out.copy_(normed), total


@triton_on_cuda(lambda: kernels.all_reduce_rms_norm.all_reduce_add_rms_norm)
def all_reduce_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    buffers: SymmetricBuffers,
    weight: Tensor,
    eps: float,
    sum_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """All-reduce the ranks' terms, then `add_rms_norm`. All ranks must call it: they wait for each other.

    In two-shot x + residual holds only the rows that this rank owns, which are all that its next all-reduce needs.
    """
    received = buffers.parts[buffers.rank]
    assert isinstance(received, Tensor)
    parts = list(received[:, : len(residual)].view(residual.dtype).float())
    parts[buffers.rank] = x.sum(0, dtype=torch.float32).to(residual.dtype).float()
    return add_rms_norm(torch.stack(parts), residual, weight, eps, sum_weight)


@triton_on_cuda(lambda: kernels.rms_norm.add_rms_norm_to_fp8)
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


class RMSNorm(nn.Module):
    """Adds to the residual stream and normalises it.

    only_scales: whether the norm is exactly x / rms(x) * weight, so that other kernels may compute it from `weight` and
    `eps`. Each subclass must set it again: an inherited value does not count.
    """

    only_scales: ClassVar[bool] = True

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(
        self, hidden: PartialSum | None, residual: Tensor, out_format: RowFormat | None = None
    ) -> tuple[Any, Tensor]:
        """Return norm(residual + hidden) and residual + hidden; `hidden` is None where there is nothing to add.

        residual: (num_tokens, size), left as it is. out_format: how the norm is rounded to QuantizedRows; None if it is
        to be a tensor like the residual.
        """
        if out_format is not None:
            return self._to_fp8(hidden, residual, out_format)
        if hidden is None:
            return rms_norm(residual, self.weight, self.eps), residual
        if hidden.all_ranks is not None:
            weights = self.weight, self.eps, hidden.sum_weight
            return all_reduce_add_rms_norm(hidden.terms, residual, hidden.all_ranks, *weights)
        weights = self.weight, self.eps, hidden.sum_weight
        return add_rms_norm(hidden.all_reduced(), residual, *weights, hidden.other_terms)

    def of_sum(self, hidden: PartialSum) -> PartialSum:
        """Return the sum, to be normalised by this norm before the next one adds it to the residual stream."""
        return replace(hidden, sum_weight=self.weight)

    def _to_fp8(
        self, hidden: PartialSum | None, residual: Tensor, out_format: RowFormat
    ) -> tuple[QuantizedRows, Tensor]:
        if hidden is None or hidden.all_ranks is not None:
            out, total = self.forward(hidden, residual)
            return quantize_rows(out, out_format), total
        weights = self.weight, self.eps, hidden.sum_weight
        return add_rms_norm_to_fp8(hidden.all_reduced(), residual, *weights, out_format, hidden.other_terms)
