"""Products of few rows by a weight in 4 bits, and widening it for more.

A product of few rows is bound by reading the weight, so its 4 bits are read, and widened in registers. Hopper has a
kernel of its own (`hopper.py`).

- Of a block of 128 inputs each word holds eight that lie 16 apart. So the i-th numbers of 16 words are a tile for the
  tensor cores, and nothing moves between threads: the tiles of a group are joined in registers.
- A number becomes 16 bits without a conversion: its bits, below those of a power of two, are that power plus the
  number (as in Marlin, Frantar et al. 2024); two at a time, by PTX. Less the zero point, it is exact.
- Each group is summed by itself and then multiplied by its scale, in float32. Powers of two multiply the weight.
"""

import math
from itertools import product

import triton
import triton.language as tl

from nanoinfer.ops.common.device_properties import next_power_of_2
from nanoinfer.ops.int4.spec import (
    COLUMNS,
    E2M1_BITS,
    E2M1_IN_BFLOAT16,
    E2M1_IN_FLOAT16,
    has_hopper_kernel,
    rotations,
)

BLOCK = tl.constexpr(128)  # inputs that are packed together
WORDS = tl.constexpr(16)  # of a block
# $1 - $2, of two; before Hopper bfloat16 has no difference, so -1 $2 is added.
LESS_BF16 = tl.constexpr("{ .reg .b32 one; mov.b32 one, 0xbf80bf80; fma.rn.bf16x2 $0, $2, one, $1; }")
LESS_F16 = tl.constexpr("sub.f16x2 $0, $1, $2;")
# $1 $2, of two; before Hopper bfloat16 has no product, so -0 is added.
TIMES_BF16 = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }")
TIMES_F16 = tl.constexpr("mul.f16x2 $0, $1, $2;")
WIDE_WORDS, WIDE_WARPS = 256, 2  # words that a program widens, of one block of some outputs, and its warps


def _ptx_of_numbers(above: str) -> str:
    """Return PTX for the numbers of two words plus 128 or 1,024: their bits, below those of that power of two.

    For each place, both words' numbers become the halves of a register. So halves of both words are joined first.
    """
    code = "{ .reg .b32 low, high, bits, above; prmt.b32 low, $8, $9, 0x5410; prmt.b32 high, $8, $9, 0x7632;"
    code += f" mov.b32 above, {above};"
    for place, (half, right) in enumerate(product(("low", "high"), (0, 4, 8, 12))):
        code += f" shr.u32 bits, {half}, {right}; lop3.b32 ${place}, bits, 0x000f000f, above, 0xea;"
    return code + " }"


def _ptx_of_e2m1(targets: tuple[int, ...]) -> str:
    """Return PTX for the values of e2m1 (OCP Microscaling Formats 1.0) that two words share, times a power of two.

    targets: the dtype's bits, as `E2M1_IN_FLOAT16`. Its denormals stay exact.
    """
    code = "{ .reg .b32 first, second, bits; mov.b32 first, $8; mov.b32 second, $9;"
    for place, (word, sources) in enumerate(product(("first", "second"), E2M1_BITS)):
        code += f" mov.b32 ${place}, 0;"
        for left, mask in rotations(sources, targets).items():
            # Where no bit comes round a shift does, which the multipliers can take over.
            rotate = f"shl.b32 bits, {word}," if mask % 2**left == 0 else f"shf.l.wrap.b32 bits, {word}, {word},"
            code += f" {rotate} {left}; lop3.b32 ${place}, bits, {mask & 0xFFFFFFFF:#010x}, ${place}, 0xea;"
    return code + " }"


NUMBERS_BF16, NUMBERS_F16 = tl.constexpr(_ptx_of_numbers("0x43004300")), tl.constexpr(_ptx_of_numbers("0x64006400"))
E2M1_BF16, E2M1_F16 = tl.constexpr(_ptx_of_e2m1(E2M1_IN_BFLOAT16)), tl.constexpr(_ptx_of_e2m1(E2M1_IN_FLOAT16))


@triton.jit
def _numbers(words, dtype: tl.constexpr, E2M1: tl.constexpr, ASM: tl.constexpr):
    """Return the eight numbers of each word as eight tensors of bits. ASM: by PTX.

    The words that share values of e2m1 are neighbours in the last dimension.
    """
    if ASM and E2M1:
        e2m1: tl.constexpr = E2M1_BF16 if dtype == tl.bfloat16 else E2M1_F16
        return _e2m1_numbers(words, e2m1)
    elif ASM:
        code: tl.constexpr = NUMBERS_BF16 if dtype == tl.bfloat16 else NUMBERS_F16
        return tl.inline_asm_elementwise(
            code,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
    else:
        return (
            _number(words, 0, dtype, E2M1),
            _number(words, 1, dtype, E2M1),
            _number(words, 2, dtype, E2M1),
            _number(words, 3, dtype, E2M1),
            _number(words, 4, dtype, E2M1),
            _number(words, 5, dtype, E2M1),
            _number(words, 6, dtype, E2M1),
            _number(words, 7, dtype, E2M1),
        )


@triton.jit
def _e2m1_numbers(words, CODE: tl.constexpr):
    """Do what `_numbers` does. Which words are neighbours is said here, as threads may hold them in any way."""
    first, second = tl.split(tl.reshape(words, (words.numel // 2, 2)))
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        CODE,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
        [first, second],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    return (
        _halves(a, words.shape),
        _halves(b, words.shape),
        _halves(c, words.shape),
        _halves(d, words.shape),
        _halves(e, words.shape),
        _halves(f, words.shape),
        _halves(g, words.shape),
        _halves(h, words.shape),
    )


@triton.jit
def _halves(words, shape: tl.constexpr):
    """Return the lower half of each word, and next to it the upper one."""
    return tl.reshape(tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)), shape)


@triton.jit
def _number(words, index: tl.constexpr, dtype: tl.constexpr, E2M1: tl.constexpr):
    if E2M1:
        bits = _e2m1_bits(_e2m1_words(words)[index // 4], index % 4)
        if dtype == tl.float16:
            bits = _for_float16(bits)
    else:
        bits = (words >> (4 * index)) & 15 | (0x4300 if dtype == tl.bfloat16 else 0x6400)
    return bits.to(tl.int16)


@triton.jit
def _e2m1_words(words):
    """Return words whose lower halves have the values of each word: i = 0 to 3, and i = 4 to 7."""
    first, second = tl.split(tl.reshape(words, (words.numel // 2, 2)))
    return _with_rotated(first, words.shape), _with_rotated(second, words.shape)


@triton.jit
def _with_rotated(words, shape: tl.constexpr):
    """Put next to each word the same with its halves exchanged."""
    return tl.reshape(tl.join(words, (words << 16) | ((words >> 16) & 0xFFFF)), shape)


@triton.jit
def _e2m1_bits(words, place: tl.constexpr):
    """Return bits 0 to 15 of values of e2m1 times 2**-126 in bfloat16. See `E2M1_BITS`."""
    if place == 0:
        bits = words
    elif place == 1:
        bits = words >> 6
    elif place == 2:
        bits = words << 4
    else:
        bits = (words >> 2) & 0x8180 | (words << 6) & 0x40
    return bits & 0x81C0


@triton.jit
def _for_float16(bits):
    """Return the same bits for float16, of values times 2**-14."""
    return bits & 0x8000 | (bits & 0x1C0) << 3


@triton.jit
def _values(bits, terms, E2M1: tl.constexpr, ASM: tl.constexpr):
    """Return what numbers stand for, (16, COLUMNS). It is exact.

    terms: for each column what was added to them and their zero point; or for e2m1 what they are multiplied by.
    """
    dtype: tl.constexpr = terms.dtype
    numbers, terms = tl.broadcast(bits.to(dtype, bitcast=True), terms[None, :])
    if ASM:
        times: tl.constexpr = TIMES_BF16 if dtype == tl.bfloat16 else TIMES_F16
        less: tl.constexpr = LESS_BF16 if dtype == tl.bfloat16 else LESS_F16
        code: tl.constexpr = times if E2M1 else less
        values = tl.inline_asm_elementwise(code, "=r,r,r", [numbers, terms], tl.int16, is_pure=True, pack=2)
        return values.to(dtype, bitcast=True)
    else:
        return numbers * terms if E2M1 else numbers - terms


@triton.jit
def _load_scales(scales_ptr, zeros_ptr, places, mask):
    """Return the scales and zero points at places, float32. Scales of 8 bits are exponents of 2, with 127 added."""
    if zeros_ptr is None:
        zeros = tl.full(places.shape, 8.0, tl.float32)
    else:
        zeros = tl.load(zeros_ptr + places, mask=mask, other=0).to(tl.float32)
    if scales_ptr.dtype.element_ty == tl.uint8:
        exponents = tl.load(scales_ptr + places, mask=mask, other=0).to(tl.int32)
        scales = tl.where(exponents == 255, float("nan"), (exponents << 23).to(tl.float32, bitcast=True))
    else:
        scales = tl.load(scales_ptr + places, mask=mask, other=0.0)
    return scales, zeros


@triton.jit
def _joined(a, b):
    """Join two tensors of inputs, (size, COLUMNS) each, one behind the other."""
    both = tl.permute(tl.join(a, b), (2, 0, 1))
    return tl.reshape(both, (2 * a.shape[0], a.shape[1]))


@triton.jit
def _quarter(numbers, first: tl.constexpr, terms, E2M1: tl.constexpr, ASM: tl.constexpr):
    """Return 32 inputs of a block, (32, COLUMNS)."""
    values = _values(numbers[first], terms, E2M1, ASM)
    return _joined(values, _values(numbers[first + 1], terms, E2M1, ASM))


@triton.jit
def _half(numbers, first: tl.constexpr, terms, E2M1: tl.constexpr, ASM: tl.constexpr):
    quarter = _quarter(numbers, first, terms, E2M1, ASM)
    return _joined(quarter, _quarter(numbers, first + 2, terms, E2M1, ASM))


@triton.jit
def _part(numbers, index: tl.constexpr, PART: tl.constexpr, terms, E2M1: tl.constexpr, ASM: tl.constexpr):
    """Return one part of a block, (PART, COLUMNS)."""
    if PART == 32:
        return _quarter(numbers, 2 * index, terms, E2M1, ASM)
    elif PART == 64:
        return _half(numbers, 4 * index, terms, E2M1, ASM)
    else:
        return _joined(_half(numbers, 0, terms, E2M1, ASM), _half(numbers, 4, terms, E2M1, ASM))


@triton.jit
def _terms(zeros, dtype: tl.constexpr, E2M1: tl.constexpr):
    """Return what `_values` takes with these zero points."""
    is_bf16: tl.constexpr = dtype == tl.bfloat16
    if E2M1:
        return tl.full(zeros.shape, 2.0**126 if is_bf16 else 2.0**14, dtype)
    else:
        return (zeros + (128.0 if is_bf16 else 1024.0)).to(dtype)


@triton.jit
def _power(exponents, index: tl.constexpr, dtype: tl.constexpr):
    """Return 2**(exponent - 127) for one byte of each word, times what makes values of e2m1 what they are.

    These are 2**126, and 2**14 in float16; so an exponent is at most 128.
    """
    exponent = (exponents >> (8 * index)) & 255
    bits = (exponent + 126) << 7 if dtype == tl.bfloat16 else tl.maximum(exponent - 98, 0) << 10
    return bits.to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _scaled_block(numbers, exponents, dtype: tl.constexpr, ASM: tl.constexpr):
    """Return a block of values of e2m1, (128, COLUMNS), each 32 inputs times their power of two."""
    first = _joined(
        _quarter(numbers, 0, _power(exponents, 0, dtype), True, ASM),
        _quarter(numbers, 2, _power(exponents, 1, dtype), True, ASM),
    )
    second = _joined(
        _quarter(numbers, 4, _power(exponents, 2, dtype), True, ASM),
        _quarter(numbers, 6, _power(exponents, 3, dtype), True, ASM),
    )
    return _joined(first, second)


@triton.jit
def _transposed(x):
    a, b, c, d, e, f, g, h = x
    return tl.trans(a), tl.trans(b), tl.trans(c), tl.trans(d), tl.trans(e), tl.trans(f), tl.trans(g), tl.trans(h)


@triton.jit
def int4_tile_product(
    x_ptr,
    weight,  # pointers to words, scales and zero points (None: all are 8)
    x_rows,
    is_row,
    lines,  # of the weight, int64
    is_line,
    x_row_stride,
    blocks,  # the first, and that behind the last
    num_inputs: tl.constexpr,
    num_groups: tl.constexpr,
    STAGES: tl.constexpr,
    E2M1: tl.constexpr,
    ASM: tl.constexpr,
    x_width: tl.constexpr = None,  # where x has fewer columns than the weight has inputs
):
    """Return x W^T in float32 for a few rows of both, (len(x_rows), len(lines)), over some blocks.

    Scales in int32 are the exponents of four groups of 32 inputs each, see `_power`. With these the weight is scaled:
    its values stay exact.
    """
    words_ptr, scales_ptr, zeros_ptr = weight
    first, end = blocks
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    group_size: tl.constexpr = num_inputs // num_groups
    scales_weight: tl.constexpr = scales_ptr.dtype.element_ty == tl.int32
    # Of a block, with one scale: 32, 64 or all.
    part_size: tl.constexpr = 128 if scales_weight or group_size % 128 == 0 else group_size
    word = tl.arange(0, WORDS)
    words_ptrs = words_ptr + lines[None, :] * (num_inputs // 8) + word[:, None]
    x_ptrs = x_ptr + x_rows.to(tl.int64)[:, None] * x_row_stride + tl.arange(0, part_size)[None, :]
    acc = tl.zeros((x_rows.shape[0], lines.shape[0]), tl.float32)
    for block in tl.range(first, end, num_stages=STAGES):
        words = tl.load(words_ptrs + block * WORDS, mask=is_line[None, :], other=0)
        if E2M1:
            numbers = _transposed(_numbers(tl.trans(words), dtype, E2M1, ASM))
        else:
            numbers = _numbers(words, dtype, E2M1, ASM)
        for index in tl.static_range(128 // part_size):
            start = block * BLOCK + index * part_size
            x_mask = is_row[:, None]
            if x_width is not None:
                x_mask &= (start + tl.arange(0, part_size) < x_width)[None, :]
            x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
            if scales_weight:
                exponents = tl.load(scales_ptr + lines * (num_inputs // BLOCK) + block, mask=is_line, other=0)
                acc = tl.dot(x, _scaled_block(numbers, exponents, dtype, ASM), acc)
            else:
                scales, zeros = _load_scales(scales_ptr, zeros_ptr, lines * num_groups + start // group_size, is_line)
                terms = _terms(zeros, dtype, E2M1)
                acc += tl.dot(x, _part(numbers, index, part_size, terms, E2M1, ASM)) * scales[None, :]
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_product_int4_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    num_rows,
    x_stride,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    num_groups: tl.constexpr,
    num_blocks: tl.constexpr,  # that a program sums up
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    E2M1: tl.constexpr,
    ASM: tl.constexpr,
):
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < num_rows, column < num_outputs
    first = tl.program_id(1) * num_blocks
    acc = int4_tile_product(
        x_ptr,
        (words_ptr, scales_ptr, zeros_ptr),
        row,
        is_row,
        column.to(tl.int64),
        is_column,
        x_stride,
        (first, tl.minimum(first + num_blocks, num_inputs // BLOCK)),
        num_inputs,
        num_groups,
        STAGES,
        E2M1,
        ASM,
    )
    out_ptrs = out_ptr + (tl.program_id(1) * num_rows + row).to(tl.int64)[:, None] * num_outputs + column[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _widen_kernel(
    words_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    num_outputs,
    num_inputs: tl.constexpr,
    num_groups: tl.constexpr,
    words_of_block: tl.constexpr,
    WORDS: tl.constexpr,  # words_of_block, padded
    COLUMNS: tl.constexpr,
    E2M1: tl.constexpr,
):
    """Widen one block of a few outputs. Neighbouring programs write neighbouring blocks, which memory takes faster."""
    group_size: tl.constexpr = num_inputs // num_groups
    block_size: tl.constexpr = 8 * words_of_block
    num_blocks: tl.constexpr = num_inputs // block_size
    # Then each place of the words has one group.
    is_even: tl.constexpr = group_size % block_size == 0 or (
        block_size % group_size == 0 and group_size % words_of_block == 0
    )
    block = tl.program_id(0) % num_blocks
    column, word = tl.program_id(0) // num_blocks * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WORDS)
    line, is_column = column.to(tl.int64), column < num_outputs
    mask = is_column[:, None] & (word < words_of_block)[None, :]
    words_ptrs = words_ptr + line[:, None] * (num_inputs // 8) + block * words_of_block + word[None, :]
    words = tl.load(words_ptrs, mask=mask, other=0)
    if E2M1:
        shared = _e2m1_words(words)
    for index in tl.static_range(8):
        place = block * block_size + index * words_of_block + word
        if is_even:
            if index == 0 or index * words_of_block % group_size == 0:
                group = (block * block_size + index * words_of_block) // group_size
                scale, zero = _load_scales(scales_ptr, zeros_ptr, line * num_groups + group, is_column)
                scales, zeros = scale[:, None], zero[:, None]
        else:
            groups = line[:, None] * num_groups + (place // group_size)[None, :]
            scales, zeros = _load_scales(scales_ptr, zeros_ptr, groups, mask)
        if E2M1:  # from float16, since float32 would have denormals
            bits = _for_float16(_e2m1_bits(shared[index // 4], index % 4))
            numbers = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        else:  # the bits of a number, below those of 2**23 in float32, are 2**23 plus the number
            numbers = (((words >> (4 * index)) & 15) | 0x4B000000).to(tl.float32, bitcast=True) - (zeros + 8388608.0)
        wide = (numbers * scales).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + line[:, None] * num_inputs + place[None, :], wide, mask=mask)


def int4_product(x, weight, num_splits):
    (num_rows, num_inputs), num_outputs = x.shape, len(weight.numbers)
    assert num_inputs % BLOCK.value == 0, f"{num_inputs} inputs are not whole blocks of {BLOCK.value}"
    if has_hopper_kernel(weight, x.device):
        from nanoinfer.ops.int4 import hopper

        return hopper.int4_product(x, weight, num_splits)
    out = x.new_empty(num_splits, num_rows, num_outputs)
    if num_rows == 0:
        return out
    rows = max(16, next_power_of_2(num_rows))
    _few_rows_product_int4_kernel[(triton.cdiv(num_outputs, COLUMNS), num_splits)](
        x,
        *weight[:3],
        out,
        num_rows,
        x.stride(0),
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        num_groups=weight.num_groups,
        num_blocks=triton.cdiv(num_inputs // BLOCK.value, num_splits),
        ROWS=rows,
        COLUMNS=COLUMNS,
        STAGES=4,
        E2M1=weight.is_e2m1,
        ASM=x.is_cuda,
        num_warps=4,
    )
    return out


def widen(numbers, scales, zeros, dtype, is_e2m1=False):
    *outputs, num_words = numbers.shape
    num_outputs, num_inputs = math.prod(outputs), num_words * 8
    words_of_block = num_words & -num_words if num_words % WORDS.value else WORDS.value
    out, columns = numbers.new_empty((*outputs, num_inputs), dtype=dtype), WIDE_WORDS // words_of_block
    _widen_kernel[(triton.cdiv(num_outputs, columns) * (num_words // words_of_block),)](
        numbers,
        scales,
        zeros,
        out,
        num_outputs,
        num_inputs=num_inputs,
        num_groups=scales.shape[-1] if scales.dim() == numbers.dim() else 1,
        words_of_block=words_of_block,
        WORDS=words_of_block,
        COLUMNS=columns,
        E2M1=is_e2m1,
        num_warps=WIDE_WARPS,
    )
    return out
