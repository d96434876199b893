"""How the kernels cut products of weights in 4 bits; for what calls them too. Needs no Triton."""

ROWS, COLUMNS = 128, 64  # of a tile, at most: rows and outputs
MANY_ROWS, MANY_COLUMNS = 256, 128  # of one for more rows, on Hopper
MAX_ROWS, MAX_HOPPER_ROWS = 64, 1024  # for which a weight is read in 4 bits; for more it is widened first
MIN_BLOCKS = 8  # that a program sums up where several share a sum

# PTX. Two words, each with eight numbers -> for each place the numbers of both words, plus 128 or 1,024: below the bits
# of that power of two, in bfloat16 or float16, the bits of a number are added to it.
_NUMBERS = """{{
    .reg .b32 low, high, bits, above;
    mov.b32 above, {above};
    prmt.b32 low, $8, $9, 0x5410; prmt.b32 high, $8, $9, 0x7632;
    lop3.b32 $0, low, 0x000f000f, above, 0xea;
    shr.u32 bits, low, 4; lop3.b32 $1, bits, 0x000f000f, above, 0xea;
    shr.u32 bits, low, 8; lop3.b32 $2, bits, 0x000f000f, above, 0xea;
    shr.u32 bits, low, 12; lop3.b32 $3, bits, 0x000f000f, above, 0xea;
    lop3.b32 $4, high, 0x000f000f, above, 0xea;
    shr.u32 bits, high, 4; lop3.b32 $5, bits, 0x000f000f, above, 0xea;
    shr.u32 bits, high, 8; lop3.b32 $6, bits, 0x000f000f, above, 0xea;
    shr.u32 bits, high, 12; lop3.b32 $7, bits, 0x000f000f, above, 0xea;
}}"""
NUMBERS_BF16, NUMBERS_F16 = (_NUMBERS.format(above=above) for above in ("0x43004300", "0x64006400"))

# The same for values of e2m1 (OCP Microscaling Formats 1.0): sign, two bits of exponent and one of mantissa are set
# where the dtype has these, which makes the value times 2**-126, or 2**-14 in float16; its denormals stay exact.
_E2M1_PLACE = """
    shr.u32 bits, {half}, {shift}; shl.b32 sign, bits, 12; shl.b32 bits, bits, {left};
    and.b32 sign, sign, 0x80008000; lop3.b32 ${place}, bits, {mask}, sign, 0xea;"""


def _e2m1(left: int, mask: str) -> str:
    code = "{ .reg .b32 low, high, bits, sign; prmt.b32 low, $8, $9, 0x5410; prmt.b32 high, $8, $9, 0x7632;"
    for place in range(8):
        half, shift = "high" if place > 3 else "low", 4 * (place % 4)
        code += _E2M1_PLACE.format(half=half, shift=shift, left=left, mask=mask, place=place)
    return code + " }"


E2M1_BF16, E2M1_F16 = _e2m1(6, "0x01c001c0"), _e2m1(9, "0x0e000e00")
