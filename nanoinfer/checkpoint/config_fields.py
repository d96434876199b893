"""The fields of a config.json: which of them count for some architectures alone, and how numbers and flags are read."""

from collections.abc import Mapping
from typing import Any

from nanoinfer.errors import ModelError

MAX_SIZE, MAX_LAYERS, MAX_FLOAT = 2**24, 2**12, 1e30  # what is beyond them in a config.json is a mistake
# What config.json may leave out, where an architecture has no default of its own. Null means the same for numbers,
# except for those that may be absent: without num_key_value_heads, each query head has a KV head of its own; without
# head_dim, the heads share the hidden size; without sliding_window, a layer attends to all tokens.
DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
}
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")  # Granite's
# Fields that count only for an architecture that names them, and what they say. For others most are passed over, since
# checkpoints carry fields of their relatives that transformers does not read either; soft caps and rotation of a part
# are refused.
SPECIAL_FIELDS = {
    "sliding_window": "how many tokens a token attends to, in layers with a window",
    "use_sliding_window": "whether any layer has a window",
    "max_window_layers": "how many layers, the first, have no window",
    "sliding_window_pattern": "of so many layers, the last has no window; layer_types goes before it",
    "no_rope_layers": "which layers know no positions; with no_rope_layer_interval",
    "rope_local_base_freq": "the base of rotary embedding in layers with a window",
    "partial_rotary_factor": "the share of a head that is rotated",
    "rotary_dim": "the same in dimensions, an older spelling",
    "llama_4_scaling_beta": "how queries far from the start grow; among the parameters of rotary embedding",
    "query_pre_attn_scalar": "scores are divided by its square root, not by that of head_dim",
    "use_qk_norm": "whether queries and keys are normalised",
    "attn_logit_softcapping": "the soft cap of scores",
    "final_logit_softcapping": "the soft cap of logits",
    "logit_scale": "logits are multiplied by it",
    "layer_norm_eps": "rms_norm_eps by another name",
    **dict.fromkeys(MULTIPLIERS, "a factor of Granite's"),
    "num_experts": "how many experts there are, by any of its names, with all that belongs to them",
    "first_k_dense_replace": "how many layers, the first, have a dense MLP",
    "n_group": "how many groups of experts there are",
    "topk_group": "how many of these groups a token's experts come from",
    "routed_scaling_factor": "what the weights of a token's experts are multiplied by",
    "n_shared_experts": "how many experts, as one, compute all tokens",
    "shared_expert_intermediate_size": "the inner size of the expert that computes all tokens",
    "swiglu_limit": "where gate and up are clamped; with swiglu_alpha",
    "linear_num_key_heads": "how many key heads linear attention has, with all that belongs to it",
}


def read_number(raw: Mapping[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    """Read a positive number; null and a missing one mean the default, where there is one."""
    value = default if raw.get(name) is None else raw[name]
    if isinstance(value, bool) or not isinstance(value, kind if kind is int else (int, float)) or not value > 0:
        wanted = "a whole number of at least 1" if kind is int else "a positive number"
        raise ModelError(f"config.json has {name}={value!r}; it must be {wanted}")
    limit = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE if kind is int else MAX_FLOAT
    if value > limit:
        raise ModelError(f"config.json has {name}={value!r}, beyond any model; download it again")
    return kind(value)


def read_flag(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    value = raw.get(name)
    if not isinstance(value, (bool, type(None))):
        raise ModelError(f"config.json has {name}={value!r}; it must be true or false")
    return default if value is None else value
