"""Linear layers with weights in integers of 8 bits, for CPUs. A checkpoint in 16 bits is rounded while it is loaded.

A weight is number * scale, with numbers from -127 to 127 and a scale for each output, which bfloat16 can hold.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from nanoinfer.checkpoint.quantization_config import QuantizationConfig
from nanoinfer.checkpoint.weights import check_is_wide
from nanoinfer.errors import ConfigError
from nanoinfer.ops.common.fp8_format import Activations
from nanoinfer.quantization.cpu_products import has_fast_kernels
from nanoinfer.quantization.linear_method import MATRIX, PER_OUTPUT, LinearMethod, ProductKind, hold_scales, stored

LARGEST = 127
KERNEL_INPUTS = 64  # of which there must be a multiple: PyTorch's kernel reads beyond the end of other weights
MAX_KERNEL_ROWS = 16  # for more, widening the weight takes less time than PyTorch's kernel


@dataclass(frozen=True, slots=True)
class Int8Config(QuantizationConfig):
    """Describes the weights of linear layers in integers of 8 bits; activations keep the dtype of the model."""

    weight_bits = 8
    has_bfloat16_kernels = True


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight, (..., num_outputs, num_inputs), to int8, with float32 scales (..., num_outputs).

    NaN and infinity make NaN of their output.
    """
    wide = weight.float()
    scales = (wide.abs().amax(dim=-1) / LARGEST).bfloat16().float()
    steps = scales.where(scales != 0, torch.ones_like(scales))
    numbers = (wide / steps.unsqueeze(-1)).round().clamp(-LARGEST, LARGEST).nan_to_num()
    return numbers.to(torch.int8), scales.where(scales.isfinite(), torch.nan)


class Int8LinearMethod(LinearMethod):
    """Holds a weight as `weight`, int8, and `weight_scale`. Few rows in bfloat16 read it so; others have it widened.

    PyTorch's kernel is for bfloat16: in float32 it is far slower than widening.
    """

    kind = ProductKind.WIDENED

    def __init__(self, layer: Any) -> None:
        if layer.weight.device.type == "cuda":
            raise ConfigError(
                "quantization='int8' is for CPUs, and the model runs on a GPU; use 'fp8' (or 'int4') there, or "
                "device='cpu'"
            )
        self.dtype = layer.weight.dtype
        self.has_kernel = self.dtype == torch.bfloat16 and has_fast_kernels()
        self.create_weights(layer, *layer.weight.shape)

    def create_weights(self, layer: Any, *shape: int) -> None:
        with layer.weight.device:
            layer.weight = stored(torch.empty(shape, dtype=torch.int8), MATRIX)
            scales = torch.empty(shape[:-1], dtype=torch.float32)
            hold_scales(layer, "weight_scale", scales, PER_OUTPUT, in_checkpoint=False)

    def check(self, layer: Any, param: Tensor, full: Tensor, shape: tuple[int, ...]) -> None:
        if param is layer.weight:
            check_is_wide(layer, full, 8)
        super().check(layer, param, full, shape)

    def prepare(self, layer: Any, param: Tensor, full: Tensor, shard: str | None) -> list[tuple[Tensor, Tensor]]:
        if param is not layer.weight:
            return [(param, full)]
        # All of a row, before it is cut, so that its scale does not depend on the number of ranks.
        numbers, scales = quantize_int8(full)
        return [(param, numbers), (layer.weight_scale, scales)]

    def fill_with_random_weights(self, layer: Any, std: float, generator: torch.Generator) -> None:
        """Draw what would be drawn in 16 bits, and round it."""
        wide = torch.empty_like(layer.weight, dtype=self.dtype)
        numbers, scales = quantize_int8(wide.normal_(0.0, std, generator=generator))
        layer.weight.copy_(numbers)
        layer.weight_scale.copy_(scales)

    def wide_weight(self, layer: Any) -> Tensor:
        return (layer.weight * layer.weight_scale.unsqueeze(-1)).to(self.dtype)

    def apply(self, layer: Any, x: Activations, bias: Tensor | None) -> Tensor:
        x = cast(Tensor, x)
        is_few = 0 < len(x) <= MAX_KERNEL_ROWS
        if not self.has_kernel or not is_few or x.shape[1] % KERNEL_INPUTS:
            return super().apply(layer, x, bias)
        scales = layer.weight_scale.to(self.dtype)
        product: Tensor = torch.ops.aten._weight_int8pack_mm.default(x.contiguous(), layer.weight, scales)
        return product if bias is None else product + bias
