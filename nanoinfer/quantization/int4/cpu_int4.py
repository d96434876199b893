"""Products on a CPU by weights in 4 bits: PyTorch's kernel for few rows; for more, a weight that is widened quickly.

PyTorch's kernel is for bfloat16: in float32 it is far slower than widening, which every dtype can do.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.common.fp8_format import Activations
from nanoinfer.ops.int4.spec import ZERO, pack, unpack
from nanoinfer.quantization.cpu_products import Prepacked, has_fast_kernels
from nanoinfer.quantization.int4.formats import Int4Config
from nanoinfer.quantization.int4.int4_linear import Int4LinearMethod

MAX_KERNEL_ROWS = 32  # for more, widening the weight takes less time than the kernel
KERNEL_GROUPS = (256, 128, 64, 32)  # inputs that share a scale, as the kernel takes them
KERNEL_OUTPUTS = 16  # of which the kernel takes multiples
PACKED_AT_ONCE = 1024  # outputs, to bound the memory that packing takes; a multiple of the kernel's blocks
WIDENED_AT_ONCE = 2**19  # numbers, so that what is computed in between stays in the cache


class CpuInt4Weight(NamedTuple):
    """Holds a weight in 4 bits as a CPU reads it.

    halves: (num_outputs, num_groups, group_size / 2) uint8: a byte has an input of the first half of a group in its low
    bits, and the one as far into the second half in its high bits. for_kernel: what PyTorch's kernel reads beside the
    rows: numbers, group size, and scale and offset of each group; None where it does not serve.
    """

    halves: Tensor
    scales: Tensor  # (num_outputs, num_groups, 1) float32
    zeros: Tensor | float  # of the same shape, or of all
    for_kernel: tuple[Tensor, int, Tensor] | None

    def widen(self, dtype: torch.dtype) -> Tensor:
        """Return what `widen` of ops/int4 does."""
        num_outputs, num_groups, size = self.halves.shape
        wide = self.halves.new_empty((num_outputs, num_groups, 2, size), dtype=dtype)
        count = max(1, WIDENED_AT_ONCE // (2 * num_groups * size))
        for rows in (slice(start, start + count) for start in range(0, num_outputs, count)):
            bits, scales = self.halves[rows], self.scales[rows]
            zeros = self.zeros[rows] if isinstance(self.zeros, Tensor) else self.zeros
            for half, numbers in enumerate((bits & 15, bits >> 4)):
                wide[rows, :, half] = numbers.float().sub_(zeros).mul_(scales)
        return wide.view(num_outputs, -1)


class PrepackedInt4(Prepacked[CpuInt4Weight]):
    """Holds a weight in 4 bits as a CPU reads it. block: inputs that are packed together in the plain weight."""

    def __init__(self, numbers: Tensor, scales: Tensor, zeros: Tensor | None, block: int, dtype: torch.dtype) -> None:
        super().__init__(numbers, scales, *([] if zeros is None else [zeros]))
        self._scales, self._zeros, self._block, self._dtype = scales, zeros, block, dtype

    def _pack(self, plain: Tensor) -> CpuInt4Weight:
        numbers = unpack(plain, self._block)  # (num_outputs, num_inputs)
        scales = self._scales.view(len(numbers), -1, 1)
        zeros = float(ZERO) if self._zeros is None else self._zeros.view(scales.shape).float()
        both = numbers.view(len(numbers), scales.shape[1], 2, -1)
        halves = both[:, :, 0] | both[:, :, 1] << 4
        return CpuInt4Weight(halves, scales, zeros, self._for_kernel(numbers, scales, zeros))

    def _for_kernel(self, numbers: Tensor, scales: Tensor, zeros: Tensor | float) -> tuple[Tensor, int, Tensor] | None:
        num_outputs, num_inputs = numbers.shape
        group_size = num_inputs // scales.shape[1]
        size = next((size for size in KERNEL_GROUPS if group_size % size == 0), None)
        is_served = self._dtype == torch.bfloat16 and num_outputs % KERNEL_OUTPUTS == 0
        if not is_served or size is None or not has_fast_kernels():
            return None
        parts = [
            torch.ops.aten._convert_weight_to_int4pack_for_cpu(part.int(), 1) for part in numbers.split(PACKED_AT_ONCE)
        ]
        # The kernel computes (number - 8) * scale + offset.
        both = torch.cat((scales, (ZERO - zeros) * scales), dim=2).repeat_interleave(group_size // size, dim=1)
        return torch.cat(parts), size, both.transpose(0, 1).to(self._dtype).contiguous()

    def _values(self, packed: CpuInt4Weight) -> Tensor:
        numbers = torch.stack((packed.halves & 15, packed.halves >> 4), dim=2)
        return pack(numbers.view(len(numbers), -1), self._block)


class CpuInt4LinearMethod(Int4LinearMethod):
    """Holds a weight in 4 bits, of inputs in the order of their groups, as a CPU reads it."""

    def __init__(self, config: Int4Config, layer: Any) -> None:
        super().__init__(config, layer)
        tensors = layer.weight, layer.weight_scale, layer.weight_zero_point
        self._weight = PrepackedInt4(*tensors, self.block, self.dtype)

    def wide_weight(self, layer: Any) -> Tensor:
        return self._weight.prepacked().widen(self.dtype)

    def apply(self, layer: Any, x: Activations, bias: Tensor | None) -> Tensor:
        x, weight = cast(Tensor, x), self._weight.prepacked()
        if weight.for_kernel is None or len(x) > MAX_KERNEL_ROWS:
            return F.linear(x, weight.widen(self.dtype), bias)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(x.contiguous(), *weight.for_kernel)
        return product if bias is None else product + bias
