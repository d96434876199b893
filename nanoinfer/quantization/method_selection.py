"""Which layers of a decoder have fewer bits, and how these multiply."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from nanoinfer.checkpoint.int4_config import Int4Config, Mxfp4Config
from nanoinfer.checkpoint.quantization_config import Fp8Config
from nanoinfer.checkpoint.quantization_fields import QuantizationConfig
from nanoinfer.ops.common.device_properties import has_fp8_products
from nanoinfer.quantization.fp8_linear import Fp8LinearMethod, Fp8WeightOnlyMethod
from nanoinfer.quantization.int4.int4_linear import Int4LinearMethod
from nanoinfer.quantization.int4.mxfp4 import Mxfp4Method
from nanoinfer.quantization.linear_method import LinearMethod

logger = logging.getLogger("nanoinfer")


def _fp8_method(config: Fp8Config, layer: Any) -> LinearMethod:
    multiplies = has_fp8_products(layer.weight.device)
    return Fp8LinearMethod(config, layer) if multiplies else Fp8WeightOnlyMethod(config, layer)


# What makes the method of a layer, by the class of the config.
METHODS: Mapping[type[QuantizationConfig], Callable[[Any, Any], LinearMethod]] = {
    Fp8Config: _fp8_method,
    Int4Config: Int4LinearMethod,
    Mxfp4Config: lambda _, layer: Mxfp4Method(layer),
}


def has_fewer_bits(config: QuantizationConfig, name: str, module: Any) -> bool:
    """Return whether the weight of a decoder's module has fewer bits. name: such as "model.layers.0.mlp.down_proj"."""
    is_linear = hasattr(module, "quant_method")
    return is_linear and (config.in_checkpoint or module.rounds_at_load) and config.covers(name)


def with_quantization(layers: Iterable[nn.Module], config: QuantizationConfig | None) -> Iterator[nn.Module]:
    """Yield a decoder's layers, with the weights in fewer bits that the config says.

    They come one by one, so that the weights of one layer alone are in memory in 16 bits.
    """
    has_logged = False
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if config is None or not has_fewer_bits(config, f"model.layers.{index}.{name}", module):
                continue
            device = module.weight.device
            module.quant_method = METHODS[type(config)](config, module)
            if type(module.quant_method) is Fp8WeightOnlyMethod and not has_logged:
                logger.info("%s has no FP8 products: weights are held in FP8, and widened for each product", device)
                has_logged = True
        yield layer
