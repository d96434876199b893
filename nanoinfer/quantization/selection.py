"""Which layers of a decoder have fewer bits, and how these multiply."""

import logging
from collections.abc import Iterable, Iterator

from torch import nn

from nanoinfer.checkpoint.int4_config import Int4Config, Mxfp4Config
from nanoinfer.checkpoint.quantization_config import Fp8Config
from nanoinfer.checkpoint.quantization_fields import QuantizationConfig
from nanoinfer.quantization.fp8 import has_fp8_products
from nanoinfer.quantization.fp8_linear import Fp8LinearMethod, Fp8WeightOnlyMethod
from nanoinfer.quantization.int4.linear import Int4LinearMethod
from nanoinfer.quantization.int4.mxfp4 import Mxfp4Method

logger = logging.getLogger("nanoinfer")


def with_quantization(layers: Iterable[nn.Module], config: QuantizationConfig | None) -> Iterator[nn.Module]:
    """Yield a decoder's layers, with the weights in fewer bits that the config says.

    They come one by one, so that the weights of one layer alone are in memory in 16 bits.
    """
    has_logged = False
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if config is None or not hasattr(module, "quant_method"):
                continue
            if not (config.in_checkpoint or module.rounds_at_load) or not config.covers(f"model.layers.{index}.{name}"):
                continue
            device = module.weight.device
            if isinstance(config, Mxfp4Config):
                module.quant_method = Mxfp4Method(module)
                continue
            if isinstance(config, Int4Config):
                module.quant_method = Int4LinearMethod(config, module)
                continue
            assert isinstance(config, Fp8Config), f"{type(config).__name__} has no method of its own"
            if has_fp8_products(device):
                module.quant_method = Fp8LinearMethod(config, module)
                continue
            module.quant_method = Fp8WeightOnlyMethod(config, module)
            if not has_logged:
                logger.info("%s has no FP8 products: weights are held in FP8, and widened for each product", device)
                has_logged = True
        yield layer
