"""What all kinds of quantized weights have in common: which modules they cover, and how fields are read and refused."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoinfer.errors import ModelError

logger = logging.getLogger("nanoinfer")

REMEDY = "use such a checkpoint, or the original one in 16 bits with quantization='fp8' or 'int4'"
# Fields that say how a checkpoint was made, or what it is not; they change nothing here.
WITHOUT_EFFECT = {
    *("version", "quantization_status", "global_compression_ratio", "run_compressed", "dequantize", "provider"),
    *("observer", "observer_kwargs", "sparsity_config", "transform_config"),
}


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Says which weights of a model have fewer bits.

    in_checkpoint: whether the checkpoint holds the weights so. If not, they are rounded when they are loaded.
    ignored: the checkpoint's modules that stay in 16 bits, by name; "re:" begins a regular expression.
    packed, renamed: our names of modules -> those of the checkpoint.
    """

    in_checkpoint: bool = False
    ignored: tuple[str, ...] = ()
    packed: Mapping[str, tuple[str, ...]] | None = None
    renamed: Mapping[str, str] | None = None

    @property
    def shard_multiple(self) -> int:
        """Return what a rank's share of a row-parallel layer's inputs has to be a multiple of."""
        return 1

    @property
    def mlp_multiple(self) -> int:
        """Return what a rank's share of an MLP's inner size is filled up to a multiple of."""
        return self.shard_multiple

    @property
    def block_size(self) -> int | None:
        """How many rows, and as many columns, of a weight share a scale; None where each row has scales of its own."""
        return None

    @property
    def unsplittable_reason(self) -> str | None:
        """Why several ranks cannot share the weights; None if they can."""
        return None

    def covers(self, module: str) -> bool:
        """Return whether the weight of one of our modules has fewer bits, such as "model.layers.0.self_attn.qkv_proj".

        Raises ModelError where only some of the weights that it packs are.
        """
        names = self._checkpoint_names(module)
        ignored = [name for name in names if self._ignores(name)]
        if 0 < len(ignored) < len(names):
            raise ModelError(
                f"quantization_config leaves {', '.join(ignored)} in 16 bits and not {names[0]} .. {names[-1]}, which "
                "are computed in one product with it; use a checkpoint that treats them alike"
            )
        return not ignored and not self._ignores(module)  # a checkpoint may pack as we do

    def _ignores(self, name: str) -> bool:
        return any(_matches(name, pattern) for pattern in self.ignored)

    def _checkpoint_names(self, module: str) -> list[str]:
        """Return what a checkpoint calls the modules that one of ours packs; of experts, those of the first one."""
        path, _, last = module.rpartition(".")
        modules: tuple[str, ...] = (last,)
        if path.endswith("experts"):
            path, modules = f"{path}.0", ("gate_up_proj", "down_proj")  # one kernel computes both
        packed, renamed = self.packed or {}, self.renamed or {}
        path = ".".join(renamed.get(part, part) for part in path.split("."))
        return [f"{path}.{name}" for module in modules for name in packed.get(module, (module,))]


def only(name: str, value: Any, supported: tuple[Any, ...]) -> None:
    """Raise ModelError unless the value of a field is one of these."""
    # True equals 1, and a tuple does not equal a list.
    if not any(value == item and type(value) is type(item) for item in supported):
        raise unsupported(name, value, supported)


def unsupported(name: str, value: Any, supported: tuple[Any, ...], where: str = "") -> ModelError:
    """Return the error for a value that is not one of these."""
    return ModelError(
        f"config.json has quantization_config with {name}={value!r:.200}{where}, which is not supported; supported: "
        f"{', '.join(map(repr, supported))}; {REMEDY}"
    )


def drop_kv_scales(raw: dict[str, Any]) -> None:
    """Drop the field that says how a checkpoint has scales for the KV cache, and tell that they are not needed."""
    if raw.pop("kv_cache_scheme", None):
        logger.info(
            "the checkpoint has scales for a KV cache in 8 bits, and none are needed: kv_cache_dtype='int8' or 'fp8' "
            "finds one for each key and value; without it the cache has 16 bits"
        )


def refuse_the_rest(raw: Mapping[str, Any], known: set[str]) -> None:
    """Raise ModelError where a field that is not known has a value that could mean something."""
    for name, value in raw.items():
        if name not in known | WITHOUT_EFFECT and value not in (None, False, {}, []):
            raise unsupported(name, value, (None,))


def module_names(field: str, names: Any) -> tuple[str, ...]:
    """Return names of modules. Raises ModelError for what is none."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json has quantization_config with {field}={names!r:.200}; it must be a list of names")
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise ModelError(
                f"config.json has quantization_config with {field}={name!r}: {error}; use a valid expression"
            ) from None
    return tuple(names)


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern means a module: by its name, that of something it lies in, or the end of its name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")
