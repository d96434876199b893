"""gpt-oss: attention with sinks, a window in every other layer, experts with biases and a clamped SwiGLU."""

from functools import partial
from typing import ClassVar

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.checkpoint.fields import Fields
from nanoinfer.layers.experts import ClampedExperts
from nanoinfer.layers.moe import BiasedRouter, SparseMoE
from nanoinfer.models.causal_lm import DecoderForCausalLM, of_all_experts
from nanoinfer.models.config_fields import read_alternating_windows, read_experts
from nanoinfer.models.decoder_spec import DecoderSpec


def read_clamped_experts(fields: Fields) -> MoEConfig:
    """Read the sizes of the experts, and where their gate and up are clamped."""
    limit, alpha = fields.float("swiglu_limit"), fields.float("swiglu_alpha")
    return read_experts(fields, swiglu_limit=limit, swiglu_alpha=alpha)


class GptOssForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(
        has_sinks=True, experts=partial(SparseMoE, router=BiasedRouter, experts=ClampedExperts)
    )
    config_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    }
    config_readers: ClassVar = {"windows": read_alternating_windows, "moe": read_clamped_experts}
    renamed_modules: ClassVar = {"router": "gate"}
    renamed_endings: ClassVar = {
        "self_attn.sinks": "self_attn.sinks.weight",
        **of_all_experts({"": "weight", "_bias": "bias", "_blocks": "weight_blocks", "_scales": "weight_scales"}),
    }
