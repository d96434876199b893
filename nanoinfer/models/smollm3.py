"""SmolLM3: the common decoder, some of whose layers know no positions (NoPE, Yang et al. 2025)."""

from typing import ClassVar

from nanoinfer.models.causal_lm import DecoderForCausalLM


class SmolLM3ForCausalLM(DecoderForCausalLM):
    config_defaults: ClassVar = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "pad_token_id": 128004,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
        "rope_theta": 2000000.0,
    }
    special_fields: ClassVar = {"sliding_window", "use_sliding_window", "no_rope_layers"}
