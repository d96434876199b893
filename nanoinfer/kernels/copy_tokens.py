"""Copies the first tokens of blocks of the KV cache to other blocks. Twin: `layers/attention/block_copies.py`."""

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096  # values that a program copies at once


@triton.jit
def _copy_tokens_kernel(
    cache_ptr,
    copies_ptr,
    copies_stride,
    num_heads,
    layer_stride,
    block_stride,
    head_stride,
    SIZE: tl.constexpr,  # values of a token
    CHUNK: tl.constexpr,
):
    copy_ptr = copies_ptr + tl.program_id(0) * copies_stride
    source, target = tl.load(copy_ptr).to(tl.int64), tl.load(copy_ptr + 1).to(tl.int64)
    layer, head = (tl.program_id(1) // num_heads).to(tl.int64), tl.program_id(1) % num_heads
    head_ptr = cache_ptr + layer * layer_stride + head * head_stride
    index = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    is_copied = index < tl.load(copy_ptr + 2) * SIZE
    values = tl.load(head_ptr + source * block_stride + index, mask=is_copied)
    tl.store(head_ptr + target * block_stride + index, values, mask=is_copied)


def copy_tokens(cache: Tensor, copies: Tensor) -> None:
    """Copy the first tokens of blocks to other blocks, which are no sources.

    cache: (num_layers, num_blocks, num_heads, block_size) or with values of a token behind that, contiguous. copies:
    (num_copies, 3) int32: from which block, to which one, and how many tokens.
    """
    num_layers, _, num_heads, block_size = cache.shape[:4]
    _copy_tokens_kernel[(len(copies), num_layers * num_heads, triton.cdiv(cache.stride(2), CHUNK))](
        cache,
        copies,
        copies.stride(0),
        num_heads,
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        SIZE=cache.stride(2) // block_size,
        CHUNK=CHUNK,
    )
