"""Mistral: the common decoder, with a sliding window in all layers unless config.json says null."""

from typing import Any, ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_windows


class MistralForCausalLM(DecoderForCausalLM):
    config_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }

    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        return {"windows": read_windows(fields)}
