"""How the kernels cut products of weights in 4 bits; for what calls them too. Needs no Triton."""

ROWS, COLUMNS = 128, 64  # of a tile, at most: rows and outputs
MANY_ROWS, MANY_COLUMNS = 256, 128  # of one for more rows, on Hopper
MAX_ROWS, MAX_HOPPER_ROWS = 64, 1024  # for which a weight is read in 4 bits; for more it is widened first
MIN_BLOCKS = 8  # that a program sums up where several share a sum

ALL_PLACES, FIRST_PLACES, LAST_PLACES = range(8), range(4), range(4, 8)  # of the numbers in a word


def _begin(places: range) -> str:
    """Return the PTX that puts the same halves of two words, the last operands, beside each other."""
    words = f"${len(places)}, ${len(places) + 1}"
    return f"{{ .reg .b32 low, high, bits, sign, above; prmt.b32 low, {words}, 0x5410; prmt.b32 high, {words}, 0x7632;"


def _move(target: str, place: int, bit: int, to: int) -> str:
    """Return the PTX that moves a bit of the numbers at a place of both words to a bit of 16."""
    half, left = "high" if place > 3 else "low", to - 4 * (place % 4) - bit
    return f" shl.b32 {target}, {half}, {left};" if left >= 0 else f" shr.u32 {target}, {half}, {-left};"


def _numbers(places: range, above: str) -> str:
    """Return the PTX from two words to the numbers at some places of both, plus 128 or 1,024.

    Below the bits of that power of two, in bfloat16 or float16, the bits of a number are added to it.
    """
    code = f"{_begin(places)} mov.b32 above, {above};"
    for index, place in enumerate(places):
        code += f"{_move('bits', place, 0, 0)} lop3.b32 ${index}, bits, 0x000f000f, above, 0xea;"
    return code + " }"


def _e2m1(places: range, to: int, mask: str) -> str:
    """Return the same for values of e2m1 (OCP Microscaling Formats 1.0) times 2**-126, or 2**-14 in float16.

    Sign, two bits of exponent and one of mantissa are set where the dtype has these; its denormals stay exact.
    """
    code = _begin(places)
    for index, place in enumerate(places):
        code += f"{_move('sign', place, 3, 15)} and.b32 sign, sign, 0x80008000;"
        code += f"{_move('bits', place, 0, to)} lop3.b32 ${index}, bits, {mask}, sign, 0xea;"
    return code + " }"


def numbers_ptx(is_e2m1: bool, is_bfloat16: bool, places: range = ALL_PLACES) -> str:
    """Return the PTX from two words to what stands at some places of both, in the bits of a dtype of 16."""
    if is_e2m1:
        return _e2m1(places, 6, "0x01c001c0") if is_bfloat16 else _e2m1(places, 9, "0x0e000e00")
    return _numbers(places, "0x43004300" if is_bfloat16 else "0x64006400")


NUMBERS_BF16, NUMBERS_F16 = numbers_ptx(False, True), numbers_ptx(False, False)
E2M1_BF16, E2M1_F16 = numbers_ptx(True, True), numbers_ptx(True, False)
