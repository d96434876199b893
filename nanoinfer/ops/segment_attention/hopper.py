"""Attention within segments for Hopper GPUs, in Gluon: each patch of an image attends to all patches of its image.

It is built as the kernel of prefill (`ops/prefill_attention/hopper.py`), where its parts are explained: one warp
fetches tiles, and two groups of four warps attend from half of a tile's queries each. What differs:

- The heads of what sees have 64, 72 or 80 numbers. They are fetched in two parts, of 64 and of 16, so that tensor cores
  multiply hardly more than there is; bulk copies fill with zeros what is beyond a head.
- Queries, keys and values may be views of one product, whose rows bulk copies find by themselves.
- Nothing is masked but keys beyond a segment, in its last tile.

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
)

TILE_ROWS = 128  # queries of a tile
KEYS = 128  # of a tile
STAGES = 3  # tiles of keys and of values that shared memory holds
FIRST, REST = 64, 16  # numbers of a head in its two parts
ATTENDING_REGISTERS, LOADING_REGISTERS = 240, 24  # as MAX_REGISTERS are shared out
HEAD_DIMS = (64, 72, 80)

NARROW = gl.NVMMASharedLayout(32, 16, rank=2)  # rows of 32 bytes, of the second part
NARROW_HEADS = gl.NVMMASharedLayout(32, 16, rank=3)


@gluon.jit
def _read_tile(tiles_ptr, item, num_tiles):
    """Return an item's head, and its tile: its first query, and where its segment begins and ends."""
    tile_ptr = tiles_ptr + (item % num_tiles) * 3
    return item // num_tiles, gl.load(tile_ptr), gl.load(tile_ptr + 1), gl.load(tile_ptr + 2)


@gluon.jit
def _fetch_part(desc, token, head, dim, full, place):
    load_tile(desc, [token, head, dim], full, place.reshape(desc.block_type.shape))


@gluon.jit
def _fetch(
    descriptors,
    tiles_ptr,
    num_tiles,
    num_items,
    buffers,
    full,
    empty,
    FIRST: gl.constexpr,
    HAS_REST: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Take one item after the other, and fetch what it needs."""
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc = descriptors
    q, q_rest, k, k_rest, v, v_rest = buffers
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    half_rows: gl.constexpr = q.shape[1]
    q_bytes: gl.constexpr = q_desc.block_type.nbytes + (q_rest_desc.block_type.nbytes if HAS_REST else 0)
    tile_bytes: gl.constexpr = k_desc.block_type.nbytes + (k_rest_desc.block_type.nbytes if HAS_REST else 0)
    count = 0
    q_phase = 1  # the phase before the first counts as complete
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, first_query, first_key, end = _read_tile(tiles_ptr, item, num_tiles)
        mbarrier.wait(q_empty, q_phase)
        q_phase ^= 1
        mbarrier.expect(q_full, 2 * q_bytes)
        for half in gl.static_range(2):
            _fetch_part(q_desc, first_query + half * half_rows, head, 0, q_full, q.index(half))
            if HAS_REST:
                _fetch_part(q_rest_desc, first_query + half * half_rows, head, FIRST, q_full, q_rest.index(half))
        for start in range(first_key, end, KEYS):
            stage = count % STAGES
            phase = (count // STAGES) & 1 ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), tile_bytes)
            _fetch_part(k_desc, start, head, 0, k_full.index(stage), k.index(stage))
            if HAS_REST:
                _fetch_part(k_rest_desc, start, head, FIRST, k_full.index(stage), k_rest.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), tile_bytes)
            _fetch_part(v_desc, start, head, 0, v_full.index(stage), v.index(stage))
            if HAS_REST:
                _fetch_part(v_rest_desc, start, head, FIRST, v_full.index(stage), v_rest.index(stage))
            count += 1


@gluon.jit
def _begin_scores(queries, q_rest, k, k_rest, zeros, HAS_REST: gl.constexpr):
    scores = warpgroup_mma(queries, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if HAS_REST:
        scores = warpgroup_mma(q_rest, k_rest.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _attend(
    half: gl.constexpr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    num_items,
    num_heads,
    scale_log2,
    buffers,
    full,
    empty,
    v_clean,
    head_dim: gl.constexpr,
    FIRST: gl.constexpr,
    REST: gl.constexpr,
    HAS_REST: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attend from half of the queries of each item that is fetched."""
    q, q_rest, k, k_rest, v, v_rest = buffers
    q_full, k_full, v_full = full
    q_empty, k_empty, v_empty = empty
    dtype: gl.constexpr = q.dtype
    num_rows: gl.constexpr = q.shape[1]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    rest_rows: gl.constexpr = gl.SliceLayout(1, rest_layout)
    zeros = gl.zeros([num_rows, KEYS], gl.float32, scores_layout)
    key = gl.arange(0, KEYS, gl.SliceLayout(0, scores_layout))
    queries = q.index(half)
    queries_rest = q_rest.index(half)
    count = 0
    q_phase = 0
    clean_phase = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        head, first_query, first_key, end = _read_tile(tiles_ptr, item, num_tiles)
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
        scores = _begin_scores(queries, queries_rest, k.index(stage), k_rest.index(stage), zeros, HAS_REST)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        if first_key + KEYS > end:
            scores = gl.where((first_key + key < end)[None, :], scores, float("-inf"))
        maximum = gl.max(scores, 1) * scale_log2
        weights = gl.exp2(scores * scale_log2 - maximum[:, None])
        total = gl.sum(weights, 1)
        weights = weights.to(dtype)
        acc = gl.zeros([num_rows, FIRST], gl.float32, acc_layout)
        acc_rest = gl.zeros([num_rows, REST], gl.float32, rest_layout)
        for start in range(first_key + KEYS, end, KEYS):
            previous, previous_phase = stage, (count // STAGES) & 1
            count += 1
            stage = count % STAGES
            mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
            scores = _begin_scores(queries, queries_rest, k.index(stage), k_rest.index(stage), zeros, HAS_REST)
            mbarrier.wait(v_full.index(previous), previous_phase)
            acc_weights = gl.convert_layout(weights, gl.DotOperandLayout(0, acc_layout, 2))
            acc = warpgroup_mma(acc_weights, v.index(previous), acc, is_async=True)
            if HAS_REST:
                rest_weights = gl.convert_layout(weights, gl.DotOperandLayout(0, rest_layout, 2))
                acc_rest = warpgroup_mma(rest_weights, v_rest.index(previous), acc_rest, is_async=True)
                scores = warpgroup_mma_wait(2, deps=[scores])
            else:
                scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            if start + KEYS > end:
                scores = gl.where((start + key < end)[None, :], scores, float("-inf"))
            new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale_log2)
            decay = gl.exp2(maximum - new_maximum)
            new_weights = gl.exp2(scores * scale_log2 - new_maximum[:, None])
            total = total * decay + gl.sum(new_weights, 1)
            maximum = new_maximum
            if HAS_REST:
                acc, acc_rest = warpgroup_mma_wait(0, deps=[acc, acc_rest])
                acc_rest = acc_rest * gl.convert_layout(decay, rest_rows)[:, None]
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(previous), count=1)
            acc = acc * gl.convert_layout(decay, acc_rows)[:, None]
            weights = new_weights.to(dtype)
        mbarrier.arrive(q_empty, count=1)
        mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
        num_valid = (end - first_key - 1) % KEYS + 1
        if num_valid < KEYS:
            values, rest = v.index(stage), v_rest.index(stage) if HAS_REST else None
            clear_values(values, rest, half, num_valid, v_clean, clean_phase, KEYS)
            clean_phase ^= 1
        acc_weights = gl.convert_layout(weights, gl.DotOperandLayout(0, acc_layout, 2))
        acc = warpgroup_mma(acc_weights, v.index(stage), acc, is_async=True)
        if HAS_REST:
            rest_weights = gl.convert_layout(weights, gl.DotOperandLayout(0, rest_layout, 2))
            acc_rest = warpgroup_mma(rest_weights, v_rest.index(stage), acc_rest, is_async=True)
            acc, acc_rest = warpgroup_mma_wait(0, deps=[acc, acc_rest])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(stage), count=1)
        count += 1
        first_own = first_query + half * num_rows
        token = first_own + gl.arange(0, num_rows, acc_rows)
        dim = gl.arange(0, FIRST, gl.SliceLayout(0, acc_layout))
        acc = acc * gl.convert_layout(1 / total, acc_rows)[:, None]
        offsets = (token.to(gl.int64) * num_heads + head) * head_dim
        gl.store(out_ptr + offsets[:, None] + dim[None, :], acc.to(dtype), mask=(token < end)[:, None])
        if HAS_REST:
            token = first_own + gl.arange(0, num_rows, rest_rows)
            dim = FIRST + gl.arange(0, REST, gl.SliceLayout(0, rest_layout))
            acc_rest = acc_rest * gl.convert_layout(1 / total, rest_rows)[:, None]
            offsets = (token.to(gl.int64) * num_heads + head) * head_dim
            is_there = (token < end)[:, None] & (dim < head_dim)[None, :]
            gl.store(out_ptr + offsets[:, None] + dim[None, :], acc_rest.to(dtype), mask=is_there)


@gluon.jit(do_not_specialize=["num_tiles", "num_items"])
def _segment_attention_kernel(
    q_desc,
    q_rest_desc,
    k_desc,
    k_rest_desc,
    v_desc,
    v_rest_desc,
    out_ptr,
    tiles_ptr,
    scale_log2,  # scale * log2(e): the softmax is computed in powers of two
    num_tiles,
    num_items,
    num_heads,
    head_dim: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    FIRST: gl.constexpr,
    REST: gl.constexpr,
    SWIZZLED: gl.constexpr,
    NARROW: gl.constexpr,
    ATTENDING_REGISTERS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
):
    has_rest: gl.constexpr = head_dim > FIRST
    q = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS // 2, FIRST], SWIZZLED)
    q_rest = gl.allocate_shared_memory(q_desc.dtype, [2, ROWS // 2, REST], NARROW)
    k = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, FIRST], SWIZZLED)
    k_rest = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, REST], NARROW)
    v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, KEYS, FIRST], SWIZZLED)
    v_rest = gl.allocate_shared_memory(v_desc.dtype, [STAGES, KEYS, REST], NARROW)
    full, empty, v_clean = attention_barriers(STAGES)
    descriptors = (q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc)
    buffers = (q, q_rest, k, k_rest, v, v_rest)
    # The constants are named in the call itself: a variable would make numbers of a step of them.
    gl.warp_specialize(
        [
            (_attend, (
                gl.constexpr(0), tiles_ptr, out_ptr, num_tiles, num_items, num_heads, scale_log2, buffers, full, empty,
                v_clean, head_dim, FIRST, REST, has_rest, KEYS, STAGES,
            )),
            (_attend, (
                gl.constexpr(1), tiles_ptr, out_ptr, num_tiles, num_items, num_heads, scale_log2, buffers, full, empty,
                v_clean, head_dim, FIRST, REST, has_rest, KEYS, STAGES,
            )),
            (_fetch, (
                descriptors, tiles_ptr, num_tiles, num_items, buffers, full, empty, FIRST, has_rest, KEYS, STAGES,
            )),
        ],
        [4, 1],
        [ATTENDING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def tiles_of(lens):
    """Return the tiles of segments with these lengths: of each its first query, and its segment's begin and end."""
    tiles, start = [], 0
    for length in lens:
        end = start + length
        tiles += [(first, start, end) for first in range(start, end, TILE_ROWS)]
        start = end
    return tiles


def segment_attention(q, k, v, tiles, scale):
    """Attend within segments; the result has the shape of q, (num_patches, num_heads, head_dim), and is contiguous.

    q, k, v: heads are contiguous, and lie at multiples of 16 bytes. tiles: those of `tiles_of`, int32, on the device.
    """
    _, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_items = len(tiles) * num_heads
    descriptors = [
        TensorDescriptor(x, [*x.shape], [*x.stride()], [rows, 1, size], layout)
        for x, rows in ((q, TILE_ROWS // 2), (k, KEYS), (v, KEYS))
        for size, layout in ((FIRST, SWIZZLED_HEADS), (REST, NARROW_HEADS))
    ]
    _segment_attention_kernel[(min(num_multiprocessors(q.device), num_items),)](
        *descriptors,
        out,
        tiles,
        scale * math.log2(math.e),
        len(tiles),
        num_items,
        num_heads,
        head_dim=head_dim,
        ROWS=TILE_ROWS,
        KEYS=KEYS,
        STAGES=STAGES,
        FIRST=FIRST,
        REST=REST,
        SWIZZLED=SWIZZLED,
        NARROW=NARROW,
        ATTENDING_REGISTERS=ATTENDING_REGISTERS,
        LOADING_REGISTERS=LOADING_REGISTERS,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )
    return out


def serves(q, k, v):
    """Whether the kernel takes these queries, keys and values."""
    if not (q.shape == k.shape == v.shape and q.shape[2] in HEAD_DIMS and q.dtype in (torch.bfloat16, torch.float16)):
        return False
    # As bulk copies want them.
    are_aligned = all(x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 for x in (q, k, v))
    return are_aligned and q.stride(2) == k.stride(2) == v.stride(2) == 1
