"""OLMo 2 and 3: norms after attention and MLP instead of before, and over all queries and keys; 3 has windows."""

from functools import partial
from typing import ClassVar

from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import ROPE_BY_TYPE_OF_LAYER, read_alternating_windows
from nanoinfer.models.decoder_spec import DecoderSpec


class Olmo2ForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(whole_qk_norm=True, has_post_norms=True, has_pre_norms=False)
    config_defaults: ClassVar = {"rms_norm_eps": 1e-5, "pad_token_id": 1}


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    config_defaults: ClassVar = {
        "rms_norm_eps": 1e-5,
        "pad_token_id": 1,
        "rope_theta": 500000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,  # every fourth layer attends to all tokens
    }
    config_readers: ClassVar = {
        **ROPE_BY_TYPE_OF_LAYER,
        "windows": partial(read_alternating_windows, needs_window=True),  # they say which RoPE a layer has
    }
