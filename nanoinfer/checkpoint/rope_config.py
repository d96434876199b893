"""Rotary embedding in a config.json, in the spellings of transformers 4.51 to 5.x."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoinfer.checkpoint.config_fields import DEFAULTS, read_number
from nanoinfer.errors import ModelError

ROPE_FLOATS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
ROPE_LISTS = ("short_factor", "long_factor")  # of longrope: a number for each pair of dimensions


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Describes a rotary embedding: `theta` is the base; `parameters` are the other numbers of its type."""

    rope_type: str
    theta: float
    parameters: Mapping[str, Any]


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Read the base, the type and the other numbers of a rotary embedding."""
    parameters = _rope_parameters(raw)
    parameters.pop("partial_rotary_factor", None)
    old_spelling = parameters.pop("type", None)
    rope_type = parameters.pop("rope_type", old_spelling) or "default"
    if rope_type == "su":  # its first name
        rope_type = "longrope"
    theta = {"rope_theta": parameters.pop("rope_theta", None) or raw.get("rope_theta")}
    original = raw.get("original_max_position_embeddings")
    if rope_type == "longrope" and original is not None:
        parameters.setdefault("original_max_position_embeddings", original)
    for name in parameters.keys() & {*ROPE_FLOATS, "mscale", "mscale_all_dim", "original_max_position_embeddings"}:
        if parameters[name] != 0 or not name.startswith("mscale"):  # where 0 means none
            parameters[name] = read_number(parameters, name, int if name.startswith("original") else float)
    for name in parameters.keys() & {*ROPE_LISTS}:
        factors = parameters[name]
        if not isinstance(factors, list):
            raise ModelError(f"config.json has {name}={factors!r}; it must be a list of numbers")
        parameters[name] = [read_number({name: factor}, name, float) for factor in factors]
    if rope_type == "default" and "factor" in parameters:
        raise ModelError(f"config.json has RoPE parameters {parameters!r} and no rope_type; say of which type")
    return RopeConfig(str(rope_type), read_number(theta, "rope_theta", float, DEFAULTS["rope_theta"]), parameters)


def read_rotary_dim(raw: Mapping[str, Any], special: Mapping[str, Any], head_dim: int) -> int:
    """Read which share of a head's dimensions is rotated."""
    if "rotary_dim" in special and raw.get("rotary_dim") is not None:  # the older spelling
        rotary_dim: int = read_number(raw, "rotary_dim", int)
        if rotary_dim > head_dim:
            raise ModelError(f"config.json has rotary_dim={rotary_dim}, more than a head's {head_dim} dimensions")
        return rotary_dim
    factor = read_number({**raw, **_rope_parameters(raw)}, "partial_rotary_factor", float, 1.0)
    if factor > 1 or (factor != 1 and "partial_rotary_factor" not in special):
        raise ModelError(f"config.json has partial_rotary_factor={factor}, which is not supported; use another model")
    return int(head_dim * factor)


def read_query_scaling(raw: Mapping[str, Any], special: Mapping[str, Any]) -> float | None:
    parameters = _rope_parameters(raw)
    if "llama_4_scaling_beta" not in special or not parameters.get("llama_4_scaling_beta"):
        return None
    read_number(parameters, "original_max_position_embeddings", int)  # which it needs
    return read_number(parameters, "llama_4_scaling_beta", float)


def by_type_of_layer(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields as they are for layers that attend to all tokens, and the RoPE fields of layers with a window.

    transformers 5 has a set of RoPE parameters for each type of layer. Before, rope_theta and rope_scaling were of the
    layers that attend to all tokens, and the others had a base.
    """
    sets = raw.get("rope_parameters") or {}
    types = ("full_attention", "sliding_attention")
    if isinstance(bases := raw.get("rope_theta"), Mapping):  # as transformers 5 has the default of both
        both = {"rope_theta": "global", "rope_local_base_freq": "local"}
        raw = {**raw, **{ours: read_number(bases, theirs, float) for ours, theirs in both.items()}}
    if isinstance(sets, Mapping) and sets.keys() >= {*types}:  # GPTQModel adds a set for all, which nothing reads
        sets = {name: part for name, part in sets.items() if name not in ("rope_type", "rope_theta")}
    if not isinstance(sets, Mapping) or not sets.keys() <= {*types}:
        raise ModelError(f"config.json has rope_parameters={sets!r:.200}; it must have a set for each of {types}")
    full, sliding = (sets.get(name) or {} for name in types)
    theta = read_number(raw, "rope_local_base_freq", float, raw.get("rope_theta"))
    of_windows = {"rope_theta": theta, "rope_parameters": sliding}
    read_rotary_dim(of_windows, {}, 0)  # refuses to rotate only a part
    read_number(raw, "sliding_window", int)  # refuses null: which RoPE a layer has would not be known
    return {**raw, "rope_parameters": full}, of_windows


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `rope_parameters` (transformers 5) or `rope_scaling` (before) holds; theta may stand outside it."""
    parameters: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = raw.get(name) or {}
        if not isinstance(part, Mapping) or any(isinstance(value, Mapping) for value in part.values()):
            raise ModelError(f"config.json has {name}={part!r}; one set of numbers for all layers is supported")
        parameters |= {key: value for key, value in part.items() if value is not None}
    return parameters
