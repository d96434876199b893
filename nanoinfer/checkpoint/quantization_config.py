"""Holds what all quantized weights have in common: which modules they cover, and how fields are read and refused."""

import functools
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.errors import ModelError

logger = logging.getLogger("nanoinfer")

REMEDY = "use such a checkpoint, or the original one in 16 bits with quantization='fp8' or 'int4'"
KV_SCALES = ("kv_cache_scheme", "static_kv_dtype")  # what says how a checkpoint has scales for the KV cache
# Fields that say how a checkpoint was made, or what it is not; they change nothing here.
WITHOUT_EFFECT = {
    *KV_SCALES,
    *("version", "quantization_status", "global_compression_ratio", "run_compressed", "dequantize", "provider"),
    *("observer", "observer_kwargs", "sparsity_config"),
}
# How names begin in checkpoints of models for text and images, where ours begin with "model.".
TEXT_PREFIXES = ("model.language_model.", "language_model.model.")


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """Says which weights of a model have fewer bits.

    weight_bits: bits of a weight, with its share of a scale where few weights have one.
    in_checkpoint: whether the checkpoint holds the weights so. If not, they are rounded when they are loaded.
    ignored: the checkpoint's modules that stay in 16 bits, as `_patterns` reads them.
    packed: our names of modules -> for each weight that they pack, its names in checkpoints.
    renamed: our names of modules -> others in checkpoints.
    """

    weight_bits: ClassVar[float]
    in_checkpoint: bool = False
    ignored: tuple[str, ...] = ()
    packed: Mapping[str, tuple[tuple[str, ...], ...]] | None = None
    renamed: Mapping[str, tuple[str, ...]] | None = None

    @property
    def has_bfloat16_kernels(self) -> bool:
        """Return whether a CPU's products of few rows read weights in fewer bits; they do so in bfloat16 alone."""
        return False

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
        if not self.ignored:
            return True
        weights = [*self._checkpoint_names(module)]
        ignored = [name for names in weights if (name := self._ignored_name(names))]
        if 0 < len(ignored) < len(weights):
            others = next(names for names in weights if not self._ignored_name(names))
            raise ModelError(
                f"quantization_config leaves {', '.join(ignored)} in 16 bits and not {others[0]}, which is computed in "
                "one product with it; use a checkpoint that treats them alike"
            )
        path, _, last = module.rpartition(".")
        return not ignored and not self._ignored_name(self._spellings(path, (last,)))  # a checkpoint may pack as we do

    def _ignored_name(self, spellings: Iterable[str]) -> str | None:
        """Return which of a weight's names is among the ignored ones; None if none is."""
        plain, expressions = _patterns(self.ignored)
        names = [*spellings]
        for name in names:
            parts = name.split(".")
            paths = (".".join(parts[start:end]) for start, end in combinations(range(len(parts) + 1), 2))
            if not plain.isdisjoint(paths):
                return name
        for expression in expressions:
            found = [name for name in names if expression.match(name)]
            # What excludes a name matches all that the checkpoint does not have.
            if found and (len(found) == len(names) or "(?!" not in expression.pattern):
                return found[0]
        return None

    def _checkpoint_names(self, module: str) -> Iterator[list[str]]:
        """Yield, for each weight that one of our modules packs, all names that it has in checkpoints.

        Versions of transformers differ, and may write the names of one into the config and those of another into the
        file. Of experts, only the first is looked at.
        """
        path, _, last = module.rpartition(".")
        modules: tuple[str, ...] = (last,)
        if path.endswith("experts"):
            path, modules = f"{path}.0", ("gate_up_proj", "down_proj")  # one kernel computes both
        for name in modules:
            weights = (self.packed or {}).get(name, ((),))
            for names in weights:
                yield [*self._spellings(path, (*names, name) if len(weights) == 1 else names)]

    def _spellings(self, path: str, names: tuple[str, ...]) -> Iterator[str]:
        """Yield what a module of these names in a path of ours, such as "model.layers.0.mlp", may be called."""
        renamed = self.renamed or {}
        for parts in product(*((part, *renamed.get(part, ())) for part in path.split(".")), names):
            name = ".".join(parts).removeprefix("model.")
            yield from (prefix + name for prefix in ("model.", *TEXT_PREFIXES, ""))


def require(fields: Fields, name: str, supported: tuple[Any, ...], default: Any = None) -> Any:
    """Return a field of a quantization_config. Raises ModelError unless its value is one of these."""
    value = fields.get(name, default)
    # True equals 1, and a tuple does not equal a list.
    if not any(value == item and type(value) is type(item) for item in supported):
        raise unsupported(".".join((*fields.path[1:], name)), value, supported)
    return value


def unsupported(name: str, value: Any, supported: tuple[Any, ...], where: str = "") -> ModelError:
    """Return the error for a value that is not one of these."""
    return ModelError(
        f"config.json has quantization_config with {name}={value!r:.200}{where}, which is not supported; supported: "
        f"{', '.join(map(repr, supported))}; {REMEDY}"
    )


def refuse_the_rest(fields: Fields, harmless: Collection[str] = ()) -> None:
    """Raise ModelError where a field that was not read has a value that could mean something."""
    if any(fields.values.get(name) for name in KV_SCALES):
        logger.info(
            "the checkpoint has scales for a KV cache in 8 bits, and none are needed: kv_cache_dtype='int8' or 'fp8' "
            "finds one for each key and value; without it the cache has 16 bits"
        )
    for name in fields.values:
        is_known = fields.is_read((*fields.path, name)) or name in WITHOUT_EFFECT or name in harmless
        if not is_known and (value := fields.get(name)) not in (None, False, {}, []):
            raise unsupported(name, value, (None,))


def module_names(fields: Fields, *names: str) -> tuple[str, ...]:
    """Return the modules that fields list. Raises ModelError unless each is a list of names."""
    return tuple(module for name in names for module in checked_names(name, fields.get(name) or []))


def checked_names(field: str, names: Any) -> tuple[str, ...]:
    """Return names of modules. Raises ModelError unless they are a list of valid names."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json has quantization_config with {field}={names!r:.200}; it must be a list of names")
    for name in names:
        try:
            _patterns((name,))
        except re.error as error:
            raise ModelError(
                f"config.json has quantization_config with {field}={name!r}: {error}; use a valid expression"
            ) from None
    return tuple(names)


@functools.lru_cache(maxsize=4)  # long lists are looked through for each module
def _patterns(names: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Sort names of ignored modules: plain ones, and expressions that match a module's whole name from its beginning.

    A plain name means a module of this name or path, and what lies in it. "re:" begins an expression; one without it
    ends where a name ends, as in transformers. A "*" stands for any letters.
    """
    plain, expressions = set(), []
    for name in names:
        if name.startswith("re:"):
            expressions.append(re.compile(name[3:]))
        elif set(name) & set("\\^$|()[]{}+?"):
            expressions.append(re.compile(rf"(?:{name})(?:\.|$)"))
        elif "*" in name:
            wild = re.escape(name).replace(r"\*", ".*")
            expressions.append(re.compile(rf"(?:.*\.)?{wild}(?:\.|$)"))
        else:
            plain.add(name)
    return frozenset(plain), tuple(expressions)
