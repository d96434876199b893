"""Decode over latents for Hopper GPUs, in Gluon.

It computes what `_latent_decode_kernel` of `triton.py` does, from the same tiles, and memory is busy all the time: the
warps of a program have parts of their own (FlashMLA, DeepSeek 2025).

- One warp fetches queries and tiles, in pieces of 64 lines of 128 bytes: in bulk, by copies of their own (TMA).
- Four warps multiply queries by keys, and leave the weights that they make of the scores in shared memory.
- Two groups of four warps add up latents by these weights, each half of the latents.
- Barriers in shared memory say when a buffer is full and when it may be filled again.

Queries are the first operand, of which the tensor cores take 64 lines: more than there are, but so a score's line lies
in one warp, and its maximum is found without the others. Lines beyond `num_queries` hold whatever lies there, and their
results are not written.

Triton's interpreter does not run Gluon: the kernel is compared with its specification on a GPU alone, and a CPU only
compiles it.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoinfer.ops.common.device_properties import next_power_of_2
from nanoinfer.ops.common.hopper import SWIZZLED, clear_rows, load_tile, thread_barrier
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.decode_attention.triton import (
    BEGINS_LATER,
    LATER_MASK,
    LATER_SHIFT,
    MASKED,
    MAX_QUERIES,
    MIN_QUERIES,
)
from nanoinfer.ops.kv_cache.spec import LayerCache

TILE = 64  # vectors
PIECE = 64  # numbers of a vector: lines of 128 bytes
LATENT_PIECES = 8  # of a vector's latent, after the piece that is rotated
STAGES = 2  # tiles that shared memory holds
REGISTERS = 128  # of a thread at the start, where 4 groups of 128 threads share 64k; then each group has its own:
ADDING_REGISTERS, LOADING_REGISTERS = 184, 24  # those that make weights have the rest

ROTATED_AND_FIRST_HALF = gl.constexpr(1 + LATENT_PIECES // 2)  # pieces
PIECES = gl.constexpr(1 + LATENT_PIECES)


@gluon.jit
def _share_of(num_tiles, num_shares):
    """Return a program's first tile, and the one after its last, as `share_of` of ops/decode_attention does."""
    num_used = gl.maximum(gl.minimum(num_shares, num_tiles), 1)
    share = gl.program_id(1)
    first = gl.minimum(share, num_used) * num_tiles // num_used
    last = gl.minimum(share + 1, num_used) * num_tiles // num_used
    return first, last


@gluon.jit
def _fetch_pieces(
    desc, slot, ring, stage, phase, full, empty, half: gl.constexpr, begin: gl.constexpr, end: gl.constexpr
):
    """Fetch some pieces of a tile once their buffers may be filled. What is rotated comes first, and lies last."""
    barrier = full.index(2 * stage + half)
    mbarrier.wait(empty.index(2 * stage + half), phase)
    mbarrier.expect(barrier, (end - begin) * desc.block_type.nbytes)
    for piece in gl.static_range(begin, end):
        column = (piece + PIECES - 1) % PIECES * ring.shape[2]
        load_tile(desc, [slot, column], barrier, ring.index(stage * PIECES + piece))


@gluon.jit
def _fetch(
    descriptors,
    tiles_ptr,
    num_tiles,
    num_shares,
    queries,
    ring,
    q_barriers,
    full,
    empty,
    lines_of_row: gl.constexpr,
    group_size: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fetch one tile after the other, and the queries of each row."""
    rotated_desc, absorbed_desc, vectors_desc = descriptors
    q_full, q_empty = q_barriers
    num_lines: gl.constexpr = absorbed_desc.block_type.shape[0]
    first, last = _share_of(num_tiles, num_shares)
    next_slot = gl.load(tiles_ptr + first * 4, mask=first < last, other=0)
    next_row = gl.load(tiles_ptr + first * 4 + 2, mask=first < last, other=0)
    row = -1
    q_phase = 1  # the phase before the first counts as complete
    for tile in range(first, last):
        slot, previous_row, row = next_slot, row, next_row
        following = gl.minimum(tile + 1, last - 1)
        next_slot = gl.load(tiles_ptr + following * 4)  # on its way while this tile is
        next_row = gl.load(tiles_ptr + following * 4 + 2)
        stage = (tile - first) % STAGES
        phase = ((tile - first) // STAGES) & 1 ^ 1
        _fetch_pieces(vectors_desc, slot, ring, stage, phase, full, empty, 0, 0, ROTATED_AND_FIRST_HALF)
        _fetch_pieces(vectors_desc, slot, ring, stage, phase, full, empty, 1, ROTATED_AND_FIRST_HALF, PIECES)
        if row != previous_row:
            mbarrier.wait(q_empty, q_phase)
            q_phase ^= 1
            mbarrier.expect(q_full, PIECES * absorbed_desc.block_type.nbytes)
            line = row * lines_of_row + gl.program_id(0) * group_size
            load_tile(rotated_desc, [line, 0], q_full, queries.index(0).slice(0, num_lines))
            for piece in gl.static_range(1, PIECES):
                place = queries.index(piece).slice(0, num_lines)
                load_tile(absorbed_desc, [line, (piece - 1) * ring.shape[2]], q_full, place)


@gluon.jit
def _read_row(tiles_ptr, row_starts_ptr, tile, last):
    """Return what a tile says of its row.

    The row's number, its flags, how many tokens its first query token sees from the tile on, the first tile of the row,
    the one after its last, and the one after the last that this share has of it.
    """
    num_visible = gl.load(tiles_ptr + tile * 4 + 1)
    row = gl.load(tiles_ptr + tile * 4 + 2)
    flags = gl.load(tiles_ptr + tile * 4 + 3)
    row_start = gl.load(row_starts_ptr + row)
    row_end = gl.load(row_starts_ptr + row + 1)
    return row, flags, num_visible, row_start, row_end, gl.minimum(row_end, last)


@gluon.jit
def _weigh(
    plan,
    prefix_lse_ptr,
    out_lse_ptr,
    lse_ptr,
    scale_log2,
    num_tiles,
    num_shares,
    queries,
    ring,
    weights,
    factors,
    q_barriers,
    w_barriers,
    full,
    num_parts: gl.constexpr,
    group_size: gl.constexpr,
    num_tokens: gl.constexpr,
    num_queries: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Make the weights of each tile of this share, and the factors by which sums are multiplied before it is added.

    After the last tile of a row come other factors: those of the sums, and those of the result of the row's prefix.
    """
    tiles_ptr, row_starts_ptr, num_sharers_ptr = plan
    q_full, q_empty = q_barriers
    w_full, w_empty = w_barriers
    num_lines: gl.constexpr = weights.shape[0]
    tile_size: gl.constexpr = weights.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile_size, 16])
    of_lines: gl.constexpr = gl.SliceLayout(1, layout)
    query = gl.arange(0, num_lines, of_lines)
    vector = gl.arange(0, tile_size, gl.SliceLayout(0, layout))
    part, share = gl.program_id(0), gl.program_id(1)
    first, last = _share_of(num_tiles, num_shares)
    q_phase = 0
    w_phase = 1  # the phase before the first counts as complete
    tile = first
    while tile < last:  # a row, or what the share has of it
        row, flags, num_visible, row_start, row_end, end = _read_row(tiles_ptr, row_starts_ptr, tile, last)
        num_later = (flags >> LATER_SHIFT) & LATER_MASK
        maximum = gl.full([num_lines], float("-inf"), gl.float32, of_lines)
        total = gl.zeros([num_lines], gl.float32, of_lines)
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        for current in range(tile, end):
            stage = (current - first) % STAGES
            phase = ((current - first) // STAGES) & 1
            pieces = stage * PIECES
            scores = gl.zeros([num_lines, tile_size], gl.float32, layout)
            mbarrier.wait(full.index(2 * stage), phase)
            for piece in gl.static_range(ROTATED_AND_FIRST_HALF):
                keys = ring.index(pieces + piece).permute((1, 0))
                scores = warpgroup_mma(queries.index(piece), keys, scores, use_acc=piece > 0, is_async=True)
            mbarrier.wait(full.index(2 * stage + 1), phase)
            for piece in gl.static_range(ROTATED_AND_FIRST_HALF, PIECES):
                keys = ring.index(pieces + piece).permute((1, 0))
                scores = warpgroup_mma(queries.index(piece), keys, scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if current == end - 1:
                mbarrier.arrive(q_empty, count=1)
            scores *= scale_log2
            if num_visible < tile_size:  # a row's later tokens see more
                end_of_query = num_visible + gl.minimum(query // group_size, num_later)
                scores = gl.where(vector[None, :] < end_of_query[:, None], scores, MASKED)
            new_maximum = gl.maximum(maximum, gl.max(scores, 1))
            decay = gl.exp2(maximum - new_maximum)
            weight = gl.exp2(scores - new_maximum[:, None])
            total = total * decay + gl.sum(weight, 1)
            maximum = new_maximum
            mbarrier.wait(w_empty, w_phase)
            w_phase ^= 1
            weights.store(weight.to(weights.dtype))
            factors.index(0).store(decay)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(w_full, count=1)
            num_visible -= tile_size

        begins_here = row_start >= first
        is_query = query < num_queries
        if num_sharers_ptr is not None:
            is_query = query < gl.load(num_sharers_ptr + row) * (num_tokens * group_size)
        line = (row.to(gl.int64) * num_tokens * num_parts + part) * group_size + query
        lse = maximum + gl.log2(total)
        factor = 1 / total
        prefix_factor = factor
        if prefix_lse_ptr is not None:
            # A prefix counts once, in the row's first share.
            has_prefix = is_query & (begins_here & ((flags & BEGINS_LATER) != 0))
            prefix_lse = gl.load(prefix_lse_ptr + line, mask=has_prefix, other=float("-inf"))
            higher = gl.maximum(lse, prefix_lse)
            own_weight, prefix_weight = gl.exp2(lse - higher), gl.exp2(prefix_lse - higher)
            both = own_weight + prefix_weight
            factor, prefix_factor, lse = factor * (own_weight / both), prefix_weight / both, higher + gl.log2(both)
        mbarrier.wait(w_empty, w_phase)
        w_phase ^= 1
        factors.index(0).store(factor)
        factors.index(1).store(prefix_factor)
        thread_barrier()
        mbarrier.arrive(w_full, count=1)
        if begins_here & (end == row_end):
            if out_lse_ptr is not None:
                gl.store(out_lse_ptr + line, lse, mask=is_query)
        else:
            partial = ((part * num_shares + share) * 2 + begins_here.to(gl.int32)) * num_queries + query
            gl.store(lse_ptr + partial, lse, mask=is_query)
        tile = end


@gluon.jit
def _add_up(
    half: gl.constexpr,
    plan,
    prefix_out_ptr,
    out_ptr,
    partials_ptr,
    num_tiles,
    num_shares,
    ring,
    weights,
    factors,
    w_barriers,
    full,
    empty,
    num_parts: gl.constexpr,
    group_size: gl.constexpr,
    num_tokens: gl.constexpr,
    num_queries: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Add up half of the latents of the tiles of this share by their weights, row by row."""
    tiles_ptr, row_starts_ptr, num_sharers_ptr = plan
    w_full, w_empty = w_barriers
    num_lines: gl.constexpr = weights.shape[0]
    tile_size: gl.constexpr = weights.shape[1]
    size: gl.constexpr = ring.shape[2]  # of a piece
    num_pieces: gl.constexpr = PIECES // 2  # of this half's latents
    first_piece: gl.constexpr = 1 + half * num_pieces
    latent_size: gl.constexpr = 2 * num_pieces * size
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, size, 16])
    of_lines: gl.constexpr = gl.SliceLayout(1, layout)
    query = gl.arange(0, num_lines, of_lines)
    dim = half * (num_pieces * size) + gl.arange(0, size, gl.SliceLayout(0, layout))
    part, share = gl.program_id(0), gl.program_id(1)
    first, last = _share_of(num_tiles, num_shares)
    w_phase = 0
    tile = first
    while tile < last:  # a row, or what the share has of it
        row, flags, num_visible, row_start, row_end, end = _read_row(tiles_ptr, row_starts_ptr, tile, last)
        num_valid = num_visible + ((flags >> LATER_SHIFT) & LATER_MASK)
        sums = ()
        for _ in gl.static_range(num_pieces):
            sums += (gl.zeros([num_lines, size], gl.float32, layout),)  # type: ignore[assignment]
        for current in range(tile, end):
            stage = (current - first) % STAGES
            pieces = stage * PIECES + first_piece
            mbarrier.wait(full.index(2 * stage + half), ((current - first) // STAGES) & 1)
            mbarrier.wait(w_full, w_phase)  # scores are made then, and the latents may be cleared
            w_phase ^= 1
            if num_valid < tile_size:
                for index in gl.static_range(num_pieces):
                    clear_rows(ring.index(pieces + index), 0, num_valid)
                fence_async_shared()
                thread_barrier()
            decay = factors.index(0).load(of_lines)
            decayed, added = (), ()
            for index in gl.static_range(num_pieces):  # all before the first product, which would be waited for
                decayed += (sums[index] * decay[:, None],)  # type: ignore[assignment]
            for index in gl.static_range(num_pieces):
                latents = ring.index(pieces + index)
                added += (warpgroup_mma(weights, latents, decayed[index], is_async=True),)  # type: ignore[assignment]
            sums = warpgroup_mma_wait(0, deps=added)
            mbarrier.arrive(w_empty, count=1)
            mbarrier.arrive(empty.index(2 * stage + half), count=1)
            num_valid -= tile_size

        begins_here = row_start >= first
        is_query = query < num_queries
        if num_sharers_ptr is not None:
            is_query = query < gl.load(num_sharers_ptr + row) * (num_tokens * group_size)
        line = (row.to(gl.int64) * num_tokens * num_parts + part) * group_size + query
        partial = ((part * num_shares + share) * 2 + begins_here.to(gl.int32)) * num_queries + query
        has_prefix = is_query & (begins_here & ((flags & BEGINS_LATER) != 0))
        mbarrier.wait(w_full, w_phase)
        w_phase ^= 1
        factor, prefix_factor = factors.index(0).load(of_lines), factors.index(1).load(of_lines)
        thread_barrier()
        mbarrier.arrive(w_empty, count=1)
        for index in gl.static_range(num_pieces):
            result = sums[index] * factor[:, None]
            offsets = line[:, None] * latent_size + (dim + index * size)[None, :]
            if prefix_out_ptr is not None:
                of_prefix = gl.load(prefix_out_ptr + offsets, mask=has_prefix[:, None], other=0.0)
                result += of_prefix * prefix_factor[:, None]
            if begins_here & (end == row_end):
                gl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=is_query[:, None])
            else:
                partial_offsets = partial[:, None] * latent_size + (dim + index * size)[None, :]
                gl.store(partials_ptr + partial_offsets, result, mask=is_query[:, None])
        tile = end


@gluon.jit(do_not_specialize=["num_rows", "num_shares"])
def _hopper_latent_decode_kernel(
    rotated_desc,
    absorbed_desc,
    vectors_desc,
    tiles_ptr,
    row_starts_ptr,
    num_sharers_ptr,  # for this and the next ones, see `_latent_decode_kernel`
    prefix_out_ptr,
    prefix_lse_ptr,
    out_ptr,
    out_lse_ptr,
    partials_ptr,
    lse_ptr,
    scale_log2,
    num_rows,
    num_shares,
    num_parts: gl.constexpr,
    group_size: gl.constexpr,
    num_tokens: gl.constexpr,
    num_queries: gl.constexpr,
    LINES: gl.constexpr,  # of a tile of queries
    TILE: gl.constexpr,
    PIECE: gl.constexpr,
    STAGES: gl.constexpr,
    ADDING_REGISTERS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    dtype: gl.constexpr = vectors_desc.dtype
    swizzled: gl.constexpr = vectors_desc.layout
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [PIECES, LINES, PIECE], swizzled)
    ring = gl.allocate_shared_memory(dtype, [STAGES * PIECES, TILE, PIECE], swizzled)
    weights = gl.allocate_shared_memory(dtype, [LINES, TILE], swizzled)
    factors = gl.allocate_shared_memory(gl.float32, [2, LINES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barriers)
    w_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    w_empty = gl.allocate_shared_memory(gl.int64, [1], barriers)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], barriers)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    mbarrier.init(w_full, count=1)
    mbarrier.init(w_empty, count=2)
    for number in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(number), count=1)
        mbarrier.init(empty.index(number), count=1)
    fence_async_shared()
    # The plan was made before the first layer, so it is there before the previous kernel is done.
    num_tiles = gl.load(row_starts_ptr + num_rows)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    descriptors = (rotated_desc, absorbed_desc, vectors_desc)
    plan = (tiles_ptr, row_starts_ptr, num_sharers_ptr)
    q_barriers, w_barriers = (q_full, q_empty), (w_full, w_empty)
    # The constants are named in the call itself: a variable would make numbers of a step of them.
    gl.warp_specialize(
        [
            (_weigh, (
                plan, prefix_lse_ptr, out_lse_ptr, lse_ptr, scale_log2, num_tiles, num_shares, queries, ring, weights,
                factors, q_barriers, w_barriers, full, num_parts, group_size, num_tokens, num_queries, STAGES,
            )),
            (_add_up, (
                gl.constexpr(0), plan, prefix_out_ptr, out_ptr, partials_ptr, num_tiles, num_shares, ring, weights,
                factors, w_barriers, full, empty, num_parts, group_size, num_tokens, num_queries, STAGES,
            )),
            (_add_up, (
                gl.constexpr(1), plan, prefix_out_ptr, out_ptr, partials_ptr, num_tiles, num_shares, ring, weights,
                factors, w_barriers, full, empty, num_parts, group_size, num_tokens, num_queries, STAGES,
            )),
            (_fetch, (
                descriptors, tiles_ptr, num_tiles, num_shares, queries, ring, q_barriers, full, empty,
                num_tokens * num_parts * group_size, group_size, STAGES,
            )),
        ],
        [4, 4, 1],
        [ADDING_REGISTERS, ADDING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def attend(absorbed, rotated, cache, plan, scale, num_sharers, prefix, out, out_lse, partials, lse, shapes):
    """Attend as `_launch_decode` of `triton.py` says; the cache is one that `serves` takes.

    partials: (num_parts, num_shares, 2, num_queries, latent_size) float32; lse: the same without the last. shapes:
    group_size, num_tokens and num_queries, constants of the kernel.
    """
    assert plan.tile_size == TILE, f"the plan has tiles of {plan.tile_size} vectors, the kernel of {TILE}"
    _, num_heads, latent_size = absorbed.shape
    vector_size, (num_parts, num_shares) = cache.k.shape[3], partials.shape[:2]
    # Lines of all tokens are equally far from each other, and bulk copies want them at multiples of 16 bytes.
    if rotated.stride(0) != num_heads * rotated.stride(1) or rotated.stride(1) % 8 or rotated.data_ptr() % 16:
        rotated = rotated.clone(memory_format=torch.contiguous_format)
    num_lines, lines = len(absorbed) * num_heads, max(MIN_QUERIES, next_power_of_2(shapes["num_queries"]))
    block, num_slots = [lines, PIECE], cache.k.numel() // vector_size
    _hopper_latent_decode_kernel[(num_parts, num_shares)](
        TensorDescriptor(rotated, [num_lines, PIECE], [rotated.stride(1), 1], block, SWIZZLED),
        TensorDescriptor(absorbed, [num_lines, latent_size], [latent_size, 1], block, SWIZZLED),
        TensorDescriptor(cache.k, [num_slots, vector_size], [vector_size, 1], [TILE, PIECE], SWIZZLED),
        plan.tiles,
        plan.row_starts,
        num_sharers,
        *(prefix or (None, None)),
        out,
        out_lse,
        partials,
        lse,
        scale * math.log2(math.e),
        len(plan.row_starts) - 1,
        num_shares,
        **shapes,
        num_parts=num_parts,
        LINES=MAX_QUERIES,
        TILE=TILE,
        PIECE=PIECE,
        STAGES=STAGES,
        ADDING_REGISTERS=ADDING_REGISTERS,
        LOADING_REGISTERS=LOADING_REGISTERS,
        num_warps=4,
        maxnreg=REGISTERS,
        **overlap_options(absorbed.device),
    )


def serves(cache: LayerCache) -> bool:
    """Whether the kernel takes such a cache of vectors."""
    sizes = cache.v.shape[3], cache.k.shape[3]
    has_sizes = sizes == (LATENT_PIECES * PIECE, (LATENT_PIECES + 1) * PIECE)
    return has_sizes and cache.block_size % TILE == 0 and cache.k.dtype in (torch.bfloat16, torch.float16)
