"""Gemma 2: soft caps of attention's scores and of logits; a window in every other layer; the rest as in Gemma 3."""

from typing import Any, ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.layers.gemma_rms_norm import GemmaRMSNorm
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import all_but_every_nth, read_windows
from nanoinfer.models.decoder_spec import DecoderSpec
from nanoinfer.models.gemma3 import Gemma3Embedding
from nanoinfer.ops.activations.spec import gelu_tanh_and_mul


class Gemma2ForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(
        has_post_norms=True, norm=GemmaRMSNorm, embedding=Gemma3Embedding, activation=gelu_tanh_and_mul
    )
    config_defaults: ClassVar = {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,  # every second layer attends to all tokens
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }

    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        fields.must_be("hidden_act", "gelu_pytorch_tanh")  # which checkpoints have beside hidden_activation
        return {
            "windows": read_windows(fields, all_but_every_nth),
            "attention_scale": fields.float("query_pre_attn_scalar") ** -0.5,
            "attention_soft_cap": fields.optional_float("attn_logit_softcapping"),
            "logits_soft_cap": fields.optional_float("final_logit_softcapping"),
        }
