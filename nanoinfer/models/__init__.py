"""The architectures that nanoinfer runs, keyed on `architectures` in config.json.

To add one, write a file beside olmo.py that says how it differs from the common decoder, and enter its class here. The
file is imported when a model needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanoinfer.errors import ModelError

if TYPE_CHECKING:
    from nanoinfer.models.causal_lm import DecoderForCausalLM

REGISTRY: dict[str, str] = {
    "Cohere2ForCausalLM": "cohere2.Cohere2ForCausalLM",
    "DeepseekV2ForCausalLM": "deepseek.DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "deepseek.DeepseekV3ForCausalLM",
    "Exaone4ForCausalLM": "exaone4.Exaone4ForCausalLM",
    "Gemma2ForCausalLM": "gemma.Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "gemma.Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "gemma.Gemma3ForCausalLM",
    "Gemma4ForCausalLM": "gemma4.Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration": "gemma4.Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM": "gemma4.Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "gemma4.Gemma4UnifiedForCausalLM",
    "Glm4MoeForCausalLM": "glm4_moe.Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "deepseek.Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM": "gpt_oss.GptOssForCausalLM",
    "GraniteForCausalLM": "granite.GraniteForCausalLM",
    "LlamaForCausalLM": "llama.LlamaForCausalLM",
    "MiniMaxM2ForCausalLM": "minimax_m2.MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM": "mistral.Ministral3ForCausalLM",
    "Mistral3ForConditionalGeneration": "mistral.MistralForCausalLM",
    "MistralForCausalLM": "mistral.MistralForCausalLM",
    "MixtralForCausalLM": "mistral.MixtralForCausalLM",
    "Olmo2ForCausalLM": "olmo.Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "olmo.Olmo3ForCausalLM",
    "Phi3ForCausalLM": "phi3.Phi3ForCausalLM",
    "Qwen2ForCausalLM": "qwen.Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "qwen.Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "qwen.Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "qwen.Qwen3MoeForCausalLM",
    "Qwen3VLForConditionalGeneration": "qwen.Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "qwen.Qwen3VLMoeForCausalLM",
    "Qwen3NextForCausalLM": "qwen3_next.Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM": "qwen3_next.Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "qwen3_next.Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "qwen3_next.Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_next.Qwen3_5MoeForCausalLM",
    "SeedOssForCausalLM": "seed_oss.SeedOssForCausalLM",
    "SmolLM3ForCausalLM": "smollm3.SmolLM3ForCausalLM",
}

# Encoders read texts and generate none. To the runner they are as decoders.
ENCODERS: dict[str, str] = {
    "BertModel": "bert.BertModel",
    "ModernBertModel": "modernbert.ModernBertModel",
    "RobertaModel": "bert.RobertaModel",
    "XLMRobertaModel": "bert.XLMRobertaModel",
}
SUPPORTED: dict[str, str] = {**REGISTRY, **ENCODERS}
# By the class for text and images, and the type of its text model: the class for text alone.
TEXT_TYPES = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    "Qwen2_5_VLForConditionalGeneration": {
        "qwen2_5_vl_text": "Qwen2ForCausalLM",
        "qwen2_5_vl": "Qwen2ForCausalLM",
    },
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
}


def get_model_class(architecture: str) -> "type[DecoderForCausalLM]":
    """Return the class of an architecture. Raises ModelError, which lists the supported ones."""
    if architecture not in SUPPORTED:
        raise ModelError(f"architecture {architecture!r} is not supported; supported are {', '.join(SUPPORTED)}")
    module, _, name = SUPPORTED[architecture].rpartition(".")
    found: Any = getattr(import_module(f"nanoinfer.models.{module}"), name)
    return found
