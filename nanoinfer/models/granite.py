"""Granite: the common decoder with four multipliers, of embeddings, scores, what layers add, and logits."""

from typing import ClassVar

from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import number

MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


class GraniteForCausalLM(DecoderForCausalLM):
    config_defaults: ClassVar = dict.fromkeys((*MULTIPLIERS, "attention_multiplier"), 1.0)
    config_readers: ClassVar = {
        **{name: number(name) for name in MULTIPLIERS},
        "attention_scale": number("attention_multiplier"),
    }
