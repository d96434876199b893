"""Linear layers with weights in 4 bits: how they are made, loaded and multiplied. The numbers: `ops/int4/spec.py`."""

from math import gcd
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.checkpoint.weights import check_is_wide, check_shape, must_have_fewer
from nanoinfer.errors import ModelError
from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.device_properties import num_multiprocessors
from nanoinfer.ops.common.fp8_format import Activations
from nanoinfer.ops.experts.spec import ExpertWeights
from nanoinfer.ops.int4.spec import (
    GROUP_SIZE,
    MAX_ROWS,
    PACKED,
    ROWS,
    ZERO,
    PackedWeight,
    block_size,
    dequantize,
    int4_product,
    max_rows_in_4_bits,
    num_splits,
    pack,
    quantize,
    reads_4_bits,
    widen,
)
from nanoinfer.quantization.int4.formats import Int4Config, readers
from nanoinfer.quantization.linear_method import PER_OUTPUT, LinearMethod, ParamSpec, ProductKind, hold_scales, stored

STD_OF_NUMBERS = 17.5**0.5  # the standard deviation of -7 to 7, where 0 is twice as likely as each other number
# By format and tensor: what a quantization_config says where there are zero points other than 8, or an order of inputs.
OF_GPTQ = {"weight_zero_point": {"sym": False}, "weight_g_idx": {"desc_act": True}}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "awq": {"weight_zero_point": {"zero_point": True}},
    "gptq": OF_GPTQ,
    "gptq_v2": OF_GPTQ,
    "compressed-tensors": {
        "weight_zero_point": {"config_groups": {"group_0": {"weights": {"symmetric": False}}}},
        "weight_g_idx": {"config_groups": {"group_0": {"weights": {"actorder": "group"}}}},
    },
}
UNORDERED = "inputs in another order than their groups"


class Int4LinearMethod(LinearMethod):
    """Holds a weight in 4 bits, and widens it for each product of more rows than kernels read it for.

    The layer has `weight`, int32; `weight_scale`, float32; `weight_zero_point`, uint8, and `weight_g_idx`, the group of
    each input, both None if the checkpoint has none: see `PackedWeight`.
    """

    splits_large_products = True

    def __init__(self, config: Int4Config, layer: Any) -> None:
        self.config = config
        self.dtype, self.device = layer.weight.dtype, layer.weight.device
        self.has_bias = getattr(layer, "bias", None) is not None
        self.readers = readers(config.checkpoint_format) if config.checkpoint_format else {}
        self.ordered: dict[str, set[str]] = {}  # by expert ("": none): the parts that agree on an order of inputs
        self.create_weights(layer, *layer.weight.shape)

    def create_weights(self, layer: Any, *shape: int) -> None:
        *experts, num_outputs, num_inputs = shape
        self.num_inputs = layer.full_shape[1]  # of all ranks
        self.group_size = self.config.group_size
        if self.config.checkpoint_format is None:
            self.group_size = gcd(num_inputs, self.num_inputs, GROUP_SIZE)
        if num_inputs % PACKED or num_inputs % (self.group_size or 1):
            raise ModelError(
                f"a weight of {num_inputs} inputs cannot be in 4 bits with groups of {self.group_size or num_inputs}: "
                f"eight are packed together, and groups are whole; use the checkpoint in 16 bits"
            )
        self.block = block_size(num_inputs)
        packed = ParamSpec(0, 1, inputs_per_entry=PACKED)
        grouped = ParamSpec(0, 1, inputs_per_entry=self.group_size) if self.group_size else PER_OUTPUT
        with layer.weight.device:
            layer.weight = stored(self._empty(experts, packed, num_outputs, num_inputs, torch.int32), packed)
            scales = self._empty(experts, grouped, num_outputs, num_inputs, torch.float32)
            hold_scales(layer, "weight_scale", scales, grouped, self.config.checkpoint_format is not None)
            layer.weight_zero_point = layer.weight_g_idx = None
            if self.config.has_zeros:
                layer.weight_zero_point = stored(torch.empty_like(scales, dtype=torch.uint8), grouped)
            if self.config.orders_inputs:
                groups = torch.empty((*experts, num_inputs), dtype=torch.int32)  # one order for all that a layer packs
                layer.weight_g_idx = stored(groups, ParamSpec(input_dim=0))
        max_rows = max_rows_in_4_bits(self.packed(layer), num_inputs, self.dtype, self.device)
        self.kind = ProductKind.NARROW if max_rows > MAX_ROWS else ProductKind.WIDENED

    def _empty(self, experts: list[int], spec: ParamSpec, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*experts, *spec.shape(outputs, inputs), dtype=dtype)

    def packed(self, layer: Any) -> PackedWeight:
        """Return the layer's weight."""
        return PackedWeight(layer.weight, layer.weight_scale, layer.weight_zero_point, layer.weight_g_idx)

    def wide_weight(self, layer: Any) -> Tensor:
        return self._widened(self.packed(layer))

    def _widened(self, weight: PackedWeight) -> Tensor:
        if weight.groups is not None:
            return dequantize(weight).to(self.dtype)
        return widen(*weight[:3], self.dtype)

    def read(self, kind: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        if not self.readers:
            return kind, tensor
        if kind == "weight":
            raise ModelError(must_have_fewer(4, tensor))
        if kind == "bias" and not self.has_bias and not bool(tensor.any()):
            return None  # tools for GPTQ write zeros for each layer without bias
        if kind not in self.readers:
            return kind, tensor
        if (found := self.readers[kind]) is None:
            return None
        name, reader = found
        ours = reader(tensor.to(self.device))
        if name == "weight":
            return name, self._pack(ours)
        is_used = {"weight_zero_point": self.config.has_zeros, "weight_g_idx": self.config.orders_inputs}
        if not is_used.get(name, True):
            self._check_unused(name, ours)
            return None
        if self.group_size is None and ours.dim() == 2 and ours.shape[1] == 1:
            ours = ours.squeeze(1)  # checkpoints write one scale for each output as a column
        return name, ours

    def _check_unused(self, name: str, ours: Tensor) -> None:
        """Raise ModelError where zero points, or the groups of inputs, are not what the config says of all layers."""
        expected = torch.full_like(ours, ZERO)
        if name == "weight_g_idx":
            expected = self._groups_in_order(self.num_inputs, ours.device)
        if not torch.equal(ours, expected.to(ours.dtype)):
            assert self.config.checkpoint_format is not None, "only a checkpoint has such tensors"
            found = f"zero points other than {ZERO}" if name == "weight_zero_point" else UNORDERED
            remedy = {"quantization_config": CORRECTIONS[self.config.checkpoint_format][name]}
            raise ModelError(
                f"it has {found}, and by quantization_config no weight has; if it is right, use hf_overrides={remedy}"
            )

    def _pack(self, numbers: Tensor) -> Tensor:
        """Pack the numbers of a whole weight in blocks as large as in this rank's share; the last is padded."""
        if numbers.shape[1] == 2 * self.num_inputs:
            raise ModelError("it is in 8 bits, and must be in 4 by quantization_config; use a checkpoint with one size")
        if numbers.shape[1] != self.num_inputs:
            raise ModelError(f"it has {numbers.shape[1]} inputs, and config.json implies {self.num_inputs}")
        return pack(numbers, self.block)

    def check(self, layer: Any, param: Tensor, full: Tensor, shape: tuple[int, ...]) -> None:
        if param is layer.weight and self.config.checkpoint_format is not None:
            words = self.block // PACKED
            return check_shape(full, (*shape[:-1], ceil_div(shape[-1], words) * words))
        if param is not layer.weight:
            return check_shape(full, shape)
        check_is_wide(layer, full, 4)
        return check_shape(full, (*shape[:-1], shape[-1] * PACKED))

    def prepare(self, layer: Any, param: Tensor, full: Tensor, shard: str | None) -> list[tuple[Tensor, Tensor]]:
        if param is layer.weight_g_idx:
            self._take_order(layer, param, full, shard)
            return []
        if param is not layer.weight or self.config.checkpoint_format is not None:
            return [(param, full)]
        rounded = quantize(full.to(param.device), self.group_size or full.shape[-1], self.block)
        return [(param, rounded.numbers), (layer.weight_scale, rounded.scales)]

    def _take_order(self, layer: Any, param: Tensor, full: Tensor, shard: str | None) -> None:
        """Take the order of a layer's inputs. Raises ModelError where parts of one product have different ones."""
        num_groups = layer.weight_scale.shape[-1]
        if full.numel() and not 0 <= int(full.min()) <= int(full.max()) < num_groups:
            raise ModelError(f"it names groups {int(full.min())} to {int(full.max())}, and there are {num_groups}")
        expert, _, part = (shard or "").rpartition(".")
        place, full = param[int(expert)] if expert else param, full.to(param.device)
        agreed = self.ordered.setdefault(expert, set())
        if part in agreed:
            agreed.clear()  # an update has begun
        if agreed and not torch.equal(place, full):
            raise ModelError(
                "it orders its inputs otherwise than a weight that is computed in one product with it; use a "
                "checkpoint with desc_act=false, or one in AWQ"
            )
        agreed.add(part)
        place.copy_(full)

    def fill_with_random_weights(self, layer: Any, std: float, generator: torch.Generator) -> None:
        """Draw numbers from 1 to 15, with one scale that gives the weight this standard deviation.

        Their mean is 0, as it is in 16 bits. Else tokens would become alike, and choose few of a layer's experts.
        """
        words = layer.weight.random_(-(2**31), 2**31 - 1, generator=generator)
        differ_from_0 = words | words >> 1 | words >> 2 | words >> 3  # the lowest bit of each number
        words |= (~differ_from_0 & 0x11111111) << 3  # 0 becomes 8, which means 0
        layer.weight_scale.fill_(std / STD_OF_NUMBERS)
        if self.config.has_zeros:
            layer.weight_zero_point.fill_(ZERO)
        if self.config.orders_inputs:
            layer.weight_g_idx.copy_(self._groups_in_order(layer.weight_g_idx.shape[-1], layer.weight.device))

    def apply(self, layer: Any, x: Activations, bias: Tensor | None) -> Tensor:
        x, weight = cast(Tensor, x), self.packed(layer)
        if not reads_4_bits(x, weight):
            return F.linear(x, self._widened(weight), bias)
        sums = self._product(x, weight, is_split=False)
        out = sums[0] if len(sums) == 1 else sums.sum(0)
        return out if bias is None else out + bias

    def apply_split(self, layer: Any, x: Activations, bias: Tensor | None) -> Tensor:
        x, weight = cast(Tensor, x), self.packed(layer)
        if bias is None and reads_4_bits(x, weight):
            return self._product(x, weight, is_split=True)
        return self.apply(layer, x, bias).unsqueeze(0)

    def expert_weights(self, layer: Any) -> ExpertWeights:
        packed = self.packed(layer)
        if packed.groups is not None:  # no kernel reads inputs in another order
            return super().expert_weights(layer)
        return ExpertWeights(*packed[:3], bias=layer.bias)

    def _product(self, x: Tensor, weight: PackedWeight, is_split: bool) -> Tensor:
        """Return partial sums. is_split: whether the next kernel adds them up; if not, there are fewer of them."""
        splits, (num_outputs, num_words) = 1, weight.numbers.shape
        # In float16 a partial sum could overflow where the whole does not.
        if x.dtype == torch.bfloat16 and (is_split or len(x) <= ROWS):
            splits = num_splits(len(x), num_words * PACKED, num_outputs, is_split, num_multiprocessors(x.device))
        return int4_product(x, weight, splits)

    def _groups_in_order(self, num_inputs: int, device: torch.device) -> Tensor:
        """Return the group of each input where neighbours share one, (num_inputs,)."""
        return torch.arange(num_inputs, device=device) // (self.group_size or num_inputs)
