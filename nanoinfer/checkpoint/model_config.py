"""The sizes of a model, read from its config.json, in the spellings of transformers 4.51 to 5.x."""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.checkpoint.config_fields import DEFAULTS, MAX_SIZE, MULTIPLIERS, read_flag, read_number
from nanoinfer.checkpoint.encoder_config import EncoderConfig, read_encoder
from nanoinfer.checkpoint.hub import read_json
from nanoinfer.checkpoint.hybrid_config import (
    read_linear_attention,
    text_architecture,
    text_part,
)
from nanoinfer.checkpoint.moe_config import read_moe
from nanoinfer.checkpoint.other_models import explain_architecture, explain_folder
from nanoinfer.checkpoint.overrides import read_overridden
from nanoinfer.checkpoint.pooling_config import (
    HeadConfig,
    choose_head,
    read_head,
    read_pooling,
    split_architecture,
    with_padding,
)
from nanoinfer.checkpoint.quantization_config import read_quantization
from nanoinfer.checkpoint.quantization_fields import QuantizationConfig
from nanoinfer.checkpoint.rope_config import (
    RopeConfig,
    by_type_of_layer,
    read_query_scaling,
    read_rope,
    read_rotary_dim,
)
from nanoinfer.checkpoint.window_config import read_unrotated, read_windows
from nanoinfer.config import DTYPES
from nanoinfer.errors import ConfigError, ModelError

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


# The products of an MLP, by the field of its inner size.
PRODUCTS_OF_MLPS = {
    "intermediate_size": ("mlp.gate_up_proj", "mlp.down_proj"),
    "moe_intermediate_size": ("mlp.experts.gate_up_proj",),  # which stands for all of an expert
    "shared_expert_intermediate_size": ("mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj"),
}


class ShareOfHeads(NamedTuple):
    """Says how many values of some heads a rank has, and which products have them as outputs and as inputs."""

    name: str
    share: int
    outputs_of: str
    inputs_of: str | None = None


class Architecture(Protocol):
    """What reading a config.json needs to know of an architecture; a model class has it.

    What reading its weights needs is in `CheckpointNames`, in `weights.py`.
    """

    config_defaults: Mapping[str, Any]  # what config.json may leave out, by the values that transformers then takes
    special_fields: Set[str]  # those of SPECIAL_FIELDS that count for it
    rotates_windows_alone: bool  # whether RoPE rotates only in layers with a window, if sliding_window is set
    needs_window: bool  # whether sliding_window must not be null
    unsupported_unless: Mapping[str, Any]  # like UNSUPPORTED_UNLESS, whose values it overrides
    packed_modules_mapping: Mapping[str, tuple[str, str]]  # a checkpoint's name -> our packed module, and its shard
    renamed_modules: Mapping[str, str]  # a checkpoint's name -> ours


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(BaseModelConfig):
    """Holds a model's sizes, read from config.json in the spellings of transformers 4.51 to 5.x."""

    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    rotary_dim: int  # how many dimensions of a head, the first ones, are rotated
    local_rope: RopeConfig | None = None  # of layers with a window, where it is not that of the others
    attention_scale: float  # the factor of the scores
    attention_soft_cap: float | None = None  # of the scores, see `AttentionSpec`; None: none
    unrotated: tuple[bool, ...]  # which layers know no positions
    qk_norm: bool | None = None  # whether each head of queries and keys is normalised; None: the architecture says
    query_scaling_beta: float | None = None  # of queries far from the start, see `layers/query_scales.py`; None: none
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
    logits_scaling: float = 1.0  # logits are divided by it
    logits_soft_cap: float | None = None  # of the logits, see `cap_logits`; None: none
    quantization: QuantizationConfig | None = None  # None: all weights have 16 bits, or 32
    encoder: EncoderConfig | None = None  # None: a decoder

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
        return replace(config, pooling=read_pooling(folder, config.head, config.hidden_size, config.is_encoder))

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
            raw, raw_of_windows = by_type_of_layer(raw)
        values = _read_plain_fields(raw, special, defaults)
        windows = read_windows(raw, special, values["num_hidden_layers"], model_class.needs_window)
        config = cls(
            architecture=architecture,
            dtype=_read_dtype(raw),
            rope=read_rope(raw),
            local_rope=read_rope(raw_of_windows) if raw_of_windows else None,
            rotary_dim=read_rotary_dim(raw, special, values["head_dim"]),
            attention_scale=_read_attention_scale(raw, special, values["head_dim"]),
            attention_soft_cap=_read_soft_cap(raw, special, "attn_logit_softcapping"),
            logits_soft_cap=_read_soft_cap(raw, special, "final_logit_softcapping"),
            windows=windows,
            unrotated=read_unrotated(raw, special, windows, model_class.rotates_windows_alone),
            qk_norm=read_flag(raw, "use_qk_norm", False) if "use_qk_norm" in special else None,
            query_scaling_beta=read_query_scaling(raw, special),
            moe=read_moe(raw, special, values["num_hidden_layers"]) if "num_experts" in special else None,
            linear_attention=read_linear_attention(raw, special, values["num_hidden_layers"]),
            quantization=read_quantization(
                raw.get("quantization_config"),
                quantization,
                model_class.packed_modules_mapping,
                model_class.renamed_modules,
            ),
            encoder=encoder,
            head=with_padding(head, raw) if encoder is None else head,
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
    def is_encoder(self) -> bool:
        return self.encoder is not None

    @property
    def has_dynamic_rope(self) -> bool:
        return self.rope.rope_type == "dynamic"

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
    def has_multipliers(self) -> bool:
        """Return whether embeddings or what is added to the residual stream are multiplied by a number."""
        return self.embedding_multiplier != 1 or self.residual_multiplier != 1

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
        if size > 1 and quantization.unsplittable_reason is not None:
            return quantization.unsplittable_reason
        block_size = quantization.block_size
        multiple = block_size or (quantization.shard_multiple if size > 1 else 1)  # a whole row may end in less
        uneven = f"is no multiple of the {multiple} that share a scale"
        for heads in self._shares_of_heads(size):  # outputs share scales in blocks alone
            products = [heads.inputs_of, heads.outputs_of if block_size else None]
            if heads.share % multiple and self._have_fewer_bits(products):
                return f"a rank's share of {heads.name}, {heads.share} values, {uneven}"
        for name, mlp in self._mlps.items() if block_size else ():  # of which ranks have whole blocks
            if mlp % multiple and self._have_fewer_bits(PRODUCTS_OF_MLPS[name]):
                return f"{name}={mlp} {uneven}"
        return None

    def _shares_of_heads(self, size: int) -> Iterator["ShareOfHeads"]:
        """Yield what each of `size` ranks has of the heads."""
        value_heads = self.num_attention_heads // size * self.head_dim
        yield ShareOfHeads("the query heads", value_heads, "self_attn.qkv_proj", "self_attn.o_proj")
        key_heads = max(1, self.num_key_value_heads // size) * self.head_dim
        yield ShareOfHeads("the KV heads", key_heads, "self_attn.qkv_proj")
        if (linear := self.linear_attention) is not None:
            products = "linear_attn.in_proj_qkvz", "linear_attn.out_proj"
            yield ShareOfHeads("the linear value heads", linear.value_size // size, *products)
            yield ShareOfHeads("the linear key heads", linear.key_size // size, products[0])

    def _have_fewer_bits(self, products: Iterable[str | None]) -> bool:
        """Return whether the weight of one of these products has fewer bits in any layer that has it."""
        covers = cast(QuantizationConfig, self.quantization).covers
        return any(
            covers(f"model.layers.{index}.{product}")
            for product in products
            if product is not None
            for index in range(self.num_hidden_layers)
            if self._has_product(index, product)
        )

    def _has_product(self, index: int, product: str) -> bool:
        part, _, last = product.partition(".")
        if part == "mlp":
            has_experts = self.moe is not None and self.moe.has_experts[index]
            return has_experts == last.startswith(("experts", "shared_expert"))
        return self.is_linear(index) == (part == "linear_attn")


def read_architecture(raw: Mapping[str, Any]) -> str:
    """Return what a config.json calls the class of its model."""
    architectures = raw.get("architectures") or ["(none)"]
    if not isinstance(architectures, list):
        raise ModelError(f"config.json has architectures={architectures!r}; it must be a list of names")
    return str(architectures[0])


def _identify(raw: Mapping[str, Any], supported: Mapping[str, Architecture]) -> tuple[str, HeadConfig | None]:
    """Return the architecture that runs a config.json, and the head in place of a language-model head, if any."""
    architecture, kind = split_architecture(raw, read_architecture(raw), supported.keys())
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
    num_heads = read_number(raw, "num_attention_heads", int)
    absent = {"num_key_value_heads": num_heads, "head_dim": read_number(raw, "hidden_size", int) // num_heads}
    values: dict[str, Any] = {}
    for item in fields(ModelConfig):
        if item.name in MULTIPLIERS and item.name not in special:
            continue
        if item.type in (int, float) and item.name not in ("rotary_dim", "attention_scale"):
            name = "layer_norm_eps" if item.name == "rms_norm_eps" and "layer_norm_eps" in special else item.name
            default = absent.get(name, defaults.get(name))
            values[item.name] = read_number(raw, name, item.type, default)
        elif item.type is bool:
            values[item.name] = read_flag(raw, item.name, defaults.get(item.name, False))
    if "logit_scale" in special:
        values["logits_scaling"] = 1 / read_number(raw, "logit_scale", float, special["logit_scale"])
    return values


def _read_attention_scale(raw: Mapping[str, Any], special: Mapping[str, Any], head_dim: int) -> float:
    """Read what scores are multiplied by: 1 / sqrt(head_dim), unless the architecture names another number."""
    if "attention_multiplier" in special:
        return read_number(raw, "attention_multiplier", float)
    name = "query_pre_attn_scalar"
    return (read_number(raw, name, float, special[name]) if name in special else head_dim) ** -0.5


def _read_soft_cap(raw: Mapping[str, Any], special: Mapping[str, Any], name: str) -> float | None:
    """Read a soft cap; null stands for none."""
    return None if name not in special or raw[name] is None else float(read_number(raw, name, float))


def _read_dtype(raw: Mapping[str, Any]) -> str:
    """Read `dtype` (transformers 5) or `torch_dtype` (before); float32 where neither is given."""
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"config.json has dtype={dtype!r}; supported are {', '.join(DTYPES)}")
    return dtype
