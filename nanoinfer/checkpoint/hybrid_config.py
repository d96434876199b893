"""The fields of hybrids of linear and full attention, and the text part of configs that also have a vision model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoinfer.checkpoint.config_fields import read_number
from nanoinfer.errors import ModelError

TYPES = ("linear_attention", "full_attention")
IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")  # of text alone all three positions of a token are the same
# By the class for text and images, and the type of its text model: the class for text alone.
TEXT_TYPES = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    "Qwen2_5_VLForConditionalGeneration": {
        "qwen2_5_vl_text": "Qwen2ForCausalLM",
        "qwen2_5_vl": "Qwen2ForCausalLM",
    },
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
}
# Fields of the whole config that hold for its text part, too, and override that part's own.
OF_THE_WHOLE = ("architectures", "tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """Describes the layers with linear attention (Gated DeltaNet, Yang et al. 2024).

    Neighbouring value heads share a key head. conv_width: how many tokens the convolution before it sees. is_linear:
    whether a layer is one of them, by layer; the others attend to all tokens.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    is_linear: tuple[bool, ...]

    @property
    def num_layers(self) -> int:
        return sum(self.is_linear)

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Return how many channels are convolved: queries, keys and values."""
        return 2 * self.key_size + self.value_size


def read_linear_attention(
    raw: Mapping[str, Any], special: Mapping[str, Any], num_layers: int
) -> LinearAttentionConfig | None:
    """Read the sizes of linear attention, and which layers have it; None if none has."""
    if "linear_num_key_heads" not in special:
        return None
    config = LinearAttentionConfig(
        num_key_heads=read_number(raw, "linear_num_key_heads", int),
        num_value_heads=read_number(raw, "linear_num_value_heads", int),
        key_head_dim=read_number(raw, "linear_key_head_dim", int),
        value_head_dim=read_number(raw, "linear_value_head_dim", int),
        conv_width=read_number(raw, "linear_conv_kernel_dim", int),
        is_linear=_read_layers(raw, read_number(raw, "full_attention_interval", int), num_layers),
    )
    if config.num_value_heads % config.num_key_heads != 0:
        raise ModelError(
            f"linear_num_value_heads={config.num_value_heads} is no multiple of "
            f"linear_num_key_heads={config.num_key_heads}"
        )
    if all(config.is_linear):
        raise ModelError(
            "config.json has layer_types without full_attention; models with some such layer are supported"
        )
    return config if any(config.is_linear) else None


def _read_layers(raw: Mapping[str, Any], interval: int, num_layers: int) -> tuple[bool, ...]:
    layer_types = raw.get("layer_types")
    if layer_types is None:
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or not {*TYPES} >= {*layer_types}:
        raise ModelError(
            f"config.json has layer_types={layer_types!r:.200}; it must name {' or '.join(TYPES)} for each of "
            f"{num_layers} layers"
        )
    return tuple(kind == "linear_attention" for kind in layer_types)


def text_part(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model of a config.json, without what only images need."""
    text = raw.get("text_config")
    if text is not None:
        if not isinstance(text, Mapping):
            raise ModelError(f"config.json has text_config={text!r:.99}; it must be a JSON object")
        if "num_hidden_layers" not in raw:  # else the text model's fields are here
            raw = {**text, **{name: raw[name] for name in OF_THE_WHOLE if raw.get(name) is not None}}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := raw.get(name), Mapping):
            rope = {key: value for key, value in rope.items() if key not in IMAGE_POSITIONS}
            raw = {**raw, name: {key: "default" if value == "mrope" else value for key, value in rope.items()}}
    return dict(raw)


def text_architecture(raw: Mapping[str, Any], architecture: str) -> str:
    """Return the class of the text model, where a config.json says of which type it is; else the architecture.

    Raises ModelError for a text model of another type than we know of this architecture.
    """
    text = raw.get("text_config")
    if architecture not in TEXT_TYPES or not isinstance(text, Mapping) or text.get("model_type") is None:
        return architecture
    types, model_type = TEXT_TYPES[architecture], text["model_type"]
    if model_type not in types:
        raise ModelError(
            f"config.json has text_config with model_type={model_type!r}, which {architecture} is not supported with; "
            f"supported: {', '.join(types)}"
        )
    return types[model_type]
