"""MiniMax-M2: experts that are scored by themselves, norms of all queries and keys, partial rotary."""

from typing import ClassVar

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.checkpoint.fields import Fields
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ModelError
from nanoinfer.layers.moe import SigmoidRouter, SparseMoE
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_experts, read_head_dim, read_rotary_dim
from nanoinfer.models.decoder_spec import DecoderSpec
from nanoinfer.models.mistral import MixtralForCausalLM


class MiniMaxM2Experts(SparseMoE):
    """Holds the router's bias beside the router, as checkpoints do."""

    def __init__(self, hidden_size: int, moe: MoEConfig, tp: TensorParallel) -> None:
        super().__init__(hidden_size, moe, tp, router=SigmoidRouter)
        self.e_score_correction_bias = self.gate.e_score_correction_bias


def read_given_rotary_dim(fields: Fields) -> int:
    """Read `rotary_dim`, the older spelling, or else the share of a head."""
    rotary_dim, head_dim = fields.optional_int("rotary_dim"), read_head_dim(fields)
    if rotary_dim is not None and rotary_dim > head_dim:
        raise ModelError(f"config.json has rotary_dim={rotary_dim}, more than a head's {head_dim} dimensions")
    return rotary_dim or read_rotary_dim(fields)


class MiniMaxM2ForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(whole_qk_norm=True, experts=MiniMaxM2Experts)
    config_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000.0,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }
    renamed_modules: ClassVar = MixtralForCausalLM.renamed_modules
    packed_modules_mapping: ClassVar = MixtralForCausalLM.packed_modules_mapping
    config_readers: ClassVar = {"rotary_dim": read_given_rotary_dim, "moe": read_experts}
