"""The numbers of 4 bits: how weights are packed, rounded and multiplied, in plain PyTorch. Kernels compute the same.

A weight is (..., num_outputs, num_inputs) numbers from 0 to 15. Inputs of an output are in groups, each with a scale
and, in some formats, a zero point: weight = (number - zero) * scale, in float32. Without zero points the zero is 8.

Instead of numbers there may be values of e2m1 (OCP Microscaling Formats 1.0), without zero points: MXFP4.

Eight numbers are packed in an int32. A block of 128 inputs is 16 words: bits 4 i to 4 i + 3 of word w hold input
16 i + w, so that the i-th number of all words meets 16 neighbouring inputs. Where 128 does not divide the number of
inputs, blocks are smaller alike.

Values of e2m1 are packed otherwise, since bfloat16 wants the sign in bit 15 and the size in bits 8 to 6. Two
neighbouring words, 2 j and 2 j + 1, share their values: the first one holds i = 0 to 3 of both, the second one i = 4 to
7. Of each word the lower half belongs to word 2 j, the upper half to word 2 j + 1; `E2M1_BITS` says where the bits lie.
So a word becomes four registers, each with the bfloat16 of two neighbouring inputs, by nine operations. One register
takes a mask, two take a rotation and a mask, and one takes two of each and joins them. Numbers as above take fifteen,
and two more to bring halves together. Seven would do if each register took one mask. But no four rotated copies of that
mask, 0x81c081c0, fill a word.
"""

from functools import reduce
from itertools import product
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import has_hopper_kernels
from nanoinfer.ops.dispatch import op

PACKED = 8  # numbers in an int32
BLOCK = 128  # inputs that are packed together
ZERO = 8  # the number that means 0 where there are no zero points
GROUP_SIZE = 128  # inputs that share a scale, where we choose
SHARES_OF_LARGEST = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # scales that are tried: what becomes -8
MAX_FITTED_ROWS = 1024  # at a time, to bound the memory that this takes
# How the kernels cut `int4_product`, so that callers know how far to split its sums.
ROWS, COLUMNS = 128, 64  # of a tile, at most: rows and outputs
MANY_ROWS, MANY_COLUMNS = 256, 128  # of one for more rows, on Hopper
OUTPUTS_AT_ONCE = 8  # that a thread of Hopper's kernel writes: it takes a multiple of so many outputs
MIN_BLOCKS = 8  # that a program sums up where several share a sum
SMALL_PROGRAMS, LARGE_PROGRAMS = 6, 3  # most for each multiprocessor that sums are split for
MAX_ROWS, MAX_HOPPER_ROWS = 64, 1024  # for which the kernels read a weight in 4 bits; for more it is widened first

# For the four values of e2m1 in a word's lower half: the bit of the word that holds the sign, and those of the size,
# exponent before mantissa. For the upper half 16 is added, modulo 32.
E2M1_BITS = ((15, 8, 7, 6), (21, 14, 13, 12), (11, 4, 3, 2), (17, 10, 9, 0))
# The bits that these become in 16-bit dtypes, which then hold the value times 2**-14 or 2**-126.
E2M1_IN_FLOAT16, E2M1_IN_BFLOAT16 = (15, 11, 10, 9), (15, 8, 7, 6)


class PackedWeight(NamedTuple):
    """Holds a weight in 4 bits.

    scales: float32, (..., num_outputs, num_groups), or (..., num_outputs), one for all inputs of an output; or uint8,
    exponents of 2 with 127 added (e8m0; 255 is NaN). zeros: the same shape, uint8; None: 8. groups: (..., num_inputs)
    int32, the group of each input; None: they are in order. is_e2m1: whether the numbers are bits of e2m1, packed by
    `pack_e2m1`; then there are no zero points.
    """

    numbers: Tensor  # (..., num_outputs, num_inputs / 8) int32
    scales: Tensor
    zeros: Tensor | None = None
    groups: Tensor | None = None
    is_e2m1: bool = False

    @property
    def num_groups(self) -> int:
        return self.scales.shape[-1] if self.scales.dim() == self.numbers.dim() else 1


def block_size(num_inputs: int) -> int:
    """Return how many inputs are packed together; 8 divides the number of inputs."""
    return gcd(num_inputs, BLOCK)


def pack(numbers: Tensor, block: int) -> Tensor:
    """Pack numbers from 0 to 15, (..., size), in int32, (..., size / 8), in blocks of so many, the last filled up."""
    numbers = (
        F.pad(numbers, (0, -numbers.shape[-1] % block)).to(torch.int32).unflatten(-1, (-1, PACKED, block // PACKED))
    )
    words = numbers[..., 0, :].clone()
    for index in range(1, PACKED):
        words |= numbers[..., index, :] << (4 * index)
    return words.flatten(-2)


def unpack(words: Tensor, block: int) -> Tensor:
    """Return the numbers from 0 to 15 of int32 words, (..., size / 8) -> (..., size) uint8."""
    words = words.unflatten(-1, (-1, block // PACKED))
    numbers = [((words >> (4 * index)) & 15).to(torch.uint8) for index in range(PACKED)]
    return torch.stack(numbers, dim=-2).flatten(-3)


def pack_e2m1(numbers: Tensor, block: int) -> Tensor:
    """Pack bits of e2m1, as `pack` packs numbers. The block is a multiple of 16."""
    first, second = pack(numbers, block).unflatten(-1, (-1, 2)).unbind(-1)
    words = torch.stack((first & 0xFFFF | second << 16, first >> 16 & 0xFFFF | second & ~0xFFFF), dim=-1)
    packed = torch.zeros_like(words)
    for index, bits in enumerate(E2M1_BITS):
        for left, mask in rotations((4 * index + 3, 4 * index + 2, 4 * index + 1, 4 * index), bits).items():
            packed |= _rotated(words, left) & mask
    return packed.flatten(-2)


def _e2m1_values(words: Tensor, block: int) -> Tensor:
    """Return the values of e2m1 of int32 words, (..., size / 8) -> (..., size) float32."""
    pairs = words.unflatten(-1, (-1, block // PACKED // 2, 2)).unbind(-1)  # the first words, and the second ones
    halves = []  # of the i-th values of two neighbouring words, as float16
    for word, bits in product(pairs, E2M1_BITS):
        parts = [_rotated(word, left) & mask for left, mask in rotations(bits, E2M1_IN_FLOAT16).items()]
        halves.append(reduce(torch.bitwise_or, parts))
    return torch.stack(halves, dim=-2).view(torch.float16).flatten(-3).float() * 2.0**14


def rotations(sources: tuple[int, ...], targets: tuple[int, ...]) -> dict[int, int]:
    """Return by how many bits a word is rotated to the left, so that bits reach their targets, and which ones do.

    sources, targets: bits of a value in the lower half; the same happens to the upper half. The values of the dict are
    masks of targets, as int32.
    """
    masks: dict[int, int] = {}
    for source, target in zip(sources, targets, strict=True):
        left = (target - source) % 32
        for bit in (target, (target + 16) % 32):
            masks[left] = masks.get(left, 0) | (1 << bit if bit < 31 else -(1 << 31))
    return masks


def _rotated(words: Tensor, left: int) -> Tensor:
    return words if left == 0 else (words << left) | ((words >> (32 - left)) & ((1 << left) - 1))


def dequantize(weight: PackedWeight) -> Tensor:
    """Return a weight in float32."""
    block = block_size(weight.numbers.shape[-1] * PACKED)
    if weight.is_e2m1:
        values = _e2m1_values(weight.numbers, block)
        return values * _of_inputs(powers_of_2(weight.scales), values, weight.groups)
    numbers = unpack(weight.numbers, block).float()
    scales = _of_inputs(weight.scales, numbers, weight.groups)
    if weight.zeros is None:
        return (numbers - ZERO) * scales
    return (numbers - _of_inputs(weight.zeros.float(), numbers, weight.groups)) * scales


def powers_of_2(scales: Tensor) -> Tensor:
    """Return scales as float32."""
    if scales.dtype != torch.uint8:
        return scales
    return torch.exp2(scales.double() - 127).float().masked_fill(scales == 255, torch.nan)


@op
def widen(numbers: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype, is_e2m1: bool = False) -> Tensor:
    """Return a weight whose groups are in order in `dtype`, (..., num_outputs, num_inputs)."""
    return dequantize(PackedWeight(numbers, scales, zeros, is_e2m1=is_e2m1)).to(dtype)


@op
def int4_product(x: Tensor, weight: PackedWeight, num_splits: int) -> Tensor:
    """Return x W^T as partial sums, (num_splits, num_rows, num_outputs), each over a part of the blocks.

    x: (num_rows, num_inputs), rows contiguous; for the kernel in 16 bits. The weight's groups are in order, and its
    blocks whole.
    """
    wide = dequantize(weight).to(x.dtype)
    num_blocks = x.shape[1] // BLOCK
    part = ceil_div(num_blocks, num_splits) * BLOCK
    parts = [slice(start, start + part) for start in range(0, num_splits * part, part)]
    return torch.stack([F.linear(x[:, columns], wide[:, columns]) for columns in parts])


def reads_4_bits(x: Tensor, weight: PackedWeight) -> bool:
    """Return whether to compute x W^T by `int4_product`. For more rows, widening W costs less than reading it often."""
    return x.is_cuda and len(x) <= max_rows_in_4_bits(weight, x.shape[1], x.dtype, x.device)


def max_rows_in_4_bits(weight: PackedWeight, num_inputs: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return for how many rows in `dtype`, at most, a GPU's kernels read a weight in 4 bits; 0 if they never do."""
    if num_inputs % BLOCK or weight.groups is not None or dtype == torch.float32:
        return 0
    return MAX_HOPPER_ROWS if has_hopper_kernel(weight, device) else MAX_ROWS


def has_hopper_kernel(weight: PackedWeight, device: torch.device) -> bool:
    """Return whether Hopper's kernel takes such a weight.

    Its groups are quarters or halves of a block, or whole blocks. Its outputs are a multiple of OUTPUTS_AT_ONCE.
    """
    group_size = weight.numbers.shape[-1] * PACKED // weight.num_groups
    if weight.numbers.shape[-2] % OUTPUTS_AT_ONCE or not (group_size in (32, 64) or group_size % BLOCK == 0):
        return False
    return has_hopper_kernels(device)


def num_splits(num_rows: int, num_inputs: int, num_outputs: int, is_split: bool, multiprocessors: int) -> int:
    """Return in how many parts a product of few rows is summed.

    is_split: whether the kernel after it adds the parts up; if not, there are fewer of them.
    Up to ROWS rows so that enough small programs read the weight; for more so that the rounds, in which each
    multiprocessor has a program, are full.
    """
    candidates = [splits for splits in (1, 2, 4, 8) if splits == 1 or num_inputs // BLOCK >= splits * MIN_BLOCKS]
    if num_rows > ROWS:
        num_units = ceil_div(num_rows, MANY_ROWS) * ceil_div(num_outputs, MANY_COLUMNS)
        return min(candidates, key=lambda splits: ceil_div(num_units * splits, multiprocessors) / splits)
    most = (SMALL_PROGRAMS if num_rows <= 64 and is_split else LARGE_PROGRAMS) * multiprocessors
    num_programs = ceil_div(num_outputs, COLUMNS)
    return max(splits for splits in candidates if splits == 1 or num_programs * splits <= most)


def _of_inputs(x: Tensor, numbers: Tensor, groups: Tensor | None) -> Tensor:
    """Return the scale or zero point of each input's group; size 1 if all inputs of an output have the same."""
    if x.dim() < numbers.dim():
        return x.unsqueeze(-1)
    if groups is not None:
        return x.gather(-1, groups.long().unsqueeze(-2).expand(numbers.shape))
    return x.repeat_interleave(numbers.shape[-1] // x.shape[-1], dim=-1)


def quantize(weight: Tensor, group_size: int, block: int | None = None) -> PackedWeight:
    """Round a weight, (..., num_outputs, num_inputs), to 4 bits without zero points.

    Of a few scales each group has the one with the smallest squared error. NaN and infinity make NaN of their group.
    block: inputs that are packed together, if not those of a whole weight of this size.
    """
    rows, block = weight.float().reshape(-1, weight.shape[-1]), block or block_size(weight.shape[-1])
    parts = [_quantize_rows(part, group_size, block) for part in rows.split(MAX_FITTED_ROWS)]
    numbers, scales = (torch.cat(side) for side in zip(*parts, strict=True))
    shape = weight.shape[:-1]
    return PackedWeight(numbers.view(*shape, -1), scales.view(*shape, -1))


def _quantize_rows(rows: Tensor, group_size: int, block: int) -> tuple[Tensor, Tensor]:
    groups = rows.unflatten(1, (-1, group_size))  # (num_rows, num_groups, group_size)
    # The largest value becomes -8. There is no 8, so the scale of a positive largest value is negative.
    largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    numbers, scales = torch.zeros_like(groups), torch.zeros_like(largest)
    least = torch.full_like(largest, torch.inf)
    for share in SHARES_OF_LARGEST:
        scale = largest * (-share / 8)
        tried = (groups / scale.where(scale != 0, torch.ones_like(scale))).round().clamp(-8, 7)
        error = (groups - tried * scale).square().sum(dim=2, keepdim=True)
        is_better = error < least
        numbers, scales = torch.where(is_better, tried, numbers), torch.where(is_better, scale, scales)
        least = torch.minimum(error, least)
    scales = torch.where(largest.abs() < torch.inf, scales, torch.nan)
    return pack((numbers + ZERO).flatten(1), block), scales.squeeze(2)
