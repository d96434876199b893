"""Reads fields of a config.json, and notes which: `LLM(hf_overrides=...)` refuses a field that nobody reads.

Overrides have vLLM's meaning.
"""

import builtins  # `int` and `float` are methods of Fields
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from nanoinfer.errors import ConfigError, ModelError, find_similar

Path = tuple[str, ...]  # the names that lead to a field: ("text_config", "hidden_size")
Config = TypeVar("Config")
Kind = TypeVar("Kind")

MAX_SIZE, MAX_LAYERS, MAX_FLOAT = 2**24, 2**12, 1e30  # larger numbers in a config.json are mistakes
# The same fields as transformers 4 and 5 spell them, both ways round.
SPELLINGS = {"rope_scaling": "rope_parameters", "torch_dtype": "dtype"}
SPELLINGS |= {new: old for old, new in SPELLINGS.items()}
ROPE_FIELDS = ("rope_scaling", "rope_parameters")
# The types of layers that have RoPE parameters of their own in transformers 5, and where transformers 4 has their base.
ROPE_BASES = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
ROPE_FLOATS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
MSCALES = ("mscale", "mscale_all_dim")  # of YaRN, where 0 means none
ROPE_LISTS = ("short_factor", "long_factor")  # of longrope: a number for each pair of dimensions
# All that transformers knows in them. What is read of these depends on rope_type.
ROPE_PARAMETERS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "truncate"),
    *(*ROPE_FLOATS, *MSCALES, *ROPE_LISTS),
)


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """Holds the fields of a config.json, or of a part of it, and notes which are read.

    Read a field only where it has an effect: an override of a field that was not read is refused. Null means the
    default for numbers, flags and choices.

    defaults: the values of fields that are absent, which go before those of single calls. path: the names that lead to
    this part. elsewhere: paths of fields that stand in another part. noted: by the path of each field that was read,
    whether all that it holds was; all parts share it. source: the file, for messages.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    path: Path = ()
    elsewhere: Mapping[str, Path] = field(default_factory=dict)
    noted: dict[Path, bool] = field(default_factory=dict)
    source: str = "config.json"

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field as it is; the default where it is absent."""
        self.noted[self.path_of(name)] = True
        return self._value(name, default)

    def part(self, name: str, rule: str = "it must be a JSON object") -> "Fields":
        """Return the fields of a nested object, none where it is absent."""
        path = self.path_of(name)
        self.noted.setdefault(path, False)
        values = self._value(name) or {}
        if not isinstance(values, Mapping):
            raise self.error(name, rule)
        return Fields(values, path=path, noted=self.noted, source=self.source)

    def int(self, name: str, default: builtins.int | None = None, least: builtins.int = 1) -> builtins.int:
        """Return a whole number of at least `least`."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"it must be a whole number of at least {least}")
        return self._within(name, value, MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE)

    def optional_int(self, name: str) -> builtins.int | None:
        """Return a whole number of at least 1, or None for null."""
        return None if self.get(name) is None else self.int(name)

    def float(self, name: str, default: builtins.float | None = None) -> builtins.float:
        """Return a positive number."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.error(name, "it must be a positive number")
        return float(self._within(name, value, MAX_FLOAT))

    def optional_float(self, name: str) -> builtins.float | None:
        """Return a positive number, or None for null."""
        return None if self.get(name) is None else self.float(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "it must be true or false")
        return value

    def choice(self, name: str, supported: Iterable[str], default: str | None = None) -> str:
        """Return one of the supported values."""
        value = self._present(name, default)
        if not isinstance(value, str) or value not in supported:
            raise self.error(name, f"supported are {', '.join(supported)}")
        return value

    def layers(self, num_layers: builtins.int, kinds: Mapping[str, Kind]) -> tuple[Kind, ...] | None:
        """Return what `layer_types` says of each layer; None if there is no such list."""
        types = self.get("layer_types")
        if types is None:
            return None
        known = isinstance(types, list) and all(isinstance(kind, str) and kind in kinds for kind in types)
        if not known or len(types) != num_layers:
            raise self.error("layer_types", f"it must name {' or '.join(kinds)} for each of {num_layers} layers")
        return tuple(kinds[kind] for kind in types)

    def must_be(self, name: str, neutral: Any) -> None:
        """Raise ModelError for another value, which the engine would have to ignore. Null is no value."""
        value = self.get(name, neutral)
        if value not in (neutral, None):
            raise self.error(name, "which is not supported; use a model without it", ",")

    def with_others(self, others: "Fields", names: Iterable[str]) -> "Fields":
        """Return these fields with some replaced by those of `others`, where these have a value."""
        found = [name for name in names if others.values.get(name) is not None]
        values = {**self.values, **{name: others.values[name] for name in found}}
        elsewhere = {**self.elsewhere, **{name: others.path_of(name) for name in found}}
        return replace(self, values=values, elsewhere=elsewhere)

    def path_of(self, name: str) -> Path:
        return self.elsewhere.get(name, (*self.path, name))

    def is_read(self, path: Path) -> bool:
        """Return whether a field was read, by itself or with all that is around it."""
        return path in self.noted or any(self.noted.get(path[:end]) for end in range(1, len(path)))

    def error(self, name: str, rule: str, mark: str = ";") -> ModelError:
        """Return the error for a value that breaks a rule."""
        return ModelError(f"{self.source} has {name}={self._value(name)!r:.200}{mark} {rule}")

    def _value(self, name: str, default: Any = None) -> Any:
        return self.values[name] if name in self.values else self.defaults.get(name, default)

    def _present(self, name: str, default: Any) -> Any:
        value = self.get(name)
        return self.defaults.get(name, default) if value is None else value

    def _within(self, name: str, value: Any, limit: Any) -> Any:
        if value > limit:
            raise ModelError(f"{self.source} has {name}={value!r}, beyond any model; download it again")
        return value


def read_overridden(
    raw: Mapping[str, Any], overrides: Mapping[str, Any] | None, read: Callable[[Fields], Config]
) -> Config:
    """Return what `read` makes of the fields `raw` after `overrides` replaced some of them.

    Raises ConfigError for an override that `read` does not look at, and passes on the ModelError of one that it
    refuses.
    """
    if not overrides:
        return read(Fields(raw))
    fields = Fields(override(raw, overrides))
    try:
        config = read(fields)
    except ModelError as error:
        raise ModelError(f"with hf_overrides={overrides!r:.200}, {error}") from None
    for path, value in replaced(overrides):
        if fields.is_read(path):
            continue
        siblings = [noted[-1] for noted in fields.noted if noted[:-1] == path[:-1]]
        meant = find_similar(path[-1], ROPE_PARAMETERS if in_rope(path) else siblings)
        hint = f"did you mean {meant!r}? Else leave it out" if meant else "leave it out"
        raise ConfigError(
            f"hf_overrides has {'.'.join(path)}={value!r:.99}, which changes nothing: nanoinfer does not read it from "
            f"this model's config.json; {hint}"
        )
    return config


def override(raw: Mapping[str, Any], overrides: Mapping[str, Any], is_nested: bool = False) -> dict[str, Any]:
    """Return the fields of a config.json with some replaced, in whichever spelling either has them.

    A dict replaces the one before, as in vLLM. In a nested config, such as text_config, fields are replaced one by one,
    at any depth. The base of RoPE stays as it is when only its scaling is replaced.
    """
    changed = _with_rope_theta_apart(raw)
    for name, value in overrides.items():
        before = changed.get(name)
        if (other := SPELLINGS.get(name, name)) not in overrides:
            before = changed.pop(other, None) or before
        merges = is_nested or name.endswith("_config")
        if merges and isinstance(before, dict) and isinstance(value, dict):
            value = override(before, value, is_nested=True)
        changed[name] = value
    return changed


def in_rope(path: Path) -> bool:
    """Return whether a path leads to a parameter of RoPE."""
    return len(path) > 1 and path[-2] in (*ROPE_FIELDS, *ROPE_BASES)


def _with_rope_theta_apart(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which bases of RoPE stand where transformers 4 has them, beside the dict of the scaling."""
    changed = dict(raw)
    for name in ROPE_FIELDS:
        if not isinstance(changed.get(name), dict):
            continue
        changed[name] = part = dict(changed[name])
        if part.get("rope_theta"):
            changed["rope_theta"] = part.pop("rope_theta")
        for kind, base in ROPE_BASES.items():
            if isinstance(part.get(kind), dict) and part[kind].get("rope_theta"):
                part[kind] = dict(part[kind])
                changed[base] = part[kind].pop("rope_theta")
    return changed


def replaced(overrides: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of each replaced field. Nested configs and RoPE parameters are taken apart."""
    for name, value in overrides.items():
        path = (*above, name)
        inside = value if isinstance(value, dict) else {}
        if inside and (name in (*ROPE_FIELDS, *ROPE_BASES) or name.endswith("_config")):
            yield from replaced(inside, path)
        else:
            yield path, value
