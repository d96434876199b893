"""Qwen3-Next and Qwen3.5, text alone: three layers of four have linear attention, the others gated attention.

The classes for text and images have the same text model. Their vision model is left out, and prompts are text.
"""

from typing import ClassVar

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.checkpoint.fields import Fields
from nanoinfer.layers.layernorm import GemmaRMSNorm
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_experts, read_linear_attention, read_rotary_dim
from nanoinfer.models.decoder_spec import DecoderSpec


def read_experts_and_shared(fields: Fields) -> MoEConfig:
    """Read the sizes of the experts, and of the one that computes all tokens."""
    return read_experts(fields, shared_size=fields.int("shared_expert_intermediate_size"))


class Qwen3_5ForCausalLM(DecoderForCausalLM):  # noqa: N801 (as in config.json)
    """Has a dense MLP, and its linear weights one after the other."""

    spec: ClassVar = DecoderSpec(qk_norm=True, has_gates=True, norm=GemmaRMSNorm)
    config_defaults: ClassVar = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
    }
    config_readers: ClassVar = {"rotary_dim": read_rotary_dim, "linear_attention": read_linear_attention}
    unused_prefixes: ClassVar = ("mtp.", "model.visual.")
    packed_modules_mapping: ClassVar = {
        **DecoderForCausalLM.packed_modules_mapping,
        "in_proj_qkv": ("in_proj_qkvz", "qkv"),
        "in_proj_z": ("in_proj_qkvz", "z"),
        "in_proj_b": ("in_proj_ba", "b"),
        "in_proj_a": ("in_proj_ba", "a"),
    }


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801
    """Has experts, and one for all tokens."""

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
    config_readers: ClassVar = {**Qwen3_5ForCausalLM.config_readers, "moe": read_experts_and_shared}


class Qwen3NextForCausalLM(DecoderForCausalLM):
    """Has experts, one of them for all tokens, and its linear weights interleaved by key heads."""

    spec: ClassVar = DecoderSpec(qk_norm=True, has_gates=True, interleaves_linear=True, norm=GemmaRMSNorm)
    config_defaults: ClassVar = {
        **Qwen3_5MoeForCausalLM.config_defaults,
        "intermediate_size": 5632,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    }
    config_readers: ClassVar = Qwen3_5MoeForCausalLM.config_readers
    packed_modules_mapping: ClassVar = {
        **DecoderForCausalLM.packed_modules_mapping,
        "in_proj_qkvz": ("in_proj_qkvz", "qkvz"),
        "in_proj_ba": ("in_proj_ba", "ba"),
    }
    unused_prefixes: ClassVar = ("mtp.",)
