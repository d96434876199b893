"""Forbids tokens by a bitmask, in plain PyTorch: the specification of `kernels/token_bitmask.py`."""

import torch
from torch import Tensor

from nanoinfer import kernels
from nanoinfer.kernels.triton_twins import triton_on_cuda


@triton_on_cuda(lambda: kernels.token_bitmask.forbid_tokens)
def forbid_tokens(logits: Tensor, rows: Tensor, bits: Tensor, first_id: int = 0) -> None:
    """Set the logits of forbidden tokens to -inf, in place; all others keep their bits.

    logits: (num_rows, vocab shard), from token `first_id` on. rows: (num_masks,) int64, the row that each mask is for,
    all different. bits: (num_masks, words) int32: token i is bit i % 32 of word i // 32, 1 if it is allowed.
    """
    ids = first_id + torch.arange(logits.shape[1], device=logits.device)
    is_forbidden = ((bits[:, ids // 32] >> (ids % 32).int()) & 1) == 0
    logits[rows] = logits[rows].masked_fill(is_forbidden, -torch.inf)
