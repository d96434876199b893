"""Llama 1 to 3, and the many models that use its class (SmolLM2, for one)."""

from nanoinfer.models.causal_lm import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """Takes the common decoder as it is."""
