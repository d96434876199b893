"""GLM-4.5 and 4.6: experts that are scored by themselves, one for all tokens; partial rotary; dense first layers."""

from functools import partial
from typing import Any, ClassVar

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.checkpoint.fields import Fields
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.layers.moe import SigmoidRouter, SparseMoE
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_experts, read_rotary_dim
from nanoinfer.models.decoder_spec import DecoderSpec


def read_glm_experts(fields: Fields) -> MoEConfig:
    """Read the sizes of the experts, their groups, and how many compute all tokens; these count as one."""
    num_shared = fields.int("n_shared_experts") if fields.get("n_shared_experts") else 0
    return read_experts(
        fields,
        num_dense=fields.int("first_k_dense_replace", least=0),
        shared_size=num_shared * fields.int("moe_intermediate_size") if num_shared else None,
        num_groups=fields.int("n_group"),
        num_chosen_groups=fields.int("topk_group"),
        scaling_factor=fields.float("routed_scaling_factor"),
    )


class Glm4MoeForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(o_bias=False, experts=partial(SparseMoE, router=SigmoidRouter, is_shared_gated=False))
    config_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    }
    config_readers: ClassVar = {
        "rotary_dim": read_rotary_dim,
        "qk_norm": partial(Fields.flag, name="use_qk_norm"),
        "moe": read_glm_experts,
    }
    renamed_modules: ClassVar = {"shared_experts": "shared_expert"}

    def __init__(self, config: ModelConfig, *args: Any) -> None:
        super().__init__(config, *args)
        # The layers after the last predict several tokens at once.
        self.unused_prefixes = (*self.unused_prefixes, f"model.layers.{config.num_hidden_layers}.")  # type: ignore[misc]
