"""Rotary position embedding (RoPE, Su et al. 2021) by itself, for towers, which keep no keys and values."""

import torch
from torch import Tensor

from nanoinfer.ops.dispatch import op


@op
def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head by its token's angles, in float32; return a contiguous tensor like `x`.

    x: (num_tokens, num_heads, head_dim), the last dimension contiguous, head_dim even. cos, sin: (num_tokens,
    head_dim), contiguous; the angles of both halves may differ.
    """
    wide, cos, sin = x.float(), cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
