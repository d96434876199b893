"""Weights from safetensors files, memory-mapped, straight into the (packed) parameters of a model.

Everything is accounted for: a parameter that no tensor fills, and a tensor that no parameter takes, are errors.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanoinfer.checkpoint.hub import GGUF_REMEDY, LFS_REMEDY, is_lfs_pointer, read_json
from nanoinfer.checkpoint.weights import ModelWeights, Place, listed
from nanoinfer.errors import ADAPTER_REMEDY, ModelError

logger = logging.getLogger("nanoinfer")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What may lie beside a model's own files: the same weights in the layout of Mistral's own code, and LoRA adapters.
NOT_THE_MODEL = ("consolidated*.safetensors", "adapter_model*.safetensors")
PICKLED = (".bin", ".pt", ".pth")
HEAD = "lm_head.weight"
# How the names of vectors end that something is multiplied by: norms, and scales of layers and experts.
FACTORS = ("norm.weight", "norm_1.weight", "norm_2.weight", "layer_scalar", "per_expert_scale")
NUMBER = re.compile(r"\.\d+(?=\.)")  # in a tensor's name


def load_model(model: Any, folder: Path) -> None:
    """Fill every parameter of `model`, as `ModelWeights` takes it, from the safetensors files in `folder`.

    Raises ModelError where tensors are missing, left over, or of another shape.
    """
    if model.is_tied:
        _untie_if_different(model, folder)
    weights = ModelWeights(model)
    weights.expect_all()
    seen, left_over = set[str](), []
    names: dict[Place, str] = {}  # of the tensors that fill the places
    for name, tensor in iterate_weights(folder):
        if name in seen:
            raise ModelError(
                f"{folder} has {name} in two of its files, {listed(_files_with(name, folder))}; remove the one that is "
                "not of this checkpoint"
            )
        seen.add(name)
        if not weights.is_needed(name):
            continue
        try:
            parts = weights.split(name, tensor)
            if not all(place in weights.missing for place in parts):
                if not (model.is_tied and model.locate(name) == model.locate(HEAD)):  # of both one is enough
                    weights.check_bits(name)
                    left_over.append(name)
                continue
            for place, part in parts.items():
                weights.fill(place, part)
                names[place] = name
        except ModelError as error:
            raise ModelError(f"{name} in {folder}: {error}; is this config.json that of the checkpoint?") from None
    if weights.missing:
        missing = _names_as_in_others(weights, names)
        raise ModelError(f"{folder} lacks weights for {listed(missing)}; download the checkpoint again")
    if left_over:
        raise ModelError(f"{folder} has weights that the model does not know: {listed(left_over)}")


def _untie_if_different(model: Any, folder: Path) -> None:
    """Give the head a weight of its own where the files have one unlike the embedding, as transformers 5 does."""
    place, dtype = model.locate(HEAD), model.lm_head.weight.dtype
    tied = [tensor.to(dtype) for name, tensor in iterate_weights(folder) if model.locate(name) == place]
    if len(tied) == 2 and not torch.equal(*tied):
        logger.warning(
            "config.json ties lm_head to the embedding, and %s has another lm_head, which is used; set "
            "tie_word_embeddings to false there",
            folder,
        )
        model.untie()


def _names_as_in_others(weights: ModelWeights, names: dict[Place, str]) -> list[str]:
    """Return the names of the missing tensors, spelt as this checkpoint spells those of other layers and experts."""

    def path_of(place: Place) -> str:
        return ".".join(filter(None, place))

    def with_numbers(name: str, path: str) -> str:
        """Return a name with the numbers of a path in place of its own: of the layer, and of the expert."""
        numbers = iter(NUMBER.findall(path))
        return NUMBER.sub(lambda _: next(numbers, ""), name)

    others = {NUMBER.sub(".#", path_of(place)): name for place, name in names.items()}
    missing = dict[str, None]()
    for place, name in zip(weights.missing, weights.missing_names(), strict=True):
        path = path_of(place)
        alike = others.get(NUMBER.sub(".#", path))
        missing[name if alike is None else with_numbers(alike, path)] = None
    return [*missing]


def fill_with_random_weights(model: nn.Module, std: float, seed: int) -> None:
    """Draw every matrix and bias from N(0, std^2) and set every norm and scale to 1: for tests and benchmarks."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, param in model.named_parameters():
        path, _, kind = name.rpartition(".")
        quant_method = getattr(model.get_submodule(path), "quant_method", None)
        if name.endswith(FACTORS):
            param.fill_(1.0)
        elif quant_method is None or kind == "bias":
            param.normal_(0.0, std, generator=generator)
        elif kind == "weight":  # its scales come with it
            quant_method.fill_with_random_weights(model.get_submodule(path), std, generator)
    for module in cast(Iterable[Any], model.modules()):
        if hasattr(module, "widen"):  # what it keeps beside a weight follows from that
            module.widen()


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
    """Return the files of the checkpoint. As transformers, take model.safetensors alone where there is one."""
    single, index = folder / SINGLE, folder / INDEX
    files = _indexed_files(index) if index.exists() else []
    if single.is_file() and single not in files:
        return [single]
    found = sorted(folder.glob("*.safetensors"))
    others = [path for path in found if any(path.match(pattern) for pattern in NOT_THE_MODEL)]
    files = files or [path for path in found if path not in others]
    if absent := [path.name for path in files if not path.is_file()]:  # what is there may be a pipe, or a broken link
        why = "which its index names" if index.exists() else "which is no file"
        raise ModelError(f"{folder} lacks {listed(absent)}, {why}; download the checkpoint again")
    if files:
        return files
    if others:
        is_mistral = any(path.match(NOT_THE_MODEL[0]) for path in others)
        why = f"such a file has the layout of Mistral's own code; download {SINGLE}" if is_mistral else ADAPTER_REMEDY
        raise ModelError(f"{folder} has no {SINGLE}, and {listed([path.name for path in others])} is not read: {why}")
    names = sorted(path.name for path in folder.iterdir())
    if gguf := [name for name in names if name.endswith(".gguf")]:
        raise ModelError(f"{folder} has its weights only in GGUF files; {GGUF_REMEDY} (found: {listed(gguf)})")
    if pickled := [name for name in names if name.endswith(PICKLED)]:
        raise ModelError(
            f"{folder} has only pickled weights, which are refused: unpickling a file can run any code that is in it; "
            f"convert {listed(pickled)} with transformers' save_pretrained(safe_serialization=True)"
        )
    raise ModelError(f"{folder} has no *.safetensors file; download the checkpoint, or use load_format='dummy'")


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index} has no weight_map; download the file again")
    for name in weight_map.values():
        # The file may be a link, as in the hub's cache; its name may not lead out of the folder.
        if not isinstance(name, str) or Path(name).name != name or len(name) > 255:
            raise ModelError(f"{index} names {name!r:.99}, which is no file of its folder; download it again")
    return sorted({index.parent / name for name in weight_map.values()})


def _files_with(name: str, folder: Path) -> list[str]:
    """Return the files that have a tensor of this name."""
    found = []
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 (not a dict)
                found.append(path.name)
    return found
