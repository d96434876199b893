"""The experts' products by weights in 4 bits for Hopper GPUs, in Gluon, in tiles of up to 64 pairs.

It computes what the two kernels of `triton.py` do, from the same tiles. As in `ops/int4/hopper.py`, whose parts it
shares, the transposed product is computed, so that the weight is widened in registers, from where the tensor cores take
it.

- Bulk copies (TMA) bring the weight's blocks, and copies of 16 bytes gather the rows of x, into a ring of buffers. The
  exponents of MXFP4 take the same way: a load of its own would keep each block waiting.
- A program is small, so that a multiprocessor has several: while one widens, another multiplies.
- A tile whose second half has no pairs is computed as one of half its rows. So tiles may be large enough for experts
  with many pairs, whose weights would else be widened several times.

Triton's interpreter does not run Gluon: the specification is compared on a GPU alone; a CPU only compiles the kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanoinfer.ops.common.device_properties import num_multiprocessors
from nanoinfer.ops.common.hopper import MAX_REGISTERS, SWIZZLED, gather, load_tile
from nanoinfer.ops.common.programmatic_launch import overlap_options
from nanoinfer.ops.experts.hopper import gated, row_of_result
from nanoinfer.ops.experts.spec import ExpertWeights
from nanoinfer.ops.int4.hopper import (
    WORDS_LAYOUT,
    _joined,
    _load_groups,
    _numbers,
    _quarters,
)
from nanoinfer.ops.int4.triton import BLOCK, TIMES_F16, WORDS
from nanoinfer.ops.routing.triton import TilePlan

# With fewer programs of 128 rows of the weight on each multiprocessor, they have half the rows. In MXFP4 this is so for
# tiles of 16 pairs, those of up to 16 tokens of gpt-oss (11.6 programs).
MAX_SMALL, MAX_SMALL_E2M1 = 2, 12
SMALL_LINES = 64
# With fewer programs of so many rows on each multiprocessor, two programs share the sums of down, if these have so many
# blocks. The activations of gate and up need whole sums.
MAX_SPLIT, MIN_SPLIT_BLOCKS = 6, 4
EXPONENTS_LAYOUT = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
TIMES_BF16 = gl.constexpr("mul.bf16x2 $0, $1, $2;")


@gluon.jit
def _times_power(bits, exponents, index: gl.constexpr, dtype: gl.constexpr):
    """Return values of e2m1 times 2**(exponent - 127) for one byte of each line's word, as `_power` of int4 does."""
    exponent = (exponents >> (8 * index)) & 255
    # For two neighbouring inputs, so in both halves of a word: (exponent + 126) << 7, or (exponent - 98) << 10.
    if dtype == gl.bfloat16:  # noqa: SIM108  # a constant alone chooses the code
        powers = exponent * 0x00800080 + 0x3F003F00
    else:
        powers = gl.maximum(exponent - 98, 0) * 0x04000400
    bits, powers = gl.broadcast(bits, gl.expand_dims(powers, 1))
    code: gl.constexpr = TIMES_BF16 if dtype == gl.bfloat16 else TIMES_F16
    values = gl.inline_asm_elementwise(code, "=r,r,r,r", [bits, powers], gl.int16, is_pure=True, pack=2)
    return values.to(dtype, bitcast=True)


@gluon.jit
def _e2m1_block(words, exponents, dtype: gl.constexpr):
    """Return a block of values of e2m1, (LINES, 128), each 32 inputs times their power of two."""
    a, b, c, d, e, f, g, h = _numbers(words, dtype, True)
    first = _joined(_times_power(a, exponents, 0, dtype), _times_power(b, exponents, 0, dtype))
    second = _joined(_times_power(c, exponents, 1, dtype), _times_power(d, exponents, 1, dtype))
    third = _joined(_times_power(e, exponents, 2, dtype), _times_power(f, exponents, 2, dtype))
    fourth = _joined(_times_power(g, exponents, 3, dtype), _times_power(h, exponents, 3, dtype))
    return _joined(_joined(first, second), _joined(third, fourth))


@gluon.jit
def _add_block(acc, words, x, terms, E2M1: gl.constexpr):
    """Add the product of a block: of values of e2m1, which are exact; or of numbers, times the scales of its group."""
    layout: gl.constexpr = acc.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    numbers = words.load(operand)
    if E2M1:
        weight = gl.convert_layout(_e2m1_block(numbers, terms, x.dtype), operand)
        return warpgroup_mma(weight, x.permute((1, 0)), acc)
    else:
        a, b, c, d = _quarters(numbers, terms, x.dtype, False)
        weight = gl.convert_layout(_joined(_joined(a, b), _joined(c, d)), operand)
        part = warpgroup_mma(weight, x.permute((1, 0)), acc, use_acc=False)
        scales = gl.convert_layout(terms[0][0], gl.SliceLayout(1, layout))
        return acc + part * gl.expand_dims(scales, 1)


@gluon.jit
def _fill_weight(weight, step, buffers, full, E2M1: gl.constexpr, STAGES: gl.constexpr):
    """Begin to load a block of the weight: two parts of its lines, `distance` lines apart.

    Of MXFP4 the exponents, too: one word for each line.
    """
    words_desc, line, distance, exponents_ptrs, first_block = weight
    _, words, exponents = buffers
    part: gl.constexpr = words.shape[1] // 2
    stage = step % STAGES
    word = (first_block + step) * WORDS
    barrier = full.index(stage)
    mbarrier.expect(barrier, 2 * words_desc.block_type.nbytes)
    load_tile(words_desc, [line, word], barrier, words.index(stage).slice(0, part))
    load_tile(words_desc, [line + distance, word], barrier, words.index(stage).slice(part, part))
    if E2M1:
        gather(exponents.index(stage), exponents_ptrs + step)


@gluon.jit
def _fill_rows(rows, step, buffers, full, depth: gl.constexpr, STAGES: gl.constexpr):
    """Begin to load a block of x of each pair, after that of the weight."""
    x_ptrs, mask, k = rows
    stage = step % STAGES
    if depth % BLOCK != 0:
        mask = mask & gl.expand_dims(step * BLOCK + k < depth, 0)
    gather(buffers[0].index(stage), x_ptrs + step * BLOCK, mask=mask)
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _load_pairs(pairs_ptr, first, row, num_pairs):
    """Return the pairs of a tile's rows, as `tile_pairs` of `ops/routing` does. first: the tile's first place there."""
    if pairs_ptr is None:
        return gl.where(row == 0, first, num_pairs)
    else:
        return gl.load(pairs_ptr + first + row)


@gluon.jit
def _line_of(first_line, index, num_lines: gl.constexpr, LINES: gl.constexpr, DISTANCE: gl.constexpr):
    """Return the line of an expert's weight that a program's index stands for, at most the last one."""
    part: gl.constexpr = LINES // 2
    return gl.minimum(first_line + index % part + index // part * DISTANCE, num_lines - 1)


@gluon.jit
def _tile_product(
    acc,
    x_ptr,
    words_desc,
    pointers,  # to scales and zero points
    rows,  # offset of each pair's row, and whether there is one
    expert,
    first_line,
    blocks,  # the first one, how many there are, and how many a line has
    num_lines: gl.constexpr,
    num_groups: gl.constexpr,
    depth: gl.constexpr,
    GATHERING: gl.constexpr,  # the layout of the offsets in x
    DISTANCE: gl.constexpr,
    GATED: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
    E2M1: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Return the lines' products with the rows of x, (LINES, ROWS)."""
    first_block, num_blocks, all_blocks = blocks
    x = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, acc.shape[1], BLOCK], SWIZZLED)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, acc.shape[0], WORDS], words_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(full.index(index), count=32 * WARPS + 1)  # threads that copy rows, and one for the weight
    fence_async_shared()
    exponents, exponents_ptrs = full, pointers[0]  # any values: MXFP4 alone reads them
    if E2M1:
        exponents = gl.allocate_shared_memory(gl.int32, [STAGES, acc.shape[0]], EXPONENTS_LAYOUT)
        place = gl.arange(0, acc.shape[0], gl.BlockedLayout([1], [32], [WARPS], [0]))
        line = expert * num_lines + _line_of(first_line, place, num_lines, acc.shape[0], DISTANCE)
        exponents_ptrs = pointers[0] + line.to(gl.int64) * all_blocks + first_block
    k = first_block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, GATHERING))
    rows = (x_ptr + gl.expand_dims(rows[0], 1) + gl.expand_dims(k, 0), gl.expand_dims(rows[1], 1), k)
    weight = (words_desc, expert * num_lines + first_line, DISTANCE, exponents_ptrs, first_block)
    buffers = (x, words, exponents)
    for step in gl.static_range(STAGES):
        if step < num_blocks:
            _fill_weight(weight, step, buffers, full, E2M1, STAGES)
    if OVERLAP and not GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for step in gl.static_range(STAGES):
        if step < num_blocks:
            _fill_rows(rows, step, buffers, full, depth, STAGES)
    lines: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, acc.type.layout, 2))
    place = gl.arange(0, acc.shape[0], lines)
    line = expert * num_lines + _line_of(first_line, place, num_lines, acc.shape[0], DISTANCE)
    line = line.to(gl.int64) * num_groups
    for step in range(num_blocks):
        stage = step % STAGES
        if not E2M1:
            terms = _load_groups(pointers, line, first_block + step, 1, GROUP_BLOCKS)
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        fence_async_shared()  # the rows were not copied in bulk; it waits for loads
        if E2M1:
            terms = exponents.index(stage).load(lines)
        acc = _add_block(acc, words.index(stage), x.index(stage), terms, E2M1)
        if step + STAGES < num_blocks:
            _fill_weight(weight, step + STAGES, buffers, full, E2M1, STAGES)
            _fill_rows(rows, step + STAGES, buffers, full, depth, STAGES)
    return acc


@gluon.jit
def _store_activations(
    acc,
    products,
    clamps,
    inner_size: gl.constexpr,
    CLAMPED: gl.constexpr,
    GELU: gl.constexpr,
):
    """Write the activations of the gate's lines, the first half of `acc`, and of those of up."""
    pairs_ptr, first, _, out_ptr, first_line, num_pairs = products
    part: gl.constexpr = acc.shape[0] // 2
    num_rows: gl.constexpr = acc.shape[1]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([4, 1, 2], [8, 4, 1], [1, gl.num_warps(), 1], [2, 0, 1])
    gate, up = gl.split(gl.convert_layout(acc.reshape((2, part, num_rows)).permute((1, 2, 0)), layout))
    out = gated(gate, up, clamps if CLAMPED else None, dtype, GELU)
    column = gl.expand_dims(first_line + gl.arange(0, part, gl.SliceLayout(1, out.type.layout)), 1)
    pair = _load_pairs(pairs_ptr, first, gl.arange(0, num_rows, gl.SliceLayout(0, out.type.layout)), num_pairs)
    mask = gl.expand_dims(pair < num_pairs, 0) & (column < inner_size)
    out_ptrs = out_ptr + gl.expand_dims(pair.to(gl.int64) * inner_size, 0) + column
    gl.store(out_ptrs, out.to(dtype), mask=mask)


@gluon.jit
def _store_products(acc, products, num_choices: gl.constexpr, num_lines: gl.constexpr):
    """Write products times the weights of their pairs."""
    pairs_ptr, first, pair_weights_ptr, out_ptr, first_line, num_pairs = products
    num_rows: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    column = gl.expand_dims(first_line + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout)), 1)
    pair = _load_pairs(pairs_ptr, first, gl.arange(0, num_rows, gl.SliceLayout(0, layout)), num_pairs)
    is_pair = pair < num_pairs
    pair_weight = gl.load(pair_weights_ptr + pair, mask=is_pair, other=0.0)
    out_row = row_of_result(pair, num_pairs, num_choices) + gl.program_id(2) * num_pairs
    out_ptrs = out_ptr + gl.expand_dims(out_row * num_lines, 0) + column
    out = (acc * gl.expand_dims(pair_weight, 0)).to(out_ptr.dtype.element_ty)
    gl.store(out_ptrs, out, mask=gl.expand_dims(is_pair, 0) & (column < num_lines))


@gluon.jit(do_not_specialize=["num_pairs", "num_blocks", "limit", "alpha"])
def _hopper_int4_experts_kernel(
    x_ptr,
    words_desc,
    scales_ptr,
    zeros_ptr,  # None: all are 8
    bias_ptr,  # None: there is none
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    pair_weights_ptr,
    out_ptr,
    x_row_stride,
    limit,
    alpha,
    num_pairs,
    num_blocks,  # of 128 inputs
    num_choices: gl.constexpr,
    num_experts: gl.constexpr,
    num_lines: gl.constexpr,  # of an expert's weight
    num_groups: gl.constexpr,  # of a line
    depth: gl.constexpr,  # of x; inputs of the weight behind it are 0
    # True or 2 (GEGLU of triton.py): rows are those of tokens, and lines those of gate and up. False: rows are those of
    # pairs.
    GATED: gl.constexpr,
    CLAMPED: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,  # that a group has; 1: one or a share of one
    E2M1: gl.constexpr,
    ROWS: gl.constexpr,
    LINES: gl.constexpr,  # a program's: of gate and up half each, or all beside each other
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    tile = gl.program_id(1)
    # The second product need not wait for its plan, nor with its weight: the first began when the plan was complete.
    if OVERLAP and GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_tiles = gl.num_programs(1) if num_tiles_ptr is None else gl.load(num_tiles_ptr)
    if tile >= num_tiles:
        return
    expert = gl.load(tile_experts_ptr + tile)
    first_line = gl.program_id(0) * (LINES // 2 if GATED else LINES)
    first = tile if pairs_ptr is None else tile * ROWS
    products = (pairs_ptr, first, pair_weights_ptr, out_ptr, first_line, num_pairs)
    if expert == num_experts:
        if not GATED:
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
            layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
            _store_products(gl.zeros([LINES, ROWS], gl.float32, layout), products, num_choices, num_lines)
        return
    part_blocks = gl.cdiv(num_blocks, gl.num_programs(2))
    first_block = gl.program_id(2) * part_blocks
    blocks = (first_block, gl.minimum(part_blocks, num_blocks - first_block), num_blocks)
    source = (x_ptr, words_desc, (scales_ptr, zeros_ptr), bias_ptr, x_row_stride, blocks)
    if pairs_ptr is not None and ROWS > 16:  # noqa: SIM102  # a constant alone chooses the code
        if gl.load(pairs_ptr + first + ROWS // 2) >= num_pairs:
            _compute_tile(
                source, expert, products, (limit, alpha), num_choices, num_lines, num_groups, depth, GATED, CLAMPED,
                GROUP_BLOCKS, E2M1, ROWS // 2, LINES, STAGES, WARPS, OVERLAP,
            )  # fmt: skip
            return
    _compute_tile(
        source, expert, products, (limit, alpha), num_choices, num_lines, num_groups, depth, GATED, CLAMPED,
        GROUP_BLOCKS, E2M1, ROWS, LINES, STAGES, WARPS, OVERLAP,
    )  # fmt: skip


@gluon.jit
def _compute_tile(
    source,
    expert,
    products,
    clamps,
    num_choices: gl.constexpr,
    num_lines: gl.constexpr,
    num_groups: gl.constexpr,
    depth: gl.constexpr,
    GATED: gl.constexpr,
    CLAMPED: gl.constexpr,
    GROUP_BLOCKS: gl.constexpr,
    E2M1: gl.constexpr,
    ROWS: gl.constexpr,
    LINES: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Multiply a program's lines with the first rows of a tile, and write the results."""
    x_ptr, words_desc, pointers, bias_ptr, x_row_stride, blocks = source
    pairs_ptr, first, _, _, first_line, num_pairs = products
    distance: gl.constexpr = num_lines // 2 if GATED else LINES // 2  # from the first part of the lines to the second
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    # With two rows to a warp, ptxas takes 185 registers for gate and up of 64 pairs, and three programs no longer fit.
    gathering: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    pair = _load_pairs(pairs_ptr, first, gl.arange(0, ROWS, gl.SliceLayout(1, gathering)), num_pairs)
    row = pair // num_choices if GATED else pair
    acc = _tile_product(
        gl.zeros([LINES, ROWS], gl.float32, layout), x_ptr, words_desc, pointers,
        (row.to(gl.int64) * x_row_stride, pair < num_pairs), expert, first_line, blocks, num_lines, num_groups,
        depth, gathering, distance, GATED, GROUP_BLOCKS, E2M1, STAGES, WARPS, OVERLAP,
    )  # fmt: skip
    if bias_ptr is not None:
        line = _line_of(first_line, gl.arange(0, LINES, gl.SliceLayout(1, layout)), num_lines, LINES, distance)
        bias = gl.load(bias_ptr + expert.to(gl.int64) * num_lines + line)
        acc += gl.expand_dims(gl.where(gl.program_id(2) == 0, bias.to(gl.float32), 0.0), 1)
    if GATED:
        _store_activations(acc, products, clamps, num_lines // 2, CLAMPED, GATED == 2)
    else:
        _store_products(acc, products, num_choices, num_lines)


def grouped_product(x, weight, plan, pair_weights, out, is_gated, clamps=None):
    """Do what `grouped_product` of `triton.py` does, by a weight in 4 bits that `serves` accepts.

    out: of down (num_parts * num_choices, num_tokens, num_rows), in parts that are to be added up.
    """
    num_experts, num_lines, num_words = weight.values.shape
    num_blocks, num_groups = num_words // WORDS.value, weight.num_groups
    num_slots = len(plan.tile_experts)
    lines, stages = _tiling(weight, plan, x.device)
    num_parts = 1 if is_gated else len(out) // pair_weights.shape[1]
    words = weight.values.view(num_experts * num_lines, num_words)
    _hopper_int4_experts_kernel[(triton.cdiv(num_lines, lines), num_slots, num_parts)](
        x,
        TensorDescriptor.from_tensor(words, [lines // 2, WORDS.value], WORDS_LAYOUT),
        weight.scales,
        weight.zeros,
        weight.bias,
        *plan.tensors,
        pair_weights,
        out,
        x.stride(0),
        *(clamps or (0.0, 0.0)),
        pair_weights.numel(),
        num_blocks,
        num_choices=pair_weights.shape[1],
        num_experts=num_experts,
        num_lines=num_lines,
        num_groups=num_groups,
        depth=x.shape[1],
        GATED=is_gated,
        CLAMPED=clamps is not None,
        GROUP_BLOCKS=max(1, num_blocks // num_groups),
        E2M1=weight.is_e2m1,
        ROWS=plan.tile_size,
        LINES=lines,
        STAGES=stages,
        WARPS=4,
        num_warps=4,
        **overlap_options(x.device),
        **_register_limit(plan.tile_size, weight.is_e2m1),
    )


def _tiling(weight: ExpertWeights, plan: TilePlan, device: torch.device) -> tuple[int, int]:
    """Return the rows of the weight that a program has, and how many buffers."""
    most = MAX_SMALL_E2M1 if weight.is_e2m1 and plan.tile_size == 16 else MAX_SMALL
    num_programs = len(plan.tile_experts) * triton.cdiv(weight.values.shape[1], 128)
    return (SMALL_LINES, 4) if num_programs < most * num_multiprocessors(device) else (128, 3)


def num_parts(down: ExpertWeights, plan: TilePlan, device: torch.device) -> int:
    """Return in how many parts down's sums are computed: in two, where few programs would take long with whole ones."""
    _, num_lines, num_words = down.values.shape
    lines, _ = _tiling(down, plan, device)
    num_programs = len(plan.tile_experts) * triton.cdiv(num_lines, lines)
    is_split = lines == SMALL_LINES and num_programs < MAX_SPLIT * num_multiprocessors(device)
    return 2 if is_split and num_words >= MIN_SPLIT_BLOCKS * WORDS.value else 1


def _register_limit(rows: int, is_e2m1: bool) -> dict[str, int]:
    """Return the limit of a thread's registers: four programs fit a multiprocessor, or three with tiles of 64 rows.

    Without a limit ptxas takes up to ten registers more for MXFP4, which it does not need. int4 has no limit, since its
    code needs them.
    """
    if not is_e2m1:
        return {}
    return {"maxnreg": MAX_REGISTERS if rows == 64 else 128}


def serves(x: Tensor, weight: ExpertWeights) -> bool:
    """Whether the kernel takes such rows in 16 bits, and groups of such a size: whole blocks, or those of MXFP4.

    Triton's copies of 16 bytes want rows that are multiples of 16 apart.
    """
    if x.stride(0) % 16 or x.shape[1] % 8 or x.data_ptr() % 16:
        return False
    return weight.is_e2m1 or weight.values.shape[2] * 8 // weight.num_groups % BLOCK.value == 0
