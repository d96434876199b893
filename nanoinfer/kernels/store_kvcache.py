"""Write a step's keys and values into the paged cache. Twin: `TorchBackend.store`."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _store_kvcache_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    k_token_stride,
    v_token_stride,
    block_size,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    HEADS: tl.constexpr,  # num_heads and head_dim, rounded up to powers of two
    DIM: tl.constexpr,
):
    """One program copies one token's heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)  # int64: a large cache has more than 2^31 elements
    if slot >= 0:
        head = tl.arange(0, HEADS)[:, None]
        dim = tl.arange(0, DIM)[None, :]
        mask = (head < num_heads) & (dim < head_dim)
        source = head * head_dim + dim
        block, offset = slot // block_size, slot % block_size
        target = ((block * num_heads + head) * block_size + offset) * head_dim + dim
        tl.store(k_cache_ptr + target, tl.load(k_ptr + token * k_token_stride + source, mask=mask), mask=mask)
        tl.store(v_cache_ptr + target, tl.load(v_ptr + token * v_token_stride + source, mask=mask), mask=mask)


def store_kvcache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy each token's key and value to its slot; slot -1 is skipped.

    k, v: (num_tokens, num_kv_heads, head_dim), heads contiguous within a token.
    k_cache, v_cache: (num_blocks, num_kv_heads, block_size, head_dim), contiguous.
    slot_mapping: (num_tokens,) int64, block_id * block_size + offset.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (head_dim, 1), f"heads must be contiguous, strides {k.stride()}"
    assert k_cache.is_contiguous(), "the keys of the cache must be contiguous"
    assert v_cache.is_contiguous(), "the values of the cache must be contiguous"
    if num_tokens == 0:
        return
    _store_kvcache_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        k_cache.shape[2],
        num_heads=num_heads,
        head_dim=head_dim,
        HEADS=triton.next_power_of_2(num_heads),
        DIM=triton.next_power_of_2(head_dim),
    )
