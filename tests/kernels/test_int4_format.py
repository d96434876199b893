"""The PTX that widens numbers of 4 bits computes what `_number` of `ops/int4/triton.py` does."""

import random
import re

import pytest
import torch

from nanoinfer.ops.int4.spec import E2M1_BITS, pack, pack_e2m1

pytest.importorskip("triton")

from nanoinfer.ops.int4.triton import E2M1_BF16, E2M1_F16, NUMBERS_BF16, NUMBERS_F16

CODES = {(False, True): NUMBERS_BF16, (False, False): NUMBERS_F16, (True, True): E2M1_BF16, (True, False): E2M1_F16}


def run(code: str, first: int, second: int) -> list[int]:
    """Return what the code computes of two words."""
    values = {"$8": first, "$9": second}

    def read(operand: str) -> int:
        return values[operand] if operand in values else int(operand, 0)

    for name, operands in re.findall(r"(\w+)(?:\.l\.wrap)?\.b?u?32 ([^;]*);", code.replace(".reg .b32", "")):
        target, *rest = (operand.strip() for operand in operands.split(","))
        x, *others = map(read, rest)
        match name:
            case "prmt":
                source = x | others[0] << 32
                picked = [source >> 8 * (others[1] >> 4 * place & 7) & 255 for place in range(4)]
                result = sum(byte << 8 * place for place, byte in enumerate(picked))
            case "lop3":
                assert others[2] == 0xEA, "the table of (x and y) or z"
                result = x & others[0] | others[1]
            case "shl":
                result = x << others[0]
            case "shf":
                result = (x << 32 | others[0]) >> 32 - others[1]
            case "shr":
                result = x >> others[0]
            case "and":
                result = x & others[0]
            case "mov":
                result = x
        values[target] = result & 0xFFFFFFFF
    return [values[f"${index}"] for index in range(8)]


def bits_of(number: int, is_e2m1: bool, is_bfloat16: bool) -> int:
    if is_e2m1:
        return (number & 8) << 12 | (number & 7) << (6 if is_bfloat16 else 9)
    return number | (0x4300 if is_bfloat16 else 0x6400)


@pytest.mark.parametrize("is_bfloat16", [False, True])
@pytest.mark.parametrize("is_e2m1", [False, True])
def test_ptx_widens_the_numbers_of_two_words(is_e2m1: bool, is_bfloat16: bool) -> None:
    draw = random.Random(0).randrange
    for _ in range(200):
        numbers = [[draw(16), draw(16)] for _ in range(8)]  # the i-th numbers of both words
        packed = (pack_e2m1 if is_e2m1 else pack)(torch.tensor(numbers).flatten(), 16)
        words = [word & 0xFFFFFFFF for word in packed.tolist()]
        for pair, found in zip(numbers, run(CODES[is_e2m1, is_bfloat16].value, *words), strict=True):
            low, high = (bits_of(number, is_e2m1, is_bfloat16) for number in pair)
            assert found == low | high << 16


def test_values_of_e2m1_fill_a_word() -> None:
    lower = [bit for bits in E2M1_BITS for bit in bits]
    assert sorted([*lower, *((bit + 16) % 32 for bit in lower)]) == [*range(32)]
