"""Mistral's family: the common decoder with windows; with YaRN and scaled queries; with experts."""

from typing import ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_experts, read_windows, rope_part


class MistralForCausalLM(DecoderForCausalLM):
    """Has a sliding window in all layers unless config.json says null."""

    config_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }
    config_readers: ClassVar = {"windows": read_windows}


class MixtralForCausalLM(DecoderForCausalLM):
    """Has experts in all layers."""

    config_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    config_readers: ClassVar = {"windows": read_windows, "moe": read_experts}
    renamed_modules: ClassVar = {"block_sparse_moe": "mlp"}
    packed_modules_mapping: ClassVar = {
        **DecoderForCausalLM.packed_modules_mapping,
        "w1": ("gate_up_proj", "gate"),
        "w3": ("gate_up_proj", "up"),
        "w2": ("down_proj", "down"),
    }


def read_query_scaling(fields: Fields) -> float | None:
    """Read how queries far from the start grow, among the parameters of rotary embedding."""
    rope, name = rope_part(fields), "llama_4_scaling_beta"
    if not rope.get(name):
        return None
    rope.int("original_max_position_embeddings")  # which it needs
    return rope.float(name)


class Ministral3ForCausalLM(DecoderForCausalLM):
    """Has YaRN, and scales queries far from the start."""

    config_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 11,
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
    config_readers: ClassVar = {"windows": read_windows, "query_scaling_beta": read_query_scaling}
