"""Qwen3-Next: three layers of four have linear attention, the others gated attention; experts, one of them for all."""

from typing import Any, ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.layers.gemma_rms_norm import GemmaRMSNorm
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_experts, read_linear_attention, read_rotary_dim
from nanoinfer.models.decoder_spec import DecoderSpec

LINEAR_FIELDS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}


class Qwen3NextForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(qk_norm=True, has_gates=True, interleaves_linear=True, norm=GemmaRMSNorm)
    config_defaults: ClassVar = {
        **LINEAR_FIELDS,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
    }
    packed_modules_mapping: ClassVar = {
        **DecoderForCausalLM.packed_modules_mapping,
        "in_proj_qkvz": ("in_proj_qkvz", "qkvz"),
        "in_proj_ba": ("in_proj_ba", "ba"),
    }
    unused_prefixes: ClassVar = ("mtp.",)

    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        return {
            "rotary_dim": read_rotary_dim(fields),
            "linear_attention": read_linear_attention(fields),
            "moe": read_experts(fields, shared_size=fields.int("shared_expert_intermediate_size")),
        }
