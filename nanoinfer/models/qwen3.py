"""Qwen3, dense: the common decoder with normalised queries and keys."""

from typing import ClassVar

from nanoinfer.models.decoder import DecoderForCausalLM, DecoderSpec


class Qwen3ForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(qk_norm=True)
