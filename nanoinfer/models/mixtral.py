"""Mixtral: Mistral's decoder with experts in all layers."""

from typing import ClassVar

from nanoinfer.models.causal_lm import DecoderForCausalLM


class MixtralForCausalLM(DecoderForCausalLM):
    config_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    special_fields: ClassVar = {"sliding_window", "num_experts"}
    renamed_modules: ClassVar = {"block_sparse_moe": "mlp"}
    packed_modules_mapping: ClassVar = {
        **DecoderForCausalLM.packed_modules_mapping,
        "w1": ("gate_up_proj", "gate"),
        "w3": ("gate_up_proj", "up"),
        "w2": ("down_proj", "down"),
    }
