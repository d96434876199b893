"""MiniMax-M2: experts that are scored by themselves, norms of all queries and keys, partial rotary."""

from typing import ClassVar

from nanoinfer.checkpoint.moe_config import MoEConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.moe import SigmoidRouter, SparseMoE
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.decoder_spec import DecoderSpec
from nanoinfer.models.mixtral import MixtralForCausalLM


class MiniMaxM2Experts(SparseMoE):
    """Has the router's bias beside the router, as checkpoints do."""

    def __init__(self, hidden_size: int, moe: MoEConfig, tp: TensorParallel) -> None:
        super().__init__(hidden_size, moe, tp, router=SigmoidRouter)
        self.e_score_correction_bias = self.gate.e_score_correction_bias


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
    special_fields: ClassVar = {"partial_rotary_factor", "rotary_dim", "num_experts"}
    renamed_modules: ClassVar = MixtralForCausalLM.renamed_modules
    packed_modules_mapping: ClassVar = MixtralForCausalLM.packed_modules_mapping
