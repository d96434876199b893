"""Cohere2: attention and MLP side by side, norms that subtract the mean, positions in layers with a window alone."""

from typing import Any, ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.layers.cohere_layer_norm import CohereLayerNorm
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import all_but_every_nth, read_windows, without_windows
from nanoinfer.models.decoder_spec import DecoderSpec

UNSUPPORTED_UNLESS = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


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

    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        for name, neutral in UNSUPPORTED_UNLESS.items():
            fields.must_be(name, neutral)
        windows = read_windows(fields, all_but_every_nth, needs_window=True)
        return {
            "windows": windows,
            "unrotated": without_windows(windows),
            "rms_norm_eps": fields.float("layer_norm_eps"),
            "logits_scaling": 1 / fields.float("logit_scale"),
        }
