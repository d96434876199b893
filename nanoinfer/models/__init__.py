"""The architectures that nanoinfer runs, keyed on `architectures` in config.json.

To add one: write its module beside qwen3.py, give the class `packed_modules_mapping` and `forward` / `compute_logits`
as there, and enter it here.
"""

from nanoinfer.errors import ModelError
from nanoinfer.models.qwen3 import Qwen3ForCausalLM

CausalLM = Qwen3ForCausalLM  # a union, once there are more

REGISTRY: dict[str, type[CausalLM]] = {
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def get_model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture. Raises ModelError that lists the supported ones."""
    if architecture not in REGISTRY:
        raise ModelError(f"architecture {architecture!r} is not supported; supported are {', '.join(REGISTRY)}")
    return REGISTRY[architecture]
