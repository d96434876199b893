"""Attention within segments: each patch of an image attends to all patches of its image, in plain PyTorch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def segment_attention(q: Tensor, k: Tensor, v: Tensor, lens: Sequence[int], scale: float | None) -> Tensor:
    """Return the outputs of attention within each segment, like q: (num_patches, num_heads, head_dim).

    lens: of the segments, which lie one after the other. scale: None for that of their size. `hopper.py` computes the
    same for Hopper GPUs.
    """
    parts = zip(*(x.transpose(0, 1)[None].split([*lens], dim=2) for x in (q, k, v)), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, scale=scale) for q, k, v in parts]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)
