"""Writes keys and values to their slots of the paged cache, where nothing is to be done with them before.

The twin is `store` in `layers/attention/attention_layer.py`. A program holds some heads of one token. It reads them
with the strides that they have: models of transformers hand out views of transposed tensors.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.kv_cache_format import LARGEST
from nanoinfer.kernels.norm_rope_store import _magnitude, _rounded
from nanoinfer.ops.common.device_properties import next_power_of_2

TILE = 1024  # elements of a program
NUM_WARPS = 4


@triton.jit
def _store_rows(
    x_ptr,
    cache_ptr,
    scales_ptr,  # None unless the cache is in 8 bits
    line,
    is_head,
    dim,
    head_dim: tl.constexpr,
    largest: tl.constexpr,
):
    mask = is_head & (dim < head_dim)
    x = tl.load(x_ptr, mask=mask, other=0.0)
    if scales_ptr is not None:
        largest_here = tl.max(_magnitude(x), axis=1)[:, None]
        scale = tl.where(largest_here < float("inf"), largest_here * tl.div_rn(1.0, largest), float("nan"))
        tl.store(scales_ptr + line, scale, mask=is_head)
        x = _rounded(x, scale, largest, cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + line * head_dim + dim, x, mask=mask)


@triton.jit
def _store_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    slot_mapping_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a program
    DIM: tl.constexpr,  # head_dim, rounded up to a power of two
    largest: tl.constexpr,  # the largest value of a format of 8 bits
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)  # int64: a large cache has more than 2^31 elements
    if slot >= 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
        dim = tl.broadcast_to(tl.arange(0, DIM)[None, :], HEADS, DIM)
        is_head = head < num_kv_heads
        line = (slot // block_size * num_kv_heads + head) * block_size + slot % block_size
        k_ptrs = k_ptr + token * k_token_stride + head * k_head_stride + dim
        v_ptrs = v_ptr + token * v_token_stride + head * v_head_stride + dim
        _store_rows(k_ptrs, k_cache_ptr, k_scales_ptr, line, is_head, dim, head_dim, largest)
        _store_rows(v_ptrs, v_cache_ptr, v_scales_ptr, line, is_head, dim, head_dim, largest)


def store(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write each token's key and value (num_tokens, num_kv_heads, head_dim) to its slot; slot -1 writes nothing.

    k, v: of unit stride in head_dim. k_cache, v_cache: (num_blocks, num_kv_heads, block_size, head_dim), contiguous.
    slot_mapping: (num_tokens,) int64. k_scales, v_scales: (num_blocks, num_kv_heads, block_size) float32, for a cache
    in 8 bits.
    """
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    assert k.stride(2) == v.stride(2) == 1, f"heads must be contiguous, strides {k.stride()} and {v.stride()}"
    assert k_cache.is_contiguous(), "the keys of the cache must be contiguous"
    assert v_cache.is_contiguous(), "the values of the cache must be contiguous"
    if not len(k):
        return
    padded_dim = next_power_of_2(head_dim)
    heads_per_program = min(next_power_of_2(num_kv_heads), max(1, TILE // padded_dim))
    _store_kernel[(len(k), -(-num_kv_heads // heads_per_program))](
        k,
        v,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        HEADS=heads_per_program,
        DIM=padded_dim,
        largest=LARGEST.get(k_cache.dtype),
        num_warps=NUM_WARPS,
    )
