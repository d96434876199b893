"""DeepSeek-V2 and V3, Kimi K2, Moonlight and GLM-4.7-Flash: latent attention, and experts as GLM-4.5 has them."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from nanoinfer.checkpoint.base_config import LatentAttentionConfig, MoEConfig
from nanoinfer.checkpoint.fields import Fields
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.layers.moe import SoftmaxGroupRouter, SparseMoE
from nanoinfer.models.config_fields import PARTIAL, rope_part
from nanoinfer.models.glm4_moe import Glm4MoeForCausalLM, read_glm_experts
from nanoinfer.models.latent_attention import LatentAttention

# Of sparse attention, where an index chooses the tokens that each attends to (DeepSeek-V3.2, GLM-5).
SPARSE_ATTENTION = dict.fromkeys(("index_topk", "index_n_heads", "index_head_dim"))


def read_latent_attention(fields: Fields, may_be_halved: bool = True) -> LatentAttentionConfig:
    """Read the sizes of latents and heads. may_be_halved: whether rotation may turn halves of a head together."""
    sizes = LatentAttentionConfig(
        query_rank=fields.optional_int("q_lora_rank"),
        latent_size=fields.int("kv_lora_rank"),
        rotary_size=fields.int("qk_rope_head_dim"),
        plain_size=fields.int("qk_nope_head_dim"),
        value_size=fields.int("v_head_dim"),
        is_interleaved=not may_be_halved or fields.flag("rope_interleave", True),
    )
    if sizes.query_rank is None and fields.flag("attention_bias"):
        raise fields.error("attention_bias", "without q_lora_rank it is not supported; use a model without it")
    return sizes


def read_key_size(fields: Fields) -> int:
    """Read the size of a head's keys; `head_dim` is that of their rotated part in these models."""
    return fields.int("qk_nope_head_dim") + fields.int("qk_rope_head_dim")


def read_rotary_size(fields: Fields) -> int:
    """Read how many numbers of a head are rotated."""
    fields.with_others(rope_part(fields), [PARTIAL]).must_be(PARTIAL, 1.0)
    return fields.int("qk_rope_head_dim")


def read_latent_scale(fields: Fields) -> float:
    """Read the factor of the scores. With YaRN it grows with the length of the context."""
    rope, scale = rope_part(fields), read_key_size(fields) ** -0.5
    if not rope.get("mscale_all_dim") or not rope.get("factor"):
        return scale
    mscale, factor = rope.float("mscale_all_dim"), rope.float("factor")
    return scale * (0.1 * mscale * math.log(factor) + 1.0) ** 2 if factor > 1 else scale


def read_softmax_experts(fields: Fields) -> MoEConfig:
    """Read the experts of DeepSeek-V2, which are in groups if topk_method says so."""
    fields.must_be("norm_topk_prob", False)  # transformers passes it over, and DeepSeek's own code does not
    if fields.choice("topk_method", ("greedy", "group_limited_greedy")) == "greedy":
        fields = replace(fields, values={**fields.values, "n_group": 1, "topk_group": 1})
    return read_glm_experts(fields)


def read_experts_by_layer(fields: Fields) -> MoEConfig:
    """Read the experts, and which layers have them: all but the first where config.json does not say."""
    moe, types = read_glm_experts(fields), fields.get("mlp_layer_types")
    if types is None:
        return moe
    if not isinstance(types, list) or not {*types} <= {"dense", "sparse"} or len(types) != len(moe.has_experts):
        raise fields.error("mlp_layer_types", f"it must name dense or sparse for each of {len(moe.has_experts)} layers")
    return replace(moe, has_experts=tuple(kind == "sparse" for kind in types))


class DeepseekV3ForCausalLM(Glm4MoeForCausalLM):
    spec: ClassVar = replace(Glm4MoeForCausalLM.spec, attention=LatentAttention)
    config_defaults: ClassVar = {
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
    }
    config_readers: ClassVar = {
        "num_key_value_heads": lambda _: 1,  # of vectors, which all heads share
        "head_dim": read_key_size,
        "rotary_dim": read_rotary_size,
        "attention_scale": read_latent_scale,
        "latent_attention": read_latent_attention,
        "moe": read_glm_experts,
    }
    unsupported_unless: ClassVar = {**SPARSE_ATTENTION, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    packed_modules_mapping: ClassVar = {
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
        "q_proj": ("qkv_a_proj", "q"),
        "q_a_proj": ("qkv_a_proj", "q"),
        "kv_a_proj_with_mqa": ("qkv_a_proj", "kv"),
        "q_b_proj": ("q_b_proj", "q"),
        "kv_b_proj": ("kv_b_proj", "kv"),
    }

    def __init__(self, config: ModelConfig, *args: Any) -> None:
        super().__init__(config, *args)
        assert config.latent_attention is not None, "the config was read by the readers above"
        absent = "q_proj" if config.latent_attention.query_rank else "q_a_proj"
        mapping = type(self).packed_modules_mapping
        self.packed_modules_mapping = {name: place for name, place in mapping.items() if name != absent}  # type: ignore[misc]


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    spec: ClassVar = replace(
        DeepseekV3ForCausalLM.spec,
        experts=partial(SparseMoE, router=SoftmaxGroupRouter, is_shared_gated=False),
    )
    config_defaults: ClassVar = {
        **DeepseekV3ForCausalLM.config_defaults,
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "num_experts_per_tok": None,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "topk_method": "greedy",
    }
    config_readers: ClassVar = {
        **DeepseekV3ForCausalLM.config_readers,
        "latent_attention": partial(read_latent_attention, may_be_halved=False),
        "moe": read_softmax_experts,
    }
    unsupported_unless: ClassVar = {**SPARSE_ATTENTION, "scoring_func": "softmax"}


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    config_defaults: ClassVar = {
        **DeepseekV3ForCausalLM.config_defaults,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 768,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
    }
    config_readers: ClassVar = {**DeepseekV3ForCausalLM.config_readers, "moe": read_experts_by_layer}
