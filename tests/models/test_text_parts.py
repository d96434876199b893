"""The text part of models that also see images, against transformers, which gets the same text and no image."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, ModelError
from nanoinfer.models.native_config import read_native_config
from tests.models.test_architectures import GREEDY, draw_prompts, generate
from tests.quantization.test_checkpoints import OF_TRANSFORMERS, write_pair

TEXT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = {"image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
GEMMA4 = {"initializer_range": 0.05, "global_head_dim": 32, "sliding_window": 16}
GEMMA4_INPUTS = {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 8}
GEMMA4_VISION = {"mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 64}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
# By name: the class, its fields, and how older checkpoints began the names of tensors.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 1}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "Gemma 3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "initializer_range": 0.05, "sliding_window": 16, "sliding_window_pattern": 2},
            "vision_config": {**VISION, **PATCHES},
        },
        {"model.language_model.": "language_model.model.", "model.": ""},
    ),
    "Gemma 4": (
        "Gemma4ForConditionalGeneration",
        {"text_config": {**TEXT, **GEMMA4, **GEMMA4_INPUTS}, "vision_config": {**VISION, "head_dim": 8}},
        {},
    ),
    "Gemma 4, unified": (
        "Gemma4UnifiedForConditionalGeneration",
        {"text_config": {**TEXT, **GEMMA4, "attention_k_eq_v": True}, "vision_config": GEMMA4_VISION},
        {},
    ),
    "Mistral 3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**VISION, **PATCHES, "model_type": "pixtral", "head_dim": 8},
        },
        {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.", "model.": ""},
    ),
    "Ministral 3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {
                **{**TEXT, "model_type": "ministral3", "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}},
            },
            "vision_config": {**VISION, **PATCHES, "model_type": "pixtral", "head_dim": 8},
        },
        {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.", "model.": ""},
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration",
        {"text_config": {**TEXT, "rope_parameters": MROPE}, "vision_config": QWEN_VISION},
        {"model.language_model.": "model.", "model.visual.": "visual."},
    ),
    "Qwen3-VL": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
            "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        },
        {},
    ),
    "Qwen3-VL with experts": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {**TEXT, **EXPERTS, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
            "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        },
        {"model.language_model.": "model.language_model."},  # with inputs before outputs
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_of_the_text_part_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    """As transformers saves the model, and with the names of older checkpoints."""
    architecture, fields, older = MODELS[name]
    model_class = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**fields, tie_word_embeddings=False)).float().eval()
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        for param_name, param in model.named_parameters():
            if param.dim() == 1:
                param.normal_(mean=1.0 if param_name.endswith("norm.weight") else 0.0, std=0.2)
    model.save_pretrained(tmp_path / "model")
    prompts, expected = draw_prompts(0, (1, 30, 90)), []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(GREEDY.max_tokens or 0):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            expected.append(ids[len(prompt) :])
    assert generate(tmp_path / "model", prompts, max_model_len=112) == expected
    if older:
        rename(tmp_path / "model" / "model.safetensors", older)
        assert generate(tmp_path / "model", prompts, max_model_len=112) == expected


def test_ministral_3_in_fp8_gives_the_tokens_of_its_weights_in_float32(tmp_path: Path) -> None:
    """Its list of what stays in 16 bits has the names of transformers 5, its file those of version 4."""
    architecture, fields, older = MODELS["Ministral 3"]
    model_class = getattr(transformers, architecture)
    model_class(model_class.config_class(**fields, tie_word_embeddings=False)).save_pretrained(tmp_path / "plain")
    if "model.language_model.norm.weight" in load_file(tmp_path / "plain" / "model.safetensors"):
        rename(tmp_path / "plain" / "model.safetensors", older)
    kept = ["model.vision_tower", "model.multi_modal_projector", "lm_head", "model.language_model.layers.1.mlp"]
    config = OF_TRANSFORMERS | {"modules_to_not_convert": kept}
    keep = ("vision_tower", "multi_modal", "language_model.model.layers.1.mlp")
    fp8, wide = write_pair(tmp_path / "plain", tmp_path, config, keep)
    assert "language_model.model.layers.1.self_attn.q_proj.activation_scale" in load_file(fp8 / "model.safetensors")
    prompts = draw_prompts(0, (1, 30, 90))
    assert generate(fp8, prompts, max_model_len=112) == generate(wide, prompts, max_model_len=112)


def rename(path: Path, prefixes: dict[str, str]) -> None:
    """Begin the names of tensors otherwise: by the first prefix that fits. Those of all experts are transposed."""
    renamed = {}
    for name, tensor in load_file(path).items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        tensor = tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        renamed[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    save_file(renamed, path)


def test_a_config_of_the_old_spelling_has_the_text_models_fields_beside_the_vision_models() -> None:
    fields = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e6}
    raw = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": QWEN_VISION, **fields}
    config = read_native_config(raw)
    assert (config.rope.rope_type, config.rope.theta) == ("default", 1e6)


def test_another_text_model_than_the_class_is_known_to_have_is_refused() -> None:
    raw = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {},
    }
    with pytest.raises(ModelError, match=r"model_type='llama', which Mistral3For.*; supported: mistral, ministral3"):
        read_native_config(raw)


def test_a_prompt_with_an_image_is_refused_with_a_sentence(tmp_path: Path) -> None:
    architecture, fields, _ = MODELS["Qwen3-VL"]
    model_class = getattr(transformers, architecture)
    model_class(model_class.config_class(**fields)).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vision_config"]
    with LLM(tmp_path, device="cpu", dtype="float32", num_kvcache_blocks=10, max_model_len=32) as llm:
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        with pytest.raises(ValueError, match="image"):
            llm.chat(image, use_tqdm=False)
