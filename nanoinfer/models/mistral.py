"""Mistral: the common decoder, with a sliding window in all layers unless config.json says null."""

from typing import ClassVar

from nanoinfer.models.causal_lm import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    config_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }
    special_fields: ClassVar = {"sliding_window"}
