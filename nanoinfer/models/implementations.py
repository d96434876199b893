"""Whose layers a model has: our own where we wrote them, else transformers'. Nobody else asks which."""

import logging
from pathlib import Path

import torch

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.checkpoint.hub import read_json
from nanoinfer.checkpoint.loader import fill_with_random_weights, load_model
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.checkpoint.other_models import explain_folder
from nanoinfer.checkpoint.pooling_config import split_architecture
from nanoinfer.config import EngineConfig
from nanoinfer.device import default_dtype
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ModelError
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.models import SUPPORTED, get_model_class
from nanoinfer.models.interface import Model

logger = logging.getLogger("nanoinfer")


def read_model_config(folder: Path, options: EngineConfig) -> BaseModelConfig:
    """Read the config of a model, and choose whose layers it has. Raises ModelError for one that cannot be run."""
    overrides, quantization, runner = options.hf_overrides, options.quantization, options.runner
    if uses_transformers(folder, options.model_impl):
        from nanoinfer.models.transformers.transformers_config import read_transformers_config  # slow to import

        return read_transformers_config(folder, overrides, quantization, runner)
    return ModelConfig.from_folder(folder, SUPPORTED, overrides, quantization, runner)


def uses_transformers(folder: Path, model_impl: str) -> bool:
    """Return whether transformers is to compute the layers of a model; say so in the log, and why."""
    if model_impl == "nanoinfer":
        return False
    if not (folder / "config.json").exists():
        raise ModelError(f"{folder} {explain_folder(folder)}")
    raw = read_json(folder / "config.json")
    names = raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "(none)"
    is_native = split_architecture(raw, name, SUPPORTED)[0] in SUPPORTED
    if model_impl == "auto" and (is_native or not isinstance(names, list) or not names):
        return False
    why = "as model_impl='transformers' asks" if is_native else "which nanoinfer has no layers of its own for"
    logger.info("%s runs by the layers of transformers, %s", name, why)
    return True


def load(
    config: BaseModelConfig,
    options: EngineConfig,
    folder: Path,
    max_positions: int,
    backends: AttentionBackends,
    tp: TensorParallel,
    device: torch.device,
    dtype: torch.dtype,
) -> Model:
    """Return a model with its weights, or random ones, on the device. max_positions: the longest sequence."""
    random_seed = options.seed + tp.rank if options.load_format == "dummy" else None
    if not isinstance(config, ModelConfig):
        from nanoinfer.models.transformers.transformers_model import TransformersModel

        return TransformersModel.load(config, folder, max_positions, backends, device, dtype, random_seed)
    with torch.device(device), default_dtype(dtype):
        model = get_model_class(config.architecture)(config, max_positions, backends, tp)
    if random_seed is None:
        load_model(model, folder)
    else:
        fill_with_random_weights(model, config.initializer_range, random_seed)
    return model.eval()
