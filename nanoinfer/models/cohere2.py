"""Cohere2: attention and MLP side by side, norms that subtract the mean, positions in layers with a window alone."""

from functools import partial
from typing import ClassVar

from nanoinfer.layers.layernorm import CohereLayerNorm
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import layers_without_windows, number, read_alternating_windows
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
    config_readers: ClassVar = {
        "windows": partial(read_alternating_windows, needs_window=True),
        "unrotated": layers_without_windows,
        "rms_norm_eps": number("layer_norm_eps"),
        "logits_scaling": lambda fields: 1 / fields.float("logit_scale"),
    }
    unsupported_unless: ClassVar = {
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_qk_norm": False,
    }
