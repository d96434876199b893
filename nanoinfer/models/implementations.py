"""Chooses whose layers a model has: our own where we wrote them, else transformers'. Nothing else asks which."""

import logging
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from nanoinfer.checkpoint.architecture_names import explain_architecture, read_architecture, read_config_json
from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.checkpoint.fields import Fields, override
from nanoinfer.checkpoint.loader import fill_with_random_weights, load_model
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.config import EngineConfig
from nanoinfer.device import default_dtype
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ConfigError, ModelError
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.models import SUPPORTED, get_model_class
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.interface import Model
from nanoinfer.models.native_config import read_native_folder
from nanoinfer.quantization.cpu_products import prepack_products
from nanoinfer.quantization.method_selection import ROUNDED_AT_LOAD, has_fewer_bits, log_widening

logger = logging.getLogger("nanoinfer")

SEEING = {  # whose layers of our own read images
    f"{name}ForConditionalGeneration"
    for name in (
        *("Gemma3", "Gemma4", "Gemma4Unified", "Mistral3"),
        *("Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe"),
    )
}
FIRST_VERSION = (4, 57)  # of transformers, whose attention and masks can be replaced as we do


def read_model_config(folder: Path, options: EngineConfig) -> BaseModelConfig:
    """Read the config of a model, and choose whose layers it has. Raises ModelError for one that cannot be run."""
    overrides, quantization, runner = options.hf_overrides, options.quantization, options.runner
    if options.model_impl == "nanoinfer" or not uses_transformers(folder, options):
        if options.sees_images:
            check_version("limit_mm_per_prompt asks for images. The models of transformers that encode these")
        config: BaseModelConfig = read_native_folder(folder, overrides, quantization, runner)
        if options.compile:
            raise ConfigError(
                f"compile=True compiles transformers' layers, and those of {config.architecture} are nanoinfer's own; "
                "leave it out, or use model_impl='transformers'"
            )
        return config
    if options.enable_return_routed_experts:
        raise ConfigError(
            "enable_return_routed_experts=True needs layers of nanoinfer's own, and those of this model are "
            "transformers'; leave it out"
        )
    from nanoinfer.models.transformers.transformers_config import read_transformers_config  # slow to import

    config = read_transformers_config(folder, overrides, quantization, runner)
    is_native = config.architecture in SUPPORTED
    why = "as model_impl='transformers' asks" if is_native else "which nanoinfer has no layers of its own for"
    logger.info("%s runs by the layers of transformers, %s", config.architecture, why)
    return config


def uses_transformers(folder: Path, options: EngineConfig) -> bool:
    """Return whether transformers is to compute the layers of a model. Raises ModelError for a version that cannot."""
    raw = override(read_config_json(folder), options.hf_overrides or {})
    architecture, _ = read_architecture(Fields(raw), SUPPORTED)
    is_native = architecture in SUPPORTED
    if not raw.get("architectures") or (is_native and options.model_impl == "auto"):
        return False
    why = "" if is_native else f"{explain_architecture(raw, architecture, SUPPORTED)}. "
    check_version(f"{why}Layers of transformers")
    return True


def check_version(what: str) -> None:
    """Raise ModelError where the installed transformers is too old. what: needs a newer one, in words."""
    version, first = metadata.version("transformers"), ".".join(map(str, FIRST_VERSION))
    if tuple(map(int, version.split(".")[:2])) < FIRST_VERSION:
        raise ModelError(f"{what} run from version {first} on, and {version} is installed; upgrade it")


def make_on_meta(
    config: BaseModelConfig, max_positions: int, backends: AttentionBackends, tp: TensorParallel
) -> Model | None:
    """Return a model of our own layers on the device "meta", which takes no memory; None for one of transformers."""
    if not isinstance(config, ModelConfig):
        return None
    with torch.device("meta"), default_dtype(backends.dtype):
        return get_model_class(config.architecture)(config, max_positions, backends, tp)


def weight_bytes(model: Any) -> int:
    """Return the bytes of a model's weights. model: an nn.Module, as all models are."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def bytes_in_4_bits(model: Any, config: BaseModelConfig) -> int | None:
    """Return the bytes of a model's weights with quantization="int4"; None if that is not for them."""
    if not isinstance(config, ModelConfig) or config.quantization is not None:
        return None
    try:
        config.check("int4")
    except ModelError:
        return None
    total, in_4_bits = weight_bytes(model), ROUNDED_AT_LOAD["int4"]
    for name, module in model.named_modules():
        if name.startswith("model.layers.") and has_fewer_bits(in_4_bits, name, module):
            total -= int(module.weight.nbytes - module.weight.numel() * in_4_bits.weight_bits / 8)
    return total


def load(
    config: BaseModelConfig,
    options: EngineConfig,
    folder: Path,
    max_positions: int,
    backends: AttentionBackends,
    tp: TensorParallel,
) -> Model:
    """Return a model with its weights, or random ones, on the device of its backends.

    max_positions: the longest sequence.
    """
    random_seed = options.seed + tp.rank if options.load_format == "dummy" else None
    if not isinstance(config, ModelConfig):
        from nanoinfer.models.transformers.transformers_model import TransformersModel

        return TransformersModel.load(
            config, folder, max_positions, backends, random_seed, options.compile, options.sees_images
        )
    log_widening(config.quantization, backends.device, backends.dtype)
    with torch.device(backends.device), default_dtype(backends.dtype):
        model = get_model_class(config.architecture)(config, max_positions, backends, tp)
    if random_seed is None:
        load_model(model, folder)
    else:
        fill_with_random_weights(model, config.initializer_range, random_seed)
    prepack_products(model, model.lm_head)
    if options.sees_images:
        see_images(model, config, options, folder, backends, random_seed)
    return model.eval()


def see_images(
    model: DecoderForCausalLM,
    config: ModelConfig,
    options: EngineConfig,
    folder: Path,
    backends: AttentionBackends,
    random_seed: int | None,
) -> None:
    """Give a model of our own the part that sees, which is transformers'. Raises ConfigError where it has none."""
    fields = override(read_config_json(folder), options.hf_overrides or {})
    architecture, _ = read_architecture(Fields(fields), SUPPORTED)
    if architecture not in SEEING:
        raise ConfigError(
            f"limit_mm_per_prompt={dict(options.limit_mm_per_prompt or {})} asks for images, which nanoinfer's layers "
            f"of {architecture} do not read; leave it out, or try model_impl='transformers' if the model sees any"
        )
    from nanoinfer.models.transformers.image_tower import load_tower  # slow to import

    model.image_encoder = load_tower(model, fields, folder, backends, random_seed)
