"""Weights from safetensors files, memory-mapped, straight into the (packed) parameters of a model.

Everything is accounted for: a parameter that no tensor fills, and a tensor that no parameter takes, are errors.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanoinfer.checkpoint.hub import GGUF_REMEDY, LFS_REMEDY, is_lfs_pointer, read_json
from nanoinfer.checkpoint.weights import ModelWeights, listed
from nanoinfer.errors import ModelError

PICKLED = (".bin", ".pt", ".pth")


def load_model(model: Any, folder: Path) -> None:
    """Fill every parameter of `model`, as `ModelWeights` takes it, from the safetensors files in `folder`.

    Raises ModelError where tensors are missing, left over, or of another shape.
    """
    weights = ModelWeights(model)
    weights.expect_all()
    seen, left_over = set(), []
    for name, tensor in iterate_weights(folder):
        if name in seen:
            raise ModelError(f"{folder} has {name} in two of its files; remove the file that is not of this checkpoint")
        seen.add(name)
        if not weights.is_needed(name):
            continue
        try:
            parts = weights.split(name, tensor)
            if not all(place in weights.missing for place in parts):
                weights.check_bits(name)
                left_over.append(name)
                continue
            for place, part in parts.items():
                weights.fill(place, part)
        except ModelError as error:
            raise ModelError(f"{name} in {folder}: {error}; is this config.json that of the checkpoint?") from None
    if weights.missing:
        raise ModelError(f"{folder} lacks weights for {listed(weights.missing_names())}; download the checkpoint again")
    if left_over:
        raise ModelError(f"{folder} has weights that the model does not know: {listed(left_over)}")


def fill_with_random_weights(model: nn.Module, std: float, seed: int) -> None:
    """Draw every matrix and bias from N(0, std^2) and set every norm to 1: for tests and benchmarks."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, param in model.named_parameters():
        path, _, kind = name.rpartition(".")
        quant_method = getattr(model.get_submodule(path), "quant_method", None)
        if name.endswith("norm.weight"):
            param.fill_(1.0)
        elif quant_method is None or kind == "bias":
            param.normal_(0.0, std, generator=generator)
        elif kind == "weight":  # its scales come with it
            quant_method.fill_with_random_weights(model.get_submodule(path), std, generator)


def iterate_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every tensor in the folder's checkpoint; the tensors are views of mapped files."""
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
            wrong = f"is not a valid safetensors file ({error}); download it again"
            raise ModelError(f"{path} {LFS_REMEDY if is_lfs_pointer(path) else wrong}") from None


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index} has no weight_map; download the file again")
        for name in weight_map.values():
            # The file may be a link, as in the hub's cache; its name may not lead out of the folder.
            if not isinstance(name, str) or Path(name).name != name or len(name) > 255:
                raise ModelError(f"{index} names {name!r:.99}, which is no file of its folder; download it again")
        files = sorted({folder / name for name in weight_map.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if absent := [path.name for path in files if not path.is_file()]:
        raise ModelError(f"{folder} lacks {listed(absent)}, which its index names; download the checkpoint again")
    if files:
        return files
    if any(folder.glob("*.gguf")):
        raise ModelError(f"{folder} has its weights only in GGUF files; {GGUF_REMEDY}")
    if any(path.suffix in PICKLED for path in folder.iterdir()):
        raise ModelError(
            f"{folder} has only pickled weights, which are refused: unpickling a file can run any code that is in it; "
            "convert them with transformers' save_pretrained(safe_serialization=True)"
        )
    raise ModelError(f"{folder} has no *.safetensors file; download the checkpoint, or use load_format='dummy'")
