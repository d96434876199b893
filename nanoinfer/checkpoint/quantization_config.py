"""Which weights of a model have fewer bits, and how: a config.json's `quantization_config`, or the option quantization.

In 8 bits three dialects are read: "fp8" (Qwen3-FP8, Ministral 3, static scales), "compressed-tensors" (llm-compressor)
and "modelopt"; in 4 bits the second, AWQ and GPTQ (`int4_config.py`). What would change the answer and is not built in
is refused by field and value.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nanoinfer.checkpoint.int4_config import (
    Int4Config,
    read_auto_round,
    read_awq,
    read_gptq,
    read_mxfp4,
    read_pack_quantized,
)
from nanoinfer.checkpoint.quantization_fields import (
    REMEDY,
    QuantizationConfig,
    drop_kv_scales,
    module_names,
    only,
    refuse_the_rest,
    unsupported,
)
from nanoinfer.errors import ModelError

BLOCK_SIZE = 128  # rows and columns of a weight, and inputs of a token, that share a scale


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


def read_quantization(
    raw: Any, requested: str | None, packed: Mapping[str, tuple[str, str]], renamed: Mapping[str, str]
) -> QuantizationConfig | None:
    """Read a config.json's quantization_config, or what the user asks for where it has none. Raises ModelError.

    packed, renamed: names of the checkpoint's modules -> ours, as a model class has them.
    """
    if not raw and requested is None:
        return None
    by_module: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, (module, shard) in packed.items():
        shards = by_module.setdefault(module, {})
        shards[shard] = (*shards.get(shard, ()), name)
    names: dict[str, Any] = {
        "packed": {module: tuple(shards.values()) for module, shards in by_module.items()},
        "renamed": {ours: tuple(name for name in renamed if renamed[name] == ours) for ours in renamed.values()},
    }
    if not raw:
        return Int4Config(**names) if requested == "int4" else Fp8Config(**names)
    if not isinstance(raw, Mapping):
        raise ModelError(f"config.json has quantization_config={raw!r:.99}; it must be a JSON object")
    method: Any = raw.get("quant_method")
    if method not in READERS:
        raise ModelError(
            f"config.json has quantization_config with quant_method={method!r}, which is not supported; supported are "
            f"{', '.join(READERS)}; {REMEDY}"
        )
    return READERS[method](dict(raw), in_checkpoint=True, **names)


def _read_fp8(raw: dict[str, Any], **common: Any) -> Fp8Config:
    """Read the dialect of Qwen3-FP8, DeepSeek and of per-tensor checkpoints, such as those of Ministral 3."""
    drop_kv_scales(raw)
    # transformers always writes weight_block_size, and gives scales names of its own.
    names = ("weight_scale_inv", "activation_scale") if "weight_block_size" in raw else ("weight_scale", "input_scale")
    block = raw.pop("weight_block_size", None)
    scheme = raw.pop("activation_scheme", "dynamic")
    fields = ("modules_to_not_convert", "ignored_layers")
    ignored = [name for field in fields for name in module_names(field, raw.pop(field, None) or [])]
    only("weight_block_size", block, (None, [BLOCK_SIZE, BLOCK_SIZE]))
    only("activation_scheme", scheme, ("dynamic", "static"))
    only("fmt", raw.pop("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    only("scale_fmt", raw.pop("scale_fmt", None), (None, "float"))
    only("expert_dtype", raw.pop("expert_dtype", None), (None, "fp8"))
    refuse_the_rest(raw, {"quant_method"})
    if block and scheme == "static":
        raise unsupported("activation_scheme", scheme, ("dynamic",), " with weight_block_size")
    return Fp8Config(
        weight_granularity="block" if block else "tensor",
        static_inputs=scheme == "static",
        scale_name=names[0],
        input_scale_name=names[1],
        ignored=tuple(ignored),
        **common,
    )


def _read_modelopt(raw: dict[str, Any], **common: Any) -> Fp8Config:
    """Read the dialect of TensorRT Model Optimizer: a static scale for each weight and its inputs."""
    drop_kv_scales(raw)
    only("quant_algo", raw.pop("quant_algo", None), ("FP8",))
    raw.pop("config_groups", None)  # says the same in other words
    ignored = raw.pop("ignore", None) or []
    refuse_the_rest(raw, {"quant_method", "producer"})
    return Fp8Config(weight_granularity="tensor", static_inputs=True, ignored=module_names("ignore", ignored), **common)


def _read_compressed_tensors(raw: dict[str, Any], **common: Any) -> QuantizationConfig:
    """Read the dialect of llm-compressor: one scheme for all linear layers, in FP8 or in packed integers of 4 bits."""
    drop_kv_scales(raw)
    layout = raw.pop("format", None)
    only("format", layout, ("float-quantized", "naive-quantized", "pack-quantized"))  # the first two are one in FP8
    groups, ignored = raw.pop("config_groups", None), raw.pop("ignore", None) or []
    for location in re.findall(r'"location": "(\w+)"', json.dumps(raw.pop("transform_config", None))):
        only("transform_config.location", location, ("weight_input", "weight_output"))  # what is in the weights already
    refuse_the_rest(raw, {"quant_method"})
    schemes = [*groups.values()] if isinstance(groups, Mapping) else []
    if len(schemes) != 1 or not isinstance(group := schemes[0], Mapping):
        raise ModelError(
            f"config.json has quantization_config with config_groups={groups!r:.200}; one group for all linear layers "
            "is supported; use a checkpoint with one"
        )
    only("targets", group.get("targets"), (["Linear"],))
    only("format", group.get("format"), (None, layout))
    only("output_activations", group.get("output_activations"), (None,))
    if layout == "pack-quantized":
        only("input_activations", group.get("input_activations"), (None,))
        if not isinstance(packed := group.get("weights"), Mapping):
            raise unsupported("weights", packed, ("a scheme of 4 bits",))
        return read_pack_quantized(packed, ignored=module_names("ignore", ignored), **common)
    weights, inputs = (_scheme(name, group.get(name)) for name in ("weights", "input_activations"))
    strategy: Any = weights.get("strategy")
    static = not inputs.get("dynamic")
    only("weights.strategy", strategy, ("channel", "block", "tensor"))
    only("weights.dynamic", weights.get("dynamic", False), (False,))
    if strategy == "block":
        block = weights.get("block_structure")
        only("weights.block_structure", block, ([BLOCK_SIZE, BLOCK_SIZE], f"{BLOCK_SIZE}x{BLOCK_SIZE}"))
        only("input_activations.dynamic", inputs.get("dynamic"), (True,))
        only("input_activations.strategy", inputs.get("strategy"), ("group", "token"))
        only("input_activations.group_size", inputs.get("group_size"), (None, BLOCK_SIZE))
    else:
        only("input_activations.strategy", inputs.get("strategy"), ("tensor",) if static else ("token",))
    return Fp8Config(
        weight_granularity=strategy, static_inputs=static, ignored=module_names("ignore", ignored), **common
    )


def _scheme(name: str, part: Any) -> Mapping[str, Any]:
    """Return what a group says of its weights or inputs, which have to be in FP8."""
    if not isinstance(part, Mapping):
        raise unsupported(name, part, ("a scheme of 8 bits",))
    only(f"{name}.num_bits", part.get("num_bits"), (8,))
    only(f"{name}.type", part.get("type"), ("float",))
    only(f"{name}.symmetric", part.get("symmetric", True), (True,))
    only(f"{name}.actorder", part.get("actorder"), (None, False))
    return part


# What reads a quantization_config, by its quant_method. It takes the fields that it knows out of them.
READERS: Mapping[str, Callable[..., QuantizationConfig]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "awq": read_awq,
    "gptq": read_gptq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,  # its name before 0.5
    "mxfp4": read_mxfp4,
    "modelopt": _read_modelopt,
}
