"""Latent attention over a paged cache of one vector a token: its write, decode, and prefill.

A tile of vectors is read once: all its numbers are keys, and its latents are values, too.

- Decode is that of `ops/decode_attention` with one KV head for all query heads: its list of tiles, its equal shares of
  them, and its second kernel, which combines what several programs have of a row. Where the query heads and tokens of a
  row are more than a tile of queries holds, the heads are split into parts, and each part reads all vectors. Products
  have vectors first and queries second: Hopper's tensor cores take 64 lines of the first operand at a time, of which
  queries would leave most empty. A program takes the rows of its share one by one, and reads the queries of each once.
  Hopper GPUs have a kernel of their own in `hopper.py`.
- Prefill is that of `ops/prefill_attention`. Queries attend to expanded keys and values, which lie as a product left
  them, and to a rotated part that all heads share. Or, absorbed, they attend to cached vectors, and several heads of a
  token share a tile. One kernel computes both.
- The write has a program for the vector of each token, and others for the queries, which are rotated in their place.
- Of few tokens, the write absorbs the queries too, and a second kernel makes values of the sums. These are products of
  one row by a weight for each head, so their weights are on their way before the kernel before them is done.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import (
    has_hopper_kernels,
    has_large_shared_memory,
    next_power_of_2,
    num_multiprocessors,
)
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import wait_for_inputs
from nanoinfer.ops.decode_attention.triton import (
    BEGINS_LATER,
    MASKED,
    MAX_QUERIES,
    MIN_QUERIES,
    SMALL_TILE,
    PrefixResult,
    add_results,
    combine,
    share_of,
    visible_tokens,
)
from nanoinfer.ops.norms.triton import normalised
from nanoinfer.ops.prefill_attention.triton import plan_query_tiles

MIN_DEPTH = 16  # of tl.dot; smaller rotated parts are filled up
HEADS_OF_WRITE = 8  # queries that a program of the write rotates
# Of few tokens: a program has these parts of a head's weight, 8 to 24 KiB, so that there are one or two of them for
# each multiprocessor of a Hopper GPU.
ABSORBED_DEPTH, ABSORBED_COLUMNS, VALUES_AT_ONCE = 64, 64, 16


@triton.jit
def _norm_rope_store_latents_kernel(
    latents_ptr,
    weight_ptr,
    queries_ptr,
    positions_ptr,
    cos_sin_ptr,  # (max_positions, 2 * rotary_half) float32: cosines, then sines
    cache_ptr,
    slot_mapping_ptr,
    vectors_ptr,
    latents_stride,
    queries_stride,  # of tokens
    eps,
    num_heads: tl.constexpr,
    query_size: tl.constexpr,
    latent_size: tl.constexpr,
    rotary_half: tl.constexpr,
    LATENT: tl.constexpr,  # latent_size, padded
    HALF: tl.constexpr,  # rotary_half, padded
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)  # 0: the vector; then groups of queries
    vector_size: tl.constexpr = latent_size + 2 * rotary_half
    half = tl.arange(0, HALF)
    dim = tl.arange(0, LATENT)
    is_half = half < rotary_half
    # Where the first number of each pair is, and how far the second one lies from it.
    first = 2 * half if INTERLEAVED else half
    distance = 1 if INTERLEAVED else rotary_half
    weight = tl.load(weight_ptr + dim, mask=dim < latent_size, other=0.0)  # before the wait: no kernel writes it
    wait_for_inputs(OVERLAP)
    cos_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * rotary_half) + half
    cos = tl.load(cos_ptr, mask=is_half, other=1.0)
    sin = tl.load(cos_ptr + rotary_half, mask=is_half, other=0.0)
    if group == 0:
        _store_vector(
            latents_ptr + token * latents_stride, weight, cos, sin, vectors_ptr + token * vector_size, cache_ptr,
            tl.load(slot_mapping_ptr + token), eps, latent_size, rotary_half, LATENT, HALF, INTERLEAVED,
        )  # fmt: skip
    else:
        head = (group - 1) * HEADS + tl.arange(0, HEADS)
        mask = (head < num_heads)[:, None] & is_half[None, :]
        first_ptr = queries_ptr + token * queries_stride + query_size - 2 * rotary_half
        _rotate(first_ptr + head[:, None] * query_size + first[None, :], distance, cos[None, :], sin[None, :], mask)


@triton.jit
def _rotate(first_ptrs, distance, cos, sin, mask):
    """Rotate pairs of numbers in their place."""
    x1 = tl.load(first_ptrs, mask=mask, other=0.0)
    x2 = tl.load(first_ptrs + distance, mask=mask, other=0.0)
    wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
    tl.store(first_ptrs, (wide1 * cos - wide2 * sin).to(x1.dtype), mask=mask)
    tl.store(first_ptrs + distance, (wide2 * cos + wide1 * sin).to(x1.dtype), mask=mask)


@triton.jit
def _store_vector(
    latent_ptr,
    weight,
    cos,
    sin,
    vector_ptr,  # None: only the cache gets it
    cache_ptr,
    slot,  # int64: a large cache has more than 2^31 elements
    eps,
    latent_size: tl.constexpr,
    rotary_half: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Normalise a token's latent, rotate what follows it, and write both."""
    dim = tl.arange(0, LATENT)
    is_latent = dim < latent_size
    half = tl.arange(0, HALF)
    is_half = half < rotary_half
    first = latent_size + (2 * half if INTERLEAVED else half)
    distance = 1 if INTERLEAVED else rotary_half
    latent = tl.load(latent_ptr + dim, mask=is_latent, other=0.0)
    normed = normalised(latent.to(tl.float32), weight, latent_size, eps).to(latent.dtype)
    x1 = tl.load(latent_ptr + first, mask=is_half, other=0.0).to(tl.float32)
    x2 = tl.load(latent_ptr + first + distance, mask=is_half, other=0.0).to(tl.float32)
    y1, y2 = (x1 * cos - x2 * sin).to(latent.dtype), (x2 * cos + x1 * sin).to(latent.dtype)
    if vector_ptr is not None:
        tl.store(vector_ptr + dim, normed, mask=is_latent)
        tl.store(vector_ptr + first, y1, mask=is_half)
        tl.store(vector_ptr + first + distance, y2, mask=is_half)
    if slot >= 0:
        cached_ptr = cache_ptr + slot * (latent_size + 2 * rotary_half)
        tl.store(cached_ptr + dim, normed, mask=is_latent)
        tl.store(cached_ptr + first, y1, mask=is_half)
        tl.store(cached_ptr + first + distance, y2, mask=is_half)


def norm_rope_store_latents(
    latents, norm_weight, eps, queries, positions, cos_sin_cache, cache, slot_mapping, interleaved=False
):
    num_tokens, num_heads, query_size = queries.shape
    assert cache.k.is_contiguous(), "the vectors of the cache must be contiguous"
    assert latents.stride(1) == 1, f"the rows of latents must be contiguous, strides {latents.stride()}"
    assert queries.stride()[1:] == (query_size, 1), f"the heads of a token must be contiguous, {queries.stride()}"
    vectors = latents.new_empty(latents.shape)
    if num_tokens == 0:
        return vectors
    _norm_rope_store_latents_kernel[(num_tokens, 1 + ceil_div(num_heads, HEADS_OF_WRITE))](
        latents,
        norm_weight,
        queries,
        positions,
        cos_sin_cache,
        cache.k,
        slot_mapping,
        vectors,
        latents.stride(0),
        queries.stride(0),
        eps,
        num_heads=num_heads,
        query_size=query_size,
        latent_size=len(norm_weight),
        rotary_half=cos_sin_cache.shape[1] // 2,
        LATENT=next_power_of_2(len(norm_weight)),
        HALF=next_power_of_2(cos_sin_cache.shape[1] // 2),
        HEADS=HEADS_OF_WRITE,
        INTERLEAVED=interleaved,
        num_warps=2,
        **overlap_options(latents.device),
    )
    return vectors


@triton.jit(do_not_specialize=["num_tokens"])
def _store_and_absorb_kernel(
    latents_ptr,
    weight_ptr,
    queries_ptr,
    positions_ptr,
    cos_sin_ptr,
    cache_ptr,
    slot_mapping_ptr,
    of_keys_ptr,
    out_ptr,
    latents_stride,
    queries_stride,
    of_keys_stride,  # of heads
    eps,
    num_tokens,
    num_heads: tl.constexpr,
    query_size: tl.constexpr,
    plain_size: tl.constexpr,
    latent_size: tl.constexpr,
    rotary_half: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    DEPTH: tl.constexpr,  # plain numbers of a query that are multiplied at a time
    COLUMNS: tl.constexpr,  # latents that a program computes of a head
    INTERLEAVED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Absorb the queries of all tokens, a few columns of a head in each program; one program a token stores its vector.

    The weights are on their way before the queries are there.
    """
    half = tl.arange(0, HALF)
    is_half = half < rotary_half
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(0) < num_tokens:
        line = tl.program_id(0).to(tl.int64)
        dim = tl.arange(0, LATENT)
        weight = tl.load(weight_ptr + dim, mask=dim < latent_size, other=0.0)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        vector_cos_ptr = cos_sin_ptr + tl.load(positions_ptr + line).to(tl.int64) * (2 * rotary_half) + half
        vector_cos = tl.load(vector_cos_ptr, mask=is_half, other=1.0)
        vector_sin = tl.load(vector_cos_ptr + rotary_half, mask=is_half, other=0.0)
        _store_vector(
            latents_ptr + line * latents_stride, weight, vector_cos, vector_sin, None, cache_ptr,
            tl.load(slot_mapping_ptr + line), eps, latent_size, rotary_half, LATENT, HALF, INTERLEAVED,
        )  # fmt: skip
    else:
        num_slices: tl.constexpr = (latent_size + COLUMNS - 1) // COLUMNS
        num_chunks: tl.constexpr = (plain_size + DEPTH - 1) // DEPTH
        program = tl.program_id(0) - num_tokens
        head = program // num_slices
        column = program % num_slices * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < latent_size
        depth = tl.arange(0, DEPTH)
        weights = ()
        for chunk in tl.static_range(num_chunks):
            k = chunk * DEPTH + depth
            ptrs = of_keys_ptr + head * of_keys_stride + k[:, None] * latent_size + column[None, :]
            weights += (tl.load(ptrs, mask=(k < plain_size)[:, None] & is_column[None, :], other=0.0),)  # type: ignore[assignment]
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        for token in range(num_tokens):
            query_ptr = queries_ptr + token * queries_stride + head * query_size
            sums = tl.zeros((DEPTH, COLUMNS), tl.float32)
            for chunk in tl.static_range(num_chunks):
                k = chunk * DEPTH + depth
                q = tl.load(query_ptr + k, mask=k < plain_size, other=0.0).to(tl.float32)
                sums += weights[chunk].to(tl.float32) * q[:, None]
            absorbed = tl.sum(sums, axis=0).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (token * num_heads + head) * latent_size + column, absorbed, mask=is_column)
            if program % num_slices == 0:
                cos_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * rotary_half) + half
                cos = tl.load(cos_ptr, mask=is_half, other=1.0)
                sin = tl.load(cos_ptr + rotary_half, mask=is_half, other=0.0)
                first_ptrs = query_ptr + query_size - 2 * rotary_half + (2 * half if INTERLEAVED else half)
                _rotate(first_ptrs, 1 if INTERLEAVED else rotary_half, cos, sin, is_half)


def store_and_absorb(
    latents, norm_weight, eps, queries, positions, cos_sin_cache, cache, slot_mapping, interleaved, of_keys
):
    num_tokens, num_heads, query_size = queries.shape
    _, plain_size, latent_size = of_keys.shape
    assert cache.k.is_contiguous(), "the vectors of the cache must be contiguous"
    assert latents.stride(1) == 1, f"the rows of latents must be contiguous, strides {latents.stride()}"
    assert queries.stride()[1:] == (query_size, 1), f"the heads of a token must be contiguous, {queries.stride()}"
    assert of_keys.stride()[1:] == (latent_size, 1), f"a head's weights must be contiguous, {of_keys.stride()}"
    absorbed = queries.new_empty(num_tokens, num_heads, latent_size)
    if num_tokens == 0:
        return absorbed
    _store_and_absorb_kernel[(num_tokens + num_heads * ceil_div(latent_size, ABSORBED_COLUMNS),)](
        latents,
        norm_weight,
        queries,
        positions,
        cos_sin_cache,
        cache.k,
        slot_mapping,
        of_keys,
        absorbed,
        latents.stride(0),
        queries.stride(0),
        of_keys.stride(0),
        eps,
        num_tokens,
        num_heads=num_heads,
        query_size=query_size,
        plain_size=plain_size,
        latent_size=latent_size,
        rotary_half=cos_sin_cache.shape[1] // 2,
        LATENT=next_power_of_2(latent_size),
        HALF=next_power_of_2(cos_sin_cache.shape[1] // 2),
        DEPTH=ABSORBED_DEPTH,
        COLUMNS=ABSORBED_COLUMNS,
        INTERLEAVED=interleaved,
        num_warps=4,
        **overlap_options(latents.device),
    )
    return absorbed


@triton.jit
def _values_of_sums_kernel(
    sums_ptr,
    of_values_ptr,
    out_ptr,
    of_values_stride,  # of heads
    num_heads: tl.constexpr,
    latent_size: tl.constexpr,
    value_size: tl.constexpr,
    LATENT: tl.constexpr,
    VALUES: tl.constexpr,  # of a head that a program computes
    OVERLAP: tl.constexpr,
):
    """Multiply a head's sum of latents by a few lines of its weight, which are on their way before the sum is there."""
    num_slices: tl.constexpr = (value_size + VALUES - 1) // VALUES
    head = tl.program_id(0) // num_slices
    value = tl.program_id(0) % num_slices * VALUES + tl.arange(0, VALUES)
    dim = tl.arange(0, LATENT)
    is_value, is_dim = value < value_size, dim < latent_size
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    ptrs = of_values_ptr + head * of_values_stride + value[:, None] * latent_size + dim[None, :]
    weights = tl.load(ptrs, mask=is_value[:, None] & is_dim[None, :], other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    line = tl.program_id(1) * num_heads + head
    sums = tl.load(sums_ptr + line * latent_size + dim, mask=is_dim, other=0.0).to(tl.float32)
    values = tl.sum(weights.to(tl.float32) * sums[None, :], axis=1)
    tl.store(out_ptr + line * value_size + value, values.to(out_ptr.dtype.element_ty), mask=is_value)


def values_of_sums(sums, of_values):
    (num_tokens, num_heads, latent_size), value_size = sums.shape, of_values.shape[1]
    assert sums.is_contiguous(), f"sums of latents must be contiguous, strides {sums.stride()}"
    assert of_values.stride()[1:] == (latent_size, 1), f"a head's weights must be contiguous, {of_values.stride()}"
    out = sums.new_empty(num_tokens, num_heads, value_size)
    if num_tokens:
        _values_of_sums_kernel[(num_heads * ceil_div(value_size, VALUES_AT_ONCE), num_tokens)](
            sums,
            of_values,
            out,
            of_values.stride(0),
            num_heads=num_heads,
            latent_size=latent_size,
            value_size=value_size,
            LATENT=next_power_of_2(latent_size),
            VALUES=VALUES_AT_ONCE,
            num_warps=4,
            **overlap_options(sums.device),
        )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_shares"])
def _latent_decode_kernel(
    absorbed_ptr,
    rotated_ptr,
    vectors_ptr,  # the cache
    tiles_ptr,
    row_starts_ptr,
    num_sharers_ptr,  # for this and the next ones, see `_paged_decode_kernel` of ops/decode_attention
    prefix_out_ptr,
    prefix_lse_ptr,
    out_ptr,
    out_lse_ptr,
    partials_ptr,  # (num_parts, num_shares, 2, num_queries, latent_size) float32
    lse_ptr,
    scale_log2,  # scale * log2(e): the softmax is computed in powers of two
    rotated_token_stride,
    rotated_head_stride,
    num_rows,
    num_shares,
    num_parts: tl.constexpr,  # of the heads
    group_size: tl.constexpr,  # heads of a part
    num_tokens: tl.constexpr,  # query tokens of a row
    num_queries: tl.constexpr,  # of a row and a part of its heads; in the pass over prefixes, of all sharers
    latent_size: tl.constexpr,
    rotary_size: tl.constexpr,
    WIDTH: tl.constexpr,  # latents of a slice
    SLICES: tl.constexpr,  # that latents are cut into, so that less is converted at a time to be stored
    ROTARY: tl.constexpr,
    QUERIES: tl.constexpr,  # num_queries, padded
    TILE: tl.constexpr,  # divides block_size, so a tile lies within one block
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    part = tl.program_id(0)
    share = tl.program_id(1)
    # The plan was made before the first layer, so it is there before the previous kernel is done.
    num_tiles = tl.load(row_starts_ptr + num_rows)
    wait_for_inputs(OVERLAP)
    first, last = share_of(num_tiles, share, num_shares)

    num_heads: tl.constexpr = num_parts * group_size
    vector_size: tl.constexpr = latent_size + rotary_size
    query = tl.arange(0, QUERIES)
    column = tl.arange(0, WIDTH)
    rotary_dim = tl.arange(0, ROTARY)
    token = tl.arange(0, TILE)
    is_rotary = (rotary_dim < rotary_size)[None, :]
    is_query = query < num_queries
    # Where a query's head is in the result, after the first head of the row.
    head = part * group_size + query % group_size
    line = query // group_size * num_heads + head
    rotated_offsets = (query // group_size)[:, None] * rotated_token_stride + head[:, None] * rotated_head_stride
    rotated_offsets += rotary_dim[None, :]

    dtype: tl.constexpr = absorbed_ptr.dtype.element_ty
    tile = first
    while tile < last:  # a row, or what the share has of it
        row = tl.load(tiles_ptr + tile * 4 + 2)
        row_start = tl.load(row_starts_ptr + row)
        row_end = tl.load(row_starts_ptr + row + 1)
        end = tl.minimum(row_end, last)
        if num_sharers_ptr is not None:  # it is enough that the rows exist: those after the sharers are not stored
            is_query = query < (num_rows - row) * (num_tokens * group_size)
        first_token = row.to(tl.int64) * num_tokens
        rotated_ptrs = rotated_ptr + first_token * rotated_token_stride + rotated_offsets
        rotated = tl.trans(tl.load(rotated_ptrs, mask=is_query[:, None] & is_rotary, other=0.0))
        absorbed, sums = (), ()
        for index in tl.static_range(SLICES):
            dim = index * WIDTH + column
            ptrs = absorbed_ptr + (first_token * num_heads + line[:, None]) * latent_size + dim[None, :]
            mask = is_query[:, None] & (dim < latent_size)[None, :]
            absorbed += (tl.trans(tl.load(ptrs, mask=mask, other=0.0)),)  # type: ignore[assignment]
            sums += (tl.zeros((WIDTH, QUERIES), tl.float32),)  # type: ignore[assignment]
        maximum = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        for place in tl.range(tile, end, num_stages=STAGES):
            slot = tl.load(tiles_ptr + place * 4).to(tl.int64)
            num_visible = tl.load(tiles_ptr + place * 4 + 1)
            flags = tl.load(tiles_ptr + place * 4 + 3)
            if num_sharers_ptr is None:
                is_read, visible = visible_tokens(token, query // group_size, num_visible, flags, num_tokens, False)
            else:  # shared blocks are full
                is_read = tl.full((TILE,), True, tl.int1)
                visible = is_read[None, :]
            # What lies past the context may be NaN, and 0 x NaN is NaN.
            vector_ptrs = vectors_ptr + slot * vector_size + token[:, None] * vector_size
            keys_ptrs = vector_ptrs + latent_size + rotary_dim[None, :]
            keys = tl.load(keys_ptrs, mask=is_read[:, None] & is_rotary, other=0.0)
            scores = tl.dot(keys, rotated, input_precision="ieee")  # (TILE, QUERIES)
            latents = ()
            for number in tl.static_range(SLICES):
                latent = number * WIDTH + column
                is_there = is_read[:, None] & (latent < latent_size)[None, :]
                x = tl.load(vector_ptrs + latent[None, :], mask=is_there, other=0.0)
                latents += (x,)  # type: ignore[assignment]
                scores = tl.dot(latents[number], absorbed[number], scores, input_precision="ieee")
            scores = tl.where(tl.trans(visible), scores * scale_log2, MASKED)
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
            decay = tl.exp2(maximum - new_maximum)
            weights = tl.exp2(scores - new_maximum[None, :])
            total = total * decay + tl.sum(weights, axis=0)
            new_sums = ()
            for number in tl.static_range(SLICES):
                acc = sums[number] * decay[None, :]
                acc = tl.dot(tl.trans(latents[number]), weights.to(dtype), acc, input_precision="ieee")
                new_sums += (acc,)  # type: ignore[assignment]
            sums, maximum = new_sums, new_maximum

        begins_here = row_start >= first
        is_whole = begins_here & (end == row_end)
        own_lse = maximum + tl.log2(total)
        lse = own_lse
        first_line = first_token * num_heads
        if num_sharers_ptr is not None:
            is_query = query < tl.load(num_sharers_ptr + row) * (num_tokens * group_size)
        if prefix_out_ptr is not None:
            row_flags = tl.load(tiles_ptr + tile * 4 + 3)
            has_prefix = query < (row_flags & BEGINS_LATER) // BEGINS_LATER * num_queries
            prefix_lse = tl.load(prefix_lse_ptr + first_line + line, mask=has_prefix, other=float("-inf"))
            prefix_lse = tl.where(begins_here, prefix_lse, float("-inf"))  # it counts once, in the first share
        partial = ((part * num_shares + share) * 2 + begins_here.to(tl.int32)) * num_queries
        for index in tl.static_range(SLICES):
            dim = index * WIDTH + column
            mask = is_query[:, None] & (dim < latent_size)[None, :]
            result = tl.trans(sums[index] / total[None, :])  # (QUERIES, WIDTH)
            line_offsets = (first_line + line[:, None]) * latent_size + dim[None, :]
            if prefix_out_ptr is not None:
                prefix = tl.load(prefix_out_ptr + line_offsets, mask=mask & has_prefix[:, None], other=0.0)
                result, lse = add_results(result, own_lse, prefix, prefix_lse)
            if is_whole:
                tl.store(out_ptr + line_offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
            else:
                partial_offsets = (partial + query[:, None]) * latent_size + dim[None, :]
                tl.store(partials_ptr + partial_offsets, result, mask=mask)
        if is_whole:
            if out_lse_ptr is not None:
                tl.store(out_lse_ptr + first_line + line, lse, mask=is_query)
        else:
            tl.store(lse_ptr + partial + query, lse, mask=is_query)
        tile = end


def paged_latent_attention(absorbed, rotated, cache, plan, scale, prefix=None):
    """Compute what `latent_decode_attention` in spec.py does, from a plan in the place of block tables and lengths.

    absorbed: (num_rows * num_tokens, num_heads, latent_size), contiguous, the tokens of a row one after the other.
    rotated: (num_rows * num_tokens, num_heads, rotary_dim). cache: contiguous vectors. plan: from `plan_decode` with
    `tile_tokens`. prefix: from `shared_latent_attention`, where the plan leaves the shared prefixes out. The rest: see
    `paged_decode_attention` of ops/decode_attention.
    """
    out = torch.empty_like(absorbed)
    _launch_decode(absorbed, rotated, cache, plan, scale, out, prefix=prefix)
    return out


def shared_latent_attention(absorbed, rotated, cache, plan, num_sharers, scale):
    """Attend from all rows that share a prefix to its blocks: see `shared_prefix_attention` of ops/decode_attention."""
    out = torch.empty_like(absorbed, dtype=torch.float32)
    lse = out.new_empty(out.shape[:2])
    _launch_decode(absorbed, rotated, cache, plan, scale, out, out_lse=lse, num_sharers=num_sharers)
    return PrefixResult(out, lse)


def heads_of_part(num_heads, num_tokens, cache):
    """Return how many of a row's heads share a tile of queries: a divisor of all.

    Larger tiles leave Triton's kernel no shared memory for a pipeline, so vectors are rather read again, from the L2
    cache.
    """
    most = MAX_QUERIES if _is_for_hopper(num_heads, num_tokens, cache) else SMALL_TILE
    most = max(1, most // num_tokens)
    return next(count for count in range(min(num_heads, most), 0, -1) if num_heads % count == 0)


def _is_for_hopper(num_heads, num_tokens, cache):
    """Return whether the kernel for Hopper GPUs serves, whose queries of a tile lie one after the other."""
    if not has_hopper_kernels(cache.k.device) or (num_tokens > 1 and num_heads * num_tokens > MAX_QUERIES):
        return False
    from nanoinfer.ops.latent_attention import hopper

    return hopper.serves(cache)


def max_latent_sharers(num_heads, num_tokens, device):
    """Return how many rows can read a shared prefix together."""
    return _queries_of_prefix(device) // (num_heads * num_tokens)


def _queries_of_prefix(device):
    """Return how many queries of sharers a tile holds: those that shared memory has room for beside a tile of keys."""
    return MAX_QUERIES if has_large_shared_memory(device) else SMALL_TILE


class DecodeShape(NamedTuple):
    """Says how decode is compiled, for a tile of so many queries."""

    tile: int  # vectors
    num_stages: int
    num_warps: int
    programs: int  # of a multiprocessor
    slices: int = 1  # of the latents


# By queries of a tile, up to so many: where a program may have 200 KiB of shared memory, and where it has less.
DECODE_SHAPES = {32: DecodeShape(64, 3, 4, 1, 4), 64: DecodeShape(32, 3, 8, 1)}
SMALL_DECODE_SHAPES = {32: DecodeShape(16, 3, 4, 1)}


def decode_shape(num_queries, device):
    """Return the shape of tiles of so many queries."""
    shapes = DECODE_SHAPES if has_large_shared_memory(device) else SMALL_DECODE_SHAPES
    return next(shape for most, shape in shapes.items() if num_queries <= most)


def tile_tokens(num_heads, num_tokens, cache, of_prefixes=False):
    """Return how many vectors a tile of decode has, of rows of so many tokens or of shared prefixes."""
    device = cache.k.device
    if _is_for_hopper(num_heads, num_tokens, cache):
        from nanoinfer.ops.latent_attention import hopper

        return hopper.TILE
    num_queries = (
        _queries_of_prefix(device) if of_prefixes else heads_of_part(num_heads, num_tokens, cache) * num_tokens
    )
    return math.gcd(cache.block_size, decode_shape(num_queries, device).tile)


def _launch_decode(absorbed, rotated, cache, plan, scale, out, *, out_lse=None, num_sharers=None, prefix=None):
    """Attend from rows, or from all sharers of a prefix, and combine what several programs have computed of one."""
    _, num_heads, latent_size = absorbed.shape
    tiles, row_starts, tile_size = plan
    num_rows, rotary_size = len(row_starts) - 1, rotated.shape[2]
    num_tokens, device = len(absorbed) // num_rows, absorbed.device
    assert absorbed.is_contiguous(), f"absorbed queries must be contiguous, strides {absorbed.stride()}"
    assert rotated.stride(2) == 1, f"rotated queries must be contiguous, strides {rotated.stride()}"
    assert cache.k.is_contiguous(), "the vectors of the cache must be contiguous"
    assert cache.block_size % tile_size == 0, f"tiles of {tile_size} tokens do not lie in blocks of {cache.block_size}"
    group_size = heads_of_part(num_heads, num_tokens, cache) if num_sharers is None else num_heads
    num_parts = num_heads // group_size
    num_queries = group_size * num_tokens if num_sharers is None else _queries_of_prefix(device)
    shape = decode_shape(num_queries, device)
    num_shares = max(1, num_multiprocessors(device) * shape.programs // num_parts)
    shapes = {"group_size": group_size, "num_tokens": num_tokens, "num_queries": num_queries}
    partials = out.new_empty((num_parts, num_shares, 2, num_queries, latent_size), dtype=torch.float32)
    lse = partials.new_empty(partials.shape[:-1])
    if _is_for_hopper(num_heads, num_tokens, cache):
        from nanoinfer.ops.latent_attention import hopper

        hopper.attend(absorbed, rotated, cache, plan, scale, num_sharers, prefix, out, out_lse, partials, lse, shapes)
    else:
        _latent_decode_kernel[(num_parts, num_shares)](
            absorbed,
            rotated,
            cache.k,
            tiles,
            row_starts,
            num_sharers,
            *(prefix or (None, None)),
            out,
            out_lse,
            partials,
            lse,
            scale * math.log2(math.e),
            rotated.stride(0),
            rotated.stride(1),
            num_rows,
            num_shares,
            **shapes,
            num_parts=num_parts,
            latent_size=latent_size,
            rotary_size=rotary_size,
            WIDTH=max(MIN_DEPTH, next_power_of_2(latent_size) // shape.slices),
            SLICES=shape.slices,
            ROTARY=max(MIN_DEPTH, next_power_of_2(rotary_size)),
            QUERIES=max(MIN_QUERIES, next_power_of_2(num_queries)),
            TILE=tile_size,
            STAGES=shape.num_stages,
            num_warps=shape.num_warps,
            **overlap_options(device),
        )
    of_parts = {**shapes, "num_kv_heads": num_parts, "head_dim": latent_size, "HEAD_DIM": next_power_of_2(latent_size)}
    combine(plan, num_sharers, partials, lse, out, out_lse, of_parts)


@triton.jit
def _attend_to_keys(
    state,
    q,
    q_rotated,
    position,
    first,
    last,
    end,
    keys_ptr,  # the first head's that the tile attends to
    values_ptr,
    rotated_keys_ptr,
    table_ptr,  # None: keys lie one after the other from `first_line` on
    first_line,
    scale_log2,
    key_stride,  # of tokens
    value_stride,
    rotated_key_stride,
    block_size: tl.constexpr,
    plain_size: tl.constexpr,
    rotary_size: tl.constexpr,
    value_size: tl.constexpr,
    PLAIN: tl.constexpr,
    ROTARY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    MASK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Run over the keys [first, last), and mask those that a query does not see if there are any."""
    maximum, total, acc = state
    plain_dim = tl.arange(0, PLAIN)
    rotary_dim = tl.arange(0, ROTARY)
    value_dim = tl.arange(0, VALUE)
    key = tl.arange(0, KEYS)
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        line = first_line + start
        if table_ptr is not None:
            line = tl.load(table_ptr + start // block_size).to(tl.int64) * block_size + start % block_size
        is_key = tl.full((KEYS, 1), True, tl.int1)
        if MASK:  # what lies past the context may be NaN, and 0 x NaN is NaN
            is_key = (key < end - start)[:, None]
        lines = line + key[:, None]
        keys = tl.load(
            keys_ptr + lines * key_stride + plain_dim[None, :],
            mask=is_key & (plain_dim < plain_size)[None, :],
            other=0.0,
        )
        rotated = tl.load(
            rotated_keys_ptr + lines * rotated_key_stride + rotary_dim[None, :],
            mask=is_key & (rotary_dim < rotary_size)[None, :],
            other=0.0,
        )
        if table_ptr is not None:
            values = keys
        else:
            values = tl.load(
                values_ptr + lines * value_stride + value_dim[None, :],
                mask=is_key & (value_dim < value_size)[None, :],
                other=0.0,
            )
        scores = tl.dot(q_rotated, tl.trans(rotated), input_precision="ieee")
        scores = tl.dot(q, tl.trans(keys), scores, input_precision="ieee") * scale_log2
        if MASK:
            scores = tl.where((start + key)[None, :] <= position[:, None], scores, MASKED)
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        decay = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(q.dtype), values, acc * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    return maximum, total, acc


@triton.jit(do_not_specialize=["num_heads", "block_table_stride"])
def _latent_prefill_kernel(
    q_ptr,
    q_rotated_ptr,
    keys_ptr,
    values_ptr,
    rotated_keys_ptr,
    tiles_ptr,
    block_tables_ptr,  # None: keys are expanded, those of all contexts, one after the other; else cached vectors
    cu_context_lens_ptr,  # None, like block_tables_ptr, where the other is there: where contexts begin
    out_ptr,
    scale_log2,  # scale * log2(e): the softmax is computed in powers of two
    q_token_stride,
    q_head_stride,
    q_rotated_token_stride,
    q_rotated_head_stride,
    key_stride,
    value_stride,
    rotated_key_stride,
    kv_head_stride,  # of keys and of values
    block_table_stride,
    num_heads,
    group_size: tl.constexpr,  # heads of a tile of queries
    block_size: tl.constexpr,
    plain_size: tl.constexpr,
    rotary_size: tl.constexpr,
    value_size: tl.constexpr,
    PLAIN: tl.constexpr,
    ROTARY: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,  # divides block_size, so a tile of keys lies within one block
    STAGES: tl.constexpr,
):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    first_token = tl.load(tiles_ptr + tile * 4).to(tl.int64)
    num_tokens = tl.load(tiles_ptr + tile * 4 + 1)
    first_position = tl.load(tiles_ptr + tile * 4 + 2)
    chunk = tl.load(tiles_ptr + tile * 4 + 3).to(tl.int64)
    table_ptr = None
    if block_tables_ptr is not None:
        table_ptr = block_tables_ptr + chunk * block_table_stride
        first_line = chunk * 0
    else:
        first_line = tl.load(cu_context_lens_ptr + chunk).to(tl.int64)

    row = tl.arange(0, ROWS)
    plain_dim = tl.arange(0, PLAIN)
    rotary_dim = tl.arange(0, ROTARY)
    value_dim = tl.arange(0, VALUE)
    token = row // group_size
    head = part * group_size + row % group_size
    is_query = (token < num_tokens)[:, None]
    q_offsets = (first_token + token)[:, None] * q_token_stride + head[:, None] * q_head_stride + plain_dim[None, :]
    q = tl.load(q_ptr + q_offsets, mask=is_query & (plain_dim < plain_size)[None, :], other=0.0)
    q_offsets = (first_token + token)[:, None] * q_rotated_token_stride + head[:, None] * q_rotated_head_stride
    q_rotated_ptrs = q_rotated_ptr + q_offsets + rotary_dim[None, :]
    q_rotated = tl.load(q_rotated_ptrs, mask=is_query & (rotary_dim < rotary_size)[None, :], other=0.0)
    position = first_position + tl.minimum(token, num_tokens - 1)

    end = first_position + num_tokens  # behind the last query
    last_full = (first_position + 1) // KEYS * KEYS  # up to here, all queries see all keys
    keys_ptr += part * kv_head_stride
    values_ptr += part * kv_head_stride
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    state = maximum, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, VALUE), tl.float32)
    state = _attend_to_keys(
        state, q, q_rotated, position, 0, last_full, end,
        keys_ptr, values_ptr, rotated_keys_ptr, table_ptr, first_line, scale_log2,
        key_stride, value_stride, rotated_key_stride, block_size, plain_size, rotary_size, value_size,
        PLAIN, ROTARY, VALUE, KEYS, False, STAGES,
    )  # fmt: skip
    state = _attend_to_keys(
        state, q, q_rotated, position, last_full, end, end,
        keys_ptr, values_ptr, rotated_keys_ptr, table_ptr, first_line, scale_log2,
        key_stride, value_stride, rotated_key_stride, block_size, plain_size, rotary_size, value_size,
        PLAIN, ROTARY, VALUE, KEYS, True, 1,
    )  # fmt: skip
    _, total, acc = state
    out_offsets = ((first_token + token)[:, None] * num_heads + head[:, None]) * value_size + value_dim[None, :]
    is_value = is_query & (value_dim < value_size)[None, :]
    tl.store(out_ptr + out_offsets, (acc * (1 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=is_value)


class Shape(NamedTuple):
    """Says how prefill is compiled: queries and keys of a tile, pipeline stages."""

    rows: int
    keys: int
    num_stages: int


# Of absorbed queries, whose sums of 512 latents take most registers, and of expanded keys and values; where a program
# may have 200 KiB of shared memory, and where it has less.
ABSORBED, EXPANDED = Shape(64, 32, 2), Shape(128, 64, 2)
SMALL_ABSORBED, SMALL_EXPANDED = Shape(32, 16, 2), Shape(64, 16, 2)


def _shape(device, is_absorbed):
    if has_large_shared_memory(device):
        return ABSORBED if is_absorbed else EXPANDED
    return SMALL_ABSORBED if is_absorbed else SMALL_EXPANDED


def plan_expanded_prefill(query_lens, context_lens, device):
    """List the tiles of queries for `expanded_prefill_attention`: see `plan_query_tiles`."""
    return plan_query_tiles(query_lens, context_lens, _shape(device, is_absorbed=False).rows, device)


def plan_absorbed_prefill(query_lens, context_lens, num_heads, device):
    """List the tiles of queries of so many heads for `absorbed_prefill_attention`: see `plan_query_tiles`."""
    rows = _shape(device, is_absorbed=True).rows
    return plan_query_tiles(query_lens, context_lens, rows // _heads_of_tile(num_heads), device)


def _heads_of_tile(num_heads):
    """Return how many heads of a token share a tile of absorbed queries in prefill: as many for most numbers of heads.

    So steps whose heads are computed in parts of several sizes run one kernel, which is compiled once.
    """
    return math.gcd(num_heads, 4)


def expanded_prefill_attention(q, expanded, rotated_keys, tiles, cu_context_lens, plain_size, scale):
    """Attend from all tokens of a step's chunks to expanded keys and values: (num_tokens, num_heads, value_size).

    For each chunk it computes `causal_attention` of ops/prefill_attention.

    q: (num_tokens, num_heads, plain_size + rotary_size). expanded: (num_context_tokens, num_heads, plain_size +
    value_size), contiguous: keys without their rotated part, then values, of all contexts, one after the other.
    rotated_keys: (num_context_tokens, rotary_size), of all heads. tiles: from `plan_expanded_prefill`.
    cu_context_lens: (num_chunks + 1,) int32, where contexts begin and end.
    """
    keys, values = expanded.split([plain_size, expanded.shape[2] - plain_size], dim=2)
    q, rotated = q.split([plain_size, q.shape[2] - plain_size], dim=2)
    return _launch_prefill(q, rotated, keys, values, rotated_keys, tiles, scale, cu_context_lens=cu_context_lens)


def absorbed_prefill_attention(absorbed, rotated, cache, tiles, block_tables, scale):
    """Attend from all tokens of a step's chunks to the vectors of their contexts; return sums of latents.

    For each chunk it computes `causal_attention` of ops/prefill_attention, with vectors as keys and latents as values.

    absorbed: (num_tokens, num_heads, latent_size), like the result. rotated: (num_tokens, num_heads, rotary_size).
    cache: contiguous vectors. tiles: from `plan_absorbed_prefill` for as many heads. block_tables: (num_chunks,
    max_blocks) int32.
    """
    vectors = cache.k.view(-1, 1, cache.k.shape[3])  # by slot
    latents, rotated_keys = vectors.split([absorbed.shape[2], rotated.shape[2]], dim=2)
    return _launch_prefill(
        absorbed, rotated, latents, latents, rotated_keys[:, 0], tiles, scale, block_tables, cache.block_size
    )


def _launch_prefill(
    q, rotated, keys, values, rotated_keys, tiles, scale, block_tables=None, block_size=None, cu_context_lens=None
):
    """Launch prefill. Last dimensions are contiguous; keys and values have one head, or as many as queries."""
    _, num_heads, plain_size = q.shape
    value_size, rotary_size = values.shape[2], rotated.shape[2]
    is_absorbed = block_tables is not None
    shape = _shape(q.device, is_absorbed)
    group_size = _heads_of_tile(num_heads) if is_absorbed else 1
    out = q.new_empty(*q.shape[:2], value_size)
    _latent_prefill_kernel[(len(tiles), num_heads // group_size)](
        q,
        rotated,
        keys,
        values,
        rotated_keys,
        tiles,
        block_tables,
        cu_context_lens,
        out,
        scale * math.log2(math.e),
        *q.stride()[:2],
        *rotated.stride()[:2],
        keys.stride(0),
        values.stride(0),
        rotated_keys.stride(0),
        0 if is_absorbed else keys.stride(1),
        block_tables.stride(0) if is_absorbed else 0,
        num_heads=num_heads,
        group_size=group_size,
        block_size=block_size,
        plain_size=plain_size,
        rotary_size=rotary_size,
        value_size=value_size,
        PLAIN=max(MIN_DEPTH, next_power_of_2(plain_size)),
        ROTARY=max(MIN_DEPTH, next_power_of_2(rotary_size)),
        VALUE=max(MIN_DEPTH, next_power_of_2(value_size)),
        ROWS=shape.rows,
        KEYS=math.gcd(block_size, shape.keys) if is_absorbed else shape.keys,
        STAGES=shape.num_stages,
        num_warps=8,
    )
    return out
