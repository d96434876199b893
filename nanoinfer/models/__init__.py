"""The architectures that nanoinfer runs, keyed on `architectures` in config.json.

To add one, write a file beside qwen3.py that says how it differs from the common decoder, and enter its class here.
"""

from typing import Any

from nanoinfer.errors import ModelError
from nanoinfer.models.causal_lm import DecoderForCausalLM
from nanoinfer.models.cohere2 import Cohere2ForCausalLM
from nanoinfer.models.encoders.bert import BertModel
from nanoinfer.models.encoders.modernbert import ModernBertModel
from nanoinfer.models.exaone4 import Exaone4ForCausalLM
from nanoinfer.models.gemma2 import Gemma2ForCausalLM
from nanoinfer.models.gemma3 import Gemma3ForCausalLM
from nanoinfer.models.glm4_moe import Glm4MoeForCausalLM
from nanoinfer.models.gpt_oss import GptOssForCausalLM
from nanoinfer.models.granite import GraniteForCausalLM
from nanoinfer.models.llama import LlamaForCausalLM
from nanoinfer.models.minimax_m2 import MiniMaxM2ForCausalLM
from nanoinfer.models.ministral3 import Ministral3ForCausalLM
from nanoinfer.models.mistral import MistralForCausalLM
from nanoinfer.models.mixtral import MixtralForCausalLM
from nanoinfer.models.olmo import Olmo2ForCausalLM, Olmo3ForCausalLM
from nanoinfer.models.phi3 import Phi3ForCausalLM
from nanoinfer.models.qwen2 import Qwen2ForCausalLM
from nanoinfer.models.qwen3 import Qwen3ForCausalLM
from nanoinfer.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from nanoinfer.models.qwen3_moe import Qwen3MoeForCausalLM
from nanoinfer.models.qwen3_next import Qwen3NextForCausalLM
from nanoinfer.models.seed_oss import SeedOssForCausalLM
from nanoinfer.models.smollm3 import SmolLM3ForCausalLM

REGISTRY: dict[str, type[DecoderForCausalLM]] = {
    "Cohere2ForCausalLM": Cohere2ForCausalLM,
    "Exaone4ForCausalLM": Exaone4ForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForCausalLM,
    "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "GraniteForCausalLM": GraniteForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MiniMaxM2ForCausalLM": MiniMaxM2ForCausalLM,
    "Ministral3ForCausalLM": Ministral3ForCausalLM,
    "Mistral3ForConditionalGeneration": MistralForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Olmo2ForCausalLM": Olmo2ForCausalLM,
    "Olmo3ForCausalLM": Olmo3ForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen2_5_VLForConditionalGeneration": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Qwen3VLForConditionalGeneration": Qwen3ForCausalLM,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5ForConditionalGeneration": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen3_5MoeForCausalLM,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5MoeForCausalLM,
    "SeedOssForCausalLM": SeedOssForCausalLM,
    "SmolLM3ForCausalLM": SmolLM3ForCausalLM,
}

# Encoders read texts and generate none. To the runner they are as decoders.
ENCODERS: dict[str, Any] = {
    "BertModel": BertModel,
    "ModernBertModel": ModernBertModel,
    "RobertaModel": BertModel,
    "XLMRobertaModel": BertModel,
}
SUPPORTED: dict[str, type[DecoderForCausalLM]] = {**REGISTRY, **ENCODERS}


def get_model_class(architecture: str) -> type[DecoderForCausalLM]:
    """Return the class of an architecture. Raises ModelError, which lists the supported ones."""
    if architecture not in SUPPORTED:
        raise ModelError(f"architecture {architecture!r} is not supported; supported are {', '.join(SUPPORTED)}")
    return SUPPORTED[architecture]
