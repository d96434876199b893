"""Seed-OSS: the common decoder with biases on q, k and v."""

from typing import ClassVar

from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.decoder_spec import DecoderSpec


class SeedOssForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(o_bias=False)
    config_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "max_position_embeddings": 524288,
        "pad_token_id": 1,
    }
