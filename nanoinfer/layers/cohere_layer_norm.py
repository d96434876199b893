"""Layer normalisation without a bias, of a decoder's residual stream: RMSNorm after the mean is subtracted (Cohere)."""

from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import PartialSum
from nanoinfer.ops.common.fp8_format import RowFormat
from nanoinfer.ops.fp8.spec import quantize_rows
from nanoinfer.ops.norms.spec import add_rms_norm, rms_norm


class CohereLayerNorm(RMSNorm):
    """Adds to the residual stream and normalises it: (x - mean) / std * weight, in float32, and so is the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)

    def forward(
        self, hidden: PartialSum | None, residual: Tensor, out_format: RowFormat | None = None
    ) -> tuple[Any, Tensor]:
        if hidden is None:
            normed, total = rms_norm(residual, self.weight, self.eps, centres=True), residual
        else:
            assert hidden.all_ranks is None, "the kernel that all-reduces subtracts no mean"
            terms, others = hidden.all_reduced(), hidden.other_terms
            normed, total = add_rms_norm(terms, residual, self.weight, self.eps, other_terms=others, centres=True)
        return (normed if out_format is None else quantize_rows(normed, out_format)), total
