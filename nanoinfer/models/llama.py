"""Llama 1 to 3, and the many models that use its class (SmolLM2, for one): the common decoder as it is."""

from collections.abc import Mapping
from typing import Any, ClassVar

from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.decoder import DecoderSpec


class LlamaForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec()
    config_defaults: ClassVar[Mapping[str, Any]] = {}
