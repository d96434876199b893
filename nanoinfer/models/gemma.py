"""Gemma 2 and 3, text alone: norms around attention and MLP, GeGLU, scaled embeddings, two types of layers."""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.embed_head import VocabParallelEmbedding
from nanoinfer.layers.layernorm import GemmaRMSNorm
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import ROPE_BY_TYPE_OF_LAYER, read_alternating_windows
from nanoinfer.models.decoder_spec import DecoderSpec
from nanoinfer.ops.activations.spec import gelu_tanh_and_mul


class Gemma3Embedding(VocabParallelEmbedding):
    """Scales the embeddings by sqrt(hidden_size), rounded to their dtype. The head that is tied to them does not.

    scaled_by: what the scale is the square root of; None for hidden_size.
    """

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel, scaled_by: int | None = None) -> None:
        super().__init__(vocab_size, hidden_size, tp)
        self.scale = torch.tensor((scaled_by or hidden_size) ** 0.5, dtype=self.weight.dtype, device="cpu").item()

    def forward(self, token_ids: Tensor) -> Tensor:
        return super().forward(token_ids) * self.scale


def read_attention_scale(fields: Fields) -> float:
    """Read the number by whose square root scores are divided."""
    return fields.float("query_pre_attn_scalar") ** -0.5


class Gemma2ForCausalLM(DecoderForCausalLM):
    """Caps the scores of attention and the logits, and has a window in every other layer."""

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
    config_readers: ClassVar = {
        "attention_scale": read_attention_scale,
        "windows": read_alternating_windows,
        "attention_soft_cap": partial(Fields.optional_float, name="attn_logit_softcapping"),
        "logits_soft_cap": partial(Fields.optional_float, name="final_logit_softcapping"),
    }
    unsupported_unless: ClassVar = {"hidden_act": "gelu_pytorch_tanh"}  # checkpoints have it beside hidden_activation


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Normalises queries and keys, and rotates them otherwise in layers with a window."""

    spec: ClassVar = DecoderSpec(
        qk_norm=True,
        has_post_norms=True,
        norm=GemmaRMSNorm,
        embedding=Gemma3Embedding,
        activation=gelu_tanh_and_mul,
    )
    config_defaults: ClassVar = {
        **Gemma2ForCausalLM.config_defaults,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,  # every sixth layer attends to all tokens
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    config_readers: ClassVar = {
        **ROPE_BY_TYPE_OF_LAYER,
        "attention_scale": read_attention_scale,
        "windows": partial(read_alternating_windows, needs_window=True),  # they say which RoPE a layer has
        "logits_soft_cap": partial(Fields.optional_float, name="final_logit_softcapping"),
    }
