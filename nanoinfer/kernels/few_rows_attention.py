"""Decode attention for few rows, from the packed QKV product to the heads' outputs. Twin: `layers/attention/layer.py`.

One kernel normalises and rotates queries and keys, writes the new keys and values to the cache, and attends. What it
reads beside the QKV product was there before the step began, so a program fetches its first keys and values before it
waits for that product. The new token is not read back from the cache: its score is where the softmax begins.

Flash-decoding (Dao et al. 2023): a row's tokens are split over several programs, whose partial results a second kernel
combines. All splits of a step have the same number of tiles, except for the last one of each row, so that all
programs read about as much. `paged_decode_attention.py` balances many rows better.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.device_properties import num_multiprocessors
from nanoinfer.kernels.programmatic_launch import overlap_options

TILE_ELEMENTS = 8192  # of keys in a tile, and of values: 64 tokens of 128 dimensions
PROGRAMS_PER_SM = 2
STAGES = 5  # a tile's block is looked up two stages before the tile, and the tile two stages before its use
MASKED = tl.constexpr(
    -3e38
)  # the score of tokens that are not there; finite, so that a tile without tokens gives no NaN


@triton.jit
def _splits(context_lens_ptr, num_rows, num_wanted, TILE: tl.constexpr, ROWS: tl.constexpr):
    """Return how many tiles the rows have in the cache, (ROWS,), and a split; and where each row's splits end."""
    row = tl.arange(0, ROWS)
    lens = tl.load(context_lens_ptr + row, mask=row < num_rows, other=0)
    num_tiles = tl.where(row < num_rows, tl.maximum(tl.cdiv(lens - 1, TILE), 1), 0)  # the new token is not there yet
    tiles_per_split = tl.cdiv(tl.sum(num_tiles, axis=0), num_wanted)
    return num_tiles, tiles_per_split, tl.cumsum(tl.cdiv(num_tiles, tiles_per_split), axis=0)


@triton.jit
def _load_two(weight_ptr, dim, partner, is_dim):
    """Return a norm's weights of all dimensions, and those of the dimensions that these are rotated with."""
    weight = tl.load(weight_ptr + dim, mask=is_dim, other=0.0)
    return weight, tl.load(weight_ptr + partner, mask=is_dim, other=0.0)


@triton.jit
def _normed(x, other, weight, other_weight, eps, head_dim: tl.constexpr, dtype: tl.constexpr):
    """Normalise heads, (HEADS, HEAD_DIM) in float32, given in two orders of their dimensions."""
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / head_dim + eps)[:, None]
    # Rounded after the division and after the weight, as PyTorch does it.
    x = (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)[None, :]
    other = (other * scale).to(weight.dtype).to(tl.float32) * other_weight.to(tl.float32)[None, :]
    return x.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)


@triton.jit
def _attend(q, k, v, is_visible, scale_log2, maximum, total, acc):
    """Go on with the online softmax over a tile of keys and values, (TILE, HEAD_DIM)."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    scores = tl.where(is_visible[None, :], scores, MASKED)
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    decay = tl.exp2(maximum - new_maximum)
    weights = tl.exp2(scores - new_maximum[:, None])
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_maximum, total * decay + tl.sum(weights, axis=1), acc


@triton.jit(do_not_specialize=["num_rows", "num_wanted"])
def _few_rows_attention_kernel(
    qkv_ptr,
    q_weight_ptr,  # None, like k_weight_ptr, for a model without q/k norms
    k_weight_ptr,
    positions_ptr,
    cos_sin_ptr,  # (max_positions, rotary_dim) float32: cosines, then sines
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    block_tables_ptr,
    out_ptr,
    partials_ptr,  # (num_splits, num_heads, head_dim) float32: the partial results of rows with several splits
    lse_ptr,  # (num_splits, num_heads) float32: the log-sum-exp of each, to base 2
    qkv_row_stride,
    block_table_stride,
    scale_log2,  # scale * log2(e): the softmax is computed in powers of two
    eps,
    num_rows,
    num_wanted,  # splits
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # head_dim, rounded up to a power of two
    QUERIES: tl.constexpr,  # group_size, padded
    TILE: tl.constexpr,  # divides block_size, so that a tile lies within one block
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    kv_head, place = tl.program_id(0), tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    num_tiles, tiles_per_split, ends = _splits(context_lens_ptr, num_rows, num_wanted, TILE, ROWS)
    rows = tl.arange(0, ROWS)
    row = tl.sum((ends <= place).to(tl.int32), axis=0)
    if row >= num_rows:
        return
    row_tiles = tl.sum(tl.where(rows == row, num_tiles, 0), axis=0)
    row_end = tl.sum(tl.where(rows == row, ends, 0), axis=0)
    num_splits = tl.cdiv(row_tiles, tiles_per_split)
    first = (place - row_end + num_splits) * tiles_per_split
    last = tl.minimum(first + tiles_per_split, row_tiles)
    has_new_token = place == row_end - 1

    dim, token = tl.arange(0, HEAD_DIM), tl.arange(0, TILE)
    is_dim = dim < head_dim
    num_old = tl.load(context_lens_ptr + row) - 1
    table_ptr = block_tables_ptr + row.to(tl.int64) * block_table_stride
    tile_offsets = token[:, None] * head_dim + dim[None, :]
    head_offset = kv_head * block_size * head_dim
    block_stride = num_kv_heads * block_size * head_dim

    block = tl.load(table_ptr + first * TILE // block_size, mask=num_old > 0, other=0).to(tl.int64)
    start = block * block_stride + head_offset + first * TILE % block_size * head_dim
    is_visible = first * TILE + token < num_old
    mask = is_visible[:, None] & is_dim[None, :]
    k = tl.load(k_cache_ptr + start + tile_offsets, mask=mask, other=0.0)
    v = tl.load(v_cache_ptr + start + tile_offsets, mask=mask, other=0.0)
    # The first halves of what is rotated go with the second halves, which follow them.
    is_rotated, is_first = dim < rotary_dim, dim < rotary_dim // 2
    angle = tl.where(is_first, dim, dim - rotary_dim // 2)
    partner = tl.where(is_first, dim + rotary_dim // 2, tl.where(is_rotated, angle, dim))
    cos_ptrs = cos_sin_ptr + tl.load(positions_ptr + row) * rotary_dim + angle
    cos = tl.load(cos_ptrs, mask=is_rotated, other=1.0)
    sin = tl.load(cos_ptrs + rotary_dim // 2, mask=is_rotated, other=0.0)
    sin = tl.where(is_first, -sin, sin)
    slot = tl.load(slot_mapping_ptr + row)
    if q_weight_ptr is not None:
        q_weight, other_q_weight = _load_two(q_weight_ptr, dim, partner, is_dim)
        k_weight, other_k_weight = _load_two(k_weight_ptr, dim, partner, is_dim)
    if OVERLAP:
        # No instruction: it keeps the compiler from waiting for the keys before it has asked for the values.
        k = tl.inline_asm_elementwise("// $0 $1", "=r,0", [k], k.dtype, is_pure=False, pack=2)
        v = tl.inline_asm_elementwise("// $0 $1", "=r,0", [v], v.dtype, is_pure=False, pack=2)
        tl.extra.cuda.gdc_wait()

    query, one = tl.arange(0, QUERIES), tl.arange(0, 1)
    is_query = query < group_size
    row_ptr = qkv_ptr + row.to(tl.int64) * qkv_row_stride
    q_ptrs = row_ptr + (kv_head * group_size + query[:, None]) * head_dim
    k_ptrs = row_ptr + (group_size * num_kv_heads + kv_head + one[:, None]) * head_dim
    is_out = is_query[:, None] & is_dim[None, :]
    q = tl.load(q_ptrs + dim[None, :], mask=is_out, other=0.0)
    other_q = tl.load(q_ptrs + partner[None, :], mask=is_out, other=0.0).to(tl.float32)
    new_k = tl.load(k_ptrs + dim[None, :], mask=is_dim[None, :], other=0.0).to(tl.float32)
    other_k = tl.load(k_ptrs + partner[None, :], mask=is_dim[None, :], other=0.0).to(tl.float32)
    new_v = tl.load(k_ptrs + num_kv_heads * head_dim + dim[None, :], mask=is_dim[None, :], other=0.0)
    dtype: tl.constexpr = q.dtype
    q = q.to(tl.float32)
    if q_weight_ptr is not None:
        q, other_q = _normed(q, other_q, q_weight, other_q_weight, eps, head_dim, dtype)
        new_k, other_k = _normed(new_k, other_k, k_weight, other_k_weight, eps, head_dim, dtype)
    q = (q * cos[None, :] + other_q * sin[None, :]).to(dtype)
    new_k = (new_k * cos[None, :] + other_k * sin[None, :]).to(dtype)
    if has_new_token & (slot >= 0):
        target = slot // block_size * block_stride + head_offset + slot % block_size * head_dim
        new_offsets = target + one[:, None] * head_dim + dim[None, :]
        tl.store(k_cache_ptr + new_offsets, new_k, mask=is_dim[None, :])
        tl.store(v_cache_ptr + new_offsets, new_v, mask=is_dim[None, :])

    score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1) * scale_log2
    maximum = tl.where(has_new_token, score, float("-inf"))
    total = tl.zeros((QUERIES,), tl.float32) + has_new_token.to(tl.float32)
    acc = tl.zeros((QUERIES, HEAD_DIM), tl.float32) + tl.where(has_new_token, new_v.to(tl.float32), 0.0)
    maximum, total, acc = _attend(q, k, v, is_visible, scale_log2, maximum, total, acc)
    for tile in tl.range(first + 1, last, num_stages=STAGES):
        block = tl.load(table_ptr + tile * TILE // block_size).to(tl.int64)
        start = block * block_stride + head_offset + tile * TILE % block_size * head_dim
        is_visible = tile * TILE + token < num_old
        mask = is_visible[:, None] & is_dim[None, :]
        k = tl.load(k_cache_ptr + start + tile_offsets, mask=mask, other=0.0)
        v = tl.load(v_cache_ptr + start + tile_offsets, mask=mask, other=0.0)
        maximum, total, acc = _attend(q, k, v, is_visible, scale_log2, maximum, total, acc)

    result = acc / total[:, None]
    line = tl.where(num_splits == 1, row, place) * (num_kv_heads * group_size) + kv_head * group_size + query
    offsets = line[:, None] * head_dim + dim[None, :]
    if num_splits == 1:
        tl.store(out_ptr + offsets, result.to(dtype), mask=is_out)
    else:
        tl.store(partials_ptr + offsets, result, mask=is_out)
        tl.store(lse_ptr + line, maximum + tl.log2(total), mask=is_query)


@triton.jit(do_not_specialize=["num_rows", "num_wanted"])
def _combine_kernel(
    context_lens_ptr,
    partials_ptr,
    lse_ptr,
    out_ptr,
    num_rows,
    num_wanted,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,  # partial results to combine at a time
    OVERLAP: tl.constexpr,
):
    """Combine the partial results of a head of a row."""
    head, row = tl.program_id(0), tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    num_tiles, tiles_per_split, ends = _splits(context_lens_ptr, num_rows, num_wanted, TILE, ROWS)
    rows = tl.arange(0, ROWS)
    num_splits = tl.cdiv(tl.sum(tl.where(rows == row, num_tiles, 0), axis=0), tiles_per_split)
    first = tl.sum(tl.where(rows == row, ends, 0), axis=0) - num_splits
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if num_splits > 1:
        dim = tl.arange(0, HEAD_DIM)
        maximum, total, acc = float("-inf"), 0.0, tl.zeros((HEAD_DIM,), tl.float32)
        for start in range(0, num_splits, SPLITS):
            split = start + tl.arange(0, SPLITS)
            line = (first + split) * num_heads + head
            lse = tl.load(lse_ptr + line, mask=split < num_splits, other=float("-inf"))
            mask = (split < num_splits)[:, None] & (dim < head_dim)[None, :]
            partials = tl.load(partials_ptr + line[:, None] * head_dim + dim[None, :], mask=mask, other=0.0)
            new_maximum = tl.maximum(maximum, tl.max(lse, axis=0))
            decay, weights = tl.exp2(maximum - new_maximum), tl.exp2(lse - new_maximum)
            acc = acc * decay + tl.sum(partials * weights[:, None], axis=0)
            total = total * decay + tl.sum(weights, axis=0)
            maximum = new_maximum
        result = (acc / total).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (row * num_heads + head) * head_dim + dim, result, mask=dim < head_dim)


def few_rows_attention(
    qkv: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    """Write each row's new key and value to the cache, and attend from its new token: (num_rows, num_heads, head_dim).

    qkv: (num_rows, (num_heads + 2 * num_kv_heads) * head_dim), rows contiguous; it is left as it is.
    norm_weights: of queries and keys, (head_dim,) each; None for a model without q/k norms.
    positions: (num_rows,) int. cos_sin_cache: (max_positions, rotary_dim) float32, contiguous.
    k_cache, v_cache: (num_blocks, num_kv_heads, block_size, head_dim), contiguous, in the dtype of qkv.
    slot_mapping: (num_rows,) int64; -1 skips the write. context_lens: (num_rows,) int32, the new token included; the
    result of a row without context is undefined. block_tables: (num_rows, max_blocks) int32. scale: of the scores.
    """
    num_rows, (_, num_kv_heads, block_size, head_dim) = len(qkv), k_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    assert qkv.stride(1) == 1, f"the rows of qkv must be contiguous, strides {qkv.stride()}"
    assert k_cache.is_contiguous(), "the keys of the cache must be contiguous"
    assert v_cache.is_contiguous(), "the values of the cache must be contiguous"
    out = qkv.new_empty(num_rows, num_heads, head_dim)
    if num_rows == 0:
        return out
    num_wanted = max(1, num_multiprocessors(qkv.device) * PROGRAMS_PER_SM // num_kv_heads)
    num_splits = num_wanted + num_rows  # one more a row at most, as the last one need not be full
    partials = out.new_empty(num_splits, num_heads, head_dim, dtype=torch.float32)
    lse = partials.new_empty(num_splits, num_heads)
    padded_dim = max(64, triton.next_power_of_2(head_dim))
    shape = {"head_dim": head_dim, "HEAD_DIM": padded_dim}
    tile = math.gcd(block_size, TILE_ELEMENTS // padded_dim)
    tiles = {"TILE": tile, "ROWS": max(16, triton.next_power_of_2(num_rows))}
    _few_rows_attention_kernel[(num_kv_heads, num_splits)](
        qkv,
        *(norm_weights or (None, None)),
        positions,
        cos_sin_cache,
        k_cache,
        v_cache,
        slot_mapping,
        context_lens,
        block_tables,
        out,
        partials,
        lse,
        qkv.stride(0),
        block_tables.stride(0),
        scale * math.log2(math.e),
        eps,
        num_rows,
        num_wanted,
        num_kv_heads=num_kv_heads,
        group_size=num_heads // num_kv_heads,
        block_size=block_size,
        rotary_dim=cos_sin_cache.shape[1],
        QUERIES=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        STAGES=STAGES,
        num_warps=4,
        **shape,
        **tiles,
        **overlap_options(qkv.device),
    )
    _combine_kernel[(num_heads, num_rows)](
        context_lens,
        partials,
        lse,
        out,
        num_rows,
        num_wanted,
        num_heads=num_heads,
        SPLITS=16,
        num_warps=2,
        **shape,
        **tiles,
        **overlap_options(qkv.device),
    )
    return out
