"""What `LLM(hf_overrides=...)` replaces in a config.json, with vLLM's meaning; what would change nothing is refused."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from nanoinfer.errors import ConfigError, ModelError, find_similar

Fields = Mapping[str, Any]  # of a config.json
Path = tuple[str, ...]  # the names that lead to a field: ("text_config", "hidden_size")
Config = TypeVar("Config", bound=Any)  # a dataclass

# The same fields as transformers 4 and 5 spell them, both ways round.
SPELLINGS = {"rope_scaling": "rope_parameters", "torch_dtype": "dtype"}
SPELLINGS |= {new: old for old, new in SPELLINGS.items()}
ROPE_FIELDS = ("rope_scaling", "rope_parameters")
# The types of layers that have RoPE parameters of their own in transformers 5, and where transformers 4 has their base.
ROPE_BASES = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
# All that transformers knows in them. What is read of these depends on rope_type.
ROPE_PARAMETERS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "short_factor", "long_factor", "low_freq_factor"),
    *("high_freq_factor", "mscale", "mscale_all_dim", "truncate"),
)
NONSENSE = "?"  # a value that no field of a config.json may have


def read_overridden(raw: Fields, overrides: Fields | None, read: Callable[[Fields], Config]) -> Config:
    """Return what `read` makes of the fields `raw` after `overrides` replaced some of them.

    Raises ConfigError for an override that `read` does not look at, and passes on the ModelError of one that it
    refuses.
    """
    if not overrides:
        return read(raw)
    try:
        config = read(override(raw, overrides))
    except ModelError as error:
        raise ModelError(f"with hf_overrides={overrides!r:.200}, {error}") from None

    def is_read(path: Path) -> bool:
        """Return whether nonsense in this field would make a difference; so `read` needs no list of what it reads."""
        if in_rope(path) and path[-1] not in ROPE_PARAMETERS:
            return False
        try:
            return bool(read(override(raw, _with(overrides, path, NONSENSE))) != config)
        except ModelError:
            return True

    for path, value in replaced(overrides):
        if is_read(path):
            continue
        siblings = ROPE_PARAMETERS if in_rope(path) else [*raw, *(field.name for field in fields(config))]
        meant = find_similar(path[-1], [name for name in siblings if is_read((*path[:-1], name))])
        hint = f"did you mean {meant!r}? Else leave it out" if meant else "leave it out"
        raise ConfigError(
            f"hf_overrides has {'.'.join(path)}={value!r:.99}, which changes nothing: nanoinfer does not read it from "
            f"this model's config.json; {hint}"
        )
    return config


def override(raw: Fields, overrides: Fields, is_nested: bool = False) -> dict[str, Any]:
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


def _with(overrides: Fields, path: Path, value: Any) -> Fields:
    """Return a copy of the overrides in which `path` leads to this value."""
    name, *rest = path
    return {**overrides, name: _with(overrides.get(name, {}), (*rest,), value) if rest else value}


def _with_rope_theta_apart(raw: Fields) -> dict[str, Any]:
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


def replaced(overrides: Fields, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of each replaced field. Nested configs and RoPE parameters are taken apart."""
    for name, value in overrides.items():
        path = (*above, name)
        inside = value if isinstance(value, dict) else {}
        if inside and (name in (*ROPE_FIELDS, *ROPE_BASES) or name.endswith("_config")):
            yield from replaced(inside, path)
        else:
            yield path, value
