"""Phi-3, Phi-3.5 and Phi-4-mini: the common decoder, packed alike in checkpoints; often a part of a head is rotated."""

from typing import ClassVar

from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_rotary_dim, read_windows


class Phi3ForCausalLM(DecoderForCausalLM):
    config_defaults: ClassVar = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 32000,
        "partial_rotary_factor": 1.0,
        "sliding_window": None,
    }
    config_readers: ClassVar = {"windows": read_windows, "rotary_dim": read_rotary_dim}
