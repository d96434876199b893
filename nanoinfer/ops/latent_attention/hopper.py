"""Decode over latents for Hopper GPUs, in Gluon.

It computes what `_latent_decode_kernel` of `triton.py` does for rows, from the same tiles, and reads faster: memory is
busy all the time. The warps of a program have parts of their own.

- One warp fetches. It copies a tile in pieces of 64 vectors x 64 numbers, in bulk (TMA), into a ring of buffers.
- Four warps attend. Both products read the pieces as they lie: as keys, and transposed as values. As soon as the last
  product with a tile is done, its buffers are filled again.
- Barriers in shared memory say when a buffer is full and when it may be filled again.

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

from nanoinfer.ops.common.hopper import SWIZZLED, load_tile, thread_barrier

TILE = 64  # vectors; the tensor cores take as many lines of a first operand
PIECE = 64  # numbers of a vector: lines of 128 bytes
MAX_QUERIES = 32  # of a program: their sums of 512 latents take half of all registers
SHARED_MEMORY = 226 * 2**10  # bytes of queries, weights and pieces
LOADING_REGISTERS, REGISTERS = 24, 128  # of a thread: the warp that fetches, and the average, which it leaves to others

MASKED = gl.constexpr(-3e38)  # see ops/decode_attention
ENDS_ROW, BEGINS_LATER, LATER_SHIFT, LATER_MASK = gl.constexpr(1), gl.constexpr(2), gl.constexpr(2), gl.constexpr(63)


@gluon.jit
def _share_of(num_tiles, num_shares):
    """Return a program's first tile, and the one after its last, as `share_of` of ops/decode_attention does."""
    num_used = gl.maximum(gl.minimum(num_shares, num_tiles), 1)
    share = gl.program_id(1)
    first = gl.minimum(share, num_used) * num_tiles // num_used
    last = gl.minimum(share + 1, num_used) * num_tiles // num_used
    return first, last


@gluon.jit
def _fetch(
    vectors_desc,
    tiles_ptr,
    num_tiles,
    num_shares,
    ring,
    full,
    empty,
    num_pieces: gl.constexpr,
):
    """Fetch the pieces of one tile after the other, the rotated part first."""
    num_buffers: gl.constexpr = ring.shape[0]
    first, last = _share_of(num_tiles, num_shares)
    number = 0
    slot = gl.load(tiles_ptr + first * 4, mask=first < last, other=0)
    for tile in range(first, last):
        line = slot
        slot = gl.load(tiles_ptr + gl.minimum(tile + 1, last - 1) * 4)  # on its way while this tile is
        for piece in gl.static_range(num_pieces):
            buffer = number % num_buffers
            mbarrier.wait(empty.index(buffer), (number // num_buffers) & 1 ^ 1)
            mbarrier.expect(full.index(buffer), vectors_desc.block_type.nbytes)
            column = (piece + num_pieces - 1) % num_pieces * ring.shape[2]
            load_tile(vectors_desc, [line, column], full.index(buffer), ring.index(buffer))
            number += 1


@gluon.jit
def _maximum(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _clear(piece, num_valid):
    """Set the vectors from `num_valid` on to 0: they may be NaN, and 0 x NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    vector = gl.arange(0, piece.shape[0], gl.SliceLayout(1, layout))
    read = piece.load(layout)
    piece.store(gl.where((vector < num_valid)[:, None], read, gl.zeros_like(read)))


@gluon.jit
def _attend(
    absorbed_ptr,
    rotated_ptr,
    tiles_ptr,
    row_starts_ptr,
    prefix_out_ptr,
    prefix_lse_ptr,
    out_ptr,
    partials_ptr,
    lse_ptr,
    scale_log2,
    rotated_token_stride,
    rotated_head_stride,
    num_tiles,
    num_shares,
    queries,
    weights,
    ring,
    full,
    empty,
    num_parts: gl.constexpr,
    group_size: gl.constexpr,
    num_tokens: gl.constexpr,
    num_queries: gl.constexpr,
    num_pieces: gl.constexpr,
):
    """Attend to the tiles of this share, row by row."""
    dtype: gl.constexpr = queries.dtype
    num_buffers: gl.constexpr = ring.shape[0]
    tile_size: gl.constexpr = ring.shape[1]
    size: gl.constexpr = ring.shape[2]  # of a piece
    padded: gl.constexpr = queries.shape[1]
    num_heads: gl.constexpr = num_parts * group_size
    latent_size: gl.constexpr = (num_pieces - 1) * size
    # Scores, (tile_size, padded), and the sums of a piece, (size, padded), lie alike in registers.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, padded, 16])
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    part, share = gl.program_id(0), gl.program_id(1)
    first, last = _share_of(num_tiles, num_shares)

    loaded_query = gl.arange(0, padded, gl.SliceLayout(1, loaded))
    loaded_head = part * group_size + loaded_query % group_size
    loaded_number = gl.arange(0, size, gl.SliceLayout(0, loaded))
    is_loaded = (loaded_query < num_queries)[:, None]
    absorbed_offsets = (loaded_query // group_size * num_heads + loaded_head) * latent_size
    rotated_offsets = loaded_query // group_size * rotated_token_stride + loaded_head * rotated_head_stride
    query = gl.arange(0, padded, gl.SliceLayout(0, layout))
    line = query // group_size * num_heads + part * group_size + query % group_size
    is_query = query < num_queries
    vector = gl.arange(0, tile_size, gl.SliceLayout(1, layout))
    dim = gl.arange(0, size, gl.SliceLayout(1, layout))
    zeros = gl.zeros([tile_size, padded], gl.float32, layout)

    number = 0  # of pieces before this tile
    tile = first
    while tile < last:  # a row, or what the share has of it
        num_visible = gl.load(tiles_ptr + tile * 4 + 1)  # to the row's first query token; later ones see more
        row = gl.load(tiles_ptr + tile * 4 + 2)
        flags = gl.load(tiles_ptr + tile * 4 + 3)
        row_start = gl.load(row_starts_ptr + row)
        row_end = gl.load(row_starts_ptr + row + 1)
        end = gl.minimum(row_end, last)
        num_later = (flags >> LATER_SHIFT) & LATER_MASK
        first_token = row.to(gl.int64) * num_tokens
        thread_barrier()
        ptrs = rotated_ptr + first_token * rotated_token_stride + rotated_offsets[:, None] + loaded_number[None, :]
        queries.index(0).store(gl.load(ptrs, mask=is_loaded, other=0.0))
        ptrs = absorbed_ptr + first_token * (num_heads * latent_size) + absorbed_offsets[:, None]
        ptrs += loaded_number[None, :]
        for piece in gl.static_range(1, num_pieces):
            queries.index(piece).store(gl.load(ptrs + (piece - 1) * size, mask=is_loaded, other=0.0))
        fence_async_shared()
        thread_barrier()

        maximum = gl.full([padded], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
        total = zeros  # of the weights that each thread has
        sums = ()
        for _ in gl.static_range(1, num_pieces):
            sums += (zeros,)  # type: ignore[assignment]
        for _ in range(tile, end):
            if num_visible + num_later < tile_size:
                for piece in gl.static_range(num_pieces):
                    buffer = (number + piece) % num_buffers
                    mbarrier.wait(full.index(buffer), ((number + piece) // num_buffers) & 1)
                    _clear(ring.index(buffer), num_visible + num_later)
                fence_async_shared()
                thread_barrier()
            scores = zeros
            for piece in gl.static_range(num_pieces):
                buffer = (number + piece) % num_buffers
                mbarrier.wait(full.index(buffer), ((number + piece) // num_buffers) & 1)
                of_piece = queries.index(piece).permute((1, 0))
                scores = warpgroup_mma(ring.index(buffer), of_piece, scores, use_acc=piece > 0, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(empty.index(number % num_buffers), count=1)  # the rotated part has no values
            scores *= scale_log2
            if num_visible < tile_size:
                end_of_query = num_visible + gl.minimum(query // group_size, num_later)
                scores = gl.where(vector[:, None] < end_of_query[None, :], scores, MASKED)
            new_maximum = gl.maximum(maximum, gl.reduce(scores, 0, _maximum))
            decay = gl.exp2(maximum - new_maximum)
            weight = gl.exp2(scores - new_maximum[None, :])
            total = total * decay[None, :] + weight
            maximum = new_maximum
            weights.store(weight.to(dtype))
            fence_async_shared()
            thread_barrier()
            new_sums = ()
            for piece in gl.static_range(1, num_pieces):
                values = ring.index((number + piece) % num_buffers).permute((1, 0))
                added = warpgroup_mma(values, weights, sums[piece - 1] * decay[None, :], is_async=True)
                new_sums += (added,)  # type: ignore[assignment]
            sums = warpgroup_mma_wait(0, deps=new_sums)
            for piece in gl.static_range(1, num_pieces):
                mbarrier.arrive(empty.index((number + piece) % num_buffers), count=1)
            number += num_pieces
            num_visible -= tile_size

        begins_here = row_start >= first
        is_whole = begins_here & (end == row_end)
        added_weights = gl.reduce(total, 0, _sum)
        lse = maximum + gl.log2(added_weights)
        factor = 1 / added_weights
        prefix_factor = factor
        out_line = first_token * num_heads + line
        if prefix_out_ptr is not None:
            # The result of the prefix counts once, in the row's first share.
            has_prefix = is_query & (begins_here & ((flags & BEGINS_LATER) != 0))
            prefix_lse = gl.load(prefix_lse_ptr + out_line, mask=has_prefix, other=float("-inf"))
            higher = gl.maximum(lse, prefix_lse)
            own_weight, prefix_weight = gl.exp2(lse - higher), gl.exp2(prefix_lse - higher)
            both = own_weight + prefix_weight
            factor, prefix_factor, lse = factor * (own_weight / both), prefix_weight / both, higher + gl.log2(both)
        partial = ((part * num_shares + share) * 2 + begins_here.to(gl.int32)) * num_queries + query
        for piece in gl.static_range(1, num_pieces):
            result = sums[piece - 1] * factor[None, :]
            offsets = out_line[None, :] * latent_size + ((piece - 1) * size + dim)[:, None]
            if prefix_out_ptr is not None:
                prefix = gl.load(prefix_out_ptr + offsets, mask=has_prefix[None, :], other=0.0)
                result += prefix * prefix_factor[None, :]
            if is_whole:
                gl.store(out_ptr + offsets, result.to(dtype), mask=is_query[None, :])
            else:
                partial_offsets = partial[None, :] * latent_size + ((piece - 1) * size + dim)[:, None]
                gl.store(partials_ptr + partial_offsets, result, mask=is_query[None, :])
        if not is_whole:
            gl.store(lse_ptr + partial, lse, mask=is_query)
        tile = end


@gluon.jit(do_not_specialize=["num_rows", "num_shares"])
def _hopper_latent_decode_kernel(
    vectors_desc,
    absorbed_ptr,
    rotated_ptr,
    tiles_ptr,
    row_starts_ptr,
    prefix_out_ptr,
    prefix_lse_ptr,
    out_ptr,
    partials_ptr,  # (num_parts, num_shares, 2, num_queries, latent_size) float32
    lse_ptr,
    scale_log2,  # scale * log2(e): the softmax is computed in powers of two
    rotated_token_stride,
    rotated_head_stride,
    num_rows,
    num_shares,
    num_parts: gl.constexpr,  # of the heads
    group_size: gl.constexpr,  # heads of a part
    num_tokens: gl.constexpr,  # query tokens of a row
    num_queries: gl.constexpr,  # of a row and a part of its heads
    num_pieces: gl.constexpr,  # of a vector
    QUERIES: gl.constexpr,  # num_queries, padded
    TILE: gl.constexpr,
    PIECE: gl.constexpr,
    BUFFERS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    dtype: gl.constexpr = vectors_desc.dtype
    swizzled: gl.constexpr = vectors_desc.layout
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [num_pieces, QUERIES, PIECE], swizzled)
    weights = gl.allocate_shared_memory(dtype, [TILE, QUERIES], gl.NVMMASharedLayout(2 * QUERIES, 16, rank=2))
    ring = gl.allocate_shared_memory(dtype, [BUFFERS, TILE, PIECE], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], barriers)
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(full.index(buffer), count=1)
        mbarrier.init(empty.index(buffer), count=1)
    fence_async_shared()
    # The plan was made before the first layer, so it is there before the previous kernel is done.
    num_tiles = gl.load(row_starts_ptr + num_rows)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    # The constants are named in the call itself: a variable would make numbers of a step of them.
    gl.warp_specialize(
        [
            (_attend, (
                absorbed_ptr, rotated_ptr, tiles_ptr, row_starts_ptr, prefix_out_ptr, prefix_lse_ptr, out_ptr,
                partials_ptr, lse_ptr, scale_log2, rotated_token_stride, rotated_head_stride, num_tiles, num_shares,
                queries, weights, ring, full, empty, num_parts, group_size, num_tokens, num_queries, num_pieces,
            )),
            (_fetch, (vectors_desc, tiles_ptr, num_tiles, num_shares, ring, full, empty, num_pieces)),
        ],
        [1],
        [LOADING_REGISTERS],
    )  # fmt: skip


def num_buffers(num_queries, vector_size):
    """Return how many pieces fit into shared memory beside the queries, padded, and their weights of a tile."""
    return (SHARED_MEMORY - num_queries * (vector_size + TILE) * 2) // (TILE * PIECE * 2)


def launch_decode(absorbed, rotated, cache, plan, scale, out, prefix, partials, lse, shapes, queries, overlap):
    """Attend from rows. For the arguments see `_launch_decode` of `triton.py`; what must hold, `serves` says.

    partials, lse: (num_parts, num_shares, 2, num_queries[, latent_size]) float32. shapes: constants of the kernel.
    queries: num_queries, padded. overlap: from `overlap_options`.
    """
    vector_size = cache.k.shape[3]
    num_parts, num_shares = partials.shape[:2]
    lines = [[cache.k.numel() // vector_size, vector_size], [vector_size, 1], [TILE, PIECE], SWIZZLED]
    _hopper_latent_decode_kernel[(num_parts, num_shares)](
        TensorDescriptor(cache.k, *lines),
        absorbed,
        rotated,
        plan.tiles,
        plan.row_starts,
        *(prefix or (None, None)),
        out,
        partials,
        lse,
        scale * math.log2(math.e),
        rotated.stride(0),
        rotated.stride(1),
        len(plan.row_starts) - 1,
        num_shares,
        **shapes,
        num_parts=num_parts,
        num_pieces=vector_size // PIECE,
        QUERIES=queries,
        TILE=TILE,
        PIECE=PIECE,
        BUFFERS=num_buffers(queries, vector_size),
        LOADING_REGISTERS=LOADING_REGISTERS,
        num_warps=4,
        maxnreg=REGISTERS,
        **overlap,
    )


def serves(num_queries: int, latent_size: int, rotary_size: int, tile_size: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes tiles of so many queries, and a cache of vectors like these."""
    fits = num_queries <= MAX_QUERIES and tile_size == TILE and latent_size % PIECE == 0 and rotary_size == PIECE
    return fits and dtype in (torch.bfloat16, torch.float16)
