"""Paged prefill attention for Hopper GPUs, in Gluon.

It computes what `paged_prefill_attention` does, from the same tiles, and is the faster the longer the contexts: the
warps of a program have parts of their own (FlashAttention 3, Shah et al. 2024).

- One warp fetches queries, keys and values: one bulk copy (TMA) brings a whole tile into shared memory.
- Two groups of four warps attend, each from half of a tile's queries. While one adds up its weights, the other
  multiplies; and each begins the next scores before it adds up the last ones.
- Barriers in shared memory say when a buffer is full and when it may be filled again.
- As many programs run as there are multiprocessors, and each takes the next tile when it is done with one, so that
  long and short ones even out.

Triton's interpreter does not run Gluon: the kernel is compared with its specification on a GPU alone, and a CPU only
compiles it.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanoinfer.ops.common.device_properties import num_multiprocessors
from nanoinfer.ops.common.hopper import (
    MAX_REGISTERS,
    SWIZZLED,
    SWIZZLED_HEADS,
    attention_barriers,
    clear_values,
    load_tile,
    thread_barrier,
)
from nanoinfer.ops.prefill_attention.triton import TILE_ROWS

KEYS = 128  # of a tile
STAGES = 2  # tiles of keys and of values that shared memory holds
ATTENDING_REGISTERS, LOADING_REGISTERS = 240, 24  # as MAX_REGISTERS are shared out


@gluon.jit
def _read_tile(tiles_ptr, item, num_tiles):
    """Return an item's KV head and its tile (see `plan_prefill`). Items of a head are together, for the L2 cache."""
    tile_ptr = tiles_ptr + (item % num_tiles) * 4
    tile = gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2), gl.load(tile_ptr + 3)
    return item // num_tiles, tile


@gluon.jit
def _fetch(
    descriptors,
    pointers,
    num_tiles,
    num_items,
    block_table_stride,
    buffers,
    full,
    empty,
    num_kv_heads: gl.constexpr,
    group_size: gl.constexpr,
    block_size: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Take one item after the other, and fetch what it needs."""
    q_desc, k_desc, v_desc = descriptors
    tiles_ptr, block_tables_ptr, _, counters_ptr, _ = pointers
    q, k, v, current = buffers
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    half_tokens: gl.constexpr = q.shape[1] // group_size
    count = 0
    q_phase = 1  # the phase before the first counts as complete
    item = gl.program_id(0)
    while item < num_items:
        kv_head, tile = _read_tile(tiles_ptr, item, num_tiles)
        first_token, num_tokens, first_position, chunk = tile
        mbarrier.wait(q_empty, q_phase)
        q_phase ^= 1
        current.store(gl.full([1], item, gl.int32, one))
        thread_barrier()
        mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
        for half in gl.static_range(2):
            place = q.index(half).reshape(q_desc.block_type.shape)
            token = first_token + half * half_tokens
            load_tile(q_desc, [token, kv_head * group_size, 0], q_full, place)
        table_ptr = block_tables_ptr + chunk.to(gl.int64) * block_table_stride
        for start in range(0, first_position + num_tokens, KEYS):
            block = gl.load(table_ptr + start // block_size)
            line = (block * num_kv_heads + kv_head) * block_size + start % block_size
            stage = count % STAGES
            phase = (count // STAGES) & 1 ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            load_tile(k_desc, [line, 0], k_full.index(stage), k.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            load_tile(v_desc, [line, 0], v_full.index(stage), v.index(stage))
            count += 1
        item = gl.num_programs(0) + gl.atomic_add(counters_ptr, 1)
    mbarrier.wait(q_empty, q_phase)
    current.store(gl.full([1], num_items, gl.int32, one))
    thread_barrier()
    mbarrier.arrive(q_full, count=1)
    # The last program leaves the counters as it found them.
    if gl.atomic_add(counters_ptr + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters_ptr, 0)
        gl.store(counters_ptr + 1, 0)


@gluon.jit
def _masked(scores, position, start, KEYS: gl.constexpr):
    key = start + gl.arange(0, KEYS, gl.SliceLayout(0, scores.type.layout))
    return gl.where(key[None, :] <= position[:, None], scores, float("-inf"))


@gluon.jit
def _attend(
    half: gl.constexpr,
    pointers,
    num_tiles,
    num_items,
    scale_log2,
    buffers,
    full,
    empty,
    v_clean,
    num_kv_heads: gl.constexpr,
    group_size: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attend from half of the queries of each item that is fetched."""
    tiles_ptr, _, cu_context_lens_ptr, _, out_ptr = pointers
    q, k, v, current = buffers
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    dtype: gl.constexpr = q.dtype
    num_rows: gl.constexpr = q.shape[1]
    head_dim: gl.constexpr = q.shape[2]
    first_own: gl.constexpr = half * (num_rows // group_size)  # token of the tile
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    zeros = gl.zeros([num_rows, KEYS], gl.float32, scores_layout)
    queries = q.index(half)
    row_token = first_own + gl.arange(0, num_rows, gl.SliceLayout(1, scores_layout)) // group_size
    count = 0
    q_phase = 0
    clean_phase = 0
    item = gl.program_id(0)
    mbarrier.wait(q_full, q_phase)
    while item < num_items:
        q_phase ^= 1
        kv_head, tile = _read_tile(tiles_ptr, item, num_tiles)
        first_token, num_tokens, first_position, chunk = tile
        context_len = gl.load(cu_context_lens_ptr + chunk + 1) - gl.load(cu_context_lens_ptr + chunk)
        end = first_position + num_tokens
        last_start = (end - 1) // KEYS * KEYS
        if num_tokens <= first_own:  # nothing to attend from: let the tiles of keys pass
            for start in range(0, end, KEYS):
                stage = count % STAGES
                phase = (count // STAGES) & 1
                mbarrier.wait(k_full.index(stage), phase)
                mbarrier.arrive(k_empty.index(stage), count=1)
                mbarrier.wait(v_full.index(stage), phase)
                if start + KEYS > context_len:
                    clear_values(v.index(stage), None, half, context_len - start, v_clean, clean_phase, KEYS)
                    clean_phase ^= 1
                mbarrier.arrive(v_empty.index(stage), count=1)
                count += 1
            mbarrier.arrive(q_empty, count=1)
        else:
            position = first_position + row_token
            stage = count % STAGES
            mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
            scores = warpgroup_mma(queries, k.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            if first_position + 1 < KEYS:
                scores = _masked(scores, position, 0, KEYS)
            maximum = gl.max(scores, 1) * scale_log2
            weights = gl.exp2(scores * scale_log2 - maximum[:, None])
            total = gl.sum(weights, 1)
            weights = gl.convert_layout(weights.to(dtype), weights_layout)
            acc = gl.zeros([num_rows, head_dim], gl.float32, acc_layout)
            for start in range(KEYS, end, KEYS):
                previous, previous_phase = stage, (count // STAGES) & 1
                count += 1
                stage = count % STAGES
                mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
                scores = warpgroup_mma(queries, k.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(previous), previous_phase)
                acc = warpgroup_mma(weights, v.index(previous), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[scores])
                mbarrier.arrive(k_empty.index(stage), count=1)
                if first_position + 1 < start + KEYS:
                    scores = _masked(scores, position, start, KEYS)
                new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale_log2)
                decay = gl.exp2(maximum - new_maximum)
                new_weights = gl.exp2(scores * scale_log2 - new_maximum[:, None])
                total = total * decay + gl.sum(new_weights, 1)
                maximum = new_maximum
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_empty.index(previous), count=1)
                acc = acc * gl.convert_layout(decay, acc_rows)[:, None]
                weights = gl.convert_layout(new_weights.to(dtype), weights_layout)
            mbarrier.arrive(q_empty, count=1)
            mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
            if last_start + KEYS > context_len:
                clear_values(v.index(stage), None, half, context_len - last_start, v_clean, clean_phase, KEYS)
                clean_phase ^= 1
            acc = warpgroup_mma(weights, v.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(stage), count=1)
            count += 1
            acc = acc * gl.convert_layout(1 / total, acc_rows)[:, None]
            row = gl.arange(0, num_rows, acc_rows)
            token = first_own + row // group_size
            head = kv_head * group_size + row % group_size
            offsets = ((first_token + token).to(gl.int64) * (num_kv_heads * group_size) + head) * head_dim
            dim = gl.arange(0, head_dim, gl.SliceLayout(0, acc_layout))
            gl.store(out_ptr + offsets[:, None] + dim[None, :], acc.to(dtype), mask=(token < num_tokens)[:, None])
        mbarrier.wait(q_full, q_phase)
        item = gl.max(current.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit(do_not_specialize=["num_tiles"])
def _hopper_prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    tiles_ptr,
    block_tables_ptr,
    cu_context_lens_ptr,
    counters_ptr,
    scale_log2,  # scale * log2(e): the softmax is computed in powers of two
    block_table_stride,
    num_tiles,
    num_kv_heads: gl.constexpr,
    group_size: gl.constexpr,
    block_size: gl.constexpr,
    head_dim: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,  # divides block_size, so a tile of keys lies within one block
    STAGES: gl.constexpr,
    ATTENDING_REGISTERS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
):
    tiles: gl.constexpr = k_desc.layout
    q = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS // 2, head_dim], tiles)
    k = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, head_dim], tiles)
    v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, KEYS, head_dim], tiles)
    current = gl.allocate_shared_memory(gl.int32, [1], mbarrier.MBarrierLayout())  # the item that is fetched
    full, empty, v_clean = attention_barriers(STAGES)
    num_items = num_tiles * num_kv_heads
    descriptors = (q_desc, k_desc, v_desc)
    pointers = (tiles_ptr, block_tables_ptr, cu_context_lens_ptr, counters_ptr, out_ptr)
    buffers = (q, k, v, current)
    # The constants are named in the call itself: a variable would make numbers of a step of them.
    gl.warp_specialize(
        [
            (_attend, (
                gl.constexpr(0), pointers, num_tiles, num_items, scale_log2, buffers, full, empty, v_clean,
                num_kv_heads, group_size, KEYS, STAGES,
            )),
            (_attend, (
                gl.constexpr(1), pointers, num_tiles, num_items, scale_log2, buffers, full, empty, v_clean,
                num_kv_heads, group_size, KEYS, STAGES,
            )),
            (_fetch, (
                descriptors, pointers, num_tiles, num_items, block_table_stride, buffers, full, empty,
                num_kv_heads, group_size, block_size, KEYS, STAGES,
            )),
        ],
        [4, 1],
        [ATTENDING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def hopper_prefill_attention(q, k_cache, v_cache, tiles, counters, block_tables, cu_context_lens, scale):
    """Attend from all tokens of a step's chunks to their contexts; the result has the shape of q.

    The shapes are those of `paged_prefill_attention`; what else must hold, `serves` says. counters: (2,) int32 zeros,
    which are zeros again at the end. cu_context_lens: (num_chunks + 1,) int32, where each chunk's context would begin
    and end if all were laid end to end.
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    group_size = num_heads // num_kv_heads
    out = q.new_empty(q.shape)
    half = [TILE_ROWS // 2 // group_size, group_size, head_dim]
    lines = [[k_cache.numel() // head_dim, head_dim], [head_dim, 1], [KEYS, head_dim], SWIZZLED]
    num_items = len(tiles) * num_kv_heads
    _hopper_prefill_kernel[(min(num_multiprocessors(q.device), num_items),)](
        TensorDescriptor.from_tensor(q, half, SWIZZLED_HEADS),
        TensorDescriptor(k_cache, *lines),
        TensorDescriptor(v_cache, *lines),
        out,
        tiles,
        block_tables,
        cu_context_lens,
        counters,
        scale * math.log2(math.e),
        block_tables.stride(0),
        len(tiles),
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        block_size=block_size,
        head_dim=head_dim,
        ROWS=TILE_ROWS,
        KEYS=KEYS,
        STAGES=STAGES,
        ATTENDING_REGISTERS=ATTENDING_REGISTERS,
        LOADING_REGISTERS=LOADING_REGISTERS,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )
    return out


def serves(head_dim: int, group_size: int, block_size: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes heads and a cache like these: full attention, in 16 bits."""
    divides = TILE_ROWS // 2 % group_size == 0
    return head_dim in (64, 128) and divides and block_size % KEYS == 0 and dtype in (torch.bfloat16, torch.float16)
