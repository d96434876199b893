"""Linear layers with weights in FP8: how a config.json says it, how they are made, loaded and multiplied.

The numbers: `ops/fp8/spec.py`.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.checkpoint.quantization_config import (
    QuantizationConfig,
    module_names,
    refuse_the_rest,
    require,
    unsupported,
)
from nanoinfer.checkpoint.weights import must_be_wide, must_have_fewer
from nanoinfer.errors import ModelError
from nanoinfer.integers import ceil_div
from nanoinfer.ops.common.fp8_format import (
    FP8,
    FP8_MAX,
    GROUP_SIZE,
    MAX_SMALL_STEP,
    Activations,
    QuantizedRows,
    RowFormat,
)
from nanoinfer.ops.experts.spec import ExpertWeights, fp8_expert_mlp
from nanoinfer.ops.fp8.spec import fit_weight, fp8_product, quantize_rows, quantize_weight, widen_weight
from nanoinfer.quantization.linear_method import (
    MATRIX,
    PER_OUTPUT,
    LinearMethod,
    ParamSpec,
    ProductKind,
    hold_scales,
    may_split,
    stored,
)

BLOCK_SIZE = 128  # rows and columns of a weight, and inputs of a token, that share a scale
MAX_SPLITS = 8  # of K
# Checkpoints have two names for the scales of a weight, and two for the scale of its inputs.
SCALE_NAMES, INPUT_SCALE_NAMES = ("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale")


@dataclass(frozen=True, slots=True)
class Fp8Config(QuantizationConfig):
    """Describes the weights of linear layers in FP8 (e4m3) and the activations that they are multiplied by.

    weight_granularity: what shares a scale: an output channel; a block of 128 x 128; or a whole tensor of the
    checkpoint.
    static_inputs: whether activations have one scale that the checkpoint gives; else each token's is computed.
    scale_name, input_scale_name: what the checkpoint calls the scales of a `weight`, and the one of its inputs.
    """

    weight_bits = 8
    weight_granularity: Literal["channel", "block", "tensor"] = "channel"
    static_inputs: bool = False
    scale_name: str = "weight_scale"
    input_scale_name: str = "input_scale"

    @property
    def block_size(self) -> int | None:
        return BLOCK_SIZE if self.weight_granularity == "block" else None

    @property
    def shard_multiple(self) -> int:
        return BLOCK_SIZE if self.weight_granularity == "block" or not self.static_inputs else 1


def read_fp8(fields: Fields) -> Fp8Config:
    """Read the dialect of Qwen3-FP8, DeepSeek and of per-tensor checkpoints, such as those of Ministral 3."""
    # transformers always writes weight_block_size, and gives scales names of its own.
    is_theirs = "weight_block_size" in fields.values
    block = require(fields, "weight_block_size", (None, [BLOCK_SIZE, BLOCK_SIZE]))
    scheme = require(fields, "activation_scheme", ("dynamic", "static"), "dynamic")
    require(fields, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    require(fields, "scale_fmt", (None, "float"))
    require(fields, "expert_dtype", (None, "fp8"))
    ignored = module_names(fields, "modules_to_not_convert", "ignored_layers")
    refuse_the_rest(fields)
    if block and scheme == "static":
        raise unsupported("activation_scheme", scheme, ("dynamic",), " with weight_block_size")
    return Fp8Config(
        weight_granularity="block" if block else "tensor",
        static_inputs=scheme == "static",
        scale_name="weight_scale_inv" if is_theirs else "weight_scale",
        input_scale_name="activation_scale" if is_theirs else "input_scale",
        ignored=ignored,
    )


def read_modelopt(fields: Fields) -> Fp8Config:
    """Read the dialect of TensorRT Model Optimizer: a static scale for each weight and its inputs."""
    require(fields, "quant_algo", ("FP8",))
    ignored = module_names(fields, "ignore")
    refuse_the_rest(fields, {"producer", "config_groups"})  # the second says the same in other words
    return Fp8Config(weight_granularity="tensor", static_inputs=True, ignored=ignored)


def read_compressed_fp8(weights: Fields, inputs: Fields) -> Fp8Config:
    """Read the schemes of llm-compressor for weights and their inputs, both in FP8."""
    for part in (weights, inputs):
        require(part, "num_bits", (8,))
        require(part, "type", ("float",))
        require(part, "symmetric", (True,), True)
        require(part, "actorder", (None, False))
    static = not inputs.get("dynamic")
    strategy = require(weights, "strategy", ("channel", "block", "tensor"))
    require(weights, "dynamic", (False,), False)
    if strategy == "block":
        require(weights, "block_structure", ([BLOCK_SIZE, BLOCK_SIZE], f"{BLOCK_SIZE}x{BLOCK_SIZE}"))
        require(inputs, "dynamic", (True,))
        require(inputs, "strategy", ("group", "token"))
        require(inputs, "group_size", (None, BLOCK_SIZE))
    else:
        require(inputs, "strategy", ("tensor",) if static else ("token",))
    return Fp8Config(weight_granularity=strategy, static_inputs=static)


class Fp8WeightOnlyMethod(LinearMethod):
    """Holds a weight in FP8, and widens it for each product: less memory, but no speed.

    weight: (..., num_outputs, num_inputs) e4m3. Its scales are named as in the checkpoint: one for each output,
    (..., num_outputs), or for each block, (..., rows, columns). So is the static scale for the inputs of each weight
    that is packed here, (num_shards,); the layer rounds its inputs with the largest of them.
    """

    kind = ProductKind.WIDENED

    def __init__(self, config: Fp8Config, layer: Any) -> None:
        self.config = config
        self.dtype = layer.weight.dtype
        self.create_weights(layer, *layer.weight.shape)

    def create_weights(self, layer: Any, *shape: int) -> None:
        with layer.weight.device:
            layer.weight = stored(torch.empty(shape, dtype=FP8), MATRIX)
            *experts, num_outputs, num_inputs = shape
            spec = ParamSpec(0, 1, BLOCK_SIZE, BLOCK_SIZE) if self.config.weight_granularity == "block" else PER_OUTPUT
            scales = torch.empty(*experts, *spec.shape(num_outputs, num_inputs), dtype=torch.float32)
            hold_scales(layer, self.config.scale_name, scales, spec, self.config.in_checkpoint)
            if self.config.static_inputs:
                num_shards = len(getattr(layer, "shards", (None,)))
                input_scales = stored(torch.zeros(num_shards, dtype=torch.float32), ParamSpec())
                setattr(layer, self.config.input_scale_name, input_scales)
                layer.register_buffer("largest_input_scale", torch.zeros((), dtype=torch.float32))

    def scales(self, layer: Any) -> Tensor:
        return cast(Tensor, getattr(layer, self.config.scale_name))

    def input_scales(self, layer: Any) -> Tensor | None:
        return cast(Tensor | None, getattr(layer, self.config.input_scale_name, None))

    def read(self, kind: str, tensor: Tensor) -> tuple[str, Tensor]:
        if kind in SCALE_NAMES:
            kind = self.config.scale_name
        elif kind in INPUT_SCALE_NAMES:
            kind = self.config.input_scale_name
        return kind, tensor

    def wide_weight(self, layer: Any) -> Tensor:
        return widen_weight(layer.weight, self.scales(layer), self.dtype)

    def check(self, layer: Any, param: Tensor, full: Tensor, shape: tuple[int, ...]) -> None:
        if param is layer.weight and (full.dtype == FP8) != self.config.in_checkpoint:
            raise ModelError(must_have_fewer(8, full) if self.config.in_checkpoint else must_be_wide("8", layer))
        if param is self.input_scales(layer):
            if full.numel() != 1:
                raise ModelError(f"it has shape {tuple(full.shape)}, and one scale for all inputs is known")
        elif self.config.weight_granularity == "block" or param is not self.scales(layer):
            super().check(layer, param, full, shape)
        elif full.numel() != 1:
            super().check(layer, param, full.reshape(-1), shape)

    def prepare(self, layer: Any, param: Tensor, full: Tensor, shard: str | None) -> list[tuple[Tensor, Tensor]]:
        if param is layer.weight:
            if self.config.in_checkpoint:
                return [(param, full)]
            # Rounds whole rows, before ranks cut them, so that scales do not depend on the number of ranks.
            values, scales = fit_weight(full.to(param.device))
            return [(param, values), (self.scales(layer), scales)]
        if param is self.input_scales(layer):
            param[0 if shard is None else layer.shards.index(shard)] = full.float().item()
            layer.largest_input_scale.copy_(param.max())
            return []
        if self.config.weight_granularity == "block" or param is not self.scales(layer):
            return [(param, full)]
        if full.numel() == 1:
            full = full.reshape(1).expand(layer.num_outputs(shard))
        return [(param, full.reshape(-1))]

    def fill_with_random_weights(self, layer: Any, std: float, generator: torch.Generator) -> None:
        """Draw what would be drawn in 16 bits, and round it. Static scales are for inputs of up to 8."""
        wide = torch.empty(layer.weight.shape, dtype=self.dtype, device=layer.weight.device)
        wide.normal_(0.0, std, generator=generator)
        whole = wide, layer.weight, self.scales(layer)
        for part, weight, scales in zip(*whole, strict=True) if wide.dim() == 3 else (whole,):  # an expert at a time
            rounded, its_scales = quantize_weight(part, self.config.block_size)
            weight.copy_(rounded)
            scales.copy_(its_scales)
        if (input_scales := self.input_scales(layer)) is not None:
            input_scales.fill_(8 / FP8_MAX)
            layer.largest_input_scale.copy_(input_scales.max())


class Fp8LinearMethod(Fp8WeightOnlyMethod):
    """Multiplies FP8 by FP8 (W8A8): inputs are rounded, by a scale of their own for each token unless it is static."""

    kind = ProductKind.ROUNDED

    def create_weights(self, layer: Any, *shape: int) -> None:
        super().create_weights(layer, *shape)
        if self.config.static_inputs:
            self.input_format = RowFormat(scale=layer.largest_input_scale)
        elif self.config.weight_granularity == "block" or layer.is_row_parallel:
            self.input_format = RowFormat(group_size=self._group_size(layer))
        else:
            self.input_format = RowFormat()

    def apply(self, layer: Any, x: Activations, bias: Tensor | None) -> Tensor:
        rows = self.round_input(x)
        return fp8_product(rows.values, rows.scales, layer.weight, self.scales(layer), bias, self.dtype)[0]

    def apply_split(self, layer: Any, x: Activations, bias: Tensor | None) -> Tensor:
        rows = self.round_input(x)
        num_splits = self._num_splits(rows.values, len(layer.weight), bias)
        return fp8_product(rows.values, rows.scales, layer.weight, self.scales(layer), bias, self.dtype, num_splits)

    def expert_weights(self, layer: Any) -> ExpertWeights:
        return ExpertWeights(layer.weight, self.scales(layer))

    def expert_mlp(self, experts: Any, x: Activations, expert_ids: Tensor, weights: Tensor) -> Tensor:
        assert experts.clamps is None, "experts in FP8 are not clamped"
        gate_up, down = experts.gate_up_proj, experts.down_proj
        rows, of_down = self.round_input(x), down.quant_method
        return fp8_expert_mlp(
            rows.values,
            rows.scales,
            self.expert_weights(gate_up),
            of_down.expert_weights(down),
            of_down.input_format,
            expert_ids,
            weights,
            self.dtype,
            experts.is_geglu,
        )

    def round_input(self, x: Activations) -> QuantizedRows:
        """Round what nobody has rounded before."""
        assert self.input_format is not None, "FP8 products have inputs in 8 bits"
        return x if isinstance(x, QuantizedRows) else quantize_rows(x, self.input_format)

    def _group_size(self, layer: Any) -> int:
        """Return how many inputs share a scale: an eighth of all ranks' inputs if no share cuts it, or GROUP_SIZE."""
        if self.config.weight_granularity == "block" or layer.weight.dim() == 3:
            return GROUP_SIZE
        num_inputs, share = layer.full_shape[1], layer.weight.shape[1]
        has_eighths = num_inputs % (8 * GROUP_SIZE) == 0 and share % (num_inputs // 8) == 0
        return num_inputs // 8 if has_eighths else GROUP_SIZE

    def _num_splits(self, x: Tensor, num_outputs: int, bias: Tensor | None) -> int:
        """Return how many splits of K, of whole groups, make about as many tiles as the GPU computes at a time."""
        if not may_split(x, self.dtype, bias):
            return 1
        is_small, group_size = len(x) <= MAX_SMALL_STEP, GROUP_SIZE
        if self.input_format is not None and self.input_format.group_size is not None:
            group_size = self.input_format.group_size
        columns, num_wanted = (64, 256) if is_small else (128, 128)  # tiles of few tokens share a multiprocessor
        num_tiles, num_splits = ceil_div(num_outputs, columns) * ceil_div(len(x), MAX_SMALL_STEP), 1
        while 2 * num_tiles * num_splits <= num_wanted and num_splits < MAX_SPLITS:
            if x.shape[1] % (2 * num_splits * group_size):
                break
            num_splits *= 2
        return num_splits
