"""Reads the fields of `ModelConfig` from a config.json, in the spellings of transformers 4.51 to 5.x.

Most architectures read them as COMMON_READERS says. One has readers of its own, in `config_readers`, for what it reads
otherwise. Readers of what several have are here, too: windows, RoPE, experts, linear attention.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nanoinfer.checkpoint.base_config import LinearAttentionConfig, MoEConfig
from nanoinfer.checkpoint.fields import MSCALES, ROPE_BASES, ROPE_FLOATS, ROPE_LISTS, ROPE_PARAMETERS, Fields
from nanoinfer.checkpoint.model_config import RopeConfig
from nanoinfer.errors import ModelError

Reader = Callable[[Fields], Any]

# What config.json may leave out, where an architecture has no default of its own.
COMMON_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
}
IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")  # of text alone all three positions of a token are the same
PARTIAL = "partial_rotary_factor"
ONE_SET = "one set of numbers for all layers is supported"


def number(name: str) -> Reader:
    """Return a function that reads a positive number."""
    return partial(Fields.float, name=name)


def read_head_dim(fields: Fields) -> int:
    """Read the size of a head: without head_dim, the heads share the hidden size."""
    return fields.optional_int("head_dim") or fields.int("hidden_size") // fields.int("num_attention_heads")


def read_num_kv_heads(fields: Fields) -> int:
    """Read the number of KV heads: each query head has one of its own where config.json does not say."""
    return fields.optional_int("num_key_value_heads") or fields.int("num_attention_heads")


def for_all_layers(value: Any) -> Reader:
    """Return a function that gives each layer the same value."""
    return lambda fields: (value,) * fields.int("num_hidden_layers")


# --- windows ---


def read_windows(
    fields: Fields, local_layers: Reader | None = None, switch: str | None = None, needs_window: bool = False
) -> tuple[int | None, ...]:
    """Read how many tokens each token attends to, by layer; None for all.

    local_layers: reads which layers have a window where `layer_types` does not say so; None: all have one. switch: a
    flag without which no layer has one. needs_window: whether null is refused, which else means that none has one.
    """
    is_on = switch is None or fields.flag(switch)
    window = fields.optional_int("sliding_window") if is_on else None
    if window is None and needs_window:
        raise fields.error("sliding_window", "it must be a whole number of at least 1")
    num_layers = fields.int("num_hidden_layers")
    if window is None:
        return (None,) * num_layers
    is_local = fields.layers(num_layers, {"sliding_attention": True, "full_attention": False})
    if is_local is None:
        is_local = (True,) * num_layers if local_layers is None else local_layers(fields)
    return tuple(window if local else None for local in is_local)


def all_but_every_nth(fields: Fields) -> tuple[bool, ...]:
    """Return True for all layers but the last of each `sliding_window_pattern` layers."""
    step = fields.int("sliding_window_pattern")
    return tuple((index + 1) % step != 0 for index in range(fields.int("num_hidden_layers")))


read_alternating_windows = partial(read_windows, local_layers=all_but_every_nth)


def layers_without_windows(fields: Fields) -> tuple[bool, ...]:
    """Return which layers have no window, where some may have one; False for all where sliding_window is null."""
    has_windows = fields.get("sliding_window") is not None
    return tuple(has_windows and window is None for window in read_alternating_windows(fields))


# --- rotary embedding ---


def rope_part(fields: Fields) -> Fields:
    """Return what `rope_parameters` (transformers 5) and `rope_scaling` (before) hold; theta may stand outside them."""
    scaling = _set_of_numbers(fields, "rope_scaling")
    if scaling.values:  # which takes the place of a default
        fields = replace(fields, defaults={})
    parameters = _set_of_numbers(fields, "rope_parameters")
    return scaling.with_others(parameters, parameters.values)


def _set_of_numbers(fields: Fields, name: str) -> Fields:
    part = fields.part(name, ONE_SET)
    if any(isinstance(value, Mapping) for value in part.values.values()):
        raise fields.error(name, ONE_SET)
    present = {key: value for key, value in part.values.items() if value is not None and key not in IMAGE_POSITIONS}
    return replace(part, values={key: "default" if value == "mrope" else value for key, value in present.items()})


def read_rope(fields: Fields) -> RopeConfig:
    """Read a rotary embedding that all layers have."""
    return _rope_config(fields, rope_part(fields), "rope_theta")


def _rope_config(fields: Fields, part: Fields, base: str) -> RopeConfig:
    """Read the base, the type and the other numbers. part: what has them. base: the field of the base elsewhere."""
    rope_type = part.get("rope_type") or part.get("type") or "default"
    if rope_type == "su":  # its first name
        rope_type = "longrope"
    theta = part.float("rope_theta") if part.get("rope_theta") else fields.float(base)
    named = ("rope_type", "type", "rope_theta", PARTIAL)
    parameters = {name: value for name, value in part.values.items() if name not in named}
    original = "original_max_position_embeddings"
    if rope_type == "longrope" and original not in parameters and fields.get(original) is not None:
        parameters[original] = fields.int(original)
    for name, value in part.values.items():
        if name in ROPE_FLOATS or (name in MSCALES and value != 0):
            parameters[name] = part.float(name)
        elif name == original:
            parameters[name] = part.int(name)
        elif name in ROPE_LISTS:
            if not isinstance(value, list):
                raise part.error(name, "it must be a list of numbers")
            parameters[name] = [Fields({name: factor}).float(name) for factor in part.get(name)]
        elif name in ROPE_PARAMETERS and name not in named:
            part.get(name)  # which the type may want
    if is_proportional(part):
        parameters[PARTIAL] = part.float(PARTIAL, 1.0)
    if rope_type == "default" and "factor" in parameters:
        raise ModelError(f"config.json has RoPE parameters {parameters!r} and no rope_type; say of which type")
    return RopeConfig(str(rope_type), theta, parameters)


def is_proportional(part: Fields) -> bool:
    """Return whether a set of RoPE parameters is of the type that leaves the last pairs of a head unrotated."""
    return bool(part.get("rope_type") == "proportional")


def read_rope_of(fields: Fields, kind: str) -> RopeConfig:
    """Read the rotary embedding of one type of layers.

    transformers 5 has a set of RoPE parameters for each type. Before, rope_theta and rope_scaling were of the layers
    that attend to all tokens, and the others had a base.
    """
    sets = fields.part("rope_parameters")
    given = {*sets.values}
    if given >= {*ROPE_BASES}:  # GPTQModel adds a set for all, which nothing reads
        given -= {"rope_type", "rope_theta"}
    if not given <= {*ROPE_BASES}:
        raise fields.error("rope_parameters", f"it must have a set for each of {(*ROPE_BASES,)}")
    if isinstance(fields.values.get("rope_theta"), Mapping):  # as transformers 5 has the default of both
        bases = fields.part("rope_theta")
        found = {"rope_theta": bases.float("global"), "rope_local_base_freq": bases.float("local")}
        fields = fields.with_others(replace(bases, values=found), found)
    part = _set_of_numbers(sets, kind)
    if not is_proportional(part):
        fields.with_others(part, [PARTIAL]).must_be(PARTIAL, 1.0)
    if kind == "full_attention":
        part = _set_of_numbers(fields, "rope_scaling").with_others(part, part.values)
    base = ROPE_BASES[kind]
    return _rope_config(fields, part, "rope_theta" if fields.get(base) is None else base)


def read_rotary_dim(fields: Fields) -> int:
    """Read how many dimensions of a head are rotated, in architectures that may rotate a part of them."""
    factor = fields.with_others(rope_part(fields), [PARTIAL]).float(PARTIAL, 1.0)
    if factor > 1:
        raise ModelError(f"config.json has {PARTIAL}={factor}, which is not supported; use another model")
    return int(read_head_dim(fields) * factor)


def rotate_whole_heads(fields: Fields) -> int:
    """Return how many dimensions of a head are rotated: all. Raises ModelError where config.json asks for a part."""
    fields.with_others(rope_part(fields), [PARTIAL]).must_be(PARTIAL, 1.0)
    return read_head_dim(fields)


ROPE_BY_TYPE_OF_LAYER: Mapping[str, Reader] = {
    "rope": partial(read_rope_of, kind="full_attention"),
    "local_rope": partial(read_rope_of, kind="sliding_attention"),
    "rotary_dim": read_head_dim,
}


# --- experts ---


def read_experts(fields: Fields, num_dense: int = 0, **own: Any) -> MoEConfig:
    """Read the sizes of the experts, and which layers have any.

    num_dense: how many layers, the first, have none. own: the fields of MoEConfig that few architectures have.
    """
    names = ("n_routed_experts", "num_local_experts")  # GLM's and Mixtral's
    name = next((name for name in names if fields.get(name) is not None), "num_experts")
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise fields.error("mlp_only_layers", "it must be a list of layers")
    step = fields.int("decoder_sparse_step", 1)
    moe = MoEConfig(
        num_experts=fields.int(name),
        num_experts_per_tok=fields.int("num_experts_per_tok"),
        intermediate_size=fields.optional_int("moe_intermediate_size") or fields.int("intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob"),
        has_experts=tuple(
            index not in dense and index >= num_dense and (index + 1) % step == 0
            for index in range(fields.int("num_hidden_layers"))
        ),
        **own,
    )
    num_experts, per_token = moe.num_experts, moe.num_experts_per_tok
    if per_token > num_experts:
        raise ModelError(f"config.json has num_experts_per_tok={per_token}, more than its num_experts={num_experts}")
    num_groups, num_chosen = moe.num_groups, moe.num_chosen_groups
    if num_experts % num_groups or num_chosen > num_groups or per_token > num_chosen * (num_experts // num_groups):
        raise ModelError(
            f"config.json has n_group={num_groups} and topk_group={num_chosen}, which {num_experts} experts, "
            f"{per_token} for each token, cannot have"
        )
    return moe


# --- linear attention ---


def read_linear_attention(fields: Fields) -> LinearAttentionConfig | None:
    """Read the sizes of linear attention, and which layers have it; None if none has."""
    num_layers = fields.int("num_hidden_layers")
    is_linear = fields.layers(num_layers, {"linear_attention": True, "full_attention": False})
    if is_linear is None:
        interval = fields.int("full_attention_interval")
        is_linear = tuple((index + 1) % interval != 0 for index in range(num_layers))
    config = LinearAttentionConfig(
        num_key_heads=fields.int("linear_num_key_heads"),
        num_value_heads=fields.int("linear_num_value_heads"),
        key_head_dim=fields.int("linear_key_head_dim"),
        value_head_dim=fields.int("linear_value_head_dim"),
        conv_width=fields.int("linear_conv_kernel_dim"),
        is_linear=is_linear,
    )
    if config.num_value_heads % config.num_key_heads != 0:
        raise ModelError(
            f"linear_num_value_heads={config.num_value_heads} is no multiple of "
            f"linear_num_key_heads={config.num_key_heads}"
        )
    if all(is_linear):
        raise ModelError(
            "config.json has layer_types without full_attention; models with some such layer are supported"
        )
    return config if any(is_linear) else None


COMMON_READERS: Mapping[str, Reader] = {
    **{
        name: partial(Fields.int, name=name)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    },
    "num_key_value_heads": read_num_kv_heads,
    "head_dim": read_head_dim,
    "max_position_embeddings": partial(Fields.int, name="max_position_embeddings"),
    "rms_norm_eps": number("rms_norm_eps"),
    "initializer_range": number("initializer_range"),
    **{name: partial(Fields.flag, name=name) for name in ("tie_word_embeddings", "attention_bias", "mlp_bias")},
    "rope": read_rope,
    "rotary_dim": rotate_whole_heads,
    "attention_scale": lambda fields: read_head_dim(fields) ** -0.5,
    "windows": for_all_layers(None),
    "unrotated": for_all_layers(False),
}
