"""Paged decode attention: one query token per sequence, work split as in stream-K. Twin: `TorchBackend.decode`.

Decode is bound by the memory bandwidth for reading keys and values, so all programs should read the same amount.

- Stream-K (Osama et al. 2023, for matrix products): once per step, `plan_decode` lists the tiles of all contexts end to
  end. In each layer, every program takes an equal share of this list, wherever rows begin and end. It runs through its
  share in one loop, so that the next tiles are loaded while it computes, also across rows.
- Grouped-query attention: the query heads that share a KV head form one tile of 16 rows.
- Online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022).
- Flash-decoding (Dao et al. 2023): a row that several programs share leaves partial results with their log-sum-exp,
  which a second kernel combines in the order of the context.

Equal steps give equal bits. But where a row is split, and so how its sums are rounded, depends on the lengths of the
other rows.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.programmatic_launch import overlap_options

TILE_ELEMENTS = 8192  # of keys in a tile, and of values: 64 tokens of 128 dimensions
QUERY_TILE = 16  # the fewest rows that tl.dot takes; the group of query heads is padded to it
PROGRAMS_PER_SM = 2  # what fits, each with three tiles in flight or in use
STAGES = 5  # a tile's slot is read two stages before the tile, and the tile two stages before its use
MAX_QUERIES = 32  # more queries take so much shared memory that fewer stages fit
MASKED = tl.constexpr(-3e38)  # the score of tokens past the context; finite, so that an empty context gives no NaN


@triton.jit(do_not_specialize=["num_rows"])
def _plan_kernel(
    context_lens_ptr,
    block_tables_ptr,
    tiles_ptr,
    row_starts_ptr,
    num_rows,
    block_table_stride,
    block_size: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """List the tiles of one row per program, after the tiles of the rows before it."""
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    lens = tl.load(context_lens_ptr + rows, mask=rows < row, other=0)
    row_start = tl.sum(tl.where(rows < row, tl.maximum(tl.cdiv(lens, TILE), 1), 0), axis=0)
    context_len = tl.load(context_lens_ptr + row)
    num_tiles = tl.maximum(tl.cdiv(context_len, TILE), 1)
    tl.store(row_starts_ptr + row, row_start)
    if row == num_rows - 1:
        tl.store(row_starts_ptr + num_rows, row_start + num_tiles)
    for first in range(0, num_tiles, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        is_tile = tile < num_tiles
        token = tile * TILE
        block = tl.load(block_tables_ptr + row.to(tl.int64) * block_table_stride + token // block_size, mask=is_tile)
        entry_ptr = tiles_ptr + (row_start + tile) * 4
        tl.store(entry_ptr, block * block_size + token % block_size, mask=is_tile)
        tl.store(entry_ptr + 1, tl.maximum(tl.minimum(context_len - token, TILE), 0), mask=is_tile)
        tl.store(entry_ptr + 2, tl.zeros_like(tile) + row, mask=is_tile)
        tl.store(entry_ptr + 3, (tile == num_tiles - 1).to(tl.int32), mask=is_tile)


@triton.jit(do_not_specialize=["num_rows", "num_shares"])
def _paged_decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    tiles_ptr,
    row_starts_ptr,
    out_ptr,
    # (num_kv_heads, num_shares, 2, group_size, head_dim) float32: the partial results of a share, first for a row that
    # began in an earlier share, then for a row that begins in this share and goes on in the next one.
    partials_ptr,
    lse_ptr,  # (num_kv_heads, num_shares, 2, group_size) float32: the log-sum-exp of each, to base 2
    scale_log2,  # head_dim ** -0.5 * log2(e): the softmax is computed in powers of two
    q_row_stride,
    num_rows,
    num_shares,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,  # divides block_size, so a tile lies within one block
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_tiles = tl.load(row_starts_ptr + num_rows)
    num_used = tl.minimum(num_shares, num_tiles)
    first = tl.minimum(share, num_used) * num_tiles // num_used
    last = tl.minimum(share + 1, num_used) * num_tiles // num_used

    query = tl.arange(0, QUERIES)
    dim = tl.arange(0, head_dim)
    token = tl.arange(0, TILE)
    is_query = (query < group_size)[:, None]
    query_offsets = query[:, None] * head_dim + dim[None, :]
    tile_offsets = token[:, None] * head_dim + dim[None, :]

    maximum = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, head_dim), tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        slot = tl.load(tiles_ptr + tile * 4)
        num_visible = tl.load(tiles_ptr + tile * 4 + 1)
        row = tl.load(tiles_ptr + tile * 4 + 2)
        ends_row = tl.load(tiles_ptr + tile * 4 + 3) != 0
        group_ptr = q_ptr + row.to(tl.int64) * q_row_stride + kv_head * group_size * head_dim
        q = tl.load(group_ptr + query_offsets, mask=is_query, other=0.0)
        block = (slot // block_size).to(tl.int64)
        start = ((block * num_kv_heads + kv_head) * block_size + slot % block_size) * head_dim
        # Masked loads, because what lies past the context may be NaN, and 0 x NaN is NaN.
        visible = token < num_visible
        k = tl.load(k_cache_ptr + start + tile_offsets, mask=visible[:, None], other=0.0)
        v = tl.load(v_cache_ptr + start + tile_offsets, mask=visible[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(visible[None, :], scores, MASKED)
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        decay = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * decay + tl.sum(weights, axis=1)
        maximum = new_maximum

        if ends_row | (tile == last - 1):
            row_start = tl.load(row_starts_ptr + row)
            result = acc / total[:, None]
            if ends_row & (row_start >= first):
                row_out_ptr = out_ptr + (row.to(tl.int64) * num_kv_heads + kv_head) * group_size * head_dim
                tl.store(row_out_ptr + query_offsets, result.to(out_ptr.dtype.element_ty), mask=is_query)
            else:
                partial = (kv_head * num_shares + share) * 2 + (row_start >= first).to(tl.int32)
                tl.store(partials_ptr + partial * group_size * head_dim + query_offsets, result, mask=is_query)
                lse = maximum + tl.log2(total)
                tl.store(lse_ptr + partial * group_size + query, lse, mask=query < group_size)
        # Reset for the next row. Multiplying by 0 would carry over the NaN of a row whose values are NaN.
        maximum = tl.where(ends_row, float("-inf"), maximum)
        total = tl.where(ends_row, 0.0, total)
        acc = tl.where(ends_row, 0.0, acc)


@triton.jit(do_not_specialize=["num_rows", "num_shares"])
def _combine_kernel(
    tiles_ptr,
    row_starts_ptr,
    partials_ptr,
    lse_ptr,
    out_ptr,
    num_rows,
    num_shares,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    head_dim: tl.constexpr,
    SPLITS: tl.constexpr,  # partial results to combine at a time
    OVERLAP: tl.constexpr,
):
    """Combine the partial results of a row. A program has one head, and the row whose second split opens its share."""
    head = tl.program_id(0)
    share = tl.program_id(1) + 1
    num_tiles = tl.load(row_starts_ptr + num_rows)
    num_used = tl.minimum(num_shares, num_tiles)
    first = tl.minimum(share * num_tiles // num_used, num_tiles - 1)
    row = tl.load(tiles_ptr + first * 4 + 2)
    row_start = tl.load(row_starts_ptr + row)
    row_end = tl.load(row_starts_ptr + row + 1)
    # A tile belongs to the last share that begins at or before it.
    first_share = ((row_start + 1) * num_used - 1) // num_tiles
    num_splits = (row_end * num_used - 1) // num_tiles - first_share + 1
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if (share < num_used) & (share == first_share + 1):
        dim = tl.arange(0, head_dim)
        maximum = float("-inf")
        total = 0.0
        acc = tl.zeros((head_dim,), tl.float32)
        for start in range(0, num_splits, SPLITS):
            split = start + tl.arange(0, SPLITS)
            exists = split < num_splits
            partial = ((head // group_size) * num_shares + first_share + split) * 2 + (split == 0).to(tl.int32)
            line = partial * group_size + head % group_size
            lse = tl.load(lse_ptr + line, mask=exists, other=float("-inf"))
            partials = tl.load(partials_ptr + line[:, None] * head_dim + dim[None, :], mask=exists[:, None], other=0.0)
            new_maximum = tl.maximum(maximum, tl.max(lse, axis=0))
            decay = tl.exp2(maximum - new_maximum)
            weights = tl.exp2(lse - new_maximum)
            acc = acc * decay + tl.sum(partials * weights[:, None], axis=0)
            total = total * decay + tl.sum(weights, axis=0)
            maximum = new_maximum
        row_out_ptr = out_ptr + (row.to(tl.int64) * num_kv_heads * group_size + head) * head_dim
        tl.store(row_out_ptr + dim, (acc / total).to(out_ptr.dtype.element_ty))


def plan_decode(context_lens: Tensor, block_tables: Tensor, block_size: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """List the tiles of all rows for `paged_decode_attention`. A row without context gets one tile without tokens.

    context_lens: (num_rows,) int32, 0 for padding. block_tables: (num_rows, max_blocks) int32. block_size, head_dim:
    those of the cache. The host does not wait for the device, so a CUDA graph can capture this.

    Returns
    - tiles, (max_tiles, 4) int32: the slot of the tile's first token, how many of its tokens are visible, its row, and
      whether it is the last tile of that row.
    - row_starts, (num_rows + 1,) int32: the index of each row's first tile, then the number of all tiles.
    """
    num_rows, max_blocks = block_tables.shape
    tile = _tile_size(block_size, head_dim)
    tiles = block_tables.new_empty((num_rows * max_blocks * (block_size // tile), 4))
    row_starts = block_tables.new_empty(num_rows + 1)
    _plan_kernel[(num_rows,)](
        context_lens,
        block_tables,
        tiles,
        row_starts,
        num_rows,
        block_tables.stride(0),
        block_size=block_size,
        TILE=tile,
        ROWS=max(256, triton.next_power_of_2(num_rows)),
        CHUNK=128,
    )
    return tiles, row_starts


def paged_decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tensor, row_starts: Tensor) -> Tensor:
    """Attend from one token of each row to the row's cached tokens; the result has the shape of q.

    q: (num_rows, num_heads, head_dim), heads contiguous; head_dim a power of two, num_heads a multiple of the KV heads.
    k_cache, v_cache: (num_blocks, num_kv_heads, block_size, head_dim), contiguous; block_size a multiple of 16.
    tiles, row_starts: from `plan_decode`. A row without tokens gives zeros.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group_size = num_heads // num_kv_heads
    num_shares = max(1, _num_programs(q.device) // num_kv_heads)
    out = q.new_empty(q.shape)
    partials = q.new_empty((num_kv_heads, num_shares, 2, group_size, head_dim), dtype=torch.float32)
    lse = q.new_empty((num_kv_heads, num_shares, 2, group_size), dtype=torch.float32)
    queries = max(QUERY_TILE, triton.next_power_of_2(group_size))
    _paged_decode_kernel[(num_kv_heads, num_shares)](
        q,
        k_cache,
        v_cache,
        tiles,
        row_starts,
        out,
        partials,
        lse,
        head_dim**-0.5 * math.log2(math.e),
        q.stride(0),
        num_rows,
        num_shares,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        block_size=block_size,
        head_dim=head_dim,
        QUERIES=queries,
        TILE=_tile_size(block_size, head_dim),
        STAGES=STAGES if queries <= MAX_QUERIES else 3,
        num_warps=4,
        **overlap_options(q.device),
    )
    if num_shares > 1:
        _combine_kernel[(num_heads, num_shares - 1)](
            tiles,
            row_starts,
            partials,
            lse,
            out,
            num_rows,
            num_shares,
            num_kv_heads=num_kv_heads,
            group_size=group_size,
            head_dim=head_dim,
            SPLITS=16,  # small programs, which fit on the GPU beside those that they wait for
            num_warps=2,
            **overlap_options(q.device),
        )
    return out


def _tile_size(block_size: int, head_dim: int) -> int:
    return math.gcd(block_size, TILE_ELEMENTS // head_dim)


@cache
def _num_programs(device: torch.device) -> int:
    """Return how many programs fill the device; for Triton's interpreter, a few."""
    if device.type != "cuda":
        return 16
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_SM
