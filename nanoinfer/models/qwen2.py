"""Qwen2 and Qwen2.5, dense: the common decoder with biases on queries, keys and values."""

from typing import Any, ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_windows
from nanoinfer.models.decoder_spec import DecoderSpec


class Qwen2ForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(qkv_bias=True)
    config_defaults: ClassVar = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,  # the first of them attend to all tokens
    }

    @classmethod
    def read_config(cls, fields: Fields) -> dict[str, Any]:
        if not fields.flag("use_sliding_window"):
            return {}
        return {"windows": read_windows(fields, all_but_the_first)}


def all_but_the_first(fields: Fields) -> tuple[bool, ...]:
    """Return True for all layers but the first `max_window_layers`."""
    first = fields.int("max_window_layers", least=0)
    return tuple(index >= first for index in range(fields.int("num_hidden_layers")))
