"""Qwen3 with a mixture of experts: the decoder of Qwen3, with experts in most layers."""

from typing import Any, ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_experts, read_windows
from nanoinfer.models.decoder_spec import DecoderSpec


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(qk_norm=True)
    config_defaults: ClassVar = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    }

    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        windows = read_windows(fields) if fields.flag("use_sliding_window") else None
        return {"windows": windows, "moe": read_experts(fields)}
