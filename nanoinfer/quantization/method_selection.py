"""Finds which weights of a model have fewer bits, and how their layers multiply: lists all formats.

A config.json's `quantization_config`, or the option quantization, says so. In 8 bits three dialects are read: "fp8"
(Qwen3-FP8, Ministral 3, static scales), "compressed-tensors" (llm-compressor) and "modelopt"; in 4 bits the second,
AWQ, GPTQ and MXFP4. What would change the answer and is not built in is refused by field and value.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.checkpoint.quantization_config import (
    REMEDY,
    QuantizationConfig,
    module_names,
    refuse_the_rest,
    require,
    unsupported,
)
from nanoinfer.errors import ModelError
from nanoinfer.ops.common.device_properties import has_fp8_products
from nanoinfer.quantization.fp8_linear import (
    Fp8Config,
    Fp8LinearMethod,
    Fp8WeightOnlyMethod,
    read_compressed_fp8,
    read_fp8,
    read_modelopt,
)
from nanoinfer.quantization.int4.cpu_int4 import CpuInt4LinearMethod
from nanoinfer.quantization.int4.formats import (
    Int4Config,
    read_auto_round,
    read_awq,
    read_gptq,
    read_pack_quantized,
)
from nanoinfer.quantization.int4.int4_linear import Int4LinearMethod
from nanoinfer.quantization.int4.mxfp4 import Mxfp4Config, Mxfp4Method, read_mxfp4_config
from nanoinfer.quantization.int8_linear import Int8Config, Int8LinearMethod
from nanoinfer.quantization.linear_method import LinearMethod

logger = logging.getLogger("nanoinfer")


def _fp8_method(config: Fp8Config, layer: Any) -> LinearMethod:
    multiplies = has_fp8_products(layer.weight.device)
    return Fp8LinearMethod(config, layer) if multiplies else Fp8WeightOnlyMethod(config, layer)


def _int4_method(config: Int4Config, layer: Any) -> LinearMethod:
    is_for_cpu = layer.weight.is_cpu and layer.weight.dim() == 2 and not config.orders_inputs
    return CpuInt4LinearMethod(config, layer) if is_for_cpu else Int4LinearMethod(config, layer)


# By the class of a config: what makes the method of a layer.
METHODS: Mapping[type[QuantizationConfig], Callable[[Any, Any], LinearMethod]] = {
    Fp8Config: _fp8_method,
    Int4Config: _int4_method,
    Int8Config: lambda _, layer: Int8LinearMethod(layer),
    Mxfp4Config: lambda _, layer: Mxfp4Method(layer),
}


# How weights of 16 bits are rounded when they are loaded, by the option quantization.
ROUNDED_AT_LOAD: Mapping[str, QuantizationConfig] = {
    "fp8": Fp8Config(),
    "int8": Int8Config(),
    "int4": Int4Config(),
}


def _read_compressed_tensors(fields: Fields) -> QuantizationConfig:
    """Read the dialect of llm-compressor: one scheme for all linear layers, in FP8 or in packed integers of 4 bits."""
    # The first two are one in FP8.
    layout = require(fields, "format", ("float-quantized", "naive-quantized", "pack-quantized"))
    transforms = json.dumps(fields.get("transform_config"))
    for location in re.findall(r'"location": "(\w+)"', transforms):
        if location not in (within := ("weight_input", "weight_output")):  # what is in the weights already
            raise unsupported("transform_config.location", location, within)
    ignored, groups = module_names(fields, "ignore"), fields.get("config_groups")
    refuse_the_rest(fields)
    schemes = [*groups.values()] if isinstance(groups, Mapping) else []
    if len(schemes) != 1 or not isinstance(schemes[0], Mapping):
        raise ModelError(
            f"config.json has quantization_config with config_groups={groups!r:.200}; one group for all linear layers "
            "is supported; use a checkpoint with one"
        )
    group = fields.part("config_groups").part(*groups)
    require(group, "targets", (["Linear"],))
    require(group, "format", (None, layout))
    require(group, "output_activations", (None,))
    if layout == "pack-quantized":
        require(group, "input_activations", (None,))
        return replace(read_pack_quantized(_scheme(group, "weights", 4)), ignored=ignored)
    config = read_compressed_fp8(_scheme(group, "weights", 8), _scheme(group, "input_activations", 8))
    return replace(config, ignored=ignored)


def _scheme(group: Fields, name: str, bits: int) -> Fields:
    """Return what a group says of its weights or inputs."""
    if not isinstance(group.values.get(name), Mapping):
        raise unsupported(name, group.get(name), (f"a scheme of {bits} bits",))
    return group.part(name)


# By quant_method: what reads a quantization_config.
READERS: Mapping[str, Callable[[Fields], QuantizationConfig]] = {
    "fp8": read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "awq": read_awq,
    "gptq": read_gptq,
    "auto-round": read_auto_round,
    "intel/auto-round": read_auto_round,  # its name before 0.5
    "mxfp4": read_mxfp4_config,
    "modelopt": read_modelopt,
}


def read_quantization(
    fields: Fields, requested: str | None, packed: Mapping[str, tuple[str, str]], renamed: Mapping[str, str]
) -> QuantizationConfig | None:
    """Read a config.json's quantization_config, or what the user asks for where it has none. Raises ModelError.

    packed, renamed: names of the checkpoint's modules -> ours, as a model class has them.
    """
    fields = fields.part("quantization_config")
    by_module: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, (module, shard) in packed.items():
        shards = by_module.setdefault(module, {})
        shards[shard] = (*shards.get(shard, ()), name)
    if not fields.values:
        if requested is None:
            return None
        config = ROUNDED_AT_LOAD[requested]
    else:
        method = fields.get("quant_method")
        if not isinstance(method, str) or method not in READERS:
            raise ModelError(
                f"config.json has quantization_config with quant_method={method!r}, which is not supported; supported "
                f"are {', '.join(READERS)}; {REMEDY}"
            )
        config = replace(READERS[method](fields), in_checkpoint=True)
    return replace(
        config,
        packed={module: tuple(shards.values()) for module, shards in by_module.items()},
        renamed={ours: tuple(name for name in renamed if renamed[name] == ours) for ours in renamed.values()},
    )


def has_fewer_bits(config: QuantizationConfig, name: str, module: Any) -> bool:
    """Return whether the weight of a decoder's module has fewer bits. name: such as "model.layers.0.mlp.down_proj"."""
    is_linear = hasattr(module, "quant_method")
    return is_linear and (config.in_checkpoint or module.rounds_at_load) and config.covers(name)


def quantize_layer(layer: nn.Module, name: str, config: QuantizationConfig | None) -> None:
    """Hold those weights of a decoder's layer in fewer bits that the config says. name: such as "model.layers.0".

    Then call `settle_weights` of the modules that have it: whether weights may lie together depends on their formats.
    """
    for path, module in layer.named_modules():
        if config is not None and has_fewer_bits(config, f"{name}.{path}", module):
            module.quant_method = METHODS[type(config)](config, module)
    for part in cast(Iterable[Any], layer.modules()):
        if hasattr(part, "settle_weights"):
            part.settle_weights()


def log_widening(config: QuantizationConfig | None, device: torch.device, dtype: torch.dtype) -> None:
    """Log why weights in fewer bits are slow: the device has no products in FP8, or a CPU computes in float32."""
    if isinstance(config, Fp8Config) and not has_fp8_products(device):
        logger.info("%s has no FP8 products: weights are held in FP8, and widened for each product", device)
    if isinstance(config, Int4Config | Int8Config) and device.type == "cpu" and dtype == torch.float32:
        bits = 4 if isinstance(config, Int4Config) else 8
        logger.info(
            "In float32 weights in %d bits are widened for each product; few sequences are faster with "
            "dtype='bfloat16'",
            bits,
        )
