"""Experts in MXFP4, as gpt-oss has them: values of e2m1, and a power of two for each 32 inputs of an output."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.checkpoint.quantization_config import QuantizationConfig, refuse_the_rest
from nanoinfer.errors import ModelError
from nanoinfer.integers import ceil_div
from nanoinfer.ops.experts.spec import ExpertWeights
from nanoinfer.ops.int4.spec import BLOCK, PACKED, PackedWeight, dequantize, pack_e2m1
from nanoinfer.quantization.int4.formats import mxfp4_numbers
from nanoinfer.quantization.linear_method import LinearMethod, ParamSpec, ProductKind, stored

MXFP4_GROUP = 32  # inputs that share a scale
MAX_EXPONENT = 128  # of a scale, with 127 added; larger ones do not fit into the kernel's bfloat16
STD_OF_VALUES = 2.93  # the standard deviation of the sixteen values of e2m1


@dataclass(frozen=True, slots=True)
class Mxfp4Config(QuantizationConfig):
    """Describes experts in MXFP4, as gpt-oss has them; all else has 16 bits."""

    weight_bits = 4.25

    def covers(self, module: str) -> bool:
        return ".experts." in module

    @property
    def shard_multiple(self) -> int:
        return MXFP4_GROUP


def read_mxfp4_config(fields: Fields) -> Mxfp4Config:
    """Read the quantization_config of gpt-oss."""
    refuse_the_rest(fields, {"modules_to_not_convert"})
    return Mxfp4Config()


class Mxfp4Method(LinearMethod):
    """Holds the weights of all experts in 4 bits, each row filled up with zeros to whole blocks of 128 inputs.

    The layer has `weight`, (num_experts, num_outputs, num_words) int32, and `weight_scale`, (num_experts, num_outputs,
    num_groups) uint8, exponents of 2 with 127 added.
    """

    kind = ProductKind.NARROW

    def __init__(self, layer: Any) -> None:
        self.dtype, self.device = layer.weight.dtype, layer.weight.device
        self.create_weights(layer, *layer.weight.shape)

    def create_weights(self, layer: Any, *shape: int) -> None:
        *experts, num_outputs, self.num_inputs = shape
        if self.num_inputs % MXFP4_GROUP:
            raise ModelError(
                f"a weight of {self.num_inputs} inputs cannot be in MXFP4, whose groups have {MXFP4_GROUP}"
            )
        num_blocks = ceil_div(self.num_inputs, BLOCK)
        words = torch.zeros(*experts, num_outputs, num_blocks * BLOCK // PACKED, dtype=torch.int32, device=self.device)
        layer.weight = stored(words, ParamSpec(0, 1))
        scales = words.new_zeros((*experts, num_outputs, num_blocks * BLOCK // MXFP4_GROUP), dtype=torch.uint8)
        layer.weight_scale = stored(scales, ParamSpec(0, 1, inputs_per_entry=MXFP4_GROUP))

    def read(self, kind: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Do what `LinearMethod.read` does. Outputs become the last dimension, as in checkpoints in 16 bits."""
        if kind not in ("weight_blocks", "weight_scales"):
            return kind, tensor
        is_blocks = kind == "weight_blocks"
        if tensor.dtype != torch.uint8 or tensor.dim() != (4 if is_blocks else 3):
            raise ModelError(
                f"it has {tensor.dtype} and shape {tuple(tensor.shape)}; MXFP4 has uint8, (experts, outputs, groups"
                f"{', 16' if is_blocks else ''})"
            )
        if is_blocks and tensor.shape[-1] * 2 != MXFP4_GROUP:
            raise ModelError(f"it has blocks of {tensor.shape[-1]} bytes; those of MXFP4 have {MXFP4_GROUP // 2}")
        if not is_blocks and int(tensor.max()) > MAX_EXPONENT:
            raise ModelError(
                f"it has the scale 2**{int(tensor.max()) - 127}; at most 2**{MAX_EXPONENT - 127} is supported"
            )
        tensor = tensor.to(self.device)
        return ("weight", mxfp4_numbers(tensor).mT) if is_blocks else ("weight_scale", tensor.mT)

    def pack_share(self, param: Tensor, share: Tensor) -> Tensor:
        if share.dim() == 1:  # a bias
            return share
        is_packed = param.dtype == torch.int32
        filled = F.pad(share, (0, param.shape[-1] * (PACKED if is_packed else 1) - share.shape[-1]))
        return pack_e2m1(filled, BLOCK) if is_packed else filled

    def packed(self, layer: Any) -> PackedWeight:
        """Return the layer's weight, with what its rows are filled up with."""
        return PackedWeight(layer.weight, layer.weight_scale, is_e2m1=True)

    def wide_weight(self, layer: Any) -> Tensor:
        return dequantize(self.packed(layer))[..., : self.num_inputs].to(self.dtype)

    def fill_with_random_weights(self, layer: Any, std: float, generator: torch.Generator) -> None:
        """Draw all values alike, with the power of two next to what gives the weight this standard deviation."""
        layer.weight.random_(-(2**31), 2**31 - 1, generator=generator)
        exponent = torch.tensor(std / STD_OF_VALUES).log2().round().int() + 127
        layer.weight_scale.fill_(int(exponent))

    def expert_weights(self, layer: Any) -> ExpertWeights:
        return ExpertWeights(layer.weight, layer.weight_scale, bias=layer.bias, is_e2m1=True)
