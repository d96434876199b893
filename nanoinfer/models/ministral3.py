"""Ministral 3: the common decoder with YaRN, whose queries are scaled far from the start."""

from typing import Any, ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_windows, rope_part


class Ministral3ForCausalLM(DecoderForCausalLM):
    config_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 11,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "max_position_embeddings": 262144,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }

    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        rope = rope_part(fields)
        beta = rope.optional_float("llama_4_scaling_beta") if rope.get("llama_4_scaling_beta") else None
        if beta is not None:
            rope.int("original_max_position_embeddings")  # which it needs
        return {"windows": read_windows(fields), "query_scaling_beta": beta}
