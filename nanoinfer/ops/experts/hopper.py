"""One grouped product of the experts' MLPs for Hopper GPUs, in Gluon: long steps, 16 bits.

It computes what the two kernels of `triton.py` do, from the same tiles of 128 pairs. The warps of a program have
parts of their own: four fetch rows (gathered, with one copy for each 16 bytes) and weights (in bulk, TMA) into a ring
of buffers, and two groups of four multiply, each half of the tile's rows, or nothing if these have no pairs. Results go
through shared memory, to be written 16 bytes at a time. As many programs run as there are multiprocessors. Neighbouring
items are columns of a tile, and tiles of an expert, so what they read is in the L2 cache. Columns beyond the last are
computed, of whatever lies there, and not written.

Triton's interpreter does not run Gluon: the specification is compared on a GPU alone; a CPU only compiles the kernel.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanoinfer.ops.common.device_properties import num_multiprocessors
from nanoinfer.ops.common.hopper import MAX_REGISTERS, SWIZZLED, gather, load_tile

ROWS = 128  # pairs of a tile
PART = 128  # columns of half a tile
DEPTH = 64  # of the inner dimension, at a time
STAGES = 4  # buffers
MULTIPLYING_REGISTERS, LOADING_REGISTERS = 232, 40


@gluon.jit
def gated(gate, up, clamps, dtype: gl.constexpr, GELU: gl.constexpr):
    """Return what `gated` of `ops/common` does, or with clamps, limit and alpha, `_clamped` of `triton.py`."""
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
    if GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return (gate / (1.0 + gl.exp(-slope))).to(dtype).to(gl.float32) * up
    elif clamps is None:
        return (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32) * up
    else:
        limit, alpha = clamps
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        return gate / (1.0 + gl.exp(-alpha * gate)) * (up + 1.0)


@gluon.jit
def row_of_result(pair, num_pairs, num_choices: gl.constexpr):
    """Return the row of each pair's result, which lie by choice, then by token."""
    return (pair % num_choices).to(gl.int64) * (num_pairs // num_choices) + pair // num_choices


@gluon.jit
def both_halves(sums, layout: gl.constexpr):
    """Return the columns of the first part, and those of the second, of (num_rows, 2 * part). A thread has both."""
    num_rows: gl.constexpr = sums.shape[0]
    part: gl.constexpr = sums.shape[1] // 2
    first, second = gl.split(sums.reshape((num_rows, 2, part)).permute((0, 2, 1)))
    return gl.convert_layout(first, layout, assert_trivial=True), gl.convert_layout(second, layout, assert_trivial=True)


@gluon.jit
def store_rows(values, out_ptr, pairs_ptr, num_pairs, first_column, width: gl.constexpr, num_choices: gl.constexpr):
    """Write rows of pairs to columns from `first_column` on: through shared memory, then 16 bytes at a time.

    values: (num_rows, size). pairs_ptr: to the rows' pairs. width: of a whole
    row; columns beyond it are not written. num_choices: None: the rows lie by pair; else as `row_of_result` says.
    """
    size: gl.constexpr = values.shape[1]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    at_once: gl.constexpr = 128 // dtype.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, at_once], [32 * at_once // size, size // at_once], [4, 1], [1, 0])
    values = gl.convert_layout(values.to(dtype), layout)
    pair = gl.load(pairs_ptr + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout)))
    column = first_column + gl.arange(0, size, gl.SliceLayout(0, layout))
    mask = (pair < num_pairs)[:, None]
    if width % (2 * size) != 0:
        mask = mask & (column < width)[None, :]
    row = pair.to(gl.int64) if num_choices is None else row_of_result(pair, num_pairs, num_choices)
    gl.store(out_ptr + row[:, None] * width + column[None, :], values, mask=mask)


@gluon.jit
def fetch(
    x_ptr,
    weight_desc,
    scales,
    plan,
    x_row_stride,
    num_pairs,
    buffers,
    full,
    empty,
    num_choices: gl.constexpr,
    num_experts: gl.constexpr,
    num_columns: gl.constexpr,
    depth: gl.constexpr,
    GATED: gl.constexpr,
    X_GROUPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Take one item after the other, and fetch its rows and weights.

    scales: of FP8: pointers to those of rows and of weights, a stride and two buffers, see `hopper_fp8.py`; else None.
    X_GROUPS, BLOCKS: whether the scales of each step along `depth` come with it.
    """
    pairs_ptr, tile_experts_ptr, num_tiles_ptr = plan
    x, weight = buffers
    half_rows: gl.constexpr = x.shape[1]
    width: gl.constexpr = x.shape[2]
    part: gl.constexpr = weight.shape[1] // 2
    num_steps: gl.constexpr = (depth + width - 1) // width
    layout: gl.constexpr = gl.BlockedLayout([1, width // 8], [4, 8], [4, 1], [1, 0])  # lines of 128 bytes
    row = gl.arange(0, half_rows, gl.SliceLayout(1, layout))
    k = gl.arange(0, width, gl.SliceLayout(0, layout))
    num_blocks: gl.constexpr = (num_columns + 2 * part - 1) // (2 * part)
    num_items = gl.load(num_tiles_ptr) * num_blocks
    count = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = item // num_blocks
        expert = gl.load(tile_experts_ptr + tile)
        if expert < num_experts:
            tile_pairs_ptr = pairs_ptr + tile * (2 * half_rows)
            first_pair, second_pair = gl.load(tile_pairs_ptr + row), gl.load(tile_pairs_ptr + half_rows + row)
            first_row, second_row = first_pair, second_pair
            if GATED:
                first_row, second_row = first_pair // num_choices, second_pair // num_choices
            first_ptrs = x_ptr + first_row.to(gl.int64)[:, None] * x_row_stride + k[None, :]
            second_ptrs = x_ptr + second_row.to(gl.int64)[:, None] * x_row_stride + k[None, :]
            # Of gate and up, which lie one behind the other, the same columns; else neighbours.
            first_line = item % num_blocks * (part if GATED else 2 * part)
            line = expert * num_columns + first_line
            distance: gl.constexpr = num_columns // 2 if GATED else part
            if X_GROUPS or BLOCKS:
                x_scales_ptr, weight_scales_ptr, x_scale_stride, x_scales, weight_scales = scales
                place = gl.arange(0, 2 * half_rows, gl.BlockedLayout([1], [32], [4], [0]))
                pair = gl.load(tile_pairs_ptr + place)
                x_row = pair // num_choices if GATED else pair
                x_scale_ptrs = x_scales_ptr + x_row.to(gl.int64) * x_scale_stride
                # The block of lines that has the scales of each half of the columns: one for all threads of a half.
                num_line_blocks: gl.constexpr = (num_columns + width - 1) // width
                block = gl.minimum(first_line // width + place // half_rows * (distance // width), num_line_blocks - 1)
                weight_scale_ptrs = weight_scales_ptr + (expert * num_line_blocks + block) * num_steps
            for step in range(0, num_steps):
                stage = count % STAGES
                start = step * width
                mbarrier.wait(empty.index(stage), (count // STAGES) & 1 ^ 1)
                mbarrier.expect(full.index(stage), 2 * weight_desc.block_type.nbytes)
                load_tile(weight_desc, [line, start], full.index(stage), weight.index(stage).slice(0, part))
                second_half = weight.index(stage).slice(part, part)
                load_tile(weight_desc, [line + distance, start], full.index(stage), second_half)
                first_mask, second_mask = (first_pair < num_pairs)[:, None], (second_pair < num_pairs)[:, None]
                if depth % width != 0:
                    is_inside = (start + k < depth)[None, :]
                    first_mask, second_mask = first_mask & is_inside, second_mask & is_inside
                gather(x.index(2 * stage), first_ptrs + start, mask=first_mask)
                gather(x.index(2 * stage + 1), second_ptrs + start, mask=second_mask)
                if X_GROUPS:
                    gather(x_scales.index(stage), x_scale_ptrs + step, mask=pair < num_pairs)
                if BLOCKS:
                    gather(weight_scales.index(stage), weight_scale_ptrs + step)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                count += 1


@gluon.jit
def _multiply(
    half: gl.constexpr,
    plan,
    pair_weights_ptr,
    bias_ptr,
    clamps,
    out_ptr,
    num_pairs,
    buffers,
    full,
    empty,
    num_choices: gl.constexpr,
    num_experts: gl.constexpr,
    num_columns: gl.constexpr,
    depth: gl.constexpr,
    GATED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply half of the rows of each item, and write them."""
    pairs_ptr, tile_experts_ptr, num_tiles_ptr = plan
    x, weight = buffers
    half_rows: gl.constexpr = x.shape[1]
    width: gl.constexpr = x.shape[2]
    part: gl.constexpr = weight.shape[1] // 2
    dtype: gl.constexpr = x.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, part, 16])
    of_both: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * part, 16])
    row = gl.arange(0, half_rows, gl.SliceLayout(1, layout))
    part_column = gl.arange(0, part, gl.SliceLayout(0, layout))
    num_blocks: gl.constexpr = (num_columns + 2 * part - 1) // (2 * part)
    num_items = gl.load(num_tiles_ptr) * num_blocks
    count = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile, block = item // num_blocks, item % num_blocks
        expert = gl.load(tile_experts_ptr + tile)
        its_pairs_ptr = pairs_ptr + tile * (2 * half_rows) + half * half_rows
        has_pairs = gl.load(its_pairs_ptr) < num_pairs
        sums = gl.zeros([half_rows, 2 * part], gl.float32, of_both)
        if expert < num_experts:
            if has_pairs:
                for start in range(0, depth, width):
                    stage = count % STAGES
                    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                    fence_async_shared()  # the rows were not copied in bulk
                    rows = x.index(2 * stage + half)
                    sums = warpgroup_mma(rows, weight.index(stage).permute((1, 0)), sums, is_async=True)
                    sums = warpgroup_mma_wait(1, deps=[sums])
                    if start > 0:  # the product before this one is done
                        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
                    count += 1
                sums = warpgroup_mma_wait(0, deps=[sums])
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
            else:
                for _ in range(0, depth, width):
                    mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)
                    mbarrier.arrive(empty.index(count % STAGES), count=1)
                    count += 1
        first, second = both_halves(sums, layout)
        first_column = block * (part if GATED else 2 * part)
        column = first_column + part_column
        distance: gl.constexpr = num_columns // 2 if GATED else part  # from the first part's lines to the second's
        if bias_ptr is not None and expert < num_experts:
            ptrs = bias_ptr + expert.to(gl.int64) * num_columns + column
            first += gl.load(ptrs, mask=column < num_columns, other=0.0).to(gl.float32)[None, :]
            is_second = column + distance < num_columns
            second += gl.load(ptrs + distance, mask=is_second, other=0.0).to(gl.float32)[None, :]
        if has_pairs:
            if GATED:
                if expert < num_experts:
                    out = gated(first, second, clamps, dtype, GATED == 2)
                    store_rows(out, out_ptr, its_pairs_ptr, num_pairs, first_column, distance, None)
            else:
                pair = gl.load(its_pairs_ptr + row)
                pair_weight = gl.load(pair_weights_ptr + pair, mask=pair < num_pairs, other=0.0)[:, None]
                first, second = first * pair_weight, second * pair_weight
                store_rows(first, out_ptr, its_pairs_ptr, num_pairs, first_column, num_columns, num_choices)
                store_rows(second, out_ptr, its_pairs_ptr, num_pairs, first_column + part, num_columns, num_choices)


@gluon.jit(do_not_specialize=["num_pairs"])
def _hopper_experts_kernel(
    x_ptr,
    weight_desc,
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    pair_weights_ptr,
    bias_ptr,  # None: there is none
    clamps,  # limit and alpha of the clamped SwiGLU; None: it is the plain one
    out_ptr,
    x_row_stride,
    num_pairs,
    num_choices: gl.constexpr,
    num_experts: gl.constexpr,
    num_columns: gl.constexpr,  # rows of an expert's weight
    depth: gl.constexpr,
    # True or 2 (GEGLU of triton.py): rows are those of tokens, and columns those of gate and up. False: rows are those
    # of pairs.
    GATED: gl.constexpr,
    ROWS: gl.constexpr,
    PART: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLYING_REGISTERS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
):
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    swizzled: gl.constexpr = weight_desc.layout
    x = gl.allocate_shared_memory(weight_desc.dtype, [2 * STAGES, ROWS // 2, DEPTH], swizzled)
    weight = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, 2 * PART, DEPTH], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=129)  # 128 threads that copy rows, and one that announces the weights
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    plan = (pairs_ptr, tile_experts_ptr, num_tiles_ptr)
    buffers = (x, weight)
    # The constants are named in the call itself: a variable would make numbers of a step of them.
    gl.warp_specialize(
        [
            (_multiply, (
                gl.constexpr(0), plan, pair_weights_ptr, bias_ptr, clamps, out_ptr, num_pairs, buffers, full, empty,
                num_choices, num_experts, num_columns, depth, GATED, STAGES,
            )),
            (_multiply, (
                gl.constexpr(1), plan, pair_weights_ptr, bias_ptr, clamps, out_ptr, num_pairs, buffers, full, empty,
                num_choices, num_experts, num_columns, depth, GATED, STAGES,
            )),
            (fetch, (
                x_ptr, weight_desc, None, plan, x_row_stride, num_pairs, buffers, full, empty,
                num_choices, num_experts, num_columns, depth, GATED, gl.constexpr(False), gl.constexpr(False), STAGES,
            )),
        ],
        [4, 4],
        [MULTIPLYING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def grouped_product(x, weight, plan, pair_weights, out, is_gated, clamps=None):
    """Do what `grouped_product` of `triton.py` does, by a weight in 16 bits, in tiles of ROWS pairs."""
    num_experts, num_columns, width = weight.values.shape
    lines = [[num_experts * num_columns, width], [width, 1], [PART, DEPTH], SWIZZLED]
    _hopper_experts_kernel[(num_multiprocessors(x.device),)](
        x,
        TensorDescriptor(weight.values, *lines),
        *plan.tensors,
        pair_weights,
        weight.bias,
        clamps,
        out,
        x.stride(0),
        pair_weights.numel(),
        num_choices=pair_weights.shape[1],
        num_experts=num_experts,
        num_columns=num_columns,
        depth=x.shape[1],
        GATED=is_gated,
        ROWS=ROWS,
        PART=PART,
        DEPTH=DEPTH,
        STAGES=STAGES,
        MULTIPLYING_REGISTERS=MULTIPLYING_REGISTERS,
        LOADING_REGISTERS=LOADING_REGISTERS,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )


def serves(hidden_size: int, inner_size: int, row_stride: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes experts of these sizes, and rows so far apart."""
    fits = inner_size % DEPTH == 0 and hidden_size % DEPTH == 0 and row_stride % 16 == 0
    return fits and dtype in (torch.bfloat16, torch.float16)
