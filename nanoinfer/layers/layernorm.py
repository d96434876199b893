"""Root-mean-square normalisation (Zhang and Sennrich 2019), alone or after the residual stream's addition."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nanoinfer.layers.linear import PartialSum
from nanoinfer.ops.all_reduce_norm.spec import all_reduce_add_rms_norm
from nanoinfer.ops.common.fp8_format import QuantizedRows, RowFormat
from nanoinfer.ops.fp8.spec import quantize_rows
from nanoinfer.ops.norms.spec import add_rms_norm, add_rms_norm_to_fp8, rms_norm


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
