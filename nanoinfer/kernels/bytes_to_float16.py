"""Widens values of 8 bits, e4m3 or int8, to float16, which holds them all, several with one instruction.

A GPU widens two values of e4m3 at a time, but only neighbours in a register, and has no such instruction for int8. Of
int8, `prmt` puts the byte of value + 128 below 0x64: the float16 number 1024 + 128 + value.

Values that a product sums over lie in different rows, and so in different registers: four neighbours of a row come as
one word, and are widened together with those of another row, each to its own result.
"""

import triton
import triton.language as tl

_PAIRS_OF_E4M3 = tl.constexpr("""{
    .reg .b32 pair; .reg .b16 low, high;
    prmt.b32 pair, $4, $5, 0x0040; mov.b32 {low, high}, pair; cvt.rn.f16x2.e4m3x2 $0, low;
    prmt.b32 pair, $4, $5, 0x0051; mov.b32 {low, high}, pair; cvt.rn.f16x2.e4m3x2 $1, low;
    prmt.b32 pair, $4, $5, 0x0062; mov.b32 {low, high}, pair; cvt.rn.f16x2.e4m3x2 $2, low;
    prmt.b32 pair, $4, $5, 0x0073; mov.b32 {low, high}, pair; cvt.rn.f16x2.e4m3x2 $3, low;
}""")
_PAIRS_OF_INT8 = tl.constexpr("""{
    .reg .b32 one, two, pair, above, offset;
    mov.b32 above, 0x64646464; mov.b32 offset, 0x64806480;
    xor.b32 one, $4, 0x80808080; xor.b32 two, $5, 0x80808080;
    prmt.b32 pair, one, two, 0x0040; prmt.b32 pair, pair, above, 0x4140; sub.f16x2 $0, pair, offset;
    prmt.b32 pair, one, two, 0x0051; prmt.b32 pair, pair, above, 0x4140; sub.f16x2 $1, pair, offset;
    prmt.b32 pair, one, two, 0x0062; prmt.b32 pair, pair, above, 0x4140; sub.f16x2 $2, pair, offset;
    prmt.b32 pair, one, two, 0x0073; prmt.b32 pair, pair, above, 0x4140; sub.f16x2 $3, pair, offset;
}""")
_FOUR_OF_INT8 = tl.constexpr("""{
    .reg .b32 four, above, offset;
    mov.b32 above, 0x64646464; mov.b32 offset, 0x64806480;
    xor.b32 four, $2, 0x80808080;
    prmt.b32 $0, four, above, 0x4140; prmt.b32 $1, four, above, 0x4342;
    sub.f16x2 $0, $0, offset; sub.f16x2 $1, $1, offset;
}""")


@triton.jit
def widened(x, dtype: tl.constexpr, ASM: tl.constexpr):
    """Return values in `dtype`. ASM: whether PTX can be used; `dtype` is float16 then."""
    if ASM and x.dtype == tl.int8:
        return tl.inline_asm_elementwise(_FOUR_OF_INT8, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return x.to(dtype)


@triton.jit
def widened_bytes(words, byte_dtype: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """Return the four values of `byte_dtype` in each int32 word, the lowest byte first, as four tensors in `dtype`."""
    if ASM:
        code: tl.constexpr = _PAIRS_OF_INT8 if byte_dtype == tl.int8 else _PAIRS_OF_E4M3
        return tl.inline_asm_elementwise(
            code,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return (
            _widened_byte(words, 0, byte_dtype, dtype),
            _widened_byte(words, 1, byte_dtype, dtype),
            _widened_byte(words, 2, byte_dtype, dtype),
            _widened_byte(words, 3, byte_dtype, dtype),
        )


@triton.jit
def _widened_byte(words, index: tl.constexpr, byte_dtype: tl.constexpr, dtype: tl.constexpr):
    byte = (words >> (8 * index)).to(tl.int8)
    return byte.to(dtype) if byte_dtype == tl.int8 else byte.to(byte_dtype, bitcast=True).to(dtype)


@triton.jit
def interleaved(x0, x1, x2, x3):
    """Return (rows, 4 * columns): the first columns of all four, (rows, columns) each, then the second ones."""
    pairs = tl.join(tl.join(x0, x1), tl.join(x2, x3))  # (rows, columns, first or second of a pair, pair)
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (x0.shape[0], 4 * x0.shape[1]))
