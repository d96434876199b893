"""OLMo 2 and 3: norms after attention and MLP instead of before, and over all queries and keys; 3 has windows."""

from typing import Any, ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import all_but_every_nth, read_ropes, read_windows
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

    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        # Windows say which RoPE a layer has.
        return {**read_ropes(fields), "windows": read_windows(fields, all_but_every_nth, needs_window=True)}
