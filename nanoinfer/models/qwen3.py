"""Qwen3, dense: the common decoder with normalised queries and keys."""

from typing import ClassVar

from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.decoder_spec import DecoderSpec
from nanoinfer.models.qwen2 import Qwen2ForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(qk_norm=True)
    config_defaults: ClassVar = {**Qwen2ForCausalLM.config_defaults, "head_dim": 128}
    special_fields: ClassVar = Qwen2ForCausalLM.special_fields
