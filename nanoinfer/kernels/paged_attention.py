"""Decode attention over the paged cache: one query token for each row. Twin: `TorchBackend.decode`.

Decode is bound by reading keys and values once. One program serves one KV head of one row; the query heads that share
it are packed into a tile of 16 rows, so that the reads are shared and the products run on tensor cores. The softmax is
computed online over tiles of the context (Milakov and Gimelshein 2018; Dao et al. 2022). Where there are too few rows
to fill the GPU, each context is split between several programs and a second kernel combines their results
(flash-decoding, Dao et al. 2023).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TILE = 128  # tokens of the context in a tile
QUERY_TILE = 16  # the fewest rows that tl.dot takes; the group of query heads is padded to it
NUM_PROGRAMS = 1024  # what it takes to keep a large GPU's memory busy
MAX_SPLITS = 64


@triton.jit
def _paged_decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,  # (num_rows, num_heads, splits, head_dim)
    log_sums_ptr,  # (num_rows, num_heads, splits) float32: log2 of each part's softmax denominator
    scale_log2,  # head_dim ** -0.5 * log2(e): the softmax is computed in powers of two
    q_row_stride,
    block_table_stride,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    splits: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,  # divides block_size, so a tile lies within one block
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(context_lens_ptr + row)
    split_len = tl.cdiv(tl.cdiv(context_len, TILE), splits) * TILE
    split_end = tl.minimum(context_len, (split + 1) * split_len)

    query = tl.arange(0, QUERIES)
    dim = tl.arange(0, head_dim)
    token = tl.arange(0, TILE)
    is_query = query < group_size
    head = kv_head * group_size + query
    q_offsets = row * q_row_stride + head[:, None] * head_dim + dim[None, :]
    q = tl.load(q_ptr + q_offsets, mask=is_query[:, None], other=0.0)

    maximum = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, head_dim), tl.float32)
    for start in range(split * split_len, split_end, TILE):
        block = tl.load(block_tables_ptr + row * block_table_stride + start // block_size).to(tl.int64)
        first = ((block * num_kv_heads + kv_head) * block_size + start % block_size) * head_dim
        tile = first + token[:, None] * head_dim + dim[None, :]
        visible = start + token < context_len
        # Masked loads: what lies past the context may be NaN, and 0 x NaN is NaN.
        k = tl.load(k_cache_ptr + tile, mask=visible[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        decay = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        v = tl.load(v_cache_ptr + tile, mask=visible[:, None], other=0.0)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * decay + tl.sum(weights, axis=1)
        maximum = new_maximum

    # A part without tokens, or a padding row, has a total of 0: its output is 0 and its weight 2^-inf.
    part = (row * num_kv_heads * group_size + head) * splits + split
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_offsets = part[:, None] * head_dim + dim[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=is_query[:, None])
    if splits > 1:
        log_sum = tl.where(total > 0, maximum + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(log_sums_ptr + part, log_sum, mask=is_query)


@triton.jit
def _combine_splits_kernel(parts_ptr, log_sums_ptr, out_ptr, head_dim: tl.constexpr, splits: tl.constexpr):
    """One program weighs the parts of one head of one row by their share of the softmax denominator."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, splits)
    dim = tl.arange(0, head_dim)
    log_sums = tl.load(log_sums_ptr + head * splits + split)
    maximum = tl.max(log_sums, axis=0)
    weights = tl.exp2(log_sums - tl.where(maximum > float("-inf"), maximum, 0.0))
    parts = tl.load(parts_ptr + (head * splits + split)[:, None] * head_dim + dim[None, :])
    total = tl.sum(weights, axis=0)
    out = tl.sum(parts * weights[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + head * head_dim + dim, out.to(out_ptr.dtype.element_ty))


def choose_splits(num_rows: int, num_kv_heads: int) -> int:
    """Into how many parts to split each context, a power of two; it depends on shapes alone, as a CUDA graph must."""
    wanted = max(1, NUM_PROGRAMS // max(1, num_rows * num_kv_heads))
    return min(MAX_SPLITS, 1 << (wanted.bit_length() - 1))


def paged_decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor
) -> Tensor:
    """Attend from one token for each row to its `context_lens` cached tokens; the result has the shape of q.

    q: (num_rows, num_heads, head_dim), heads contiguous; head_dim a power of two, num_heads a multiple of the KV heads.
    k_cache, v_cache: (num_blocks, num_kv_heads, block_size, head_dim), contiguous; block_size a multiple of 16.
    block_tables: (num_rows, max_blocks) int32. context_lens: (num_rows,) int32, 0 for padding.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group_size = num_heads // num_kv_heads
    splits = choose_splits(num_rows, num_kv_heads)
    out = q.new_empty(q.shape)
    parts = out if splits == 1 else q.new_empty((num_rows, num_heads, splits, head_dim), dtype=torch.float32)
    log_sums = out if splits == 1 else q.new_empty((num_rows, num_heads, splits), dtype=torch.float32)
    _paged_decode_kernel[(num_rows, num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        parts,
        log_sums,
        head_dim**-0.5 * math.log2(math.e),
        q.stride(0),
        block_tables.stride(0),
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        block_size=block_size,
        head_dim=head_dim,
        splits=splits,
        QUERIES=max(QUERY_TILE, triton.next_power_of_2(group_size)),
        TILE=math.gcd(block_size, MAX_TILE),
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        _combine_splits_kernel[(num_rows * num_heads,)](parts, log_sums, out, head_dim=head_dim, splits=splits)
    return out
