"""Qwen2 and Qwen2.5, dense: the common decoder with biases on queries, keys and values."""

from typing import ClassVar

from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.decoder_spec import DecoderSpec


class Qwen2ForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(qkv_bias=True)
    config_defaults: ClassVar = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,  # the first of them attend to all tokens
    }
    special_fields: ClassVar = {"sliding_window", "use_sliding_window", "max_window_layers"}
