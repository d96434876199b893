"""Norms of OLMo 2 and 3: they take all queries of a token together, and all keys; a layer's inputs have no norm."""

from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.checkpoint.weights import check_shape
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import PartialSum
from nanoinfer.ops.common.fp8_format import RowFormat
from nanoinfer.ops.fp8.spec import quantize_rows
from nanoinfer.ops.norms.spec import rms_norm


class WholeNorm(nn.Module):
    """RMSNorm over all heads of the queries or keys, those of other ranks included.

    split: which of the heads this rank has; ranks may share some, which count once.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, tp: TensorParallel, split: TensorParallel) -> None:
        super().__init__()
        self.eps, self.tp, self.split = eps, tp, split
        self.full_size = num_heads * head_dim
        self.num_sharing = tp.size // split.size
        size = split.shard_size(num_heads, "heads") * head_dim
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def check_weight(self, _param: Tensor, full: Tensor) -> None:
        check_shape(full, (self.full_size,))

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        self.check_weight(param, full)
        param.copy_(self.split.shard(full, 0))

    def normalise_(self, x: Tensor) -> None:
        """Normalise the rows of (num_tokens, this rank's size) in place."""
        if self.tp.size == 1:
            rms_norm(x, self.weight, self.eps, out=x)
            return
        wide = x.float()
        squares = self.tp.all_reduce(wide.square().sum(-1, keepdim=True)) / self.num_sharing
        wide = wide * torch.rsqrt(squares / self.full_size + self.eps)
        x.copy_(self.weight * wide.to(x.dtype))


def normalise_wholly(qkv: Tensor, q_norm: WholeNorm, k_norm: WholeNorm) -> Tensor:
    """Return queries, keys and values with all queries of each token normalised together, and all its keys.

    qkv: (num_tokens, size), or terms of it that are to be summed: (num_terms, num_tokens, size).
    """
    qkv = qkv.sum(0) if qkv.dim() == 3 else qkv
    num_queries, num_keys = len(q_norm.weight), len(k_norm.weight)
    q_norm.normalise_(qkv[:, :num_queries])
    k_norm.normalise_(qkv[:, num_queries : num_queries + num_keys])
    return qkv


class ResidualSum(RMSNorm):
    """Adds to the residual stream, and hands it on as it is; for layers whose norms come after attention and MLP."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        del self.weight
        self.register_buffer("weight", torch.ones(size), persistent=False)

    def forward(
        self, hidden: PartialSum | None, residual: Tensor, out_format: RowFormat | None = None
    ) -> tuple[Any, Tensor]:
        assert hidden is None or hidden.all_ranks is None, "a rank has only its own rows of such a sum"
        total = residual if hidden is None else super().forward(hidden, residual)[1]
        return (total if out_format is None else quantize_rows(total, out_format)), total
