"""Paged prefill attention: prompts attend to their contexts in the cache.

Attention is causal, or, for encoders, of whole texts to both sides.

Keys and values are read through block tables, also those of the chunk itself, which are in the cache already. So a
chunk gives the same result whether its prefix was computed in this step, in an earlier one or for another sequence.

- Online softmax (Milakov and Gimelshein 2018; FlashAttention 2, Dao 2023): a program holds a tile of queries and runs
  over its keys, first those that all its queries see, then those along the diagonal, which it masks.
- Grouped-query attention: a tile holds the query heads that share a KV head, for as many tokens as it has room for. So
  keys and values are read once for the group, and little is computed above the diagonal.
- `plan_prefill` lists the tiles once per step, those with the longest contexts first. Programs that run at the same
  time have the same KV head, so their keys and values are found in the L2 cache.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.device import to_device
from nanoinfer.ops.common.device_properties import has_large_shared_memory, next_power_of_2
from nanoinfer.ops.common.triton import soft_capped
from nanoinfer.ops.decode_attention.triton import LIFT, LOG2_E, MASKED, padded_head_dim
from nanoinfer.ops.kv_cache.spec import LayerCache

TILE_ROWS = 128  # queries of a tile: tokens x heads of a group
# The same for heads of more than 256: the sums of more queries would not fit into registers. The second: where a
# program has less shared memory, which holds the queries.
WIDE_TILE_ROWS, SMALL_WIDE_TILE_ROWS = 64, 32


class Shape(NamedTuple):
    """Says how the kernel is compiled for a head size: keys of a tile, pipeline stages, registers of a thread."""

    keys: int
    num_stages: int
    max_registers: int | None  # so few that two programs share a multiprocessor: one multiplies as the other adds up


# By head size, padded: where a program may have 200 KiB of shared memory (measured on an H200), and where it has less.
SHAPES = {64: Shape(128, 3, 128), 128: Shape(64, 3, 128), 256: Shape(64, 2, None), 512: Shape(32, 2, None)}
# For a cache in 8 bits, whose conversion takes registers. Chosen by what compiles without spilling them.
SHAPES_IN_8_BITS = {64: Shape(64, 3, 128), 128: Shape(64, 3, None), 256: Shape(32, 2, None), 512: Shape(32, 2, None)}
SMALL_SHAPES = {64: Shape(128, 3, None), 128: Shape(64, 3, None), 256: Shape(16, 2, None), 512: Shape(16, 2, None)}


@triton.jit
def _load_tile(
    cache_ptr,
    first_line,
    num_visible,
    head_dim: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    MASK: tl.constexpr,
):
    """Load KEYS keys or values (KEYS, HEAD_DIM), which lie one after the other in the cache."""
    key = tl.arange(0, KEYS)
    dim = tl.arange(0, HEAD_DIM)
    pointers = cache_ptr + first_line * head_dim + key[:, None] * head_dim + dim[None, :]
    # What lies past the context may be NaN, and 0 x NaN is NaN.
    if MASK:
        return tl.load(pointers, mask=(key < num_visible)[:, None] & (dim < head_dim)[None, :], other=0.0)
    elif head_dim < HEAD_DIM:
        return tl.load(pointers, mask=(dim < head_dim)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _attend(
    state,
    q,
    position,
    first,
    last,
    end,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,
    kv_head,
    scale_log2,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Run over the keys [first, last), and mask those that a query does not see if there are any."""
    maximum, total, acc = state
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        block = tl.load(table_ptr + start // block_size).to(tl.int64)
        line = (block * num_kv_heads + kv_head) * block_size + start % block_size
        k = _load_tile(k_cache_ptr, line, end - start, head_dim, HEAD_DIM, KEYS, MASK)
        v = _load_tile(v_cache_ptr, line, end - start, head_dim, HEAD_DIM, KEYS, MASK)
        if k_scales_ptr is not None:
            k, v = k.to(q.dtype), v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        key = tl.arange(0, KEYS)
        if k_scales_ptr is not None:
            scores *= tl.load(k_scales_ptr + line + key, mask=key < end - start, other=0.0)[None, :]
        factor = scale_log2
        if SOFT_CAP is not None:
            scores, factor = soft_capped(scores * scale_log2, SOFT_CAP * LOG2_E), 1.0
        if MASK:
            if CAUSAL:
                visible = (start + key)[None, :] <= position[:, None]
            else:
                visible = (start + key)[None, :] < end
                if WINDOW is not None:
                    visible &= (start + key)[None, :] < position[:, None] + WINDOW
            if WINDOW is not None:
                visible &= (start + key)[None, :] > position[:, None] - WINDOW
            # Scaled before it is masked: below, a compiler that fuses product and difference would not round MASKED *
            # scale as new_maximum is rounded, and their difference would not be 0.
            scores = tl.where(visible, scores * factor, MASKED)
            factor = 1.0
        highest = tl.max(scores, axis=1) * factor
        if k_scales_ptr is not None:
            highest -= LIFT
        new_maximum = tl.maximum(maximum, highest)
        decay = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores * factor - new_maximum[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        if v_scales_ptr is not None:
            weights *= tl.load(v_scales_ptr + line + key, mask=key < end - start, other=0.0)[None, :]
        acc = tl.dot(weights.to(q.dtype), v, acc * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    return maximum, total, acc


@triton.jit
def _paged_prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    tiles_ptr,
    block_tables_ptr,
    sinks_ptr,  # None: there are none
    cu_lens_ptr,  # of the chunks; None where attention is causal
    out_ptr,
    scale_log2,  # scale * log2(e): the softmax is computed in powers of two
    q_token_stride,
    block_table_stride,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # head_dim, padded
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,  # divides block_size, so a tile of keys lies within one block
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # of the scores, to base e; None for none
    STAGES: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_token = tl.load(tiles_ptr + tile * 4).to(tl.int64)
    num_tokens = tl.load(tiles_ptr + tile * 4 + 1)
    first_position = tl.load(tiles_ptr + tile * 4 + 2)
    chunk = tl.load(tiles_ptr + tile * 4 + 3).to(tl.int64)
    table_ptr = block_tables_ptr + chunk * block_table_stride

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    token = row // group_size
    head = kv_head * group_size + row % group_size
    mask = (token < num_tokens)[:, None] & (dim < head_dim)[None, :]
    q_offsets = (first_token + token)[:, None] * q_token_stride + head[:, None] * head_dim + dim[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0)
    if k_cache_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)  # which a GPU makes of e4m3 faster than bfloat16
    position = first_position + tl.minimum(token, num_tokens - 1)

    last_end = first_position + num_tokens  # behind the last query
    first_key = 0
    first_full = 0  # from here on, all queries see all keys, as far as
    if CAUSAL:
        end = last_end
        last_full = (first_position + 1) // KEYS * KEYS
    else:
        end = tl.load(cu_lens_ptr + chunk + 1) - tl.load(cu_lens_ptr + chunk)
        last_full = end // KEYS * KEYS
        if WINDOW is not None:
            last_full = tl.minimum(end, first_position + WINDOW) // KEYS * KEYS
            end = tl.minimum(end, last_end - 1 + WINDOW)
    if WINDOW is not None:
        first_key = tl.maximum(first_position + 1 - WINDOW, 0) // KEYS * KEYS
        first_full = tl.cdiv(tl.maximum(last_end - WINDOW, 0), KEYS) * KEYS
        last_full = tl.maximum(last_full, first_key)
        first_full = tl.minimum(first_full, last_full)
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks_ptr is not None:  # a score without a value
        maximum = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total += 1.0
    state = maximum, total, tl.zeros((ROWS, HEAD_DIM), tl.float32)
    if WINDOW is not None:
        state = _attend(
            state, q, position, first_key, first_full, end,
            k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head, scale_log2,
            num_kv_heads, block_size, head_dim, HEAD_DIM, KEYS, WINDOW, CAUSAL, SOFT_CAP, True, STAGES,
        )  # fmt: skip
    state = _attend(
        state, q, position, first_full, last_full, end,
        k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head, scale_log2,
        num_kv_heads, block_size, head_dim, HEAD_DIM, KEYS, WINDOW, CAUSAL, SOFT_CAP, False, STAGES,
    )  # fmt: skip
    state = _attend(
        state, q, position, last_full, end, end,
        k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, table_ptr, kv_head, scale_log2,
        num_kv_heads, block_size, head_dim, HEAD_DIM, KEYS, WINDOW, CAUSAL, SOFT_CAP, True, 1,
    )  # fmt: skip
    _, total, acc = state
    out_stride = num_kv_heads * group_size * head_dim
    out_offsets = (first_token + token)[:, None] * out_stride + head[:, None] * head_dim + dim[None, :]
    tl.store(out_ptr + out_offsets, (acc * (1 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def plan_prefill(
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    group_size: int,
    device: torch.device,
    head_dim: int,
) -> Tensor:
    """List the tiles of queries for `paged_prefill_attention`: see `plan_query_tiles`.

    group_size: query heads for each KV head. head_dim: their size.
    """
    num_tokens = max(1, tile_rows(group_size, head_dim, device) // group_size)
    return plan_query_tiles(query_lens, context_lens, num_tokens, device)


def plan_query_tiles(
    query_lens: tuple[int, ...], context_lens: tuple[int, ...], size: int, device: torch.device
) -> Tensor:
    """List the tiles of queries of a prefill step, those with the longest contexts first.

    query_lens, context_lens: tokens of each chunk, and of its context, the chunk's own included. size: tokens of a
    tile. Returns (num_tiles, 4) int32: the tile's first token among those of the step, how many tokens it has, the
    position of the first one in its context, and its chunk. The host does not wait for the device.
    """
    lens, contexts = np.array(query_lens), np.array(context_lens)
    counts = -(-lens // size)
    chunk = np.repeat(np.arange(len(lens)), counts)
    offset = (np.arange(len(chunk)) - np.repeat(counts.cumsum() - counts, counts)) * size
    position = (contexts - lens)[chunk] + offset
    num_tokens = np.minimum(lens[chunk] - offset, size)
    tiles = np.stack(((lens.cumsum() - lens)[chunk] + offset, num_tokens, position, chunk), axis=1).astype(np.int32)
    return to_device(torch.from_numpy(tiles[np.argsort(-position, kind="stable")]), device)


def paged_prefill_attention(
    q: Tensor,
    cache: LayerCache,
    tiles: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    cu_lens: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attend from all tokens of a step's chunks to their contexts; the result has the shape of q.

    For each chunk it computes `causal_attention` or `full_attention` in spec.py, of what `gather_context` reads there.

    q: (num_tokens, num_heads, head_dim), the heads of a token contiguous; num_heads a multiple of the KV heads,
    head_dim at most 512. cache: contiguous; block_size a multiple of 16. tiles: from `plan_prefill`.
    block_tables: (num_chunks, max_blocks) int32. cu_lens: (num_chunks + 1,) int32, where each text begins and ends, for
    attention to both sides; None for causal attention.
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = cache.k.shape
    group_size = num_heads // num_kv_heads
    shapes = SHAPES if cache.k_scales is None else SHAPES_IN_8_BITS
    shape = (shapes if has_large_shared_memory(q.device) else SMALL_SHAPES)[padded_head_dim(head_dim)]
    out = q.new_empty(q.shape)
    _paged_prefill_kernel[(len(tiles), num_kv_heads)](
        q,
        cache.k,
        cache.v,
        cache.k_scales,
        cache.v_scales,
        tiles,
        block_tables,
        sinks,
        cu_lens,
        out,
        scale * math.log2(math.e),
        q.stride(0),
        block_tables.stride(0),
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        block_size=block_size,
        head_dim=head_dim,
        HEAD_DIM=padded_head_dim(head_dim),
        ROWS=tile_rows(group_size, head_dim, q.device),
        KEYS=math.gcd(block_size, shape.keys),
        WINDOW=window,
        CAUSAL=cu_lens is None,
        SOFT_CAP=soft_cap,
        STAGES=shape.num_stages,
        num_warps=8,
        maxnreg=shape.max_registers,
    )
    return out


def tile_rows(group_size: int, head_dim: int, device: torch.device) -> int:
    """Return how many queries a tile has room for."""
    rows = TILE_ROWS
    if head_dim > 256:
        rows = WIDE_TILE_ROWS if has_large_shared_memory(device) else SMALL_WIDE_TILE_ROWS
    return max(rows, next_power_of_2(group_size))
