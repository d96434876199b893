"""Weights from safetensors files, memory-mapped, straight into the (packed) parameters of a model.

Everything is accounted for: a parameter that no tensor fills, and a tensor that no parameter takes, are errors.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanoinfer.checkpoint.hub import GGUF_REMEDY, read_json
from nanoinfer.errors import ModelError

PICKLED = (".bin", ".pt", ".pth")
SHOWN = 8  # names listed in a message
# A table that we compute, and scales calibrated for a KV cache in 8 bits: ours are those of each token's own vectors.
NOT_NEEDED = re.compile(r"rotary_emb\.inv_freq$|self_attn\.(\w+\.)?(q|k|v|kv|output)_scale$")


def load_model(model: Any, folder: Path) -> None:
    """Fill every parameter of `model`, an nn.Module, from the safetensors files in `folder`.

    `model.locate(name)` says which parameter, or shard of one, a tensor fills; `model.ignored_weights` lists tensors to
    skip; a module with a `weight_loader(param, tensor[, shard])` places its own share. Raises ModelError where tensors
    are missing, left over, or of another shape.
    """
    missing: dict[tuple[str, str | None], tuple[Any, Tensor]] = {}  # parameter and shard -> its module, the parameter
    for name, param in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        missing |= {(name, shard): (module, param) for shard in getattr(module, "shards", (None,))}
    seen, left_over = set(), []
    for name, tensor in iterate_weights(folder):
        if name in seen:
            raise ModelError(f"{folder} has {name} in two of its files; remove the file that is not of this checkpoint")
        seen.add(name)
        if name in model.ignored_weights or NOT_NEEDED.search(name):
            continue
        target, shard = model.locate(name)
        try:
            parts = {shard: tensor} if shard else _unpack(model, target, tensor)
            if not all((target, key) in missing for key in parts):
                left_over.append(name)
                continue
            for key, full in parts.items():
                _place(*missing.pop((target, key)), key, full)
        except ModelError as error:
            raise ModelError(f"{name} in {folder}: {error}; is this config.json that of the checkpoint?") from None
    if missing:
        names = [f"{name} ({shard})" if shard else name for name, shard in missing]
        raise ModelError(f"{folder} lacks weights for {_listed(names)}; download the checkpoint again")
    if left_over:
        raise ModelError(f"{folder} has weights that the model does not know: {_listed(left_over)}")


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
            raise ModelError(f"{path} is not a valid safetensors file ({error}); download it again") from None


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
        raise ModelError(f"{folder} lacks {_listed(absent)}, which its index names; download the checkpoint again")
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


def _unpack(model: Any, name: str, tensor: Tensor) -> dict[str | None, Tensor]:
    """Return the parts of a tensor that a checkpoint holds packed as we do, or the tensor itself."""
    try:
        module = model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return {None: tensor}
    param = getattr(module, name.rpartition(".")[2], None)
    return module.unpack(tensor, param) if hasattr(module, "unpack") else {None: tensor}


def _place(module: Any, param: Tensor, shard: str | None, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        raise ModelError(f"the checkpoint has {tensor.dtype}, and only floating-point weights are supported")
    if hasattr(module, "weight_loader"):
        module.weight_loader(param, tensor, *([shard] if shard else []))
    elif param.shape != tensor.shape:
        raise ModelError(f"the checkpoint has shape {tuple(tensor.shape)}, config.json implies {tuple(param.shape)}")
    else:
        param.copy_(tensor)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(sorted(names)[:SHOWN]) + more
