"""The architectures that nanoinfer runs, keyed on `architectures` in config.json.

To add one, write a file beside qwen3.py that says how it differs from the common decoder, and enter its class here.
"""

from nanoinfer.errors import ModelError
from nanoinfer.models.decoder import DecoderForCausalLM
from nanoinfer.models.qwen3 import Qwen3ForCausalLM

REGISTRY: dict[str, type[DecoderForCausalLM]] = {
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def get_model_class(architecture: str) -> type[DecoderForCausalLM]:
    """Return the class of an architecture. Raises ModelError, which lists the supported ones."""
    if architecture not in REGISTRY:
        raise ModelError(f"architecture {architecture!r} is not supported; supported are {', '.join(REGISTRY)}")
    return REGISTRY[architecture]
