"""Decode attention over the paged cache: one query token for each row. Twin: `TorchBackend.decode`.

Decode is bound by reading keys and values once, so every program must read as much as every other, from its start to
its end. `plan_decode` lists the tiles of all contexts, once a step, and each layer's programs take equal shares of that
list, whatever rows they belong to (as stream-K does for matrix products, Osama et al. 2023). A program goes through its
share in one loop, so the next tiles are on their way while it computes, across rows too. The query heads that share a
KV head are packed into a tile of 16 rows, and the softmax is computed online (Milakov and Gimelshein 2018; Dao et al.
2022). The parts of a row that lies in more than one share are combined by a second kernel (flash-decoding, Dao et al.
2023), in the order of the context. Equal steps give equal bits; where a row is cut, and so how its sums are rounded,
depends on the lengths of the rows beside it.
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
PROGRAMS_PER_SM = 2  # what fits, each with three tiles on their way or in use
STAGES = 5  # a tile's place is read two stages before the tile, and the tile two before its use
MAX_QUERIES = 32  # beyond, the queries take the room of the stages
MASKED = tl.constexpr(-3e38)  # the score of what lies past the context; finite, so that an empty context gives no NaN


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
    """One program lists the tiles of one row, after those of the rows before it."""
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
    parts_ptr,  # (num_kv_heads, num_shares, 2, group_size, head_dim) float32: of the row that a share goes on with, and
    # of the one that it begins and does not end
    log_sums_ptr,  # (num_kv_heads, num_shares, 2, group_size) float32: log2 of each part's softmax denominator
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
        # Masked loads: what lies past the context may be NaN, and 0 x NaN is NaN.
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
                part = (kv_head * num_shares + share) * 2 + (row_start >= first).to(tl.int32)
                tl.store(parts_ptr + part * group_size * head_dim + query_offsets, result, mask=is_query)
                log_sum = maximum + tl.log2(total)
                tl.store(log_sums_ptr + part * group_size + query, log_sum, mask=query < group_size)
        # Start anew, and not by a factor of 0: a row whose values are NaN must not spoil the next one.
        maximum = tl.where(ends_row, float("-inf"), maximum)
        total = tl.where(ends_row, 0.0, total)
        acc = tl.where(ends_row, 0.0, acc)


@triton.jit(do_not_specialize=["num_rows", "num_shares"])
def _combine_kernel(
    tiles_ptr,
    row_starts_ptr,
    parts_ptr,
    log_sums_ptr,
    out_ptr,
    num_rows,
    num_shares,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    head_dim: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for each share but the first, and each head: combines the row whose second part begins there."""
    head = tl.program_id(0)
    share = tl.program_id(1) + 1
    num_tiles = tl.load(row_starts_ptr + num_rows)
    num_used = tl.minimum(num_shares, num_tiles)
    first = tl.minimum(share * num_tiles // num_used, num_tiles - 1)
    row = tl.load(tiles_ptr + first * 4 + 2)
    row_start = tl.load(row_starts_ptr + row)
    row_end = tl.load(row_starts_ptr + row + 1)
    # The share of a tile is the last that begins at or before it.
    first_share = ((row_start + 1) * num_used - 1) // num_tiles
    num_parts = (row_end * num_used - 1) // num_tiles - first_share + 1
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if (share < num_used) & (share == first_share + 1):
        dim = tl.arange(0, head_dim)
        maximum = float("-inf")
        total = 0.0
        acc = tl.zeros((head_dim,), tl.float32)
        for start in range(0, num_parts, PARTS):
            index = start + tl.arange(0, PARTS)
            is_part = index < num_parts
            part = ((head // group_size) * num_shares + first_share + index) * 2 + (index == 0).to(tl.int32)
            line = part * group_size + head % group_size
            log_sums = tl.load(log_sums_ptr + line, mask=is_part, other=float("-inf"))
            parts = tl.load(parts_ptr + line[:, None] * head_dim + dim[None, :], mask=is_part[:, None], other=0.0)
            new_maximum = tl.maximum(maximum, tl.max(log_sums, axis=0))
            decay = tl.exp2(maximum - new_maximum)
            weights = tl.exp2(log_sums - new_maximum)
            acc = acc * decay + tl.sum(parts * weights[:, None], axis=0)
            total = total * decay + tl.sum(weights, axis=0)
            maximum = new_maximum
        row_out_ptr = out_ptr + (row.to(tl.int64) * num_kv_heads * group_size + head) * head_dim
        tl.store(row_out_ptr + dim, (acc / total).to(out_ptr.dtype.element_ty))


def plan_decode(context_lens: Tensor, block_tables: Tensor, block_size: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """List the tiles of all rows for `paged_decode_attention`; a context of 0 tokens has one, in which none is visible.

    context_lens: (num_rows,) int32, 0 for padding. block_tables: (num_rows, max_blocks) int32. block_size, head_dim:
    those of the cache. Nothing waits for the device, so a CUDA graph can capture it.

    Returns tiles, (max_tiles, 4) int32: the slot of its first token, how many tokens are visible, the row, and whether
    it is the row's last; and row_starts, (num_rows + 1,) int32: where each row's tiles begin, and how many there are.
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
    """Attend from one token for each row to its cached tokens; the result has the shape of q.

    q: (num_rows, num_heads, head_dim), heads contiguous; head_dim a power of two, num_heads a multiple of the KV heads.
    k_cache, v_cache: (num_blocks, num_kv_heads, block_size, head_dim), contiguous; block_size a multiple of 16.
    tiles, row_starts: from `plan_decode`. A row without tokens gives zeros.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group_size = num_heads // num_kv_heads
    num_shares = max(1, _num_programs(q.device) // num_kv_heads)
    out = q.new_empty(q.shape)
    parts = q.new_empty((num_kv_heads, num_shares, 2, group_size, head_dim), dtype=torch.float32)
    log_sums = q.new_empty((num_kv_heads, num_shares, 2, group_size), dtype=torch.float32)
    queries = max(QUERY_TILE, triton.next_power_of_2(group_size))
    _paged_decode_kernel[(num_kv_heads, num_shares)](
        q,
        k_cache,
        v_cache,
        tiles,
        row_starts,
        out,
        parts,
        log_sums,
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
            parts,
            log_sums,
            out,
            num_rows,
            num_shares,
            num_kv_heads=num_kv_heads,
            group_size=group_size,
            head_dim=head_dim,
            PARTS=16,  # small programs: all have a place beside those that they wait for
            num_warps=2,
            **overlap_options(q.device),
        )
    return out


def _tile_size(block_size: int, head_dim: int) -> int:
    return math.gcd(block_size, TILE_ELEMENTS // head_dim)


@cache
def _num_programs(device: torch.device) -> int:
    """How many programs fill the device; in the interpreter, a few."""
    if device.type != "cuda":
        return 16
    return torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_SM
