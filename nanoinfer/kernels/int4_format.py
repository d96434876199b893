"""How the kernels cut products of weights in 4 bits; for what calls them too. Needs no Triton."""

ROWS, COLUMNS = 128, 64  # of a tile, at most: rows and outputs
MANY_ROWS, MANY_COLUMNS = 256, 128  # of one for more rows, on Hopper
MAX_ROWS, MAX_HOPPER_ROWS = 64, 1024  # for which a weight is read in 4 bits; for more it is widened first
MIN_BLOCKS = 8  # that a program sums up where several share a sum

# PTX. Two words, each with eight numbers -> for each place the numbers of both words, as bits of a 16-bit dtype. The
# same halves of both words are put beside each other first.
_BEGIN = "{ .reg .b32 low, high, bits, sign, above; prmt.b32 low, $8, $9, 0x5410; prmt.b32 high, $8, $9, 0x7632;"


def _move(target: str, place: int, bit: int, to: int) -> str:
    """Return the code that moves a bit of the numbers at a place of both words to a bit of 16."""
    half, left = "high" if place > 3 else "low", to - 4 * (place % 4) - bit
    return f" shl.b32 {target}, {half}, {left};" if left >= 0 else f" shr.u32 {target}, {half}, {-left};"


def _numbers(above: str) -> str:
    """Return the code for numbers plus 128 or 1,024: their bits are added below those of that power of two."""
    code = f"{_BEGIN} mov.b32 above, {above};"
    for place in range(8):
        code += f"{_move('bits', place, 0, 0)} lop3.b32 ${place}, bits, 0x000f000f, above, 0xea;"
    return code + " }"


def _e2m1(to: int, mask: str) -> str:
    """Return the code for values of e2m1 (OCP Microscaling Formats 1.0) times 2**-126, or 2**-14 in float16.

    Sign, two bits of exponent and one of mantissa are set where the dtype has these; its denormals stay exact.
    """
    code = _BEGIN
    for place in range(8):
        code += f"{_move('sign', place, 3, 15)} and.b32 sign, sign, 0x80008000;"
        code += f"{_move('bits', place, 0, to)} lop3.b32 ${place}, bits, {mask}, sign, 0xea;"
    return code + " }"


NUMBERS_BF16, NUMBERS_F16 = _numbers("0x43004300"), _numbers("0x64006400")
E2M1_BF16, E2M1_F16 = _e2m1(6, "0x01c001c0"), _e2m1(9, "0x0e000e00")
