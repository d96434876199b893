"""Gemma 3, text alone: norms around attention and MLP, GeGLU, scaled embeddings, two types of layers.

A layer with a window has another RoPE than one that attends to all tokens.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.embed_head import VocabParallelEmbedding
from nanoinfer.layers.gemma_rms_norm import GemmaRMSNorm
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import all_but_every_nth, read_ropes, read_windows
from nanoinfer.models.decoder_spec import DecoderSpec
from nanoinfer.ops.activations.spec import gelu_tanh_and_mul


class Gemma3Embedding(VocabParallelEmbedding):
    """Scales the embeddings by sqrt(hidden_size), rounded to their dtype. The head that is tied to them does not."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__(vocab_size, hidden_size, tp)
        self.scale = torch.tensor(hidden_size**0.5, dtype=self.weight.dtype, device="cpu").item()

    def forward(self, token_ids: Tensor) -> Tensor:
        return super().forward(token_ids) * self.scale


class Gemma3ForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(
        qk_norm=True,
        has_post_norms=True,
        norm=GemmaRMSNorm,
        embedding=Gemma3Embedding,
        activation=gelu_tanh_and_mul,
    )
    config_defaults: ClassVar = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,  # every sixth layer attends to all tokens
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    }

    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        return {
            **read_ropes(fields),
            "windows": read_windows(fields, all_but_every_nth, needs_window=True),  # they say which RoPE a layer has
            "attention_scale": fields.float("query_pre_attn_scalar") ** -0.5,
        }
