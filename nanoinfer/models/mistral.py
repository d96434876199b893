"""Mistral: the common decoder, with a sliding window in all layers unless config.json says null."""

from collections.abc import Mapping
from typing import Any, ClassVar

from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.decoder import DecoderSpec


class MistralForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec()
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }
    special_fields: ClassVar = {"sliding_window"}
