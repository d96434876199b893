"""EXAONE 4: norms after attention and MLP instead of before; layers without a window know no positions."""

from typing import ClassVar

from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import layers_without_windows, read_alternating_windows
from nanoinfer.models.decoder_spec import DecoderSpec


class Exaone4ForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(qk_norm=True, has_post_norms=True, has_pre_norms=False)
    config_defaults: ClassVar = {
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,  # every fourth layer attends to all tokens
    }
    config_readers: ClassVar = {"windows": read_alternating_windows, "unrotated": layers_without_windows}
