"""The residual stream, and norms: RMSNorm (Zhang and Sennrich 2019) and its kin, which add to it first; LayerNorm."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.linear import PartialSum, ShardedVector
from nanoinfer.ops.all_reduce_norm.spec import all_reduce_add_rms_norm
from nanoinfer.ops.common.fp8_format import Activations, QuantizedRows, RowFormat
from nanoinfer.ops.fp8.spec import quantize_rows
from nanoinfer.ops.norms.spec import (
    add_layer_norm,
    add_rms_norm,
    add_rms_norm_to_fp8,
    add_scaled_rms_norm,
    rms_norm,
)


class RMSNorm(nn.Module):
    """Adds to the residual stream and normalises it.

    centres: whether the mean is subtracted first. weight_dtype: None for that of the model.
    """

    centres: ClassVar[bool] = False
    weight_dtype: ClassVar[torch.dtype | None] = None

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=self.weight_dtype), requires_grad=False)

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
            return rms_norm(residual, self.weight, self.eps, self.centres), residual
        weight, eps, sum_weight, others = self.weight, self.eps, hidden.sum_weight, hidden.other_terms
        if hidden.total_scale is not None or hidden.part_weights is not None:
            terms, scale, parts = hidden.all_reduced(), hidden.total_scale, hidden.part_weights
            return add_scaled_rms_norm(terms, residual, weight, eps, sum_weight, scale, others, parts)
        if hidden.buffers is not None:
            assert not self.centres, "the kernel that all-reduces subtracts no mean"
            return all_reduce_add_rms_norm(hidden.terms, residual, hidden.buffers, weight, eps, sum_weight)
        return add_rms_norm(hidden.all_reduced(), residual, weight, eps, sum_weight, others, centres=self.centres)

    def of_sum(self, hidden: PartialSum) -> PartialSum:
        """Return the sum, to be normalised by this norm before the next one adds it to the residual stream."""
        return replace(hidden, sum_weight=self.weight)

    def _to_fp8(
        self, hidden: PartialSum | None, residual: Tensor, out_format: RowFormat
    ) -> tuple[QuantizedRows, Tensor]:
        is_scaled = hidden is not None and (hidden.total_scale is not None or hidden.part_weights is not None)
        if hidden is None or hidden.buffers is not None or is_scaled or self.centres:
            out, total = self.forward(hidden, residual)
            return quantize_rows(out, out_format), total
        sum_weight, others = hidden.sum_weight, hidden.other_terms
        return add_rms_norm_to_fp8(
            hidden.all_reduced(), residual, self.weight, self.eps, sum_weight, out_format, others
        )


class GemmaRMSNorm(RMSNorm):
    """Normalises as RMSNorm, with a weight of 1 + w where checkpoints hold w: of Gemma 2 and 3, Qwen3-Next and Qwen3.5.

    The product is in float32, and so is the weight.
    """

    weight_dtype = torch.float32

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        param.copy_(1 + full.float())


class WideRMSNorm(RMSNorm):
    """Normalises as RMSNorm, with the weight, and the product with it, in float32 (Gemma 4)."""

    weight_dtype = torch.float32


# What is exactly x / rms(x) * weight, so that other kernels may compute it from `weight` and `eps`.
SCALING_NORMS = frozenset({RMSNorm, GemmaRMSNorm, WideRMSNorm})


class CohereLayerNorm(RMSNorm):
    """Normalises layers without a bias: (x - mean) / std * weight, in float32, and so is the weight."""

    centres = True
    weight_dtype = torch.float32


class ResidualSum(RMSNorm):
    """Adds to the residual stream without a norm, for layers whose norms come after attention and MLP."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        del self.weight
        self.register_buffer("weight", torch.ones(size), persistent=False)

    def forward(
        self, hidden: PartialSum | None, residual: Tensor, out_format: RowFormat | None = None
    ) -> tuple[Any, Tensor]:
        assert hidden is None or hidden.buffers is None, "a rank has only its own rows of such a sum"
        total = residual if hidden is None else super().forward(hidden, residual)[1]
        return (total if out_format is None else quantize_rows(total, out_format)), total


class ResidualStream:
    """Carries a step's residual stream through the layers. Attention and MLPs add to it, norms read it.

    What is added waits for the next norm, which does both at once. residual: (num_tokens, hidden_size).
    """

    def __init__(self, residual: Tensor) -> None:
        self.residual = residual
        self.added: PartialSum | None = None  # by the next norm
        self.normed: Any = None

    def add(self, terms: PartialSum, norm_of_terms: RMSNorm | None) -> None:
        """Let the next norm add these terms, after a norm of their own if there is one."""
        terms = terms if norm_of_terms is None else norm_of_terms.of_sum(terms)
        self.added = terms if self.added is None else self.added.plus(terms)

    def scale(self, factor: Tensor) -> None:
        """Let the next norm multiply the stream by a factor, (1,), when it has added the waiting terms."""
        assert self.added is not None, "the norm that scales a sum also adds it"
        self.added = replace(self.added, total_scale=factor)

    def normalise(self, norm: RMSNorm, out_format: RowFormat | None = None) -> None:
        """Add the waiting terms, and normalise the sum. out_format: how the next product wants its inputs."""
        self.normed = None  # frees it first
        self.normed, self.residual = norm(self.added, self.residual, out_format)
        self.added = None

    def normed_rows(self) -> Activations:
        """Return the rows of the last norm, in the format that it was asked for."""
        return self.normed


class WholeNorm(ShardedVector):
    """Normalises over all heads of the queries or keys, those of other ranks included (OLMo 2 and 3).

    split: which of the heads this rank has; ranks may share some, which count once.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, tp: TensorParallel, split: TensorParallel) -> None:
        super().__init__(num_heads * head_dim, split)
        self.eps, self.tp = eps, tp
        self.num_sharing = tp.size // split.size

    def normalise_(self, x: Tensor) -> None:
        """Normalise the rows of (num_tokens, this rank's size) in place."""
        if self.tp.size == 1:
            rms_norm(x, self.weight, self.eps, out=x)
            return
        wide = x.float()
        squares = self.tp.all_reduce(wide.square().sum(-1, keepdim=True)) / self.num_sharing
        wide = wide * torch.rsqrt(squares / self.full_shape[0] + self.eps)
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


class LayerNorm(nn.Module):
    """Computes (x - mean) / std * weight + bias over the last dimension (Ba et al. 2016); the bias may be absent."""

    def __init__(self, size: int, eps: float, has_bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor, total: Tensor | None = None) -> Tensor:
        """Return the norm of x + residual. total: see `add_layer_norm`."""
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps, total)
