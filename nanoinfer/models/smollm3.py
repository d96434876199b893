"""SmolLM3: the common decoder, some of whose layers know no positions (NoPE, Yang et al. 2025)."""

from functools import partial
from typing import ClassVar

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.config_fields import read_windows


def unrotated_layers(fields: Fields) -> tuple[bool, ...]:
    """Return which layers have 0 in `no_rope_layers`."""
    layers, num_layers = fields.get("no_rope_layers"), fields.int("num_hidden_layers")
    if layers is None:
        interval = fields.int("no_rope_layer_interval")
        return tuple((index + 1) % interval == 0 for index in range(num_layers))
    if not isinstance(layers, list) or len(layers) != num_layers or not all(layer in (0, 1) for layer in layers):
        rule = f"it must have 1, or 0 for no positions, for each of {num_layers} layers"
        raise fields.error("no_rope_layers", rule)
    return tuple(not layer for layer in layers)


class SmolLM3ForCausalLM(DecoderForCausalLM):
    config_defaults: ClassVar = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "pad_token_id": 128004,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
        "rope_theta": 2000000.0,
    }
    config_readers: ClassVar = {
        "windows": partial(read_windows, local_layers=unrotated_layers, switch="use_sliding_window"),
        "unrotated": unrotated_layers,
    }
