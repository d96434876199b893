"""Decode attention over the paged cache: one query token for each row. Twin: `TorchBackend.decode`.

Decode is bound by reading keys and values once. One program serves one KV head of one row; the query heads that share
it are packed into a tile of 16 rows, so that the reads are shared and the products run on tensor cores. The softmax is
computed online over tiles of the context (Milakov and Gimelshein 2018; Dao et al. 2022).
"""

import math

import triton
import triton.language as tl
from torch import Tensor

MAX_TILE = 128  # tokens of the context in a tile
QUERY_TILE = 16  # the fewest rows that tl.dot takes; the group of query heads is padded to it


@triton.jit
def _paged_decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,
    scale_log2,  # head_dim ** -0.5 * log2(e): the softmax is computed in powers of two
    q_row_stride,
    block_table_stride,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,  # divides block_size, so a tile lies within one block
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    context_len = tl.load(context_lens_ptr + row)

    query = tl.arange(0, QUERIES)
    dim = tl.arange(0, head_dim)
    token = tl.arange(0, TILE)
    is_query = (query < group_size)[:, None]
    heads = (kv_head * group_size + query)[:, None] * head_dim + dim[None, :]  # offsets within a row
    q = tl.load(q_ptr + row * q_row_stride + heads, mask=is_query, other=0.0)

    maximum = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, head_dim), tl.float32)
    for start in range(0, context_len, TILE):
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
    # A padding row has no context: its total is 0 and its output is 0.
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_row = row * (num_kv_heads * group_size * head_dim)
    tl.store(out_ptr + out_row + heads, out.to(out_ptr.dtype.element_ty), mask=is_query)


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
    out = q.new_empty(q.shape)
    _paged_decode_kernel[(num_rows, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        out,
        head_dim**-0.5 * math.log2(math.e),
        q.stride(0),
        block_tables.stride(0),
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        block_size=block_size,
        head_dim=head_dim,
        QUERIES=max(QUERY_TILE, triton.next_power_of_2(group_size)),
        TILE=math.gcd(block_size, MAX_TILE),
        num_warps=4,
        num_stages=3,
    )
    return out
