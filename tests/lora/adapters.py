"""Adapters written by hand in peft's format, and the checkpoints that have them merged: what peft's merge makes."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoinfer import LoRARequest
from nanoinfer.ops.lora.spec import LoRAMatrices, LoRARows

PREFIX = "base_model.model."


def write_adapter(
    base: Path,
    folder: Path,
    seed: int,
    modules: str,
    ranks: Callable[[str], int] = lambda _: 4,
    std: float = 0.1,
    **config: Any,
) -> Path:
    """Write random matrices for those linear layers of a checkpoint whose names a regular expression matches."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and weight.dim() == 2 and re.fullmatch(modules, module):
            a = torch.empty(ranks(module), weight.shape[1]).normal_(0, std, generator=generator)
            b = torch.empty(weight.shape[0], ranks(module)).normal_(0, std, generator=generator)
            tensors |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
    assert tensors, f"no layer is called {modules}"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": modules, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(given))
    return folder


def merge(base: Path, adapter: Path, folder: Path, factor: Callable[[str], float] = lambda _: 2.0) -> Path:
    """Write the checkpoint whose weights are those of the base and factor * B A. factor: of a module, by its name."""
    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    matrices = load_file(adapter / "adapter_model.safetensors")
    for name, a in matrices.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            product = matrices[f"{PREFIX}{module}.lora_B.weight"].double() @ a.double()
            merged = weights[f"{module}.weight"].double() + factor(module) * product
            weights[f"{module}.weight"] = merged.to(a.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def request(folder: Path, number: int) -> LoRARequest:
    return LoRARequest(folder.name, number, str(folder))


def random_products(
    slots: list[int],
    num_slots: int,
    num_inputs: int,
    sizes: tuple[int, ...],
    max_rank: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, LoRARows, LoRAMatrices]:
    """Return random arguments of `add_lora`, in another order: x and out amid NaN, the rows, the matrices."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def amid_nan(width: int) -> Tensor:
        wide = torch.full((len(slots), width + 64), float("nan"), dtype=dtype, device=device)
        wide[:, :width] = randn(len(slots), width)
        return wide[:, :width]

    generator = torch.Generator().manual_seed(0)
    a, b = randn(num_slots, len(sizes) * max_rank, num_inputs), randn(num_slots, sum(sizes), max_rank)
    rows = LoRARows(torch.tensor(slots, dtype=torch.int32, device=device))
    return amid_nan(num_inputs), amid_nan(sum(sizes)), rows, LoRAMatrices(a / num_inputs**0.5, b, sizes)
