"""Granite: the common decoder with four multipliers, of embeddings, scores, what layers add, and logits."""

from typing import ClassVar

from nanoinfer.checkpoint.config_fields import MULTIPLIERS
from nanoinfer.models.causal_lm import DecoderForCausalLM


class GraniteForCausalLM(DecoderForCausalLM):
    config_defaults: ClassVar = dict.fromkeys(MULTIPLIERS, 1.0)
    special_fields: ClassVar = {*MULTIPLIERS}
