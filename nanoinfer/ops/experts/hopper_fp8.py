"""One grouped product of the experts' MLPs for Hopper GPUs, in Gluon: long steps, weights and activations in FP8.

It computes what the two kernels of `triton_fp8.py` do, in tiles of 128 pairs, as `hopper.py` does in 16 bits.

- Where scales are of groups or blocks, the tensor cores begin their sums anew with each 128 inputs, and the sums are
  added up in float32, times the scales (as in DeepGEMM). While one group of warps adds, the other multiplies.
- The scales of 128 inputs come with them, through shared memory: a load of its own would keep each step waiting.

Triton's interpreter does not run Gluon: the specification is compared on a GPU alone; a CPU only compiles the kernel.
"""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanoinfer.ops.common.device_properties import num_multiprocessors
from nanoinfer.ops.common.fp8_format import FP8_MAX, GROUP_SIZE, TINY, TO_SCALE
from nanoinfer.ops.common.hopper import MAX_REGISTERS
from nanoinfer.ops.experts.hopper import (
    LOADING_REGISTERS,
    MULTIPLYING_REGISTERS,
    PART,
    ROWS,
    both_halves,
    fetch,
    gated,
    store_rows,
)

DEPTH = GROUP_SIZE  # of the inner dimension, at a time
GATE_UP_STAGES, DOWN_STAGES = 4, 3  # buffers; beside those of down, its results take more shared memory
LARGEST, LARGEST_TO_SCALE, SMALLEST_SCALE = gl.constexpr(FP8_MAX), gl.constexpr(TO_SCALE), gl.constexpr(TINY)
WEIGHT_LAYOUT = gl.NVMMASharedLayout(128, 8, rank=2)  # rows of 128 bytes, as the tensor cores read them
SCALES_LAYOUT = gl.SwizzledSharedLayout(1, 1, 1, order=[0])


@gluon.jit
def _multiply(
    half: gl.constexpr,
    scales,
    plan,
    pair_weights_ptr,
    out,
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
    DTYPE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply half of the rows of each item, and write them."""
    x_scales_ptr, weight_scales_ptr, x_scale_stride, x_scales, weight_scales = scales
    pairs_ptr, tile_experts_ptr, num_tiles_ptr = plan
    out_ptr, out_scales_ptr, static_scale_ptr = out
    x, weight = buffers
    half_rows: gl.constexpr = x.shape[1]
    width: gl.constexpr = x.shape[2]
    part: gl.constexpr = weight.shape[1] // 2
    num_groups: gl.constexpr = (depth + width - 1) // width
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, part, 32])
    of_both: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * part, 32])
    has_parts: gl.constexpr = X_GROUPS or BLOCKS  # whether sums of 128 inputs have scales of their own
    zeros = gl.zeros([half_rows, part], gl.float32, layout)
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
        pair = gl.load(its_pairs_ptr + row)
        is_pair = pair < num_pairs
        if has_parts:
            first, second = zeros, zeros
        else:
            both = gl.zeros([half_rows, 2 * part], gl.float32, of_both)
        if expert < num_experts:
            if has_pairs:
                for step in range(0, num_groups):
                    stage = count % STAGES
                    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                    fence_async_shared()  # the rows were not copied in bulk
                    rows = x.index(2 * stage + half)
                    if has_parts:
                        first_scale = gl.full([half_rows], 1.0, gl.float32, gl.SliceLayout(1, layout))
                        if X_GROUPS:
                            its_scales = x_scales.index(stage).slice(half * half_rows, half_rows)
                            first_scale = its_scales.load(gl.SliceLayout(1, layout))
                        second_scale = first_scale
                        if BLOCKS:
                            of_first = weight_scales.index(stage).slice(0, half_rows)
                            of_second = weight_scales.index(stage).slice(half_rows, half_rows)
                            first_scale *= of_first.load(gl.SliceLayout(1, layout))
                            second_scale *= of_second.load(gl.SliceLayout(1, layout))
                        columns = weight.index(stage).slice(0, part).permute((1, 0))
                        sums = warpgroup_mma(rows, columns, zeros, use_acc=False, is_async=True)
                        sums = warpgroup_mma_wait(0, deps=[sums])
                        first += sums * first_scale[:, None]
                        columns = weight.index(stage).slice(part, part).permute((1, 0))
                        sums = warpgroup_mma(rows, columns, zeros, use_acc=False, is_async=True)
                        sums = warpgroup_mma_wait(0, deps=[sums])
                        mbarrier.arrive(empty.index(stage), count=1)
                        second += sums * second_scale[:, None]
                    else:
                        both = warpgroup_mma(rows, weight.index(stage).permute((1, 0)), both, is_async=True)
                        both = warpgroup_mma_wait(1, deps=[both])
                        if step > 0:  # the product before this one is done
                            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
                    count += 1
                if not has_parts:
                    both = warpgroup_mma_wait(0, deps=[both])
                    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
            else:
                for _ in range(0, num_groups):
                    stage = count % STAGES
                    mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                    mbarrier.arrive(empty.index(stage), count=1)
                    count += 1
        if not has_parts:
            first, second = both_halves(both, layout)
        first_column = block * (part if GATED else 2 * part)
        column = first_column + part_column
        distance: gl.constexpr = num_columns // 2 if GATED else part  # from the first part's lines to the second's
        if not BLOCKS and expert < num_experts:
            ptrs = weight_scales_ptr + expert * num_columns + column
            first *= gl.load(ptrs, mask=column < num_columns, other=0.0)[None, :]
            second *= gl.load(ptrs + distance, mask=column + distance < num_columns, other=0.0)[None, :]
        if not X_GROUPS:
            x_row = pair // num_choices if GATED else pair
            has_scale = is_pair & (expert < num_experts)  # what has no expert was not written
            of_rows = gl.load(x_scales_ptr + x_row.to(gl.int64) * x_scale_stride, mask=has_scale, other=0.0)[:, None]
            first, second = first * of_rows, second * of_rows
        if has_pairs:
            if GATED:
                if expert < num_experts:
                    values = gated(first, second, None, DTYPE, GATED == 2).to(DTYPE).to(gl.float32)
                    rounded = _round_activations(
                        values, out_scales_ptr, static_scale_ptr, pair, is_pair, block, distance
                    )
                    store_rows(rounded, out_ptr, its_pairs_ptr, num_pairs, first_column, distance, None)
            else:
                pair_weight = gl.load(pair_weights_ptr + pair, mask=is_pair, other=0.0)[:, None]
                first, second = first * pair_weight, second * pair_weight
                store_rows(first, out_ptr, its_pairs_ptr, num_pairs, first_column, num_columns, num_choices)
                store_rows(second, out_ptr, its_pairs_ptr, num_pairs, first_column + part, num_columns, num_choices)


@gluon.jit
def _round_activations(values, scales_ptr, static_scale_ptr, pair, is_pair, block, inner_size: gl.constexpr):
    """Return activations of 128 columns in e4m3, rounded by a scale of each row, which is written, or the static one.

    As `_gate_up_kernel` of `triton_fp8.py` does.
    """
    size: gl.constexpr = values.shape[1]
    if inner_size % size != 0:
        column = block * size + gl.arange(0, size, gl.SliceLayout(0, values.type.layout))
        values = gl.where((column < inner_size)[None, :], values, 0.0)
    if static_scale_ptr is not None:
        scales = gl.zeros_like(pair).to(gl.float32) + gl.load(static_scale_ptr)
    else:
        scales = gl.max(gl.where(values == values, gl.abs(values), 0.0), axis=1) * LARGEST_TO_SCALE
        num_groups: gl.constexpr = (inner_size + size - 1) // size
        gl.store(scales_ptr + pair.to(gl.int64) * num_groups + block, scales, mask=is_pair)
    values *= gl.where(scales < SMALLEST_SCALE, 0.0, gl.div_rn(gl.full_like(scales, 1.0), scales))[:, None]
    values = gl.where(values > LARGEST, LARGEST, gl.where(values < -LARGEST, -LARGEST, values))  # NaN stays
    return values.to(gl.float8e4nv)


@gluon.jit(do_not_specialize=["num_pairs"])
def _hopper_fp8_experts_kernel(
    x_ptr,
    x_scales_ptr,
    weight_desc,
    weight_scales_ptr,
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    pair_weights_ptr,
    out_ptr,
    out_scales_ptr,  # of activations; None: of products
    static_scale_ptr,  # of all activations; None: each group of 128 has one
    x_row_stride,
    x_scale_stride,
    num_pairs,
    num_choices: gl.constexpr,
    num_experts: gl.constexpr,
    num_columns: gl.constexpr,  # rows of an expert's weight
    depth: gl.constexpr,
    # True or 2 (GEGLU of triton.py): rows are those of tokens, and columns those of gate and up. False: rows are those
    # of pairs.
    GATED: gl.constexpr,
    X_GROUPS: gl.constexpr,  # whether each 128 values of a row of x have a scale, and not all
    BLOCKS: gl.constexpr,  # whether each 128 x 128 values of the weight have a scale, and not all of a row
    DTYPE: gl.constexpr,  # to which gate, up and their product are rounded
    ROWS: gl.constexpr,
    PART: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLYING_REGISTERS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
):
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    x = gl.allocate_shared_memory(weight_desc.dtype, [2 * STAGES, ROWS // 2, DEPTH], weight_desc.layout)
    weight = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, 2 * PART, DEPTH], weight_desc.layout)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], SCALES_LAYOUT)
    weight_scales = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], SCALES_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=129)  # 128 threads that copy rows, and one that announces the weights
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    scales = (x_scales_ptr, weight_scales_ptr, x_scale_stride, x_scales, weight_scales)
    plan = (pairs_ptr, tile_experts_ptr, num_tiles_ptr)
    out = (out_ptr, out_scales_ptr, static_scale_ptr)
    buffers = (x, weight)
    # The constants are named in the call itself: a variable would make numbers of a step of them.
    gl.warp_specialize(
        [
            (_multiply, (
                gl.constexpr(0), scales, plan, pair_weights_ptr, out, num_pairs, buffers, full, empty,
                num_choices, num_experts, num_columns, depth, GATED, X_GROUPS, BLOCKS, DTYPE, STAGES,
            )),
            (_multiply, (
                gl.constexpr(1), scales, plan, pair_weights_ptr, out, num_pairs, buffers, full, empty,
                num_choices, num_experts, num_columns, depth, GATED, X_GROUPS, BLOCKS, DTYPE, STAGES,
            )),
            (fetch, (
                x_ptr, weight_desc, scales, plan, x_row_stride, num_pairs, buffers, full, empty, num_choices,
                num_experts, num_columns, depth, GATED, X_GROUPS, BLOCKS, STAGES,
            )),
        ],
        [4, 4],
        [MULTIPLYING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def grouped_product(x, weight, plan, pair_weights, out, is_gated, dtype, out_scales=None, static_scale=None):
    """Multiply the rows of each expert's pairs by its rows of the weight, as the kernels of `triton_fp8.py` do.

    x: QuantizedRows. is_gated: see `grouped_product` of `triton.py`; then out and out_scales are the values and scales
    of activations. static_scale: of all activations; None: they have scales of their own.
    """
    num_experts, num_columns, depth = weight.values.shape
    lines = [[num_experts * num_columns, depth], [depth, 1], [PART, DEPTH], WEIGHT_LAYOUT]
    _hopper_fp8_experts_kernel[(num_multiprocessors(x.values.device),)](
        x.values,
        x.scales,
        TensorDescriptor(weight.values, *lines),
        weight.scales,
        *plan.tensors,
        pair_weights,
        out,
        out_scales,
        static_scale,
        x.values.stride(0),
        x.scales.stride(0),
        pair_weights.numel(),
        num_choices=pair_weights.shape[1],
        num_experts=num_experts,
        num_columns=num_columns,
        depth=depth,
        GATED=is_gated,
        X_GROUPS=x.scales.shape[1] > 1,
        BLOCKS=weight.scales.dim() == 3,
        DTYPE=getattr(tl, str(dtype).removeprefix("torch.")),
        ROWS=ROWS,
        PART=PART,
        DEPTH=DEPTH,
        STAGES=GATE_UP_STAGES if is_gated else DOWN_STAGES,
        MULTIPLYING_REGISTERS=MULTIPLYING_REGISTERS,
        LOADING_REGISTERS=LOADING_REGISTERS,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )


def serves(hidden_size: int, inner_size: int, row_stride: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes experts of these sizes, and rows so far apart: Triton's copies want multiples of 16."""
    fits = hidden_size % 16 == 0 and inner_size % 16 == 0 and row_stride % 16 == 0
    return fits and dtype in (torch.bfloat16, torch.float16)
