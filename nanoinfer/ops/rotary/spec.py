"""Rotary position embedding (RoPE, Su et al. 2021) by itself, for towers, which keep no keys and values."""

import torch
from torch import Tensor

from nanoinfer.ops.dispatch import op


@op
def rotate_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the two halves of each head by its token's angles, in float32, in place.

    q, k: (num_tokens, num_heads, head_dim) of equal strides, the last dimension contiguous, head_dim even. They may be
    views of one tensor. cos, sin: (num_tokens, head_dim), contiguous; the angles of both halves may differ.
    """
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    for x in (q, k):
        first, second = x.float().chunk(2, dim=-1)
        x.copy_(x.float() * cos + torch.cat((-second, first), dim=-1) * sin)
