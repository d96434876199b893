"""Kernels that write keys and values to a paged KV cache in 16 or 8 bits, and one that widens blocks of 8 bits.

A program of `norm_rope_store` holds a few heads of one token as two tiles (heads, head_dim / 2), one for each of the
halves that RoPE mixes. So only the sum of squares moves data between threads. Where only the first dimensions are
rotated, the tiles hold the halves of these and the halves of the others, which are turned by nothing. Where RoPE turns
neighbouring dimensions, the tiles hold the even and the odd ones. Queries and keys are rotated in place.

A program of `store_keys_values` holds some heads of one token, and reads them with the strides that they have.
"""

import torch
import triton
import triton.language as tl

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import next_power_of_2
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import SMALLEST_SCALE, wait_for_inputs
from nanoinfer.ops.kv_cache.spec import LARGEST

NUM_WARPS = 4
# Four elements for each thread: 16 bytes in float32, 8 in a 16-bit dtype. With these, Triton gives all tiles the same
# layout, and all loads can be in flight together. With more it would have to convert the layout of 16-bit tiles.
TILE = NUM_WARPS * 32 * 4
STORED_TILE = 1024  # elements of a program that only stores
WIDENED_TILE = 4096  # elements of a program that widens a cache in 8 bits
# In steps of so many tokens, a program of `qkv_norm_rope_store` has several: more bytes are on their way at a time.
MANY_TOKENS, TOKENS_AT_ONCE = 1024, 4


@triton.jit
def _magnitude(x):
    """Return absolute values in float32; infinity for NaN, which `tl.max` would pass over."""
    x = tl.abs(x.to(tl.float32))
    return tl.where(x < float("inf"), x, float("inf"))


@triton.jit
def _scale(largest_here, largest: tl.constexpr):
    """Return the scales of vectors in 8 bits by their largest magnitudes; NaN where one is infinite."""
    return tl.where(largest_here < float("inf"), largest_here * tl.div_rn(1.0, largest), float("nan"))


@triton.jit
def _rounded(x, scale, largest: tl.constexpr, dtype: tl.constexpr):
    """Return x / scale in 8 bits, or 0 where there is no such number.

    Unlike `to_e4m3` it stores no NaN. int8 has none, so in both formats the scale of the vector is NaN instead.
    """
    x = tl.where(scale >= SMALLEST_SCALE, x.to(tl.float32) * tl.div_rn(1.0, scale), 0.0)
    x = tl.minimum(tl.maximum(x, -largest), largest)
    return x.to(dtype) if dtype.is_floating() else tl.floor(x + 0.5).to(dtype)


@triton.jit
def _norm_rope_store_kernel(
    qkv_ptr,
    q_weight_ptr,  # None, like k_weight_ptr, for a model without q/k norms
    k_weight_ptr,
    positions_ptr,
    cos_sin_ptr,  # (max_positions, 2 * rotary_half) float32: cosines, then sines
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,  # None, like v_scales_ptr, unless the cache is in 8 bits
    v_scales_ptr,
    slot_mapping_ptr,
    split_stride,
    token_stride,
    eps,
    num_splits: tl.constexpr,  # of split-K: partial sums of qkv to add up, in the place of the first
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    half_dim: tl.constexpr,
    rotary_half: tl.constexpr,  # half of the dimensions that are rotated, which come first
    num_groups: tl.constexpr,
    HEADS: tl.constexpr,  # heads for each program
    HALF_DIM: tl.constexpr,  # half_dim, rounded up to a power of two
    largest: tl.constexpr,  # the largest value of a format of 8 bits
    INTERLEAVED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = (tl.program_id(0) // num_groups).to(tl.int64)
    head = tl.program_id(0) % num_groups * HEADS + tl.arange(0, HEADS)[:, None]  # queries, then keys, then values
    dim = tl.broadcast_to(tl.arange(0, HALF_DIM)[None, :], HEADS, HALF_DIM)
    is_query = head < num_heads
    is_rotated = head < num_heads + num_kv_heads  # a query or a key
    mask = (head < num_heads + 2 * num_kv_heads) & (dim < half_dim)
    is_key = mask & is_rotated & (head >= num_heads)
    is_value = mask & (head >= num_heads + num_kv_heads)

    wait_for_inputs(OVERLAP)
    # Which dimension of the head each element of the tiles is, and how far its partner lies from it.
    first_dim = dim
    distance = half_dim
    is_turned = mask
    if INTERLEAVED:
        is_turned = mask & (dim < rotary_half)
        first_dim = 2 * dim
        distance = 1
    elif rotary_half < half_dim:
        is_turned = mask & (dim < rotary_half)
        first_dim = tl.where(dim < rotary_half, dim, dim + rotary_half)
        distance = tl.where(dim < rotary_half, rotary_half, half_dim - rotary_half)
    slot = tl.load(slot_mapping_ptr + token)  # int64: a large cache has more than 2^31 elements
    cos_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * rotary_half) + dim
    first_ptr = qkv_ptr + token * token_stride + head * (2 * half_dim) + first_dim
    first = tl.load(first_ptr, mask=mask, other=0.0)
    second = tl.load(first_ptr + distance, mask=mask, other=0.0)
    is_written = mask & is_rotated
    if num_splits > 1:
        is_written = mask  # values too, since prefill reads them here
        sum1, sum2 = first.to(tl.float32), second.to(tl.float32)
        for split in tl.static_range(1, num_splits):
            sum1 += tl.load(first_ptr + split * split_stride, mask=mask, other=0.0).to(tl.float32)
            sum2 += tl.load(first_ptr + split * split_stride + distance, mask=mask, other=0.0).to(tl.float32)
        first, second = sum1.to(first.dtype), sum2.to(second.dtype)
    cos = tl.load(cos_ptr, mask=is_turned, other=1.0)
    sin = tl.load(cos_ptr + rotary_half, mask=is_turned, other=0.0)

    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    if q_weight_ptr is not None:
        q_weight1 = tl.load(q_weight_ptr + first_dim, mask=mask & is_query)
        q_weight2 = tl.load(q_weight_ptr + first_dim + distance, mask=mask & is_query)
        k_weight1 = tl.load(k_weight_ptr + first_dim, mask=is_key)
        k_weight2 = tl.load(k_weight_ptr + first_dim + distance, mask=is_key)
        weight1 = tl.where(is_query, q_weight1, k_weight1).to(tl.float32)
        weight2 = tl.where(is_query, q_weight2, k_weight2).to(tl.float32)
        mean_square = tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * half_dim)
        scale = tl.rsqrt(mean_square + eps)[:, None]
        # Rounded after the division and after the weight, as PyTorch does it.
        x1 = (x1 * scale).to(q_weight1.dtype).to(tl.float32) * weight1
        x2 = (x2 * scale).to(q_weight2.dtype).to(tl.float32) * weight2
        x1, x2 = x1.to(first.dtype).to(tl.float32), x2.to(first.dtype).to(tl.float32)
    first = tl.where(is_rotated, (x1 * cos - x2 * sin).to(first.dtype), first)
    second = tl.where(is_rotated, (x2 * cos + x1 * sin).to(first.dtype), second)
    tl.store(first_ptr, first, mask=is_written)
    tl.store(first_ptr + distance, second, mask=is_written)

    if slot >= 0:
        kv_head = tl.where(is_rotated, head - num_heads, head - num_heads - num_kv_heads)
        block, offset = slot // block_size, slot % block_size
        line = (block * num_kv_heads + kv_head) * block_size + offset
        target = line * (2 * half_dim) + first_dim
        if k_scales_ptr is not None:
            largest_here = tl.max(tl.maximum(_magnitude(first), _magnitude(second)), axis=1)[:, None]
            scale = _scale(largest_here, largest)
            tl.store(k_scales_ptr + line, scale, mask=is_rotated & (head >= num_heads))
            tl.store(v_scales_ptr + line, scale, mask=(kv_head < num_kv_heads) & (head >= num_heads + num_kv_heads))
            stored_first = _rounded(first, scale, largest, k_cache_ptr.dtype.element_ty)
            stored_second = _rounded(second, scale, largest, k_cache_ptr.dtype.element_ty)
        else:
            stored_first, stored_second = first, second
        tl.store(k_cache_ptr + target, stored_first, mask=is_key)
        tl.store(k_cache_ptr + target + distance, stored_second, mask=is_key)
        tl.store(v_cache_ptr + target, stored_first, mask=is_value)
        tl.store(v_cache_ptr + target + distance, stored_second, mask=is_value)


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
        scale = _scale(largest_here, largest)
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


@triton.jit
def _widen_blocks_kernel(
    values_ptr,
    scales_ptr,
    block_ids_ptr,
    out_ptr,
    num_vectors,  # of a block
    head_dim: tl.constexpr,
    VECTORS: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # head_dim, padded
):
    place = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids_ptr + place).to(tl.int64)
    vector = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    dim = tl.arange(0, HEAD_DIM)
    offsets = vector[:, None] * head_dim + dim[None, :]
    mask = (vector < num_vectors)[:, None] & (dim < head_dim)[None, :]
    values = tl.load(values_ptr + block * num_vectors * head_dim + offsets, mask=mask, other=0.0).to(tl.float32)
    scales = tl.load(scales_ptr + block * num_vectors + vector, mask=vector < num_vectors, other=0.0)
    wide = (values * scales[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place * num_vectors * head_dim + offsets, wide, mask=mask)


def _heads_of(qkv, cache):
    """Return the heads of all tokens (of their first partial sums), the number of partial sums, and their stride."""
    is_split = qkv.dim() == 3
    first = qkv[0] if is_split else qkv
    assert first.stride(1) == 1, f"the rows of qkv must be contiguous, strides {qkv.stride()}"
    _check_cache(cache)
    heads = first.unflatten(1, (-1, cache.k.shape[3]))
    return (heads, len(qkv), qkv.stride(0)) if is_split else (heads, 1, 0)


def _check_cache(cache):
    assert cache.k.is_contiguous(), "the keys of the cache must be contiguous"
    assert cache.v.is_contiguous(), "the values of the cache must be contiguous"


def norm_rope_store(qkv, norm_weights, eps, positions, cos_sin_cache, cache, slot_mapping, interleaved=False):
    _, num_kv_heads, block_size, head_dim = cache.k.shape
    heads, num_splits, split_stride = _heads_of(qkv, cache)
    num_tokens, num_all_heads, _ = heads.shape
    num_heads = num_all_heads - 2 * num_kv_heads
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q_weight, k_weight = norm_weights or (None, None)
    if num_tokens == 0:
        return q, k, v
    padded_half_dim = next_power_of_2(head_dim // 2)
    heads_per_program = max(1, TILE // padded_half_dim)
    num_groups = ceil_div(num_all_heads, heads_per_program)
    _norm_rope_store_kernel[(num_tokens * num_groups,)](
        qkv,
        q_weight,
        k_weight,
        positions,
        cos_sin_cache,
        cache.k,
        cache.v,
        cache.k_scales,
        cache.v_scales,
        slot_mapping,
        split_stride,
        heads.stride(0),
        eps,
        num_splits=num_splits,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        half_dim=head_dim // 2,
        rotary_half=cos_sin_cache.shape[1] // 2,
        num_groups=num_groups,
        HEADS=heads_per_program,
        HALF_DIM=padded_half_dim,
        largest=LARGEST.get(cache.k.dtype),
        INTERLEAVED=interleaved,
        num_warps=NUM_WARPS,
        **overlap_options(qkv.device),
    )
    return q, k, v


def store_keys_values(k, v, cache, slot_mapping):
    _, num_kv_heads, block_size, head_dim = cache.k.shape
    assert k.stride(2) == v.stride(2) == 1, f"heads must be contiguous, strides {k.stride()} and {v.stride()}"
    _check_cache(cache)
    if not len(k):
        return
    padded_dim = next_power_of_2(head_dim)
    heads_per_program = min(next_power_of_2(num_kv_heads), max(1, STORED_TILE // padded_dim))
    _store_kernel[(len(k), ceil_div(num_kv_heads, heads_per_program))](
        k,
        v,
        cache.k,
        cache.v,
        cache.k_scales,
        cache.v_scales,
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
        largest=LARGEST.get(cache.k.dtype),
        num_warps=NUM_WARPS,
    )


def widen_blocks(values, scales, block_ids, out):
    head_dim, num_vectors = values.shape[3], scales[0].numel()
    padded = next_power_of_2(head_dim)
    vectors = WIDENED_TILE // padded
    assert out.dtype in (torch.bfloat16, torch.float16), f"blocks are widened to 16 bits, not to {out.dtype}"
    _widen_blocks_kernel[(len(block_ids), triton.cdiv(num_vectors, vectors))](
        values, scales, block_ids, out, num_vectors, head_dim=head_dim, VECTORS=vectors, HEAD_DIM=padded
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _qkv_norm_rope_store_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,  # None, like the caches, where there are queries alone
    positions_ptr,
    cos_sin_ptr,  # (max_positions, 2 * half_dim) float32: cosines, then sines
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,  # None, like v_scales_ptr, unless the cache is in 8 bits
    v_scales_ptr,
    v_ptr,  # where values go that are keys in qkv, (num_tokens, num_kv_heads, 2 * half_dim); None: back to qkv
    slot_mapping_ptr,
    split_stride,
    token_stride,
    eps,
    num_tokens,
    num_splits: tl.constexpr,  # of split-K: partial sums of qkv to add up, in the place of the first
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    half_dim: tl.constexpr,
    HALF_DIM: tl.constexpr,  # half_dim, rounded up to a power of two
    largest: tl.constexpr,  # the largest value of a format of 8 bits
    TOKENS: tl.constexpr,  # of a program
    OVERLAP: tl.constexpr,
):
    """Normalise a head of some tokens; rotate it unless it is a value; store it unless it is a query."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    is_token = token < num_tokens
    head = tl.program_id(1)  # queries, then keys, then values
    dim = tl.arange(0, HALF_DIM)[None, :]
    is_dim = dim < half_dim
    mask = is_token & is_dim
    wait_for_inputs(OVERLAP)
    first_ptr = qkv_ptr + token * token_stride + head * (2 * half_dim) + dim
    x1 = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(first_ptr + half_dim, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, num_splits):
        x1 += tl.load(first_ptr + split * split_stride, mask=mask, other=0.0).to(tl.float32)
        x2 += tl.load(first_ptr + split * split_stride + half_dim, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    x1, x2 = x1.to(dtype).to(tl.float32), x2.to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * half_dim) + eps)[:, None]
    x1, x2 = x1 * scale, x2 * scale
    is_value = head >= num_heads + num_kv_heads
    if k_weight_ptr is not None:
        slot = tl.load(slot_mapping_ptr + token, mask=is_token, other=-1)  # int64: a cache may be that large
        block, offset = slot // block_size, slot % block_size
        if v_ptr is not None and head >= num_heads:
            line = (block * num_kv_heads + head - num_heads) * block_size + offset
            values_ptr = v_ptr + (token * num_kv_heads + head - num_heads) * (2 * half_dim) + dim
            tl.store(values_ptr, x1.to(dtype), mask=mask)
            tl.store(values_ptr + half_dim, x2.to(dtype), mask=mask)
            _store_head(v_cache_ptr, v_scales_ptr, line, x1, x2, slot, dim, mask, half_dim, largest, dtype)
    if not is_value:
        weight_ptr = q_weight_ptr
        if k_weight_ptr is not None:
            weight_ptr = k_weight_ptr if head >= num_heads else q_weight_ptr
        weight1 = tl.load(weight_ptr + dim, mask=is_dim, other=0.0).to(tl.float32)
        weight2 = tl.load(weight_ptr + half_dim + dim, mask=is_dim, other=0.0).to(tl.float32)
        position = tl.load(positions_ptr + token, mask=is_token, other=0).to(tl.int64)
        cos_ptr = cos_sin_ptr + position * (2 * half_dim) + dim
        cos = tl.load(cos_ptr, mask=mask, other=1.0)
        sin = tl.load(cos_ptr + half_dim, mask=mask, other=0.0)
        x1, x2 = (x1 * weight1).to(dtype).to(tl.float32), (x2 * weight2).to(dtype).to(tl.float32)
        x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    tl.store(first_ptr, x1.to(dtype), mask=mask)
    tl.store(first_ptr + half_dim, x2.to(dtype), mask=mask)
    if k_weight_ptr is not None:
        if is_value:
            line = (block * num_kv_heads + head - num_heads - num_kv_heads) * block_size + offset
            _store_head(v_cache_ptr, v_scales_ptr, line, x1, x2, slot, dim, mask, half_dim, largest, dtype)
        elif head >= num_heads:
            line = (block * num_kv_heads + head - num_heads) * block_size + offset
            _store_head(k_cache_ptr, k_scales_ptr, line, x1, x2, slot, dim, mask, half_dim, largest, dtype)


@triton.jit
def _store_head(
    cache_ptr,
    scales_ptr,
    line,
    x1,
    x2,
    slot,
    dim,
    mask,
    half_dim: tl.constexpr,
    largest: tl.constexpr,
    dtype: tl.constexpr,
):
    """Write the two halves of vectors to their lines of the cache, unless a token has no slot."""
    x1, x2 = x1.to(dtype), x2.to(dtype)
    has_slot = slot >= 0
    target = cache_ptr + line * (2 * half_dim) + dim
    if scales_ptr is not None:
        largest_here = tl.max(tl.maximum(_magnitude(x1), _magnitude(x2)), axis=1)[:, None]
        scale = _scale(largest_here, largest)
        tl.store(scales_ptr + line, scale, mask=has_slot)
        x1 = _rounded(x1, scale, largest, cache_ptr.dtype.element_ty)
        x2 = _rounded(x2, scale, largest, cache_ptr.dtype.element_ty)
    tl.store(target, x1, mask=mask & has_slot)
    tl.store(target + half_dim, x2, mask=mask & has_slot)


def qkv_norm_rope_store(qkv, num_heads, q_weight, k_weight, eps, positions, cos_sin_cache, cache, slot_mapping):
    _, num_kv_heads, block_size, head_dim = cache.k.shape
    heads, num_splits, split_stride = _heads_of(qkv, cache)
    num_tokens, num_all_heads, _ = heads.shape
    assert cos_sin_cache.shape[1] == head_dim, f"whole heads are rotated, not {cos_sin_cache.shape[1]} dimensions"
    q, k, v = heads[:, :num_heads], None, None
    values = None  # of their own, where the keys are values too
    if k_weight is not None:
        k, v = heads[:, num_heads : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if num_all_heads == num_heads + num_kv_heads:
            v = values = torch.empty_like(k, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return q, k, v
    stored = (None,) * 4 if k_weight is None else (cache.k, cache.v, cache.k_scales, cache.v_scales)
    padded_half_dim = next_power_of_2(head_dim // 2)
    tokens_at_once = TOKENS_AT_ONCE if num_tokens >= MANY_TOKENS else 1
    _qkv_norm_rope_store_kernel[(ceil_div(num_tokens, tokens_at_once), num_all_heads)](
        qkv,
        q_weight,
        k_weight,
        positions,
        cos_sin_cache,
        *stored,
        values,
        slot_mapping,
        split_stride,
        heads.stride(0),
        eps,
        num_tokens,
        num_splits=num_splits,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        half_dim=head_dim // 2,
        HALF_DIM=padded_half_dim,
        largest=LARGEST.get(cache.k.dtype),
        TOKENS=tokens_at_once,
        num_warps=tokens_at_once * (1 if padded_half_dim <= 128 else 2),
        **overlap_options(qkv.device),
    )
    return q, k, v
