"""Cohere2: attention and MLP side by side, norms that subtract the mean, positions in layers with a window alone."""

from typing import ClassVar

from nanoinfer.layers.cohere_layer_norm import CohereLayerNorm
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.decoder_spec import DecoderSpec


class Cohere2ForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(has_parallel_block=True, interleaves_rotary=True, norm=CohereLayerNorm)
    config_defaults: ClassVar = {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,  # every fourth layer attends to all tokens
    }
    special_fields: ClassVar = {"layer_norm_eps", "logit_scale", "sliding_window", "sliding_window_pattern"}
    rotates_windows_alone: ClassVar = True
    needs_window: ClassVar = True
    unsupported_unless: ClassVar = {
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_qk_norm": False,
    }
