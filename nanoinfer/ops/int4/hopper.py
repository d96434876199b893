"""Products by a weight in 4 bits for Hopper GPUs, in Gluon, up to 1,024 rows.

The transposed product is computed, outputs by rows: so the weight is the operand that the tensor cores take from
registers, where its numbers are widened, and x comes from shared memory. Bulk copies (TMA) bring blocks of the weight,
16 words for 128 inputs, and x's part of them into a ring of buffers.

- Up to 128 rows a program is small, so that a multiprocessor has several: while one widens, another multiplies.
- For more rows a program fills a multiprocessor, and its warps have parts of their own: one loads, and two groups of
  four widen and multiply in turns, each its own outputs.

- The numbers of two neighbouring words are widened at once (`triton.py`). Less the zero point, they are exact.
- Up to 64 rows each group is summed by itself and then multiplied by its scale, in float32. For more rows the weight
  is scaled first and rounded to 16 bits, as `widen` does, since that takes fewer operations.

Triton's interpreter does not run Gluon: the specification is compared on a GPU alone; a CPU only compiles the kernel.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanoinfer.ops.common.device_properties import num_multiprocessors
from nanoinfer.ops.common.hopper import MAX_REGISTERS, SWIZZLED, load_tile
from nanoinfer.ops.int4.spec import COLUMNS, MANY_COLUMNS, MANY_ROWS, OUTPUTS_AT_ONCE
from nanoinfer.ops.int4.triton import BLOCK, E2M1_BF16, E2M1_F16, NUMBERS_BF16, NUMBERS_F16, WORDS

AT_ONCE = gl.constexpr(OUTPUTS_AT_ONCE)
MAX_ROWS_WITH_SCALED_SUMS = gl.constexpr(64)  # with more, the weight is scaled


# The rows of a tile, and how many blocks of inputs are loaded together for it.
TILE_BLOCKS = {8: 2, 16: 2, 32: 2, 64: 1, 128: 1}
STAGES = 2  # how many of these loads there are buffers for
MANY_STAGES = 3  # the same for more rows, of one block each
MULTIPLYING_REGISTERS, LOADING_REGISTERS = 240, 24  # as MAX_REGISTERS are shared out
X_LAYOUTS = {
    1: SWIZZLED,
    2: SWIZZLED,
    4: gl.NVMMASharedLayout(64, 16, rank=2),
}
WORDS_LAYOUT = gl.NVMMASharedLayout(64, 32, rank=2)

# $1 2**126, which makes values of e2m1 what they are; $1 2**14 in float16.
WHOLE_BF16 = gl.constexpr("{ .reg .b32 two; mov.b32 two, 0x7e807e80; mul.bf16x2 $0, $1, two; }")
WHOLE_F16 = gl.constexpr("{ .reg .b32 two; mov.b32 two, 0x74007400; mul.f16x2 $0, $1, two; }")
# Two numbers, and both parts of their scale: only the product with the low part is rounded by itself.
TIMES_BF16 = gl.constexpr("{ .reg .b32 low; mul.bf16x2 low, $1, $3; fma.rn.bf16x2 $0, $1, $2, low; }")


@gluon.jit
def _numbers(words, dtype: gl.constexpr, E2M1: gl.constexpr):
    """Return the eight numbers of each word as eight tensors of the bits of `dtype`."""
    plain: gl.constexpr = NUMBERS_BF16 if dtype == gl.bfloat16 else NUMBERS_F16
    e2m1: gl.constexpr = E2M1_BF16 if dtype == gl.bfloat16 else E2M1_F16
    code: gl.constexpr = e2m1 if E2M1 else plain
    return gl.inline_asm_elementwise(
        code,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
        [words],
        (gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _values(bits, zeros, dtype: gl.constexpr, E2M1: gl.constexpr):
    """Return numbers less the zero points of their outputs, or values of e2m1; both are exact."""
    numbers = bits.to(dtype, bitcast=True)
    if E2M1:
        whole: gl.constexpr = WHOLE_BF16 if dtype == gl.bfloat16 else WHOLE_F16
        values = gl.inline_asm_elementwise(whole, "=r,r", [numbers], gl.int16, is_pure=True, pack=2)
    else:
        above: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
        less: gl.constexpr = "sub.bf16x2 $0, $1, $2;" if dtype == gl.bfloat16 else "sub.f16x2 $0, $1, $2;"
        numbers, zeros = gl.broadcast(numbers, gl.expand_dims((zeros + above).to(dtype), 1))
        values = gl.inline_asm_elementwise(less, "=r,r,r", [numbers, zeros], gl.int16, is_pure=True, pack=2)
    return values.to(dtype, bitcast=True)


@gluon.jit
def _load_group(pointers, line, group):
    """Return the scales and zero points of a group, float32. line: where those of each output begin."""
    scales_ptr, zeros_ptr = pointers
    if zeros_ptr is None:
        zeros = gl.full(line.shape, 8.0, gl.float32, line.type.layout)
    else:
        zeros = gl.load(zeros_ptr + line + group).to(gl.float32)
    return gl.load(scales_ptr + line + group), zeros


@gluon.jit
def _load_groups(pointers, line, block, GROUPS: gl.constexpr, GROUP_BLOCKS: gl.constexpr):
    """Return scales and zero points of each quarter of a block."""
    group = block // GROUP_BLOCKS * GROUPS
    first = _load_group(pointers, line, group)
    second, third, fourth = first, first, first
    if GROUPS == 2:
        third = _load_group(pointers, line, group + 1)
        fourth = third
    if GROUPS == 4:
        second = _load_group(pointers, line, group + 1)
        third = _load_group(pointers, line, group + 2)
        fourth = _load_group(pointers, line, group + 3)
    return first, second, third, fourth


@gluon.jit
def _joined(a, b):
    """Join two tensors of inputs, (COLUMNS, size) each, one behind the other."""
    both = gl.join(a, b).permute((0, 2, 1))
    return both.reshape((both.shape[0], 2 * both.shape[2]))


@gluon.jit
def _quarters(words, groups, dtype: gl.constexpr, E2M1: gl.constexpr):
    """Return the numbers of a block less their zero points, as four tensors (COLUMNS, 32)."""
    a, b, c, d, e, f, g, h = _numbers(words, dtype, E2M1)
    first, second, third, fourth = groups
    return (
        _joined(_values(a, first[1], dtype, E2M1), _values(b, first[1], dtype, E2M1)),
        _joined(_values(c, second[1], dtype, E2M1), _values(d, second[1], dtype, E2M1)),
        _joined(_values(e, third[1], dtype, E2M1), _values(f, third[1], dtype, E2M1)),
        _joined(_values(g, fourth[1], dtype, E2M1), _values(h, fourth[1], dtype, E2M1)),
    )


@gluon.jit
def _times(numbers, scales, dtype: gl.constexpr):
    """Return numbers, exact in `dtype`, times the scales of their outputs."""
    scales = gl.expand_dims(gl.convert_layout(scales, gl.SliceLayout(1, numbers.type.layout)), 1)
    if dtype == gl.bfloat16:  # which has float32's range: two parts of a scale take less than widening the numbers
        high = scales.to(dtype)
        low = (scales - high.to(gl.float32)).to(dtype)
        numbers, high = gl.broadcast(numbers, high)
        numbers, low = gl.broadcast(numbers, low)
        operands = [numbers, high, low]
        bits = gl.inline_asm_elementwise(TIMES_BF16, "=r,r,r,r", operands, gl.int16, is_pure=True, pack=2)
        return bits.to(dtype, bitcast=True)
    else:
        return (numbers.to(gl.float32) * scales).to(dtype)


@gluon.jit
def _fill(descriptors, buffers, full, first, step, place, STAGES: gl.constexpr):
    """Begin to load what a step reads: blocks of the weight, and those parts of x. What lies behind the end is 0."""
    x_desc, words_desc = descriptors
    x, words = buffers
    first_row, first_column = place
    num_blocks: gl.constexpr = words.shape[0] // STAGES
    num_parts: gl.constexpr = x.shape[0] // STAGES
    stage = step % STAGES
    block = first + step * num_blocks
    barrier = full.index(stage)
    mbarrier.expect(barrier, num_parts * x_desc.block_type.nbytes + num_blocks * words_desc.block_type.nbytes)
    for index in gl.static_range(num_blocks):
        load_tile(words_desc, [first_column, (block + index) * WORDS], barrier, words.index(stage * num_blocks + index))
    for index in gl.static_range(num_parts):
        line = block * BLOCK + index * x.shape[2]
        load_tile(x_desc, [first_row, line], barrier, x.index(stage * num_parts + index))


@gluon.jit
def _add_product(acc, weight, x, scales):
    """Add a product of one group, times its scales."""
    layout: gl.constexpr = acc.type.layout
    weight = gl.convert_layout(weight, gl.DotOperandLayout(0, layout, 2))
    part = warpgroup_mma(weight, x.permute((1, 0)), acc, use_acc=False)
    return acc + part * gl.expand_dims(gl.convert_layout(scales, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def _scaled(quarters, groups, dtype: gl.constexpr):
    """Return a block of the weight, (COLUMNS, 128)."""
    a, b, c, d = quarters
    left = _joined(_times(a, groups[0][0], dtype), _times(b, groups[1][0], dtype))
    right = _joined(_times(c, groups[2][0], dtype), _times(d, groups[3][0], dtype))
    return _joined(left, right)


@gluon.jit
def _multiply_block(acc, weight, x, part, groups, PARTS: gl.constexpr):
    """Add the product of a block. weight: its quarters. part: where x's part is in `x`."""
    a, b, c, d = weight
    layout: gl.constexpr = acc.type.layout
    if x.shape[1] > MAX_ROWS_WITH_SCALED_SUMS:
        scaled = gl.convert_layout(_scaled(weight, groups, x.dtype), gl.DotOperandLayout(0, layout, 2))
        acc = warpgroup_mma(scaled, x.index(part).permute((1, 0)), acc)
    elif PARTS == 4:
        acc = _add_product(acc, a, x.index(part), groups[0][0])
        acc = _add_product(acc, b, x.index(part + 1), groups[1][0])
        acc = _add_product(acc, c, x.index(part + 2), groups[2][0])
        acc = _add_product(acc, d, x.index(part + 3), groups[3][0])
    elif PARTS == 2:
        acc = _add_product(acc, _joined(a, b), x.index(part), groups[0][0])
        acc = _add_product(acc, _joined(c, d), x.index(part + 1), groups[2][0])
    else:
        acc = _add_product(acc, _joined(_joined(a, b), _joined(c, d)), x.index(part), groups[0][0])
    return acc


@gluon.jit
def _store(acc, out_ptr, first_row, first_column, split, num_rows, num_outputs, dtype: gl.constexpr):
    """Write sums, (COLUMNS, ROWS), into those of a split.

    Lanes exchange sums within their warp first, so that each writes neighbouring outputs of a row at once.
    """
    share: gl.constexpr = min(AT_ONCE, acc.shape[1] // 2)  # of the 16 outputs that a warp has
    layout: gl.constexpr = gl.BlockedLayout([share, 1], [16 // share, 2 * share], [4, 1], [0, 1])
    acc = gl.convert_layout(acc.to(dtype), layout)
    column = gl.expand_dims(first_column + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout)), 1)
    row = gl.expand_dims(first_row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout)), 0)
    num_outputs = num_outputs // AT_ONCE * AT_ONCE  # which it is, so that the compiler knows
    out_ptrs = out_ptr + (split * num_rows + row).to(gl.int64) * num_outputs + column
    gl.store(out_ptrs, acc, mask=(row < num_rows) & (column < num_outputs))


@gluon.jit(do_not_specialize=["num_rows", "num_steps", "num_outputs", "num_blocks", "num_groups"])
def _hopper_int4_kernel(
    x_desc,
    words_desc,
    scales_ptr,
    zeros_ptr,  # None: all are 8
    out_ptr,
    num_rows,
    num_outputs,
    num_blocks,  # of 128 inputs
    num_groups,
    num_steps,  # of BLOCKS each, that a program sums up
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUPS: gl.constexpr,  # that a block has; 1: one or a share of one
    GROUP_BLOCKS: gl.constexpr,  # that a group has; 1: one or a share of one
    E2M1: gl.constexpr,
    BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,  # of a block of x
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES * BLOCKS * PARTS, ROWS, BLOCK // PARTS], x_desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [STAGES * BLOCKS, COLUMNS, WORDS], words_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(full.index(index), count=1)
    fence_async_shared()
    place = gl.program_id(0) * ROWS, gl.program_id(1) * COLUMNS
    split = gl.program_id(2)
    first = split * num_steps * BLOCKS
    count = gl.minimum(num_steps, gl.cdiv(num_blocks - first, BLOCKS))
    descriptors, buffers = (x_desc, words_desc), (x, words)
    for index in gl.static_range(STAGES):
        if index < count:
            _fill(descriptors, buffers, full, first, index, place, STAGES)
    column = gl.minimum(place[1] + gl.arange(0, COLUMNS, gl.SliceLayout(1, operand)), num_outputs - 1)
    line = column.to(gl.int64) * num_groups
    acc = gl.zeros([COLUMNS, ROWS], gl.float32, layout)
    groups = _load_groups((scales_ptr, zeros_ptr), line, gl.minimum(first, num_blocks - 1), GROUPS, GROUP_BLOCKS)
    for step in range(count):
        stage = step % STAGES
        for index in gl.static_range(BLOCKS):
            # Those of the next block arrive during this block's product. Behind the end x and weight are 0.
            following = gl.minimum(first + step * BLOCKS + index + 1, num_blocks - 1)
            next_groups = _load_groups((scales_ptr, zeros_ptr), line, following, GROUPS, GROUP_BLOCKS)
            if index == 0:
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            buffer = stage * BLOCKS + index
            weight = _quarters(words.index(buffer).load(operand), groups, x.dtype, E2M1)
            acc = _multiply_block(acc, weight, x, buffer * PARTS, groups, PARTS)
            groups = next_groups
        if step + STAGES < count:
            _fill(descriptors, buffers, full, first, step + STAGES, place, STAGES)
    _store(acc, out_ptr, place[0], place[1], split, num_rows, num_outputs, x_desc.dtype)


@gluon.jit
def _read_unit(unit, sizes, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the first row and output of a unit of work, its split, its first block, and how many blocks it sums up."""
    num_rows, num_outputs, num_blocks, _, num_steps, _ = sizes
    num_row_tiles, num_column_tiles = gl.cdiv(num_rows, ROWS), gl.cdiv(num_outputs, COLUMNS)
    row_tile, others = unit % num_row_tiles, unit // num_row_tiles
    column_tile, split = others % num_column_tiles, others // num_column_tiles
    first = split * num_steps
    count = gl.maximum(gl.minimum(num_steps, num_blocks - first), 0)
    return row_tile * ROWS, column_tile * COLUMNS, split, first, count


@gluon.jit
def _fetch_units(descriptors, buffers, full, empty, sizes, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Take one unit after the other, and load what it reads."""
    x_desc, words_desc = descriptors
    x, words = buffers
    shares: gl.constexpr = words.shape[0] // STAGES
    loaded = 0
    for unit in range(gl.program_id(0), sizes[5], gl.num_programs(0)):
        first_row, first_column, _, first, count = _read_unit(unit, sizes, x.shape[1], COLUMNS)
        for block in range(first, first + count):
            stage = loaded % STAGES
            barrier = full.index(stage)
            mbarrier.wait(empty.index(stage), (loaded // STAGES) & 1 ^ 1)
            mbarrier.expect(barrier, x_desc.block_type.nbytes + shares * words_desc.block_type.nbytes)
            for share in gl.static_range(shares):
                line = first_column + share * words.shape[1]
                load_tile(words_desc, [line, block * WORDS], barrier, words.index(stage * shares + share))
            load_tile(x_desc, [first_row, block * BLOCK], barrier, x.index(stage))
            loaded += 1


@gluon.jit
def _multiply_units(
    share: gl.constexpr,
    pointers,
    buffers,
    full,
    empty,
    sizes,
    GROUPS: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
    E2M1: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Multiply one share of the outputs of each unit, and write the sums."""
    x, words = buffers
    scales_ptr, zeros_ptr, out_ptr = pointers
    num_rows, num_outputs, num_blocks, num_groups, _, num_units = sizes
    num_tile_rows: gl.constexpr = x.shape[1]
    share_columns: gl.constexpr = words.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, num_tile_rows, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    used = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        first_row, first_column, split, first, count = _read_unit(unit, sizes, num_tile_rows, COLUMNS)
        first_column += share * share_columns
        column = first_column + gl.arange(0, share_columns, gl.SliceLayout(1, operand))
        line = gl.minimum(column, num_outputs - 1).to(gl.int64) * num_groups
        acc = gl.zeros([share_columns, num_tile_rows], gl.float32, layout)
        groups = _load_groups((scales_ptr, zeros_ptr), line, gl.minimum(first, num_blocks - 1), GROUPS, GROUP_BLOCKS)
        for block in range(first, first + count):
            stage = used % STAGES
            mbarrier.wait(full.index(stage), (used // STAGES) & 1)
            tile = words.index(stage * (COLUMNS // share_columns) + share)
            weight = _quarters(tile.load(operand), groups, x.dtype, E2M1)
            # Those of the next block arrive during this block's product.
            following = gl.minimum(block + 1, num_blocks - 1)
            next_groups = _load_groups((scales_ptr, zeros_ptr), line, following, GROUPS, GROUP_BLOCKS)
            acc = _multiply_block(acc, weight, x, stage, groups, 1)
            mbarrier.arrive(empty.index(stage), count=1)
            groups = next_groups
            used += 1
        _store(acc, out_ptr, first_row, first_column, split, num_rows, num_outputs, x.dtype)


@gluon.jit(do_not_specialize=["num_rows", "num_outputs", "num_blocks", "num_groups", "num_steps", "num_units"])
def _hopper_int4_many_rows_kernel(
    x_desc,
    words_desc,
    scales_ptr,
    zeros_ptr,  # None: all are 8
    out_ptr,
    num_rows,
    num_outputs,
    num_blocks,  # of 128 inputs
    num_groups,
    num_steps,  # blocks that a unit sums up
    num_units,  # tiles, each as often as its sum is split
    GROUPS: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
    E2M1: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLYING_REGISTERS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
):
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, BLOCK], x_desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [2 * STAGES, COLUMNS // 2, WORDS], words_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(full.index(index), count=1)
        mbarrier.init(empty.index(index), count=2)
    fence_async_shared()
    pointers, buffers = (scales_ptr, zeros_ptr, out_ptr), (x, words)
    sizes = (num_rows, num_outputs, num_blocks, num_groups, num_steps, num_units)
    # The constants are named in the call itself: a variable would make numbers of a step of them.
    gl.warp_specialize(
        [
            (_multiply_units, (
                gl.constexpr(0), pointers, buffers, full, empty, sizes, GROUPS, GROUP_BLOCKS, E2M1, COLUMNS, STAGES,
            )),
            (_multiply_units, (
                gl.constexpr(1), pointers, buffers, full, empty, sizes, GROUPS, GROUP_BLOCKS, E2M1, COLUMNS, STAGES,
            )),
            (_fetch_units, ((x_desc, words_desc), buffers, full, empty, sizes, COLUMNS, STAGES)),
        ],
        [4, 1],
        [MULTIPLYING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


def int4_product(x, weight, num_splits):
    (num_rows, num_inputs), num_outputs = x.shape, len(weight.numbers)
    out = x.new_empty(num_splits, num_rows, num_outputs)
    if num_rows == 0:
        return out
    if x.stride(0) % 8 or x.data_ptr() % 16:  # what is loaded in bulk begins at multiples of 16 bytes
        x = x.clone(memory_format=torch.contiguous_format)
    num_blocks, num_groups = num_inputs // BLOCK.value, weight.num_groups
    groups, group_blocks = max(1, num_groups // num_blocks), max(1, num_blocks // num_groups)
    rows = next((rows for rows in TILE_BLOCKS if num_rows <= rows), None)
    if rows is None:
        num_units = triton.cdiv(num_rows, MANY_ROWS) * triton.cdiv(num_outputs, MANY_COLUMNS) * num_splits
        _hopper_int4_many_rows_kernel[(min(num_units, num_multiprocessors(x.device)),)](
            TensorDescriptor.from_tensor(x, [MANY_ROWS, BLOCK.value], SWIZZLED),
            TensorDescriptor.from_tensor(weight.numbers, [MANY_COLUMNS // 2, WORDS.value], WORDS_LAYOUT),
            weight.scales,
            weight.zeros,
            out,
            num_rows,
            num_outputs,
            num_blocks,
            num_groups,
            triton.cdiv(num_blocks, num_splits),
            num_units,
            GROUPS=groups,
            GROUP_BLOCKS=group_blocks,
            E2M1=weight.is_e2m1,
            ROWS=MANY_ROWS,
            COLUMNS=MANY_COLUMNS,
            STAGES=MANY_STAGES,
            MULTIPLYING_REGISTERS=MULTIPLYING_REGISTERS,
            LOADING_REGISTERS=LOADING_REGISTERS,
            num_warps=4,
            maxnreg=MAX_REGISTERS,
        )
        return out
    blocks, parts = TILE_BLOCKS[rows], groups if rows <= MAX_ROWS_WITH_SCALED_SUMS.value else 1
    _hopper_int4_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_outputs, COLUMNS), num_splits)](
        TensorDescriptor.from_tensor(x, [rows, BLOCK.value // parts], X_LAYOUTS[parts]),
        TensorDescriptor.from_tensor(weight.numbers, [COLUMNS, WORDS.value], WORDS_LAYOUT),
        weight.scales,
        weight.zeros,
        out,
        num_rows,
        num_outputs,
        num_blocks,
        num_groups,
        triton.cdiv(num_blocks, num_splits * blocks),
        ROWS=rows,
        COLUMNS=COLUMNS,
        GROUPS=groups,
        GROUP_BLOCKS=group_blocks,
        E2M1=weight.is_e2m1,
        BLOCKS=blocks,
        PARTS=parts,
        STAGES=STAGES,
        WARPS=4,
        num_warps=4,
    )
    return out
