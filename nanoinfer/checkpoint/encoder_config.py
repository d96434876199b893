"""What a config.json says of an encoder, which attends to all of a text: BERT, RoBERTa, XLM-RoBERTa, ModernBERT."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoinfer.errors import ModelError

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
BERT_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
ROBERTA_DEFAULTS = {**BERT_DEFAULTS, "vocab_size": 50265, "pad_token_id": 1}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "BertModel": BERT_DEFAULTS,
    "RobertaModel": ROBERTA_DEFAULTS,
    "XLMRobertaModel": {**ROBERTA_DEFAULTS, "vocab_size": 30522},
    "ModernBertModel": {
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
    },
}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Describes what encoders have and decoders lack.

    first_position: the row of the position table that a text's first token has; None where positions are rotations.
    type_vocab_size: kinds of segments, such as the first and the second text of a pair; 0 for none. activation: of the
    MLP. norm_bias: whether layer norms add a bias. window: how many tokens a layer with a window sees to either side,
    its own included. local_layers: which layers have that window, by layer. rope_thetas: the bases of layers without a
    window, and of those with one. head_bias, head_activation: of the dense layer of ModernBERT's classifiers.
    """

    activation: str
    first_position: int | None = None
    type_vocab_size: int = 0
    norm_bias: bool = True
    window: int | None = None
    local_layers: tuple[bool, ...] = ()
    rope_thetas: tuple[float, float] = (10000.0, 10000.0)
    head_bias: bool = True
    head_activation: str = "tanh"


def read_encoder(raw: Mapping[str, Any], architecture: str) -> tuple[EncoderConfig | None, dict[str, Any]]:
    """Return an encoder's config (None for a decoder), and the fields of config.json under the names of a decoder's."""
    if architecture not in DEFAULTS:
        return None, dict(raw)
    raw = {**DEFAULTS[architecture], **{name: value for name, value in raw.items() if value is not None}}
    for name, without in (("position_embedding_type", "absolute"), ("is_decoder", False)):
        if raw.get(name, without) != without:
            raise ModelError(f"config.json has {name}={raw[name]!r}, which is not supported; use a model without it")
    common = {name: value for name, value in raw.items() if name not in ("hidden_act", "hidden_activation")}
    if architecture == "ModernBertModel":
        return _read_modernbert(raw), {**common, "rms_norm_eps": raw["norm_eps"], "rope_parameters": None}
    first_position = 0 if architecture == "BertModel" else _whole(raw, "pad_token_id", 0) + 1
    max_tokens = _whole(raw, "max_position_embeddings", 1) - first_position
    encoder = EncoderConfig(_activation(raw, "hidden_act"), first_position, _whole(raw, "type_vocab_size", 0))
    biases = {"attention_bias": True, "mlp_bias": True}
    return encoder, {
        **common,
        **biases,
        "rms_norm_eps": raw["layer_norm_eps"],
        "max_position_embeddings": max_tokens,
    }


def _read_modernbert(raw: Mapping[str, Any]) -> EncoderConfig:
    num_layers, every = _whole(raw, "num_hidden_layers", 1), _whole(raw, "global_attn_every_n_layers", 1)
    layer_types = raw.get("layer_types") or [
        "sliding_attention" if index % every else "full_attention" for index in range(num_layers)
    ]
    kinds = {"sliding_attention": True, "full_attention": False}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or not kinds.keys() >= {*layer_types}:
        raise ModelError(
            f"config.json has layer_types={layer_types!r:.200}; it must name {' or '.join(kinds)} for each of "
            f"{num_layers} layers"
        )
    thetas = {"full_attention": raw["global_rope_theta"], "sliding_attention": raw["local_rope_theta"]}
    sets = raw.get("rope_parameters") or {}
    for name, part in sets.items() if isinstance(sets, Mapping) else [("", sets)]:
        if name not in thetas or not isinstance(part, Mapping) or part.get("rope_type", "default") != "default":
            raise ModelError(f"config.json has rope_parameters={sets!r:.200}; only those of type default are supported")
        thetas[name] = part.get("rope_theta") or thetas[name]
    if not all(isinstance(theta, (int, float)) and theta > 0 for theta in thetas.values()):
        raise ModelError(f"config.json has the bases of RoPE {thetas!r}; they must be positive numbers")
    return EncoderConfig(
        _activation(raw, "hidden_activation"),
        norm_bias=raw.get("norm_bias") is True,
        window=_whole(raw, "local_attention", 2) // 2 + 1,
        local_layers=tuple(kinds[kind] for kind in layer_types),
        rope_thetas=(float(thetas["full_attention"]), float(thetas["sliding_attention"])),
        head_bias=raw.get("classifier_bias") is True,
        head_activation=_activation(raw, "classifier_activation"),
    )


def _activation(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name, "gelu")
    if value not in ACTIVATIONS:
        raise ModelError(f"config.json has {name}={value!r}; supported are {', '.join(ACTIVATIONS)}")
    return str(value)


def _whole(raw: Mapping[str, Any], name: str, least: int) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**24:
        raise ModelError(f"config.json has {name}={value!r}; it must be a whole number of at least {least}")
    return value
