"""Finds which classes of the installed transformers run by its layers, by their names, without importing any."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import transformers
from transformers.models.auto import modeling_auto

from nanoinfer.models import SUPPORTED
from nanoinfer.models.transformers.transformers_config import GENERATING

version: str = transformers.__version__

SPARSE = "sparse attention: an index chooses the tokens that each attends to"
STATES = "convolutions or recurrent states beside attention"
DRAFTS = "drafts from the keys and values of another model"
# Classes that have the attention interface, and why they are refused. The probe and the guards find it, not this list.
REFUSED = {
    "AXK2ForCausalLM": SPARSE,
    "DeepseekV32ForCausalLM": SPARSE,
    "DeepseekV4ForCausalLM": "keys that stand for several tokens",
    "DogeForCausalLM": "a mask that the model computes from its values",
    "DoryForCausalLM": "other answers with transformers' own cache than without",
    "Dots3NoteForCausalLM": SPARSE,
    "Gemma4AssistantForCausalLM": DRAFTS,
    "Gemma4UnifiedAssistantForCausalLM": DRAFTS,
    "GlmMoeDsaForCausalLM": SPARSE,
    "GraniteMoeHybridForCausalLM": STATES,
    "HYV4ForCausalLM": SPARSE,
    "Lfm2ForCausalLM": STATES,
    "Lfm2MoeForCausalLM": STATES,
    "Lfm3ForCausalLM": STATES,
    "MiniMaxForCausalLM": STATES,
    "MiniMaxM3VLForCausalLM": SPARSE,
    "MobileBertModel": "words that are mixed with their neighbours before attention",
    "RecurrentGemmaForCausalLM": STATES,
    "ZayaForCausalLM": STATES,
}


def generating_classes() -> list[str]:
    """Return the classes that generate and run by transformers' layers alone, sorted."""
    return _with_interface(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), GENERATING)


def embedding_classes() -> list[str]:
    """Return the encoders that run by transformers' layers alone, sorted."""
    models = modeling_auto.MODEL_MAPPING_NAMES
    kinds = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return _with_interface((models.get(kind, ()) for kind in kinds), "Model")


def _with_interface(found: Iterable[str | Sequence[str]], endings: str | tuple[str, ...]) -> list[str]:
    """Return the names with these endings that run, and that we have no layers for. found: names, by kind of model."""
    names = {name for part in found for name in ((part,) if isinstance(part, str) else part)}
    wanted = (name for name in names - {*SUPPORTED, *REFUSED} if name.endswith(endings))
    return sorted(name for name in wanted if _has_interface(name))


def _has_interface(name: str) -> bool:
    """Return whether the source of a class says that its attention can be replaced."""
    module = getattr(transformers, "_class_to_module", {}).get(name)
    if module is None:
        return False
    path = Path(str(transformers.__file__)).parent / f"{module.replace('.', '/')}.py"
    return "_supports_attention_backend = True" in path.read_text(encoding="utf-8")
