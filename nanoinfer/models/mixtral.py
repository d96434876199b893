"""Mixtral: Mistral's decoder with experts in all layers."""

from typing import Any, ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_experts, read_windows


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
    renamed_modules: ClassVar = {"block_sparse_moe": "mlp"}
    packed_modules_mapping: ClassVar = {
        **DecoderForCausalLM.packed_modules_mapping,
        "w1": ("gate_up_proj", "gate"),
        "w3": ("gate_up_proj", "up"),
        "w2": ("down_proj", "down"),
    }

    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        return {"windows": read_windows(fields), "moe": read_experts(fields)}
