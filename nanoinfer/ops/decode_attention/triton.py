"""Paged decode attention: one or several query tokens of each sequence, work split as in stream-K.

Decode is bound by the memory bandwidth for reading keys and values, so all programs should read the same amount.

- Stream-K (Osama et al. 2023, for matrix products): once per step, `plan_decode` lists the tiles of all contexts end to
  end. In each layer, every program takes an equal share of this list, wherever rows begin and end. It runs through its
  share in one loop, so that the next tiles are loaded while it computes, also across rows.
- Grouped-query attention: a tile of queries has the query heads that share a KV head, of all query tokens of a row.
  Query i of the tile is head i % group_size of query token i // group_size. A tile is padded to 16, 32 or 64 queries.
- Online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022).
- Flash-decoding (Dao et al. 2023): a row that several programs share leaves partial results with their log-sum-exp,
  which a second kernel combines in the order of the context.
- Shared prefixes (Hydragen, Juravsky et al. 2024): rows whose block tables begin alike are prefix sharers. A first
  pass reads the shared blocks once for all queries of the sharers. The second one reads the rest of each row, and adds
  the first pass's result by its log-sum-exp. Both passes run the same two kernels: the first pass treats all sharers of
  a prefix as the second one treats a row.
- A cache in 8 bits: values are widened to float16, which holds them all, several with one instruction.

`group_size` is the number of query heads of a KV head, `num_tokens` the number of query tokens of a row.

Equal steps give equal bits. But where a row is split, and so how its sums are rounded, depends on the lengths of the
other rows.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.ops.common.device_properties import has_large_shared_memory, next_power_of_2, num_multiprocessors
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.common.triton import soft_capped
from nanoinfer.ops.kv_cache.spec import LayerCache

TILE_ELEMENTS = 8192  # of keys in a tile, and of values: 64 tokens of 128 dimensions
MAX_TOKENS_IN_8_BITS = 128  # a tile of few queries in 8 bits has twice as many tokens, if it is not more than this
MIN_QUERIES = 16  # the fewest rows that tl.dot takes; a tile of queries is padded to it
PROGRAMS_PER_SM = 2  # what fits, each with three tiles in flight or in use
STAGES = 5  # a tile's slot is read two stages before the tile, and the tile two stages before its use
SMALL_TILE = 32  # queries; larger tiles take so much shared memory that one program fills a multiprocessor
MAX_QUERIES = 64  # in a tile: query heads of a KV head x tokens of a row x rows that share a prefix
MAX_WIDE_QUERIES = 32  # the same, of heads of more than 256
# A tile's flags. Bit 0: it is the last one of its row. Bit 1: its row does not attend from the first token on. Bits 2
# to 7: how many query tokens the row has after its first. Above: how many tokens of the tile lie before the first one
# that the row's first query token attends to; negative where all of them lie after it.
ENDS_ROW, BEGINS_LATER = tl.constexpr(1), tl.constexpr(2)
LATER_SHIFT, LATER_MASK, HIDDEN_SHIFT = tl.constexpr(2), tl.constexpr(63), tl.constexpr(8)
# Weights of a cache in 8 bits are 2**6 times as large, so that float16 still holds them times a small scale.
LIFT = tl.constexpr(6)
# Where the shares are at least so many times the rows, each program that combines has a row, as nearly none would find
# one by its share. So there are few of them, and the kernel after it, which waits until all of them run, fetches its
# weights while attention computes. Of heads of more than 256 each has some dimensions, as each row has many splits. Of
# one or two rows, a long context has a split for each program of the GPU. More programs then read more splits at a
# time, so that none waits for memory often; of a short context, they read a tile of few splits.
ROWS_TO_SHARES, FEW_ROWS_TO_SHARES = 4, 64
OF_ROWS, OF_FEW_ROWS = (32, 128, 4), (128, 32, 4)  # splits that are combined at a time, dimensions, warps
FEW_SPLITS = 32
LOG2_E = tl.constexpr(math.log2(math.e))
MASKED = tl.constexpr(-3e38)  # the score of tokens past the context; finite, so that an empty context gives no NaN

# A GPU widens two values of e4m3 at a time, but only neighbours in a register, and has no such instruction for int8. Of
# int8, `prmt` puts the byte of value + 128 below 0x64: the float16 number 1024 + 128 + value.
#
# Values that a product sums over lie in different rows, and so in different registers: four neighbours of a row come as
# one word, and are widened together with those of another row, each to its own result.
_PAIRS_OF_E4M3 = tl.constexpr("""{
    .reg .b32 pair; .reg .b16 low, high;
    prmt.b32 pair, $4, $5, 0x0040; mov.b32 {low, high}, pair; cvt.rn.f16x2.e4m3x2 $0, low;
    prmt.b32 pair, $4, $5, 0x0051; mov.b32 {low, high}, pair; cvt.rn.f16x2.e4m3x2 $1, low;
    prmt.b32 pair, $4, $5, 0x0062; mov.b32 {low, high}, pair; cvt.rn.f16x2.e4m3x2 $2, low;
    prmt.b32 pair, $4, $5, 0x0073; mov.b32 {low, high}, pair; cvt.rn.f16x2.e4m3x2 $3, low;
}""")
_PAIRS_OF_INT8 = tl.constexpr("""{
    .reg .b32 one, two, pair, above, offset;
    mov.b32 above, 0x64646464; mov.b32 offset, 0x64806480;
    xor.b32 one, $4, 0x80808080; xor.b32 two, $5, 0x80808080;
    prmt.b32 pair, one, two, 0x0040; prmt.b32 pair, pair, above, 0x4140; sub.f16x2 $0, pair, offset;
    prmt.b32 pair, one, two, 0x0051; prmt.b32 pair, pair, above, 0x4140; sub.f16x2 $1, pair, offset;
    prmt.b32 pair, one, two, 0x0062; prmt.b32 pair, pair, above, 0x4140; sub.f16x2 $2, pair, offset;
    prmt.b32 pair, one, two, 0x0073; prmt.b32 pair, pair, above, 0x4140; sub.f16x2 $3, pair, offset;
}""")
_FOUR_OF_INT8 = tl.constexpr("""{
    .reg .b32 four, above, offset;
    mov.b32 above, 0x64646464; mov.b32 offset, 0x64806480;
    xor.b32 four, $2, 0x80808080;
    prmt.b32 $0, four, above, 0x4140; prmt.b32 $1, four, above, 0x4342;
    sub.f16x2 $0, $0, offset; sub.f16x2 $1, $1, offset;
}""")


@triton.jit(do_not_specialize=["num_rows"])
def _plan_kernel(
    context_lens_ptr,
    num_row_tokens_ptr,  # None: each row has one query token
    first_tokens_ptr,  # None: rows attend from their first token on
    block_tables_ptr,
    tiles_ptr,
    row_starts_ptr,
    num_rows,
    block_table_stride,
    block_size: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEAST: tl.constexpr,  # tiles of a row without tokens
):
    """List the tiles of one row per program, after the tiles of the rows before it."""
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    lens = tl.load(context_lens_ptr + rows, mask=rows < row, other=0)
    context_len = tl.load(context_lens_ptr + row)
    num_later = 0  # query tokens after the first
    if num_row_tokens_ptr is not None:
        lens += tl.where(lens > 0, tl.load(num_row_tokens_ptr + rows, mask=rows < row, other=1) - 1, 0)
        num_later = tl.where(context_len > 0, tl.load(num_row_tokens_ptr + row) - 1, 0)
    first_token = 0
    if first_tokens_ptr is not None:
        first_tokens = tl.load(first_tokens_ptr + rows, mask=rows < row, other=0)
        lens -= tl.maximum(first_tokens, 0) // TILE * TILE
        first_token = tl.load(first_tokens_ptr + row)
    first_tile = tl.maximum(first_token, 0) // TILE
    row_start = tl.sum(tl.where(rows < row, tl.maximum(tl.cdiv(lens, TILE), LEAST), 0), axis=0)
    num_tiles = tl.maximum(tl.cdiv(context_len + num_later - first_tile * TILE, TILE), LEAST)
    tl.store(row_starts_ptr + row, row_start)
    if row == num_rows - 1:
        tl.store(row_starts_ptr + num_rows, row_start + num_tiles)
    for first in range(0, num_tiles, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        is_tile = tile < num_tiles
        token = (first_tile + tile) * TILE
        block = tl.load(block_tables_ptr + row.to(tl.int64) * block_table_stride + token // block_size, mask=is_tile)
        entry_ptr = tiles_ptr + (row_start + tile) * 4
        tl.store(entry_ptr, block * block_size + token % block_size, mask=is_tile)
        tl.store(entry_ptr + 1, context_len - token, mask=is_tile)
        tl.store(entry_ptr + 2, tl.zeros_like(tile) + row, mask=is_tile)
        flags = (tile == num_tiles - 1).to(tl.int32) * ENDS_ROW + (num_later << LATER_SHIFT)
        if first_tokens_ptr is not None:
            flags += tl.minimum(tl.maximum(first_token, 0), 1) * BEGINS_LATER
            flags += (first_token - token) << HIDDEN_SHIFT
        tl.store(entry_ptr + 3, flags, mask=is_tile)


@triton.jit
def share_of(num_tiles, share, num_shares):
    """Return a program's first tile, and the one after its last."""
    num_used = tl.maximum(tl.minimum(num_shares, num_tiles), 1)  # there may be no sharers, and so no tiles
    first = tl.minimum(share, num_used) * num_tiles // num_used
    last = tl.minimum(share + 1, num_used) * num_tiles // num_used
    return first, last


@triton.jit
def visible_tokens(token, token_of_query, num_visible, flags, num_tokens: tl.constexpr, WINDOWED: tl.constexpr):
    """Return which tokens of a tile the row attends to, (TILE,), and each of its queries, (QUERIES or 1, TILE).

    num_visible: tokens from the tile's first one to the row's first query token. Each later query token attends to one
    more; those of padding attend to as many as the row's last one.
    """
    num_hidden = flags >> HIDDEN_SHIFT
    if num_tokens == 1:
        is_read = token < num_visible
        if WINDOWED:
            is_read &= token >= num_hidden
        visible = is_read[None, :]
    else:
        num_later = (flags >> LATER_SHIFT) & LATER_MASK
        later = tl.minimum(token_of_query, num_later)[:, None]
        is_read = token < num_visible + num_later
        visible = token[None, :] < num_visible + later
        if WINDOWED:
            is_read &= token >= num_hidden
            visible &= token[None, :] >= num_hidden + later
    return is_read, visible


@triton.jit
def _load_tile(cache_ptr, first_line, visible, size: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Load keys or values, (TILE, SIZE), which lie one after the other in the cache; 0 where they are not visible.

    What lies past the context may be NaN, and 0 x NaN is NaN.
    """
    token = tl.arange(0, TILE)
    dim = tl.arange(0, SIZE)
    offsets = token[:, None] * size + dim[None, :]
    return tl.load(cache_ptr + first_line * size + offsets, mask=visible[:, None] & (dim < size)[None, :], other=0.0)


@triton.jit
def widened(x, dtype: tl.constexpr, ASM: tl.constexpr):
    """Return values in `dtype`. ASM: whether PTX can be used; `dtype` is float16 then."""
    if ASM and x.dtype == tl.int8:
        return tl.inline_asm_elementwise(_FOUR_OF_INT8, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return x.to(dtype)


@triton.jit
def widened_bytes(words, byte_dtype: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """Return the four values of `byte_dtype` in each int32 word, the lowest byte first, as four tensors in `dtype`."""
    if ASM:
        code: tl.constexpr = _PAIRS_OF_INT8 if byte_dtype == tl.int8 else _PAIRS_OF_E4M3
        return tl.inline_asm_elementwise(
            code,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return (
            _widened_byte(words, 0, byte_dtype, dtype),
            _widened_byte(words, 1, byte_dtype, dtype),
            _widened_byte(words, 2, byte_dtype, dtype),
            _widened_byte(words, 3, byte_dtype, dtype),
        )


@triton.jit
def _widened_byte(words, index: tl.constexpr, byte_dtype: tl.constexpr, dtype: tl.constexpr):
    byte = (words >> (8 * index)).to(tl.int8)
    return byte.to(dtype) if byte_dtype == tl.int8 else byte.to(byte_dtype, bitcast=True).to(dtype)


@triton.jit
def interleaved(x0, x1, x2, x3):
    """Return (rows, 4 * columns): the first columns of all four, (rows, columns) each, then the second ones."""
    pairs = tl.join(tl.join(x0, x1), tl.join(x2, x3))  # (rows, columns, first or second of a pair, pair)
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (x0.shape[0], 4 * x0.shape[1]))


@triton.jit
def _score(q, k, k_scales, visible, scale_log2, dtype: tl.constexpr, ASM: tl.constexpr, SOFT_CAP: tl.constexpr):
    """Return the scores of a tile's keys, (QUERIES, TILE), to base 2. visible: (QUERIES or 1, TILE)."""
    wide_k = tl.trans(widened(k, dtype, ASM))
    scores = tl.dot(q.to(dtype), wide_k, input_precision="ieee")
    scores *= scale_log2 if k_scales is None else (k_scales * scale_log2)[None, :]
    if SOFT_CAP is not None:
        scores = soft_capped(scores, SOFT_CAP * LOG2_E)
    return tl.where(visible, scores, MASKED)


@triton.jit
def attend_to_tile(state, scores, v, v_scales, dtype: tl.constexpr, byte_dtype: tl.constexpr, ASM: tl.constexpr):
    """Add a tile's values to each query's sums, weighted by the exponentials of its scores, (QUERIES, TILE).

    If there are scales, v has 8-bit values as words of four dimensions, and each of the four has sums of its own.
    """
    maximum, total, sums = state
    highest = tl.max(scores, axis=1)
    if v_scales is not None:
        highest -= LIFT
    new_maximum = tl.maximum(maximum, highest)
    decay = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(scores - new_maximum[:, None])
    total = total * decay + tl.sum(weights, axis=1)
    if v_scales is None:
        values = (v,)
    else:
        weights = (weights * v_scales[None, :]).to(dtype)
        values = widened_bytes(v, byte_dtype, dtype, ASM)
    new_sums = ()
    for index in tl.static_range(len(sums)):
        acc = sums[index] * decay[:, None]
        acc += tl.dot(weights.to(dtype), values[index], input_precision="ieee")
        new_sums += (acc,)  # type: ignore[assignment]
    return new_maximum, total, new_sums


@triton.jit
def results_of(state):
    """Return the results of all queries, (QUERIES, HEAD_DIM), and their log-sum-exp, to base 2."""
    maximum, total, sums = state
    acc = sums[0] if len(sums) == 1 else interleaved(sums[0], sums[1], sums[2], sums[3])
    return acc / total[:, None], maximum + tl.log2(total)


@triton.jit
def add_results(result, lse, other, other_lse):
    """Combine two results of the same queries by their log-sum-exp."""
    higher = tl.maximum(lse, other_lse)
    weight, other_weight = tl.exp2(lse - higher), tl.exp2(other_lse - higher)
    both = weight + other_weight
    result = result * (weight / both)[:, None] + other * (other_weight / both)[:, None]
    return result, higher + tl.log2(both)


@triton.jit
def reset_where(state, is_done):
    """Begin anew after a row. Multiplying by 0 would carry over the NaN of a row whose values are NaN."""
    maximum, total, sums = state
    maximum, total = tl.where(is_done, float("-inf"), maximum), tl.where(is_done, 0.0, total)
    new_sums = ()
    for index in tl.static_range(len(sums)):
        new_sums += (tl.where(is_done, 0.0, sums[index]),)  # type: ignore[assignment]
    return maximum, total, new_sums


@triton.jit(do_not_specialize=["num_rows", "num_shares"])
def _paged_decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,  # None, like v_scales_ptr, unless the cache is in 8 bits
    v_scales_ptr,
    tiles_ptr,
    row_starts_ptr,
    num_sharers_ptr,  # None in the pass over rows; in the pass over prefixes, a row stands for the sharers it begins
    prefix_out_ptr,  # None, like prefix_lse_ptr, unless a pass over prefixes has left results for the rows
    prefix_lse_ptr,
    sinks_ptr,  # None: there are none, or this is the pass over prefixes
    out_ptr,
    out_lse_ptr,  # (num_rows * num_tokens, num_heads) float32: log-sum-exp of out, to base 2; None if nobody needs it
    # (num_kv_heads, num_shares, 2, num_queries, head_dim) float32: the partial results of a share, first for a row that
    # began in an earlier share, then for a row that begins in this share and goes on in the next one.
    partials_ptr,
    lse_ptr,  # (num_kv_heads, num_shares, 2, num_queries) float32: the log-sum-exp of each, to base 2
    scale_log2,  # scale * log2(e): the softmax is computed in powers of two
    q_token_stride,
    num_rows,
    num_shares,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    num_tokens: tl.constexpr,  # query tokens of a row
    num_queries: tl.constexpr,  # of a row and a KV head; in the pass over prefixes `max_queries`
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # head_dim, padded
    QUERIES: tl.constexpr,  # num_queries, padded
    TILE: tl.constexpr,  # divides block_size, so a tile lies within one block
    WINDOWED: tl.constexpr,  # whether the first tile of a row begins before the row's window
    SOFT_CAP: tl.constexpr,  # of the scores, to base e; None for none
    ASM: tl.constexpr,  # whether a cache in 8 bits may be widened by PTX
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    query = tl.arange(0, QUERIES)
    # The plan was made before the first layer, so it is there before the previous kernel is done.
    num_tiles = tl.load(row_starts_ptr + num_rows)
    first, last = share_of(num_tiles, share, num_shares)
    # Whether the row of the first tile begins in this share: the tile before it ends another row.
    begins_here = (tl.load(tiles_ptr + first * 4 - 1, mask=first > 0, other=ENDS_ROW) & ENDS_ROW) != 0
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + kv_head * group_size + query % group_size).to(tl.float32) * LOG2_E
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dim = tl.arange(0, HEAD_DIM)
    token = tl.arange(0, TILE)
    is_dim = (dim < head_dim)[None, :]
    is_query = query < num_queries
    # Where a query's head is in the result, after the first head of the row.
    line = query // group_size * (num_kv_heads * group_size) + kv_head * group_size + query % group_size
    line_offsets = line[:, None] * head_dim + dim[None, :]
    q_offsets = (query // group_size)[:, None] * q_token_stride + kv_head * group_size * head_dim
    q_offsets += (query % group_size)[:, None] * head_dim + dim[None, :]

    # Operands of products: 8-bit values are widened to float16, which holds them all, unless queries have float32.
    q_dtype: tl.constexpr = q_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float16 if k_scales_ptr is not None and q_dtype == tl.bfloat16 else q_dtype
    in_word: tl.constexpr = 1 if k_scales_ptr is None else 4  # neighbouring dimensions of a value, read as one word
    sums = ()
    for _ in tl.static_range(in_word):
        sums += (tl.zeros((QUERIES, HEAD_DIM // in_word), tl.float32),)  # type: ignore[assignment]
    state = tl.full((QUERIES,), float("-inf"), tl.float32), tl.zeros((QUERIES,), tl.float32), sums
    for tile in tl.range(first, last, num_stages=STAGES):
        slot = tl.load(tiles_ptr + tile * 4)
        num_visible = tl.load(tiles_ptr + tile * 4 + 1)
        row = tl.load(tiles_ptr + tile * 4 + 2)
        flags = tl.load(tiles_ptr + tile * 4 + 3)
        ends_row = (flags & ENDS_ROW) != 0
        if num_sharers_ptr is not None:  # it is enough that the rows exist: those after the sharers are not stored
            is_query = query < (num_rows - row) * (num_tokens * group_size)
        q_row_ptr = q_ptr + row.to(tl.int64) * num_tokens * q_token_stride
        q = tl.load(q_row_ptr + q_offsets, mask=is_query[:, None] & is_dim, other=0.0)
        block = (slot // block_size).to(tl.int64)
        start = (block * num_kv_heads + kv_head) * block_size + slot % block_size
        if num_sharers_ptr is None:
            is_read, visible = visible_tokens(token, query // group_size, num_visible, flags, num_tokens, WINDOWED)
        else:  # shared blocks are full
            is_read = tl.full((TILE,), True, tl.int1)
            visible = is_read[None, :]
        k = _load_tile(k_cache_ptr, start, is_read, head_dim, HEAD_DIM, TILE)
        v = _load_tile(v_cache_ptr, start, is_read, head_dim // in_word, HEAD_DIM // in_word, TILE)
        k_scales, v_scales = None, None
        if k_scales_ptr is not None:
            k_scales = tl.load(k_scales_ptr + start + token, mask=is_read, other=0.0)
            v_scales = tl.load(v_scales_ptr + start + token, mask=is_read, other=0.0)
        scores = _score(q, k, k_scales, visible, scale_log2, dtype, ASM, SOFT_CAP)
        state = attend_to_tile(state, scores, v, v_scales, dtype, k.dtype, ASM)

        if ends_row | (tile == last - 1):
            result, lse = results_of(state)
            first_line = row.to(tl.int64) * (num_tokens * num_kv_heads * group_size)
            if num_sharers_ptr is not None:
                is_query = query < tl.load(num_sharers_ptr + row) * (num_tokens * group_size)
            mask = is_query[:, None] & is_dim
            if prefix_out_ptr is not None:
                has_prefix = query < (flags & BEGINS_LATER) // BEGINS_LATER * num_queries
                prefix_lse = tl.load(prefix_lse_ptr + first_line + line, mask=has_prefix, other=float("-inf"))
                prefix_ptrs = prefix_out_ptr + first_line * head_dim + line_offsets
                prefix = tl.load(prefix_ptrs, mask=has_prefix[:, None] & is_dim, other=0.0)
                prefix_lse = tl.where(begins_here, prefix_lse, float("-inf"))  # it counts once, in the first share
                result, lse = add_results(result, lse, prefix, prefix_lse)
            if sinks_ptr is not None:  # what has a log-sum-exp and no value; it counts once, too
                sink = tl.where(begins_here, sinks, float("-inf"))
                result, lse = add_results(result, lse, tl.zeros_like(result), sink)
            if ends_row & begins_here:
                out_ptrs = out_ptr + first_line * head_dim + line_offsets
                tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
                if out_lse_ptr is not None:
                    tl.store(out_lse_ptr + first_line + line, lse, mask=is_query)
            else:
                partial = ((kv_head * num_shares + share) * 2 + begins_here.to(tl.int32)) * num_queries
                partial_offsets = (partial + query[:, None]) * head_dim + dim[None, :]
                tl.store(partials_ptr + partial_offsets, result, mask=mask)
                tl.store(lse_ptr + partial + query, lse, mask=is_query)
        state = reset_where(state, ends_row)
        begins_here |= ends_row


@triton.jit
def _combined(
    partials_ptr,
    lse_ptr,
    first_partial,
    query,
    is_query,
    dim,
    num_splits,
    num_queries: tl.constexpr,
    head_dim: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Return the largest log-sum-exp of all splits, the sum of their weights beside it, and of weights times results.

    query, is_query: (QUERIES,). dim: (DIMS,). The rest: see `combine_kernel`.
    """
    is_dim = dim < head_dim
    maximum = tl.full((query.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((query.shape[0],), tl.float32)
    acc = tl.zeros((query.shape[0], dim.shape[0]), tl.float32)
    for start in range(0, num_splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        exists = (split < num_splits)[None, :] & is_query[:, None]
        partial = (first_partial + split) * 2 + (split == 0).to(tl.int32)
        line = partial[None, :] * num_queries + query[:, None]  # (QUERIES, SPLITS)
        lse = tl.load(lse_ptr + line, mask=exists, other=float("-inf"))
        partials = tl.load(
            partials_ptr + line[:, :, None] * head_dim + dim[None, None, :],
            mask=exists[:, :, None] & is_dim[None, None, :],
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, tl.max(lse, axis=1))
        decay = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(lse - new_maximum[:, None])
        acc = acc * decay[:, None] + tl.sum(partials * weights[:, :, None], axis=1)
        total = total * decay + tl.sum(weights, axis=1)
        maximum = new_maximum
    return maximum, total, acc


@triton.jit(do_not_specialize=["num_rows", "num_shares"])
def combine_kernel(
    tiles_ptr,
    row_starts_ptr,
    num_sharers_ptr,
    partials_ptr,
    lse_ptr,
    out_ptr,
    out_lse_ptr,
    num_rows,
    num_shares,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    num_tokens: tl.constexpr,
    num_queries: tl.constexpr,
    head_dim: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,  # queries of a program
    SPLITS: tl.constexpr,  # partial results to combine at a time
    FEW_SPLITS: tl.constexpr,  # as many at a time where there are no more
    DIMS: tl.constexpr,  # of the HEAD_DIM, that a program combines
    BY_ROW: tl.constexpr,  # whether programs are counted by rows, and not by shares
    OVERLAP: tl.constexpr,
):
    """Combine the partial results of a row. A program has a few queries of the row whose second split opens its share.

    Or those of the row of its number, where rows are few. For the arguments, see `_paged_decode_kernel`.
    """
    num_slices: tl.constexpr = HEAD_DIM // DIMS
    programs_per_head: tl.constexpr = num_queries // QUERIES
    group = tl.program_id(0) // num_slices
    kv_head = group // programs_per_head
    query = group % programs_per_head * QUERIES + tl.arange(0, QUERIES)
    num_tiles = tl.maximum(tl.load(row_starts_ptr + num_rows), 1)
    num_used = tl.minimum(num_shares, num_tiles)
    if BY_ROW:
        row = tl.program_id(1)
    else:
        share = tl.program_id(1) + 1
        first = tl.minimum(share * num_tiles // num_used, num_tiles - 1)
        row = tl.load(tiles_ptr + first * 4 + 2, mask=share < num_used, other=0)
    row_start = tl.load(row_starts_ptr + row)
    row_end = tl.load(row_starts_ptr + row + 1)
    # A tile belongs to the last share that begins at or before it.
    first_share = ((row_start + 1) * num_used - 1) // num_tiles
    num_splits = (row_end * num_used - 1) // num_tiles - first_share + 1
    is_split = (row_end > row_start) & (num_splits > 1) if BY_ROW else (share < num_used) & (share == first_share + 1)
    is_query = query < num_queries
    if num_sharers_ptr is not None:
        is_query = query < tl.load(num_sharers_ptr + row) * (num_tokens * group_size)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if is_split:
        dim = tl.program_id(0) % num_slices * DIMS + tl.arange(0, DIMS)
        first_partial = kv_head * num_shares + first_share
        if FEW_SPLITS < SPLITS and num_splits <= FEW_SPLITS:
            maximum, total, acc = _combined(
                partials_ptr,
                lse_ptr,
                first_partial,
                query,
                is_query,
                dim,
                num_splits,
                num_queries,
                head_dim,
                FEW_SPLITS,
            )
        else:
            maximum, total, acc = _combined(
                partials_ptr, lse_ptr, first_partial, query, is_query, dim, num_splits, num_queries, head_dim, SPLITS
            )
        tokens = row.to(tl.int64) * num_tokens + query // group_size
        out_lines = tokens * (num_kv_heads * group_size) + kv_head * group_size + query % group_size
        result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(
            out_ptr + out_lines[:, None] * head_dim + dim[None, :],
            result,
            mask=is_query[:, None] & (dim < head_dim)[None, :],
        )
        if out_lse_ptr is not None:
            tl.store(out_lse_ptr + out_lines, maximum + tl.log2(total), mask=is_query)


class TileList(NamedTuple):
    """Lists the tiles of keys that rows attend to, those of a row one after the other."""

    # (max_tiles, 4) int32: the slot of the first token; how many tokens there are from it to the row's first query
    # token, both counted; the row; the flags
    tiles: Tensor
    row_starts: Tensor  # (num_rows + 1,) int32: the index of each row's first tile, then the number of all tiles
    tile_size: int  # tokens


def plan_decode(
    context_lens: Tensor,
    block_tables: Tensor,
    block_size: int,
    head_dim: int,
    first_tokens: Tensor | None = None,
    least_tiles: int = 1,
    large_tiles: bool = False,
    num_row_tokens: Tensor | None = None,
    tile_size: int | None = None,
) -> TileList:
    """List the tiles of all rows for `paged_decode_attention`.

    context_lens: (num_rows,) int32, the tokens that each row's first query token attends to; 0 for padding rows.
    block_tables: (num_rows, max_blocks) int32. block_size, head_dim: those of the cache.
    first_tokens: (num_rows,) int32, the first token that each row attends to, where a window or a shared prefix leaves
    tokens out. With a window, context_lens - window, which may be negative: a row's later tokens count on from there.
    least_tiles: how many tiles a row without tokens gets; with 0, its result is not written.
    large_tiles: what `has_large_tiles` says of rows; leave it out for shared prefixes.
    num_row_tokens: (num_rows,) int32, how many query tokens each row has; None where each has one.
    tile_size: tokens of a tile, a divisor of block_size, for other kernels than `paged_decode_attention`.
    The host does not wait for the device, so a CUDA graph can capture this.
    """
    num_rows, max_blocks = block_tables.shape
    tile_size = tile_size or _tile_size(block_size, head_dim, large_tiles)
    tiles = block_tables.new_empty((num_rows * max_blocks * (block_size // tile_size), 4))
    row_starts = block_tables.new_empty(num_rows + 1)
    _plan_kernel[(num_rows,)](
        context_lens,
        num_row_tokens,
        first_tokens,
        block_tables,
        tiles,
        row_starts,
        num_rows,
        block_tables.stride(0),
        block_size=block_size,
        TILE=tile_size,
        ROWS=max(256, next_power_of_2(num_rows)),
        CHUNK=128,
        LEAST=least_tiles,
    )
    return TileList(tiles, row_starts, tile_size)


class PrefixResult(NamedTuple):
    """Holds what prefix sharers have from attending to their shared prefixes; for other rows it is undefined."""

    out: Tensor  # (num_rows * num_tokens, num_heads, head_dim) float32
    lse: Tensor  # (num_rows * num_tokens, num_heads) float32: the log-sum-exp of the scores, to base 2


def paged_decode_attention(
    q: Tensor,
    cache: LayerCache,
    plan: TileList,
    scale: float,
    windowed: bool = False,
    prefix: PrefixResult | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Compute what `decode_attention` in spec.py does, from a plan in the place of block tables, lengths and a window.

    q: (num_rows * num_tokens, num_heads, head_dim), the tokens of a row one after the other; heads contiguous, head_dim
    at most 512. Token j of a row attends to j tokens more than its first one. A row may have fewer real tokens; see
    `num_row_tokens` of `plan_decode`. The query heads of a KV head times num_tokens are at most `max_queries`.
    cache: contiguous; block_size a multiple of 16. plan: from `plan_decode`. A row without tokens gives zeros.
    windowed: whether the plan has first tokens that are no multiple of the block size.
    prefix: from `shared_prefix_attention`, where the plan leaves the shared prefixes out.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _launch(q, cache, plan, scale, out, prefix=prefix, windowed=windowed, sinks=sinks, soft_cap=soft_cap)
    return out


def shared_prefix_attention(
    q: Tensor,
    cache: LayerCache,
    plan: TileList,
    num_sharers: Tensor,
    scale: float,
    soft_cap: float | None = None,
) -> PrefixResult:
    """Attend from all rows that share a prefix to its blocks, which are read once for all of them.

    Sharers are a run of rows. num_sharers: (num_rows,) int32: at the first row of each run, how many rows it has, at
    most `max_prefix_sharers`; 0 at other rows. plan: from a `plan_decode` in which the first row of a run has the
    shared blocks, and other rows have no tokens. For the rest, see `paged_decode_attention`.
    """
    out = torch.empty_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    lse = out.new_empty(out.shape[:2])
    _launch(q, cache, plan, scale, out, out_lse=lse, num_sharers=num_sharers, soft_cap=soft_cap)
    return PrefixResult(out, lse)


def max_queries(head_dim: int) -> int:
    """Return how many queries a tile may have."""
    return MAX_QUERIES if head_dim <= 256 else MAX_WIDE_QUERIES


def max_prefix_sharers(group_size: int, num_tokens: int = 1, head_dim: int = 128) -> int:
    """Return how many rows can read a shared prefix together, with `group_size` query heads for each KV head."""
    return max_queries(head_dim) // (group_size * num_tokens)


def has_large_tiles(in_8_bits: bool, num_queries: int) -> bool:
    """Return whether the tiles of a cache have twice the tokens. Many queries leave no registers for them."""
    return in_8_bits and num_queries <= SMALL_TILE


def padded_head_dim(head_dim: int) -> int:
    """Return the size that kernels compute with: 64, 128, 256 or 512."""
    return max(64, next_power_of_2(head_dim))


def _launch(
    q,
    cache,
    plan,
    scale,
    out,
    *,
    out_lse=None,
    num_sharers=None,
    prefix=None,
    windowed=False,
    sinks=None,
    soft_cap=None,
):
    """Attend from rows, or from all sharers of a prefix, and combine what several programs have computed of one."""
    _, num_heads, head_dim = q.shape
    tiles, row_starts, tile_size = plan
    _, num_kv_heads, block_size, _ = cache.k.shape
    num_rows = len(row_starts) - 1
    group_size, num_tokens = num_heads // num_kv_heads, len(q) // num_rows
    most = max_queries(head_dim)
    num_queries = group_size * num_tokens if num_sharers is None else most
    assert group_size * num_tokens <= most, f"{num_tokens} tokens of {group_size} heads do not fit into a tile"
    assert block_size % tile_size == 0, f"tiles of {tile_size} tokens do not lie within blocks of {block_size}"
    v_cache = cache.v
    if in_8_bits := cache.k_scales is not None:
        assert head_dim % 4 == 0, f"a head_dim of {head_dim} values of 8 bits is not made of words"
        v_cache = v_cache.view(torch.int32)
    queries = max(MIN_QUERIES, next_power_of_2(num_queries))
    num_programs = num_multiprocessors(q.device) * _programs_per_multiprocessor(q.device, queries, head_dim)
    num_shares = max(1, num_programs // num_kv_heads)
    shapes = {
        "num_kv_heads": num_kv_heads,
        "group_size": group_size,
        "num_tokens": num_tokens,
        "num_queries": num_queries,
        "head_dim": head_dim,
        "HEAD_DIM": padded_head_dim(head_dim),
    }
    partials = out.new_empty((num_kv_heads, num_shares, 2, num_queries, head_dim), dtype=torch.float32)
    lse = partials.new_empty(partials.shape[:-1])
    _paged_decode_kernel[(num_kv_heads, num_shares)](
        q,
        cache.k,
        v_cache,
        cache.k_scales,
        cache.v_scales,
        tiles,
        row_starts,
        num_sharers,
        *(prefix or (None, None)),
        sinks,
        out,
        out_lse,
        partials,
        lse,
        scale * math.log2(math.e),
        q.stride(0),
        num_rows,
        num_shares,
        **shapes,
        block_size=block_size,
        QUERIES=queries,
        TILE=tile_size,
        WINDOWED=windowed,
        SOFT_CAP=soft_cap,
        ASM=q.is_cuda,
        STAGES=_num_stages(q.device, queries, head_dim),
        num_warps=_num_warps(queries, head_dim, in_8_bits),
        **overlap_options(q.device),
    )
    combine(plan, num_sharers, partials, lse, out, out_lse, shapes)


def combine(plan, num_sharers, partials, lse, out, out_lse, shapes):
    """Combine what several programs have computed of a row. shapes: constants of `combine_kernel`, as decode has them.

    partials, lse: (num_kv_heads, num_shares, 2, num_queries[, head_dim]). For the rest, see `_paged_decode_kernel`.
    """
    tiles, row_starts, _ = plan
    num_kv_heads, num_shares, _, num_queries, head_dim = partials.shape
    if num_shares == 1:
        return
    num_rows, padded = len(row_starts) - 1, shapes["HEAD_DIM"]
    # One token's queries are so few that each has a program.
    queries = 1 if num_sharers is None and shapes["num_tokens"] == 1 else math.gcd(4, num_queries)
    is_wide = head_dim > 256
    by_row = num_rows * ROWS_TO_SHARES <= num_shares
    # Small programs, which fit on the GPU beside those that they wait for.
    splits, dims, num_warps = (8, padded, 4) if is_wide else (16, padded, 2)
    if by_row and is_wide:
        splits, dims, num_warps = OF_FEW_ROWS if num_rows * FEW_ROWS_TO_SHARES <= num_shares else OF_ROWS
    combine_kernel[(num_kv_heads * num_queries // queries * (padded // dims), num_rows if by_row else num_shares - 1)](
        tiles,
        row_starts,
        num_sharers,
        partials,
        lse,
        out,
        out_lse,
        num_rows,
        num_shares,
        **shapes,
        QUERIES=queries,
        SPLITS=splits // queries,
        FEW_SPLITS=min(splits, FEW_SPLITS) // queries,
        DIMS=dims,
        BY_ROW=by_row,
        num_warps=num_warps,
        **overlap_options(out.device),
    )


def _tile_size(block_size: int, head_dim: int, large: bool) -> int:
    """Return how many tokens a tile has."""
    tokens = TILE_ELEMENTS // padded_head_dim(head_dim)
    return math.gcd(block_size, min(2 * tokens, max(tokens, MAX_TOKENS_IN_8_BITS)) if large else tokens)


def _num_warps(queries: int, head_dim: int, in_8_bits: bool) -> int:
    """Return four warps, or eight where four would spill registers.

    In 8 bits the assembler of Triton 3.6 also makes wrong code of many queries with four warps (docs/quantization.md).
    """
    if head_dim > 256:
        return 8 if queries > MIN_QUERIES else 4
    return 8 if queries > SMALL_TILE and (in_8_bits or head_dim > 128) else 4


def _programs_per_multiprocessor(device: torch.device, queries: int, head_dim: int) -> int:
    """Return how many programs fit into a multiprocessor's shared memory."""
    fits = queries <= SMALL_TILE and (head_dim <= 256 or has_large_shared_memory(device))
    return PROGRAMS_PER_SM if fits else 1


def _num_stages(device: torch.device, queries: int, head_dim: int) -> int:
    """Return how deep a pipeline fits into shared memory."""
    if head_dim > 256:
        return 3
    always, on_hopper = (SMALL_TILE, MAX_QUERIES) if head_dim <= 128 else (MIN_QUERIES, SMALL_TILE)
    return STAGES if queries <= (on_hopper if has_large_shared_memory(device) else always) else 3
