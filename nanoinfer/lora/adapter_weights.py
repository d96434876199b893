"""Reads the matrices of an adapter, and cuts from them what this rank's layers add to their products.

A layer may pack several of a checkpoint's modules: q, k, v; gate, up. Each module has matrices of its own, A (rank,
inputs) and B (outputs, rank). B is multiplied by the adapter's factor here, once. Ranks split B of column-parallel
layers, and A of row-parallel ones. Each matrix is copied once, from the file's memory to where it stays.
"""

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanoinfer.checkpoint.weights import check_plain, check_shape, listed
from nanoinfer.errors import ModelError
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoinfer.lora.adapter_config import CONFIG_FILE, MERGE, AdapterConfig

WEIGHTS_FILE = "adapter_model.safetensors"
# Names of a peft model in memory also have the name of the adapter, such as "default".
MATRIX = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")
WHOLE = "whole"  # the only shard of a layer that packs nothing


class ShardMatrices(NamedTuple):
    """Holds this rank's part of the matrices for one shard of a layer, on the host. b: times the adapter's factor."""

    a: Tensor  # (rank, inputs)
    b: Tensor  # (outputs, rank)


LayerMatrices = dict[str, ShardMatrices]  # by shard
AdapterMatrices = dict[str, LayerMatrices]  # by the path of a layer in the model


def adaptable_layers(model: Any) -> dict[str, ColumnParallelLinear | RowParallelLinear]:
    """Return the layers of a model that adapters can change, by their paths."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    modules = model.model.named_modules(prefix="model")
    return {path: module for path, module in modules if isinstance(module, kinds) and module.takes_adapters}


def shards_of(layer: Any) -> tuple[str, ...]:
    """Return the names of the modules that are packed in a layer."""
    return layer.shards if isinstance(layer, ColumnParallelLinear) else (WHOLE,)


def read_adapter(folder: Path, model: Any, max_rank: int, dtype: torch.dtype) -> AdapterMatrices:
    """Read an adapter that peft has saved, as matrices in `dtype`.

    Raises ModelError for an adapter that does not fit the model, or is not supported.
    """
    config, path = AdapterConfig.read(folder), folder / WEIGHTS_FILE
    try:
        return place_matrices(dict(_read_tensors(path)), config, model, max_rank, dtype)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


@contextmanager
def temporary_folder(like: Path, named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Iterator[Path]:
    """Write tensors as an adapter with the config of the folder `like`, in memory where the system has such a place."""
    try:
        tensors = dict(named_tensors)
    except (TypeError, ValueError) as error:
        raise ModelError(f"named_tensors cannot be read ({error}); give a dict of peft's names to tensors") from None
    for name, tensor in tensors.items():
        check_plain(name, tensor)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        shutil.copy(like / CONFIG_FILE, folder)
        layout = torch.contiguous_format
        # Copies, since views of one tensor cannot be saved.
        copies = {name: tensor.detach().cpu().clone(memory_format=layout) for name, tensor in tensors.items()}
        save_file(copies, folder / WEIGHTS_FILE)
        yield folder


def place_matrices(
    tensors: Mapping[str, Tensor], config: AdapterConfig, model: Any, max_rank: int, dtype: torch.dtype
) -> AdapterMatrices:
    """Return this rank's part of an adapter's tensors, by layer, in `dtype`. tensors: by peft's names."""
    layers = adaptable_layers(model)
    modules: dict[str, dict[str, Tensor]] = {}  # of the checkpoint, by name
    for name, tensor in tensors.items():
        found = MATRIX.fullmatch(name)
        if found is None:
            raise ModelError(f"it has {name}, which is no matrix of a linear layer, and is not supported; {MERGE}")
        modules.setdefault(found[1], {})[found[2]] = tensor
    placed: AdapterMatrices = {}
    for module, pair in modules.items():
        target, shard = model.locate(f"{module}.weight")
        layer = layers.get(target.removesuffix(".weight"))
        if layer is None:
            raise ModelError(f"it changes {module}, which is not supported for this model; {MERGE}")
        try:
            given = _checked(pair, config, module, max_rank)
            factor = config.factor_of(module)
            for its_shard, part in _by_shard(layer, given, shard).items():
                share = _share(layer, its_shard, part)
                placed.setdefault(target.removesuffix(".weight"), {})[its_shard] = _kept(share, factor, dtype)
        except ModelError as error:
            raise ModelError(f"{module}: {error}") from None
    left_out = [
        name
        for (path, shard), name in checkpoint_modules(model, layers).items()
        if shard not in placed.get(path, {}) and config.target_modules is not None and config.targets(name)
    ]
    if left_out:
        raise ModelError(f"it lacks the matrices of {listed(left_out)}, which adapter_config.json names")
    return placed


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"it cannot be read ({error}); save the adapter with peft's save_pretrained") from None


def _checked(pair: Mapping[str, Tensor], config: AdapterConfig, module: str, max_rank: int) -> ShardMatrices:
    """Return both matrices of a module of the checkpoint."""
    if not config.targets(module):
        raise ModelError("it has matrices, and adapter_config.json does not name it among its target_modules")
    if len(pair) < 2:
        raise ModelError(f"it has lora_{next(iter(pair))} alone; save the adapter again")
    a, b, rank = pair["A"], pair["B"], config.rank_of(module)
    if rank > max_rank:
        raise ModelError(f"it has rank {rank}, above max_lora_rank={max_rank}; raise that")
    if not (a.is_floating_point() and b.is_floating_point()):
        raise ModelError(f"A is in {a.dtype} and B in {b.dtype}, and only floating-point matrices are supported")
    if a.dim() != 2 or b.dim() != 2 or not len(a) == b.shape[1] == rank:
        raise ModelError(
            f"A has shape {tuple(a.shape)} and B {tuple(b.shape)}, and adapter_config.json has rank {rank}; are both "
            "files of one adapter?"
        )
    return ShardMatrices(a, b)


def _by_shard(layer: Any, given: ShardMatrices, shard: str | None) -> LayerMatrices:
    """Return the matrices by the shard of the layer, cut if the checkpoint packs them too; check their shapes."""
    num_outputs, num_inputs = layer.full_shape
    check_shape(given.a, (len(given.a), num_inputs))
    if isinstance(layer, ColumnParallelLinear):
        if shard is None:
            return {name: ShardMatrices(given.a, b) for name, b in layer.unpack(given.b, None).items()}
        num_outputs = layer.num_outputs(shard)
    check_shape(given.b, (num_outputs, given.b.shape[1]))
    return {shard or WHOLE: given}


def _share(layer: Any, shard: str, full: ShardMatrices) -> ShardMatrices:
    """Return this rank's part of the matrices of a shard."""
    if isinstance(layer, ColumnParallelLinear):
        return ShardMatrices(full.a, layer.share_of(full.b, shard, 0, 1))
    return ShardMatrices(layer.tp.shard(full.a, 1), full.b)


def _kept(share: ShardMatrices, factor: float, dtype: torch.dtype) -> ShardMatrices:
    """Return matrices in memory of their own, B times the factor. The product is rounded once.

    PyTorch multiplies 16 bits by a number in float32, so B needs to be widened only where its dtype changes.
    """
    a, b = share.a.to(dtype, copy=True, memory_format=torch.contiguous_format), share.b
    return ShardMatrices(a, ((b if b.dtype == dtype else b.float()) * factor).to(dtype).contiguous())


def checkpoint_modules(model: Any, layers: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return the names that checkpoints give to the modules in these layers, by the path of the layer and the shard."""
    return {
        (path, shard): model.checkpoint_name((f"{path}.weight", None if shard == WHOLE else shard)).removesuffix(
            ".weight"
        )
        for path, layer in layers.items()
        for shard in shards_of(layer)
    }
