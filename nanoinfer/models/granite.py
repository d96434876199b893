"""Granite: the common decoder with four multipliers, of embeddings, scores, what layers add, and logits."""

from typing import Any

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.models.causal_lm import DecoderForCausalLM


class GraniteForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        return {
            "attention_scale": fields.float("attention_multiplier", 1.0),
            **{
                name: fields.float(name, 1.0)
                for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
            },
        }
