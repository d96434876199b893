"""Reads which architecture and which head a config.json means by the class that it names, or says what to do."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.checkpoint.hub import GGUF_REMEDY, read_json
from nanoinfer.errors import ADAPTER_REMEDY, ModelError

# How the names of architectures end that generate nothing, and what their head computes.
ENDINGS = {"ForSequenceClassification": "sequence", "ForTokenClassification": "tokens", "Model": "none"}
ENCODER_DECODER = (
    "an encoder-decoder, which reads its prompt with one half and writes with the other; run it with transformers, or "
    "take a model whose architecture ends in ForCausalLM"
)
MULTIMODAL = (
    "a model that reads images or sound beside text; nanoinfer runs the text part of a few alone, as docs/models.md "
    "lists: take a text model of the same family"
)
CLASSIFIER = "a classifier, which generates no text; run it with transformers' pipeline"
# By how the name of an architecture ends; the first that fits counts.
KINDS = {
    "ForSequenceClassification": f"{CLASSIFIER}, or with sentence-transformers if it ranks or rewards texts",
    "RewardModel": "a reward model, which scores texts and generates none; run it with transformers",
    "Classification": CLASSIFIER,
    "ForQuestionAnswering": CLASSIFIER,
    "ForMultipleChoice": CLASSIFIER,
    "ForMaskedLM": "an encoder like BERT, which fills in masked words and generates no text; run it with transformers",
    "ForPreTraining": "an encoder like BERT, which generates no text; run it with transformers",
    "ForCTC": "a model that reads speech; run it with transformers",
}
HEADLESS = (
    "a model without a language-model head, as for embeddings; run it with sentence-transformers, or take the "
    "checkpoint of the same family that generates"
)
# How the names of encoder-decoders begin; their config.json says is_encoder_decoder, but may leave it out.
ENCODER_DECODERS = (
    *("Bart", "BigBirdPegasus", "Blenderbot", "FSMT", "LED", "LongT5", "M2M100", "MBart", "MT5", "Marian", "Pegasus"),
    *("ProphetNet", "Seamless", "Speech2Text", "SwitchTransformers", "T5", "UMT5", "Whisper"),
)
SENSES = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower")  # fields of models that see or hear


def read_architecture(fields: Fields, supported: Collection[str]) -> tuple[str, str | None]:
    """Return the architecture that is run, and what its head computes; None for a language-model head.

    Qwen3ForSequenceClassification, say, is Qwen3ForCausalLM with the head "sequence". What is not known is returned as
    `architectures` calls it.
    """
    names = fields.get("architectures")
    if not isinstance(names, (list, type(None))):
        raise fields.error("architectures", "it must be a list of names")
    architecture = str((names or ["(none)"])[0])
    if architecture in supported and not architecture.endswith(tuple(ENDINGS)):
        return architecture, None
    for ending, kind in ENDINGS.items():
        if not architecture.endswith(ending):
            continue
        stem = architecture.removesuffix(ending).removesuffix("Text")
        whole = "ForConditionalGeneration" if "text_config" in fields.values else "ForCausalLM"
        for base in (f"{stem}{whole}", f"{stem}Model"):
            if base in supported:
                return base, kind
    return architecture, None


def explain_architecture(raw: Mapping[str, Any], architecture: str, supported: Iterable[str]) -> str:
    """Say what kind of model an unsupported architecture is, and what to do.

    raw: the fields of its config.json.
    """
    kind = next((text for ending, text in KINDS.items() if architecture.endswith(ending)), None)
    generates = architecture.endswith(("ForConditionalGeneration", "ForImageTextToText", "ForVision2Seq"))
    is_headless = architecture.endswith("Model") and not architecture.endswith("HeadModel")
    if kind is None and not architecture.endswith("EncoderModel"):
        if raw.get("is_encoder_decoder") is True or (generates and architecture.startswith(ENCODER_DECODERS)):
            kind = ENCODER_DECODER
        elif generates or any(raw.get(name) for name in SENSES):
            kind = MULTIMODAL
    kind = kind or (HEADLESS if is_headless else None)
    if kind is None:
        return f"architecture {architecture!r} is not supported; supported are {', '.join(supported)}"
    return f"architecture {architecture!r} is not supported: it is {kind}"


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return the fields of a model's config.json. Raises ModelError for a folder without one, as what it is."""
    if (folder / "config.json").exists():
        return read_json(folder / "config.json")
    if (folder / "adapter_config.json").exists():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        raise ModelError(f"{folder} holds a LoRA adapter of {base!r}, not a model; {ADAPTER_REMEDY}")
    if any(folder.glob("*.gguf")):
        raise ModelError(f"{folder} has only GGUF files; {GGUF_REMEDY}")
    raise ModelError(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint")
