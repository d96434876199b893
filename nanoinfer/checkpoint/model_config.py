"""The sizes of a model, read from its config.json, in the spellings of transformers 4.51 to 5.x."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from nanoinfer.checkpoint.encoder_config import EncoderConfig, read_encoder
from nanoinfer.checkpoint.hub import read_json
from nanoinfer.checkpoint.hybrid_config import (
    LinearAttentionConfig,
    read_linear_attention,
    text_architecture,
    text_part,
)
from nanoinfer.checkpoint.other_models import explain_architecture, explain_folder
from nanoinfer.checkpoint.overrides import read_overridden
from nanoinfer.checkpoint.pooling_config import (
    HeadConfig,
    PoolingConfig,
    choose_head,
    read_head,
    read_pooling,
    split_architecture,
)
from nanoinfer.checkpoint.quantization_config import read_quantization
from nanoinfer.checkpoint.quantization_fields import QuantizationConfig
from nanoinfer.config import DTYPES
from nanoinfer.errors import ConfigError, ModelError

MAX_SIZE, MAX_LAYERS, MAX_FLOAT = 2**24, 2**12, 1e30  # what is beyond them in a config.json is a mistake
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")  # Granite's
ROPE_FLOATS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
ROPE_LISTS = ("short_factor", "long_factor")  # of longrope: a number for each pair of dimensions
# What config.json may ask for that is not built in, and the value that does not ask for it.
UNSUPPORTED_UNLESS = {
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",  # Gemma's name for it
    "use_bidirectional_attention": False,
    "is_causal": True,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_out_bias": False,
}
# What config.json may leave out, where an architecture has no default of its own. Null means the same for numbers,
# except for those that may be absent: without num_key_value_heads, each query head has a KV head of its own; without
# head_dim, the heads share the hidden size; without sliding_window, a layer attends to all tokens.
DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
}

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


class Architecture(Protocol):
    """What reading a config.json needs to know of an architecture; a model class has it."""

    config_defaults: Mapping[str, Any]  # what config.json may leave out, by the values that transformers then takes
    special_fields: Set[str]  # those of SPECIAL_FIELDS that count for it
    rotates_windows_alone: bool  # whether layers without a window know no positions where others have one
    needs_window: bool  # whether sliding_window may not be null
    unsupported_unless: Mapping[str, Any]  # as UNSUPPORTED_UNLESS, and before it
    packed_modules_mapping: Mapping[str, tuple[str, str]]  # a checkpoint's name -> our packed module, and its shard
    renamed_modules: Mapping[str, str]  # a checkpoint's name -> ours


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Describes the mixture-of-experts MLPs of a model.

    norm_topk_prob: whether the weights of a token's experts are made to sum to 1. has_experts: whether a layer has
    experts, by layer; the others have a dense MLP. shared_size: the inner size of the expert that computes all tokens;
    None: there is none. num_groups, num_chosen_groups: experts are in groups, and a token's come from a few of these.
    scaling_factor: what the weights of a token's experts are multiplied by. swiglu_limit, swiglu_alpha: where gate and
    up are clamped, and the slope of the gate's sigmoid, see `layers/clamped_experts.py`; None: plain SwiGLU.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of an expert
    norm_topk_prob: bool
    has_experts: tuple[bool, ...]
    shared_size: int | None = None
    num_groups: int = 1
    num_chosen_groups: int = 1
    scaling_factor: float = 1.0
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Describes a rotary embedding: `theta` is the base; `parameters` are the other numbers of its type."""

    rope_type: str
    theta: float
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Holds a decoder's sizes, read from config.json in the spellings of transformers 4.51 to 5.x."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    rope: RopeConfig
    rotary_dim: int  # how many dimensions of a head, the first ones, are rotated
    local_rope: RopeConfig | None = None  # of layers with a window, where it is not that of the others
    attention_scale: float  # the factor of the scores
    attention_soft_cap: float | None = None  # of the scores, see `AttentionSpec`; None: none
    windows: tuple[int | None, ...]  # how many tokens each token attends to, by layer; None for all before it
    unrotated: tuple[bool, ...]  # which layers know no positions
    qk_norm: bool | None = None  # whether each head of queries and keys is normalised; None: the architecture says
    query_scaling_beta: float | None = None  # of queries far from the start, see `layers/query_scales.py`; None: none
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
    logits_scaling: float = 1.0  # logits are divided by it
    logits_soft_cap: float | None = None  # of the logits, see `layers/soft_cap.py`; None: none
    moe: MoEConfig | None = None
    linear_attention: LinearAttentionConfig | None = None  # None: all layers attend to tokens
    quantization: QuantizationConfig | None = None  # None: all weights have 16 bits, or 32
    encoder: EncoderConfig | None = None  # None: a decoder
    head: HeadConfig | None = None  # None: a language-model head
    # What becomes of hidden states; None until the folder was read, which says more than config.json.
    pooling: PoolingConfig | None = field(default=None, compare=False)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        supported: Mapping[str, Architecture],
        overrides: Mapping[str, Any] | None = None,
        quantization: str | None = None,
        runner: str = "auto",
    ) -> "ModelConfig":
        """Read `folder`/config.json. Raises ModelError where it is missing, not JSON, or lacks a size.

        supported: the architectures that can be run, by name; any other is refused first, since its config.json may
        name its sizes differently. overrides: fields that replace those of the file. quantization: how to round weights
        that the checkpoint has in 16 bits; one in 8 bits says itself how it is to be read. runner: whether the model is
        to generate or to embed, where it can do both.
        """
        if not (folder / "config.json").exists():
            raise ModelError(f"{folder} {explain_folder(folder)}")
        raw = read_json(folder / "config.json")
        config = read_overridden(raw, overrides, lambda fields: cls.from_dict(fields, supported, quantization))
        config = replace(config, head=choose_head(config.head, runner, folder))
        is_encoder = config.encoder is not None
        return replace(config, pooling=read_pooling(folder, config.head, config.hidden_size, is_encoder))

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], supported: Mapping[str, Architecture], quantization: str | None = None
    ) -> "ModelConfig":
        """Read the fields of a config.json; what the engine would have to ignore is refused."""
        architecture, head = _identify(raw, supported)
        encoder, raw = read_encoder(text_part(raw), architecture)
        if encoder is not None and (quantization is not None or raw.get("quantization_config") is not None):
            raise ModelError(
                "encoders have their weights in 16 or 32 bits; leave quantization out, or take another checkpoint"
            )
        model_class = supported[architecture]
        defaults = {**DEFAULTS, **model_class.config_defaults}
        special = {name: defaults.get(name) for name in model_class.special_fields}
        _refuse_unsupported(raw, special, {**UNSUPPORTED_UNLESS, **model_class.unsupported_unless})
        if raw.get("rope_scaling"):
            defaults.pop("rope_parameters", None)
        raw = {**defaults, **raw}
        raw_of_windows = None
        if "rope_local_base_freq" in special:
            raw, raw_of_windows = _by_type_of_layer(raw)
        values = _read_plain_fields(raw, special, defaults)
        windows = _read_windows(raw, special, values["num_hidden_layers"], model_class.needs_window)
        config = cls(
            architecture=architecture,
            dtype=_read_dtype(raw),
            rope=_read_rope(raw),
            local_rope=_read_rope(raw_of_windows) if raw_of_windows else None,
            rotary_dim=_read_rotary_dim(raw, special, values["head_dim"]),
            attention_scale=_read_attention_scale(raw, special, values["head_dim"]),
            attention_soft_cap=_read_soft_cap(raw, special, "attn_logit_softcapping"),
            logits_soft_cap=_read_soft_cap(raw, special, "final_logit_softcapping"),
            windows=windows,
            unrotated=_read_unrotated(raw, special, windows, model_class.rotates_windows_alone),
            qk_norm=_flag(raw, "use_qk_norm", False) if "use_qk_norm" in special else None,
            query_scaling_beta=_read_query_scaling(raw, special),
            moe=_read_moe(raw, special, values["num_hidden_layers"]) if "num_experts" in special else None,
            linear_attention=_read_linear_attention(raw, special, values["num_hidden_layers"]),
            quantization=read_quantization(
                raw.get("quantization_config"),
                quantization,
                model_class.packed_modules_mapping,
                model_class.renamed_modules,
            ),
            encoder=encoder,
            head=head,
            **values,
        )
        config._check(quantization)
        return config

    def _check(self, quantization: str | None) -> None:
        """Raise ModelError for sizes that do not fit each other. quantization: how the user wants weights rounded."""
        num_heads, num_kv_heads = self.num_attention_heads, self.num_key_value_heads
        if num_heads % num_kv_heads != 0:
            raise ModelError(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}")
        for name in ("head_dim", "rotary_dim"):
            if getattr(self, name) % 2 != 0:
                raise ModelError(f"{name}={getattr(self, name)} is odd; rotary embedding turns pairs of dimensions")
        if not 0 < self.max_model_len <= MAX_SIZE:
            raise ModelError(f"config.json stretches the context to {self.max_model_len} tokens; check its RoPE factor")
        if quantization is not None and self.moe is not None and self.moe.swiglu_limit is not None:
            raise ModelError(
                f"quantization={quantization!r} rounds experts without biases, and {self.architecture} has biases; "
                "leave quantization out, or use a checkpoint in MXFP4"
            )
        if cut := self._cut_blocks(1):
            raise ModelError(f"{cut}, and weights of different scales are packed in one; use the checkpoint in 16 bits")

    @property
    def max_model_len(self) -> int:
        """Return the longest sequence, in tokens, that the model's positions are made for."""
        factor = self.rope.parameters.get("factor", 1.0)
        original = self.rope.parameters.get("original_max_position_embeddings")
        if self.rope.rope_type == "linear" and self.local_rope is None:  # Gemma counts the factor in already
            return int(self.max_position_embeddings * factor)
        if self.rope.rope_type == "yarn" and original:
            return int(original * factor)
        return self.max_position_embeddings

    @property
    def refusal(self) -> str | None:
        """Return why the model completes no prompts, and which calls serve it; None if it does."""
        if self.head is None:
            return None
        return f"{self.architecture} has no language-model head here; use " + (
            "classify or reward" if self.head.is_classifier else "embed"
        )

    @property
    def finds_prefixes(self) -> bool:
        """Return whether requests can use what was computed before: an encoder's cannot, nor what pools all tokens."""
        if self.encoder is not None:
            return False
        return self.head is None or (self.pooling is not None and self.pooling.finds_prefixes)

    @property
    def has_multipliers(self) -> bool:
        """Return whether embeddings or what is added to the residual stream are multiplied by a number."""
        return self.embedding_multiplier != 1 or self.residual_multiplier != 1

    @property
    def num_attention_layers(self) -> int:
        """Return how many layers keep keys and values. Those of an encoder keep none, and use the memory of one."""
        if self.encoder is not None:
            return 1
        return self.num_hidden_layers - (self.linear_attention.num_layers if self.linear_attention else 0)

    def is_linear(self, index: int) -> bool:
        """Return whether a layer has linear attention."""
        return self.linear_attention is not None and self.linear_attention.is_linear[index]

    def windows_within(self, max_positions: int) -> tuple[int | None, ...]:
        """Return the windows of the layers; one that no sequence of so many positions outgrows is none."""
        return tuple(window if window and window < max_positions else None for window in self.windows)

    def longest_sequence(self, requested: int | None) -> int:
        """Return how long a sequence may be: as asked for, or as the model allows. Raises ConfigError above that."""
        limit = self.max_model_len
        if requested is not None and requested > limit:
            remedy = f"use at most {limit}, or a config.json with RoPE scaling"
            if self.rope.rope_type == "dynamic":
                remedy = (
                    f"use at most {limit}: beyond it rope_type='dynamic' depends on the current length, so that keys "
                    "in the KV cache would disagree with newer ones"
                )
            raise ConfigError(f"max_model_len={requested} is above the model's own limit of {limit} tokens; {remedy}")
        return requested or limit

    def check_tensor_parallel_size(self, size: int) -> None:
        """Raise ConfigError where heads or MLP cannot be split over `size` ranks, with the sizes that would do."""
        heads, kv_heads, mlps = self.num_attention_heads, self.num_key_value_heads, self._mlps
        even = {} if self.mlp_multiple > 1 else {**mlps}  # others are filled up
        if self.linear_attention is not None:
            even["linear_num_key_heads"] = mlps["linear_num_key_heads"] = self.linear_attention.num_key_heads

        def fits(n: int) -> bool:  # ranks may share a KV head
            fit = all(size % n == 0 for size in even.values())
            return heads % n == 0 and fit and (kv_heads % n == 0 or n % kv_heads == 0)

        if not fits(size) or self._cut_blocks(size):
            sizes = ", ".join(str(n) for n in range(1, heads + 1) if fits(n) and not self._cut_blocks(n))
            of_mlps = " and ".join(f"{name}={mlp}" for name, mlp in mlps.items())
            why = f": {self._cut_blocks(size)}" if fits(size) else ""
            raise ConfigError(
                f"tensor_parallel_size={size} cannot split num_attention_heads={heads}, num_key_value_heads="
                f"{kv_heads} and {of_mlps} of this model{why}; use one of {sizes}"
            )

    @property
    def mlp_multiple(self) -> int:
        """Return what every rank's share of an MLP is a multiple of; see `TensorParallel`."""
        return 1 if self.quantization is None else self.quantization.mlp_multiple

    @property
    def _mlps(self) -> dict[str, int]:
        """Return the inner sizes of the MLPs that the model has, by the names of their fields."""
        mlps = {}
        if self.moe is None or not all(self.moe.has_experts):
            mlps["intermediate_size"] = self.intermediate_size
        if self.moe is not None:
            mlps["moe_intermediate_size"] = self.moe.intermediate_size
            if self.moe.shared_size is not None:
                mlps["shared_expert_intermediate_size"] = self.moe.shared_size
        return mlps

    def _cut_blocks(self, size: int) -> str | None:
        """Return which share of one of `size` ranks ends inside a group of values that have one scale, if any."""
        quantization = self.quantization
        if quantization is None:
            return None
        if size > 1 and quantization.uncut is not None:
            return quantization.uncut
        shares = {}
        if quantization.covers_attention:
            shares["the query heads"] = self.num_attention_heads // size * self.head_dim
        if quantization.covers_attention and self.linear_attention is not None:
            shares["the linear key heads"] = self.linear_attention.key_size // size
            shares["the linear value heads"] = self.linear_attention.value_size // size
        multiple = quantization.shard_multiple if size > 1 else 1  # a whole row may end in a smaller group
        if quantization.block_size is not None:
            multiple = quantization.block_size
            shares["the KV heads"] = max(1, self.num_key_value_heads // size) * self.head_dim
            for name, mlp in self._mlps.items():  # of which ranks have whole blocks
                if mlp % multiple:
                    return f"{name}={mlp} is no multiple of the {multiple} that share a scale"
        for name, share in shares.items():
            if share % multiple:
                return f"a rank's share of {name}, {share} values, is no multiple of the {multiple} that share a scale"
        return None


def _identify(raw: Mapping[str, Any], supported: Mapping[str, Architecture]) -> tuple[str, HeadConfig | None]:
    """Return the architecture that reads a config.json, and the head in place of one of language models."""
    architectures = raw.get("architectures") or ["(none)"]
    if not isinstance(architectures, list):
        raise ModelError(f"config.json has architectures={architectures!r}; it must be a list of names")
    architecture, kind = split_architecture(raw, str(architectures[0]), supported.keys())
    head = read_head(raw, kind)
    if architecture not in supported:
        raise ModelError(explain_architecture(raw, architecture, supported))
    return text_architecture(raw, architecture), head


def _refuse_unsupported(raw: Mapping[str, Any], special: Mapping[str, Any], unless: Mapping[str, Any]) -> None:
    """Raise ModelError for a field of `unless` with another value than that, which the engine would have to ignore."""
    for name, without in unless.items():
        value = None if name in special else raw.get(name, without)
        if value not in (without, None):
            raise ModelError(f"config.json has {name}={value!r}, which is not supported; use a model without it")


def _read_plain_fields(
    raw: Mapping[str, Any], special: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Read what is a number or a flag in config.json and in ModelConfig, by name."""
    num_heads = _number(raw, "num_attention_heads", int)
    absent = {"num_key_value_heads": num_heads, "head_dim": _number(raw, "hidden_size", int) // num_heads}
    values: dict[str, Any] = {}
    for item in fields(ModelConfig):
        if item.name in MULTIPLIERS and item.name not in special:
            continue
        if item.type in (int, float) and item.name not in ("rotary_dim", "attention_scale"):
            name = "layer_norm_eps" if item.name == "rms_norm_eps" and "layer_norm_eps" in special else item.name
            default = absent.get(name, defaults.get(name))
            values[item.name] = _number(raw, name, item.type, default)
        elif item.type is bool:
            values[item.name] = _flag(raw, item.name, defaults.get(item.name, False))
    if "logit_scale" in special:
        values["logits_scaling"] = 1 / _number(raw, "logit_scale", float, special["logit_scale"])
    return values


def _number(raw: Mapping[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    """Read a positive number; null and a missing one mean the default, where there is one."""
    value = default if raw.get(name) is None else raw[name]
    if isinstance(value, bool) or not isinstance(value, kind if kind is int else (int, float)) or not value > 0:
        wanted = "a whole number of at least 1" if kind is int else "a positive number"
        raise ModelError(f"config.json has {name}={value!r}; it must be {wanted}")
    limit = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE if kind is int else MAX_FLOAT
    if value > limit:
        raise ModelError(f"config.json has {name}={value!r}, beyond any model; download it again")
    return kind(value)


def _flag(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    value = raw.get(name)
    if not isinstance(value, (bool, type(None))):
        raise ModelError(f"config.json has {name}={value!r}; it must be true or false")
    return default if value is None else value


def _read_windows(
    raw: Mapping[str, Any], special: Mapping[str, Any], num_layers: int, needs_window: bool
) -> tuple[int | None, ...]:
    """Read which layers have a sliding window. special: the architecture's special fields, and their defaults."""
    none = (None,) * num_layers
    if "sliding_window" not in special or (raw.get("sliding_window") is None and not needs_window):
        return none
    if "use_sliding_window" in special and not _flag(raw, "use_sliding_window", False):
        return none
    window = _number(raw, "sliding_window", int)
    layer_types = raw.get("layer_types")
    if layer_types is None and "no_rope_layers" in special:
        return tuple(window if is_unrotated else None for is_unrotated in _read_no_rope_layers(raw, num_layers))
    if layer_types is None and "sliding_window_pattern" in special:
        step = _number(raw, "sliding_window_pattern", int, special["sliding_window_pattern"])
        return tuple(window if (index + 1) % step else None for index in range(num_layers))
    if layer_types is None:
        first = raw["max_window_layers"] if "max_window_layers" in special else 0
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ModelError(f"config.json has max_window_layers={first!r}; it must be a whole number of at least 0")
        return tuple(window if index >= first else None for index in range(num_layers))
    kinds = {"sliding_attention": window, "full_attention": None}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or not kinds.keys() >= {*layer_types}:
        raise ModelError(
            f"config.json has layer_types={layer_types!r:.200}; it must name {' or '.join(kinds)} for each of "
            f"{num_layers} layers"
        )
    return tuple(kinds[kind] for kind in layer_types)


def _read_unrotated(
    raw: Mapping[str, Any],
    special: Mapping[str, Any],
    windows: tuple[int | None, ...],
    rotates_windows_alone: bool,
) -> tuple[bool, ...]:
    """Read which layers know no positions."""
    if rotates_windows_alone and raw.get("sliding_window") is not None:
        return tuple(window is None for window in windows)
    if "no_rope_layers" in special:
        return _read_no_rope_layers(raw, len(windows))
    return (False,) * len(windows)


def _read_no_rope_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return which layers have 0 in `no_rope_layers`."""
    layers = raw.get("no_rope_layers")
    if layers is None:
        interval = _number(raw, "no_rope_layer_interval", int)
        return tuple((index + 1) % interval == 0 for index in range(num_layers))
    if not isinstance(layers, list) or len(layers) != num_layers or not all(layer in (0, 1) for layer in layers):
        raise ModelError(
            f"config.json has no_rope_layers={layers!r:.200}; it must have 1, or 0 for no positions, for each of "
            f"{num_layers} layers"
        )
    return tuple(not layer for layer in layers)


def _read_query_scaling(raw: Mapping[str, Any], special: Mapping[str, Any]) -> float | None:
    parameters = _rope_parameters(raw)
    if "llama_4_scaling_beta" not in special or not parameters.get("llama_4_scaling_beta"):
        return None
    _number(parameters, "original_max_position_embeddings", int)  # which it needs
    return _number(parameters, "llama_4_scaling_beta", float)


def _read_moe(raw: Mapping[str, Any], special: Mapping[str, Any], num_layers: int) -> MoEConfig:
    """Read the sizes of the experts, and which layers have any."""
    names = ("n_routed_experts", "num_local_experts")  # GLM's and Mixtral's
    name = next((name for name in names if raw.get(name) is not None), "num_experts")
    num_experts = _number(raw, name, int, special["num_experts"])
    per_token = _number(raw, "num_experts_per_tok", int)
    if per_token > num_experts:
        raise ModelError(f"config.json has num_experts_per_tok={per_token}, more than its num_experts={num_experts}")
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise ModelError(f"config.json has mlp_only_layers={dense!r:.200}; it must be a list of layers")
    step = _number(raw, "decoder_sparse_step", int, 1)
    num_dense = raw.get("first_k_dense_replace", 0) if "first_k_dense_replace" in special else 0
    if isinstance(num_dense, bool) or not isinstance(num_dense, int) or num_dense < 0:
        raise ModelError(f"config.json has first_k_dense_replace={num_dense!r}; it must be a whole number")
    num_groups, num_chosen = (
        _number(raw, name, int, 1) if name in special else 1 for name in ("n_group", "topk_group")
    )
    if num_experts % num_groups or num_chosen > num_groups or per_token > num_chosen * (num_experts // num_groups):
        raise ModelError(
            f"config.json has n_group={num_groups} and topk_group={num_chosen}, which {num_experts} experts, "
            f"{per_token} for each token, cannot have"
        )
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        intermediate_size=_number(raw, "moe_intermediate_size", int, raw.get("intermediate_size")),
        norm_topk_prob=_flag(raw, "norm_topk_prob", False),
        has_experts=tuple(
            index not in dense and index >= num_dense and (index + 1) % step == 0 for index in range(num_layers)
        ),
        shared_size=_read_shared_size(raw, special),
        num_groups=num_groups,
        num_chosen_groups=num_chosen,
        scaling_factor=_number(raw, scale, float, 1.0) if (scale := "routed_scaling_factor") in special else 1.0,
        swiglu_limit=_number(raw, "swiglu_limit", float) if "swiglu_limit" in special else None,
        swiglu_alpha=_number(raw, "swiglu_alpha", float) if "swiglu_limit" in special else 1.0,
    )


def _read_shared_size(raw: Mapping[str, Any], special: Mapping[str, Any]) -> int | None:
    """Read the inner size of the expert that computes all tokens; of several, which are one, that of all."""
    if "shared_expert_intermediate_size" in special:
        return _number(raw, "shared_expert_intermediate_size", int)
    if "n_shared_experts" not in special or raw.get("n_shared_experts") in (0, None):
        return None
    size: int = _number(raw, "n_shared_experts", int) * _number(raw, "moe_intermediate_size", int)
    return size


def _read_linear_attention(
    raw: Mapping[str, Any], special: Mapping[str, Any], num_layers: int
) -> LinearAttentionConfig | None:
    """Read the sizes of linear attention, and which layers have it."""
    if "linear_num_key_heads" not in special:
        return None
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    sizes = {name: _number(raw, name, int) for name in (*names, "linear_conv_kernel_dim", "full_attention_interval")}
    return read_linear_attention(raw, sizes, num_layers)


def _read_rotary_dim(raw: Mapping[str, Any], special: Mapping[str, Any], head_dim: int) -> int:
    """Read which share of a head's dimensions is rotated."""
    if "rotary_dim" in special and raw.get("rotary_dim") is not None:  # the older spelling
        rotary_dim: int = _number(raw, "rotary_dim", int)
        if rotary_dim > head_dim:
            raise ModelError(f"config.json has rotary_dim={rotary_dim}, more than a head's {head_dim} dimensions")
        return rotary_dim
    factor = _number({**raw, **_rope_parameters(raw)}, "partial_rotary_factor", float, 1.0)
    if factor > 1 or (factor != 1 and "partial_rotary_factor" not in special):
        raise ModelError(f"config.json has partial_rotary_factor={factor}, which is not supported; use another model")
    return int(head_dim * factor)


def _read_attention_scale(raw: Mapping[str, Any], special: Mapping[str, Any], head_dim: int) -> float:
    """Read what scores are multiplied by: 1 / sqrt(head_dim), unless the architecture names another number."""
    if "attention_multiplier" in special:
        return _number(raw, "attention_multiplier", float)
    name = "query_pre_attn_scalar"
    return (_number(raw, name, float, special[name]) if name in special else head_dim) ** -0.5


def _read_soft_cap(raw: Mapping[str, Any], special: Mapping[str, Any], name: str) -> float | None:
    """Read a soft cap; null stands for none."""
    return None if name not in special or raw[name] is None else float(_number(raw, name, float))


def _read_dtype(raw: Mapping[str, Any]) -> str:
    """Read `dtype` (transformers 5) or `torch_dtype` (before); float32 where neither is given."""
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"config.json has dtype={dtype!r}; supported are {', '.join(DTYPES)}")
    return dtype


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `rope_parameters` (transformers 5) or `rope_scaling` (before) holds; theta may stand outside it."""
    parameters: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = raw.get(name) or {}
        if not isinstance(part, Mapping) or any(isinstance(value, Mapping) for value in part.values()):
            raise ModelError(f"config.json has {name}={part!r}; one set of numbers for all layers is supported")
        parameters |= {key: value for key, value in part.items() if value is not None}
    return parameters


def _by_type_of_layer(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields as they are for layers that attend to all tokens, and the RoPE fields of layers with a window.

    transformers 5 has a set of RoPE parameters for each type of layer. Before, rope_theta and rope_scaling were of the
    layers that attend to all tokens, and the others had a base.
    """
    sets = raw.get("rope_parameters") or {}
    types = ("full_attention", "sliding_attention")
    if not isinstance(sets, Mapping) or not sets.keys() <= {*types}:
        raise ModelError(f"config.json has rope_parameters={sets!r:.200}; it must have a set for each of {types}")
    full, sliding = (sets.get(name) or {} for name in types)
    theta = _number(raw, "rope_local_base_freq", float, raw.get("rope_theta"))
    of_windows = {"rope_theta": theta, "rope_parameters": sliding}
    _read_rotary_dim(of_windows, {}, 0)  # refuses to rotate only a part
    _number(raw, "sliding_window", int)  # refuses null: which RoPE a layer has would not be known
    return {**raw, "rope_parameters": full}, of_windows


def _read_rope(raw: Mapping[str, Any]) -> RopeConfig:
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
            parameters[name] = _number(parameters, name, int if name.startswith("original") else float)
    for name in parameters.keys() & {*ROPE_LISTS}:
        factors = parameters[name]
        if not isinstance(factors, list):
            raise ModelError(f"config.json has {name}={factors!r}; it must be a list of numbers")
        parameters[name] = [_number({name: factor}, name, float) for factor in factors]
    if rope_type == "default" and "factor" in parameters:
        raise ModelError(f"config.json has RoPE parameters {parameters!r} and no rope_type; say of which type")
    return RopeConfig(str(rope_type), _number(theta, "rope_theta", float, DEFAULTS["rope_theta"]), parameters)
