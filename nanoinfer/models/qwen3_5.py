"""Qwen3.5, text alone: as Qwen3-Next, with a dense MLP or with experts, and its linear weights one after the other.

The classes for text and images have the same text model. Their vision model is left out, and prompts are text.
"""

from typing import Any, ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.layers.gemma_rms_norm import GemmaRMSNorm
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_experts, read_linear_attention, read_rotary_dim
from nanoinfer.models.decoder_spec import DecoderSpec
from nanoinfer.models.qwen3_next import LINEAR_FIELDS


class Qwen3_5ForCausalLM(DecoderForCausalLM):  # noqa: N801 (as in config.json)
    spec: ClassVar = DecoderSpec(qk_norm=True, has_gates=True, norm=GemmaRMSNorm)
    config_defaults: ClassVar = {
        **LINEAR_FIELDS,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
    }
    unused_prefixes: ClassVar = ("mtp.", "model.visual.")
    packed_modules_mapping: ClassVar = {
        **DecoderForCausalLM.packed_modules_mapping,
        "in_proj_qkv": ("in_proj_qkvz", "qkv"),
        "in_proj_z": ("in_proj_qkvz", "z"),
        "in_proj_b": ("in_proj_ba", "b"),
        "in_proj_a": ("in_proj_ba", "a"),
    }

    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        return {"rotary_dim": read_rotary_dim(fields), "linear_attention": read_linear_attention(fields)}


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801
    config_defaults: ClassVar = {
        **Qwen3_5ForCausalLM.config_defaults,
        "num_key_value_heads": 2,
        "intermediate_size": 512,  # of a dense MLP, which no layer has
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }

    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        moe = read_experts(fields, shared_size=fields.int("shared_expert_intermediate_size"))
        return {**super().read_config(fields), "moe": moe}
