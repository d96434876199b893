"""Forbids tokens by a bitmask, in place, straight in the model's logits. Twin: `sampling/token_bitmask.py`.

Eight neighbouring ids are a group: one byte of the mask, and 16 bytes of 16-bit logits, which one thread moves at once.
Logits are read only where a group has both allowed and forbidden ids, and written only where it has forbidden ones.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.ops.common.programmatic_launch import overlap_options

GROUP_SIZE = tl.constexpr(8)  # ids
INF = tl.constexpr(float("inf"))
TILE_GROUPS = 512  # groups for each program


@triton.jit
def _forbid_tokens_kernel(
    logits_ptr,
    rows_ptr,
    bytes_ptr,
    num_ids,
    logits_stride,
    num_bytes,  # of a mask
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    mask, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = tile * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    byte = tl.load(bytes_ptr + mask * num_bytes + group, mask=group * GROUP_SIZE < num_ids, other=255).to(tl.int32)
    is_mixed, has_forbidden = (byte > 0) & (byte < 255), byte < 255
    logits_ptrs = logits_ptr + tl.load(rows_ptr + mask) * logits_stride + ids
    logits = tl.load(logits_ptrs, mask=is_mixed[:, None] & (ids < num_ids), other=-INF)
    is_allowed = ((byte[:, None] >> tl.arange(0, GROUP_SIZE)[None, :]) & 1) == 1
    tl.store(logits_ptrs, tl.where(is_allowed, logits, -INF), mask=has_forbidden[:, None] & (ids < num_ids))


def forbid_tokens(logits: Tensor, rows: Tensor, bits: Tensor, first_id: int = 0) -> None:
    """Do as `forbid_tokens` in `sampling/token_bitmask.py`; rows must be contiguous, and `first_id` divisible by 32."""
    assert logits.stride(1) == 1, f"the logits of a row must be contiguous, strides {logits.stride()}"
    assert bits.stride(1) == 1, f"the bits of a mask must be contiguous, strides {bits.stride()}"
    assert first_id % 32 == 0, f"first_id={first_id} lies within a word"
    num_masks, num_ids = len(rows), logits.shape[1]
    if num_masks == 0:
        return
    grid = (num_masks, -(-num_ids // (TILE_GROUPS * GROUP_SIZE.value)))
    _forbid_tokens_kernel[grid](
        logits,
        rows,
        bits[:, first_id // 32 :].view(torch.uint8),
        num_ids,
        logits.stride(0),
        4 * bits.stride(0),
        GROUPS=TILE_GROUPS,
        **overlap_options(logits.device),
    )
