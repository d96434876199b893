"""Qwen3, dense: Qwen2 with normalised queries and keys in place of biases."""

from typing import ClassVar

from nanoinfer.models.decoder_spec import DecoderSpec
from nanoinfer.models.qwen2 import Qwen2ForCausalLM


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    spec: ClassVar = DecoderSpec(qk_norm=True)
    config_defaults: ClassVar = {**Qwen2ForCausalLM.config_defaults, "head_dim": 128}
