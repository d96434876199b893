"""Fills, replaces and moves the weights of a model, by their names in a checkpoint.

`load_model` fills them from files, and `LLM.update_weights` from the tensors of a trainer. Both go this way, so they
pack, shard and quantize alike. Everything happens in place.
"""

import difflib
import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from nanoinfer.checkpoint.quantization_config import REMEDY
from nanoinfer.device import why_not_plain
from nanoinfer.errors import ModelError

Place = tuple[str, str | None]  # a parameter's name, and the shard of it that one tensor fills; None where that is all
# A table that we compute, and scales calibrated for a KV cache in 8 bits: ours are those of each token's own vectors.
NOT_NEEDED = re.compile(r"rotary_emb\.inv_freq$|self_attn\.(\w+\.)?(q|k|v|kv|output)_scale$")
# Tensors that only weights in fewer bits have -> how many bits.
FEWER_BITS = {
    **dict.fromkeys(("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_g_idx", "weight_shape"), "4"),
    **dict.fromkeys(("weight_scale", "weight_zero_point"), "8 or 4"),
    **dict.fromkeys(("weight_scale_inv", "input_scale", "activation_scale"), "8"),
}
WIDE_TYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SHOWN = 8  # names listed in a message
NUM_CLOSE = 5  # names suggested for one that is not known


class CheckpointNames(Protocol):
    """Says how checkpoints name the tensors of a model."""

    @property
    def ignored_weights(self) -> Collection[str]:
        """The tensors to skip."""

    @property
    def unused_prefixes(self) -> tuple[str, ...]:
        """The beginnings of the names of others to skip."""

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding, so that both names mean one place."""

    def untie(self) -> None:
        """Make two places of them."""

    def locate(self, name: str) -> Place:
        """Return which parameter, or shard of one, a checkpoint's tensor fills."""

    def checkpoint_name(self, place: Place) -> str:
        """Return the name of a tensor that fills a place."""


class FoundName(NamedTuple):
    """Says what a checkpoint's name stands for. module: None if the model has none of this path."""

    is_needed: bool
    module: Any
    path: str
    kind: str  # of the module's tensors
    shard: str | None


class ModelWeights:
    """Knows where each tensor of a checkpoint goes.

    model: an nn.Module with `CheckpointNames`. A module of it that has a `weight_loader(param, tensor[, shard])` places
    its own share. Its `check_weight`, which is called first, with the same arguments, raises ModelError for a tensor
    that does not fit. A module without it may have `full_shape`, where the checkpoint's shape is not the parameter's.
    missing: the places that are still to be filled, in the model's order.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._names = model, cast(CheckpointNames, model)
        self._homes: dict[Place, tuple[Any, Tensor]] = {}  # the module, and its parameter
        for name, param in model.named_parameters():
            module = model.get_submodule(name.rpartition(".")[0])
            self._homes |= {(name, shard): (module, param) for shard in getattr(module, "shards", (None,))}
        self.missing: dict[Place, None] = {}
        self._found: dict[str, FoundName] = {}  # by a checkpoint's name
        self._freed: dict[torch.UntypedStorage, int] = {}  # memory that is off the device -> its size in bytes
        self._on_host: dict[torch.UntypedStorage, torch.UntypedStorage] = {}  # the same -> its copy, if it has one

    def expect_all(self) -> None:
        """Hold all places for missing."""
        self.missing = dict.fromkeys(self._homes)

    def missing_names(self) -> list[str]:
        """Return the tensors that are to come, as checkpoints of this architecture call them."""
        return [*map(self._names.checkpoint_name, self.missing)]

    def is_needed(self, name: str) -> bool:
        """Return whether a checkpoint's tensor fills anything; its name may still be unknown."""
        return self._find(name).is_needed

    def _find(self, name: str) -> FoundName:
        """Look up a checkpoint's name, once: trainers send the same ones again and again."""
        found = self._found.get(name)
        if found is None:
            is_unused = name in self._names.ignored_weights or name.startswith(self._names.unused_prefixes)
            is_needed = not is_unused and not NOT_NEEDED.search(name)
            target, shard = self._names.locate(name)
            path, _, kind = target.rpartition(".")
            try:
                module = self._model.get_submodule(path)
            except AttributeError:
                module = None
            found = self._found[name] = FoundName(is_needed, module, path, kind, shard)
        return found

    def split(self, name: str, tensor: Tensor) -> dict[Place, Tensor]:
        """Return where a tensor goes, in parts if the checkpoint holds it packed. The places may not exist.

        Raises ModelError for a tensor that cannot be cut into its parts.
        """
        _, module, path, kind, shard = self._find(name)
        if hasattr(module, "quant_method"):
            read = module.quant_method.read(kind, tensor)
            if read is None:
                return {}
            kind, tensor = read
        target = f"{path}.{kind}" if path else kind
        if shard is not None or not hasattr(module, "unpack"):
            return {(target, shard): tensor}
        return {(target, key): part for key, part in module.unpack(tensor, getattr(module, kind, None)).items()}

    def fill(self, place: Place, tensor: Tensor) -> None:
        """Copy a tensor, or the part of one, into its place. Raises ModelError for one that does not fit."""
        self._check_part(place, tensor)
        self._put(place, tensor)

    def _put(self, place: Place, tensor: Tensor) -> None:
        (module, param), shard = self._homes[place], place[1]
        restore_plain(param)
        if hasattr(module, "weight_loader"):
            module.weight_loader(param, tensor, *([shard] if shard else []))
        else:
            param.copy_(tensor)
        self.missing.pop(place, None)

    def _check_part(self, place: Place, tensor: Tensor) -> None:
        (module, param), shard = self._homes[place], place[1]
        if tensor.dtype in FP8_TYPES and param.dtype in WIDE_TYPES:
            raise ModelError(must_be_wide("8", module))
        if not tensor.is_floating_point() and param.is_floating_point():
            raise ModelError(f"it has {tensor.dtype}, and only floating-point weights are supported")
        if hasattr(module, "check_weight"):
            module.check_weight(param, tensor, *([shard] if shard else []))
        else:
            check_shape(tensor, getattr(module, "full_shape", tuple(param.shape)))

    def check_bits(self, name: str) -> None:
        """Raise ModelError where a tensor without a place is of a weight in fewer bits, and ours has 16 or 32."""
        found = self._find(name)
        bits = FEWER_BITS.get(found.kind)
        if bits is not None and getattr(getattr(found.module, "weight", None), "dtype", None) in WIDE_TYPES:
            raise ModelError(must_be_wide(bits, found.module))

    def explain_missing(self) -> str | None:
        """Say which weights are missing, and what to do; None if none are."""
        if not self.missing:
            return None
        return f"this engine lacks weights for {listed(self.missing_names())}; give them to update_weights"

    # -------- Updates -------------------------------------------------------------------------------------------------

    def check(self, name: str, tensor: Any, given: dict[Place, str] | None = None) -> dict[Place, Tensor]:
        """Return where a tensor goes: nowhere, if it is not needed. Raises ModelError for one that does not fit.

        given: the names of tensors that this update has copied before, by place; the tensor is added to them.
        """
        check_plain(name, tensor)
        if not self.is_needed(name):
            return {}
        try:
            parts = self.split(name, tensor)
            if not all(place in self._homes for place in parts):
                self.check_bits(name)
                close = difflib.get_close_matches(name, names := self.names(), NUM_CLOSE)
                known = f"close ones are {', '.join(close)}" if close else f"it has {names[0]} and so on"
                raise ModelError(f"the model has no weight of this name; use the names of its checkpoint: {known}")
            for place, part in parts.items():
                self._check_part(place, part)
                self._check_tied(place, part, name, {} if given is None else given)
        except ModelError as error:
            raise ModelError(f"{name!r} cannot be updated: {error}") from None
        return parts

    def _check_tied(self, place: Place, tensor: Tensor, name: str, given: dict[Place, str]) -> None:
        """Raise ModelError where head and embedding are tied, and an update has two that differ."""
        module = self._homes[place][0]
        if not hasattr(module, "holds"):
            return
        first = given.setdefault(place, name)
        if first != name and not module.holds(tensor):
            raise ModelError(
                f"it differs from {first}, and config.json ties one to the other; send one of them, or load the model "
                "with hf_overrides={'tie_word_embeddings': False}"
            )

    @torch.inference_mode()
    def update(self, name: str, tensor: Tensor, given: dict[Place, str] | None = None) -> None:
        """Check a tensor and copy it into its place. given: see `check`."""
        for place, part in self.check(name, tensor, given).items():
            self._put(place, part)

    @torch.inference_mode()
    def copy(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor that was checked, and is needed, into its place."""
        for place, part in self.split(name, tensor).items():
            self._put(place, part)

    def names(self) -> list[str]:
        """Return the names under which checkpoints hold the weights, packed ones under both their names."""
        whole = [(name, None) for name, shard in self._homes if shard]
        return [*dict.fromkeys(map(self._names.checkpoint_name, [*self._homes, *whole]))]

    # -------- Off the device, and back --------------------------------------------------------------------------------

    def leave_device(self, keep: bool) -> None:
        """Free the memory of the weights, until `return_to_device`.

        keep: whether host memory gets a copy of them, pinned, if the device is a GPU; a CPU's stay where they are.
        Buffers, which no checkpoint has, are kept in any case. If memory for the copies is short, nothing is freed.
        """
        if not keep:
            for param in self._model.parameters():
                restore_plain(param)
        params, buffers = _storages(self._model.parameters()), _storages(self._model.buffers())
        if all(storage.device.type == "cpu" for storage in params):
            self._free([] if keep else params)
            return
        copies = {}
        for storage in [*params, *buffers] if keep else buffers:
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True).untyped_storage()
            copies[storage] = host.copy_(storage, non_blocking=True)
        torch.cuda.synchronize()
        self._on_host |= copies  # all or none, so that every copy comes back
        self._free([*params, *buffers])

    def _free(self, storages: list[torch.UntypedStorage]) -> None:
        for storage in storages:
            self._freed[storage] = storage.nbytes()
            storage.resize_(0)

    def return_to_device(self) -> None:
        """Allocate the weights' memory again, and copy back what was kept; if some was not, all places are missing.

        The memory has other addresses. If it is short, some of it may have been taken; `leave_device` gives that back.
        """
        for storage, num_bytes in list(self._freed.items()):
            storage.resize_(num_bytes)
            host = self._on_host.pop(storage, None)
            if host is None:
                storage.fill_(0)  # type: ignore[attr-defined]  # graphs are captured before the weights come
                self.expect_all()
            else:
                storage.copy_(host, non_blocking=True)
            del self._freed[storage]


def must_be_wide(bits: str, module: Any) -> str:
    """Say that a weight has fewer bits than the module's, and what to do."""
    remedy = "use a checkpoint that has it so, as routers, embeddings and heads always are"
    if hasattr(module, "quant_method"):
        remedy = (
            "config.json has no quantization_config (of old checkpoints it is in quantize_config.json), or one that "
            "leaves this layer in 16 bits; correct it"
        )
    return f"the weight is in {bits} bits, and must be in 16 (or 32); {remedy}"


def check_is_wide(module: Any, tensor: Tensor, bits: int) -> None:
    """Raise ModelError unless a weight has 32 or 16 bits, to be rounded to `bits` of them."""
    if not tensor.is_floating_point():
        raise ModelError(f"it has {tensor.dtype}, and what is rounded to {bits} bits has 16 or 32")
    if tensor.dtype.itemsize == 1:
        raise ModelError(must_be_wide("8", module))


def must_have_fewer(bits: int, tensor: Tensor) -> str:
    """Say that a weight has more bits than it must have by quantization_config, and what to do."""
    return (
        f"the weight is in {8 * tensor.dtype.itemsize} bits ({tensor.dtype}), and must be in {bits} by "
        "quantization_config; if the checkpoint leaves it so, add its module to modules_to_not_convert (of "
        f"compressed-tensors: ignore); else {REMEDY}"
    )


def check_plain(name: Any, tensor: Any) -> None:
    """Raise ModelError unless a name is a string, and a tensor has values that can be copied."""
    if not isinstance(name, str):
        raise ModelError(f"{name!r:.100} is no name of a weight; give pairs of a name and a tensor, or a dict of these")
    if not isinstance(tensor, Tensor):
        raise ModelError(f"{name!r} cannot be updated: it is a {type(tensor).__name__}; give a tensor")
    if why := why_not_plain(tensor):
        raise ModelError(f"{name!r} cannot be updated: it {why}; give a plain dense tensor")


def check_shape(full: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ModelError where a checkpoint's tensor does not have the shape that config.json implies."""
    if tuple(full.shape) != expected:
        raise ModelError(f"it has shape {tuple(full.shape)}, config.json implies {expected}")


def restore_plain(param: Tensor) -> None:
    """Have a weight's values in itself, if a CPU holds them prepacked: something is about to change them."""
    if (prepacked := getattr(param, "prepacked", None)) is not None:
        prepacked.restore_plain()


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the memory of all these tensors, each once, if it is not empty."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return [storage for storage in dict.fromkeys(storages) if storage.nbytes()]


def listed(names: list[str]) -> str:
    """Return the first names in one line, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(sorted(names)[:SHOWN]) + more
