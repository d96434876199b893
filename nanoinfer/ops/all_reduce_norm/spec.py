"""All-reduce, residual addition and RMSNorm in one operation, for tensor-parallel steps of few tokens."""

import torch
from torch import Tensor

from nanoinfer.ops.common.symmetric_buffers import SymmetricBuffers
from nanoinfer.ops.dispatch import op
from nanoinfer.ops.norms.spec import add_rms_norm


@op
def all_reduce_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    buffers: SymmetricBuffers,
    weight: Tensor,
    eps: float,
    sum_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """All-reduce the ranks' partial sums, then `add_rms_norm`: return the norm, and x + residual.

    All ranks must call it with as many tokens and the same variant: they wait for each other. In two-shot x + residual
    holds only the rows that this rank owns, which are all that its next all-reduce needs.

    x: (num_terms, num_tokens, size), this rank's terms. residual: (num_tokens, size). weight: (size,). All have one
    dtype, but weight may be in float32. sum_weight: like weight, of a norm of the sum by itself before the residual is
    added; None for no such norm.
    """
    received = buffers.parts[buffers.rank]
    assert isinstance(received, Tensor)
    parts = list(received[:, : len(residual)].view(residual.dtype).float())
    parts[buffers.rank] = x.sum(0, dtype=torch.float32).to(residual.dtype).float()
    return add_rms_norm(torch.stack(parts), residual, weight, eps, sum_weight)
