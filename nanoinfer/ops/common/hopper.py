"""Holds what kernels in Gluon for Hopper GPUs share: copies into shared memory, its layout, and barriers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# What Triton 3.6 calls otherwise than 3.9.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # in bulk, a whole tile (TMA)
gather = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # each 16 bytes
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

SWIZZLED = gl.NVMMASharedLayout(128, 16, rank=2)  # rows of 128 bytes, as the tensor cores read them
SWIZZLED_HEADS = gl.NVMMASharedLayout(128, 16, rank=3)  # the same of (tokens, heads, numbers)
MAX_REGISTERS = 168  # of a thread at the start, where 3 groups of 128 threads share 64k


@gluon.jit
def attention_barriers(STAGES: gl.constexpr):
    """Return the barriers of a kernel in which one warp fetches and two groups of four attend: full, empty, v_clean.

    full, empty: of the queries, the keys and the values; the last two have one for each of `STAGES` tiles. A buffer is
    full after the one warp's copies, and empty after both groups have read it. v_clean: both have cleared their values.
    """
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], layout)
    v_clean = gl.allocate_shared_memory(gl.int64, [1], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(v_clean, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    return (q_full, k_full, v_full), (q_empty, k_empty, v_empty), v_clean


@gluon.jit
def clear_rows(rows, first, num_valid):
    """Set the rows of a tile from `num_valid` on to 0. rows: (num_rows, size), rows of the tile from `first` on.

    What lies after a context may be NaN. Its weights are 0, but 0 x NaN is NaN. Called by groups of four warps.
    """
    per_row: gl.constexpr = 8 if rows.shape[1] >= 64 else rows.shape[1] // 8  # threads, of 16 bytes each
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // per_row, per_row], [4, 1], [1, 0])
    row = first + gl.arange(0, rows.shape[0], gl.SliceLayout(1, layout))
    read = rows.load(layout)
    rows.store(gl.where((row < num_valid)[:, None], read, gl.zeros_like(read)))


@gluon.jit
def clear_values(values, rest, half: gl.constexpr, num_valid, v_clean, clean_phase, KEYS: gl.constexpr):
    """Set the values of a tile from `num_valid` on to 0: half of the tile here, and the other by the other group.

    rest: the second part of heads; None where the first is all. Returns once both groups are done, as `v_clean` says.
    """
    first: gl.constexpr = half * (KEYS // 2)
    clear_rows(values.slice(first, KEYS // 2), first, num_valid)
    if rest is not None:
        clear_rows(rest.slice(first, KEYS // 2), first, num_valid)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(v_clean, count=1)
    mbarrier.wait(v_clean, clean_phase)
