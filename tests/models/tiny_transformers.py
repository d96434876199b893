"""Tiny random checkpoints of nearly any causal class that the installed transformers has, and its own greedy answers.

`write_tiny` shrinks the class's default config: SIZES gives small values to fields by their names, every kind of layer
stays at least once, nested configs are shrunk likewise, and EXCEPTIONS holds what these rules cannot know. transformers
itself writes the folder, so that an engine under test and transformers load the same files. `reference` and
`reference_generate` are what transformers answers, without a cache and with its own.
"""

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Classes beside AutoModelForCausalLM's that see or hear, and whose text part answers text alone.
SEEING = """
    Aria Cohere2Vision Ernie4_5_VLMoe Glm4v Idefics3 InternVL Llama4 LlavaNext Mistral3 PaliGemma Qwen2VL Qwen3VLMoe
"""

VOCAB_SIZE = 256
# Small values of fields by their names. A field that is smaller by default, or None, stays as it is.
SIZES = {
    name: value
    for value, names in {
        VOCAB_SIZE: "vocab_size vocab_size_per_layer_input shape_vocab_size pronunciation_vocab_size",
        512: "max_position_embeddings original_max_position_embeddings n_positions n_ctx max_seq_len",
        96: "intermediate_size intermediate_size_mlp ffn_dim n_inner dff hidden_dim ffn_hidden_size mlp_dim "
        "dense_intermediate_size alignment_intermediate_size",
        64: "hidden_size d_model n_embd dim embed_dim word_embed_proj_dim embedding_size lru_width "
        "out_hidden_size output_channels output_proj_dims projection_dim projector_input_dim projector_output_dim "
        "vision_output_dim position_embedding_size num_position_embeddings mm_embed_dim mm_posemb_size "
        "ext_pw_out_channel nemo_conv_channels",
        48: "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
        "shared_intermediate_size expert_ffn_hidden_size",
        32: "q_lora_rank o_lora_rank mamba_chunk_size block_size block_multiple_of router_hidden_size dim_model_base "
        "backbone_hidden_size image_size num_centroids pronunciation_embed_dim shape_embed_dim",
        24: "attention_chunk_size",
        20: "keep_window_size sliding_window local_attention attention_window_size",
        16: "head_dim kv_lora_rank qk_nope_head_dim v_head_dim kv_channels index_head_dim index_n_heads index_topk "
        "floor_scale",
        8: "qk_rope_head_dim rotary_dim hidden_size_per_layer_input laurel_rank mamba_d_state gated_norm_rank "
        "patch_size index_block_size centroid_intermediate_top_k",
        5.0: "attn_logit_softcapping",
        4: "num_attention_heads n_head n_heads num_heads num_experts num_local_experts n_routed_experts "
        "moe_num_experts mamba_n_heads query_pre_attn_scalar",
        2: "num_hidden_layers n_layer n_layers num_layers num_blocks depth num_key_value_heads num_experts_per_tok "
        "moe_k moe_topk index_topk_blocks n_group",
        1.5: "final_logit_softcapping logits_soft_cap",
        1: "topk_group n_shared_experts first_k_dense_replace zero_expert_num max_window_layers",
        0.5: "attention_multiplier embedding_multiplier residual_multiplier logits_scaling",
    }.items()
    for name in names.split()
}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
TEXT_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
THREE_POSITIONS = {**ROPE, "mrope_section": [3, 3, 2]}  # time, height and width of images
SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]
ROPE_OF_EACH = dict.fromkeys(SLIDING_THEN_FULL, ROPE)
# The last two layers read the cache of the first two.
SHARED_CACHE = {"num_hidden_layers": 4, "layer_types": SLIDING_THEN_FULL * 2, "num_kv_shared_layers": 2}
MIXTURE = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
# All layers read the cache of another model.
DRAFT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 0}
SLIDING_LATENTS = {"swa_q_lora_rank": 32, "swa_kv_lora_rank": 16, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16}
SLIDING_HEADS = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 24}
# What the rules cannot know, by model_type.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0},
    "cohere_compass_text": {"layer_types": SLIDING_THEN_FULL, "rope_parameters": ROPE_OF_EACH},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": MIXTURE,
    "dots1": MIXTURE,
    "dots3_note_text": {"sliding_window": 20, **SLIDING_HEADS, **SLIDING_LATENTS},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [48, 32], "rope_parameters": THREE_POSITIONS},
    "gemma3n_text": {**SHARED_CACHE, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]},
    "gemma4": {"vision_config": {}},  # None by default
    "gemma4_assistant": {"text_config": DRAFT},
    "gemma4_text": {**SHARED_CACHE, "global_head_dim": 32},
    "gemma4_unified": {"vision_config": {}},
    "gemma4_unified_text": {"global_head_dim": 32, "num_global_key_value_heads": 1},
    "glm4v_text": {"rope_parameters": THREE_POSITIONS},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "laguna": {"layer_types": SLIDING_THEN_FULL, "num_attention_heads_per_layer": [4, 8]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mellum": {"layer_types": SLIDING_THEN_FULL},
    "mimo_v2_flash": {"v_head_dim": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "ministral3": {"rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}},
    "phi3": {"sliding_window": 20},
    "phimoe": {"sliding_window": 20},
    "qwen2_vl_text": {"rope_parameters": THREE_POSITIONS},
    "qwen3_vl_moe_text": {"rope_parameters": THREE_POSITIONS},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "starcoder2": {"sliding_window": 20},
    "xmod": {"default_language": "en_XX"},
}


class Answer(NamedTuple):
    """Holds a greedy continuation: its tokens, and the log-probability of each."""

    token_ids: list[int]
    logprobs: list[float]


def causal_classes() -> dict[str, bool]:
    """Return the classes that answer text: {name: whether they run any attention that is registered}.

    This imports every model of transformers, which takes about 20 seconds.
    """
    classes = {name: getattr(transformers, name) for name in causal_names() if hasattr(transformers, name)}
    return {name: bool(getattr(cls, "_supports_attention_backend", False)) for name, cls in classes.items()}


def causal_names() -> list[str]:
    """Return the names that AutoModelForCausalLM maps to, and those of SEEING, without an import of any model."""
    names = {f"{name}ForConditionalGeneration" for name in SEEING.split()}
    for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        names.update([value] if isinstance(value, str) else value)
    return sorted(names)


def write_tiny(architecture: str, folder: Path | str, **overrides: Any) -> int:
    """Write a random float32 checkpoint of a class of transformers to a folder; return its number of parameters.

    The overrides are fields of its config. Every call with the same arguments writes the same weights.
    """
    cls = getattr(transformers, architecture)
    config = cls.config_class(**tiny_fields(cls.config_class, overrides))
    if architecture in causal_names() and hasattr(config, "is_decoder"):
        config.is_decoder = True  # else tokens of BERT and its like see later ones
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = cls(config).float()
        spread_weights(model)
    model.save_pretrained(folder)
    return sum(param.numel() for param in model.parameters())


def tiny_fields(config_class: type[PretrainedConfig], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a small config: SIZES, every kind of layer, plain rotary embeddings, and the overrides."""
    exceptions = {**EXCEPTIONS.get(config_class.model_type, {}), **overrides}
    default = config_class(**{name: exceptions[name] for name in config_class.sub_configs if name in exceptions})
    fields = {
        name: field.default
        for kind in reversed(config_class.__mro__)
        for name, field in inspect.signature(kind.__init__).parameters.items()
    }
    values = {name: min(SIZES[name], value) for name, value in fields.items() if name in SIZES and is_number(value)}
    if "qk_rope_head_dim" in fields:  # latent attention expands the keys of all heads from one vector
        values["num_key_value_heads"] = 4
    else:
        values |= {name: SIZES[name] for name in ("num_key_value_heads", "head_dim") if fields.get(name, 0) is None}
    values |= layer_kinds(default, fields, exceptions.get("num_hidden_layers"))
    values |= token_ids(fields)
    rope_name = "rope_parameters" if "rope_parameters" in fields else "rope_scaling"  # transformers 5; before
    if rope_name in fields:
        values[rope_name] = exceptions.pop("rope_parameters", None) or plain_rope(vars(default).get(rope_name))
    for name in config_class.sub_configs:
        if isinstance(part := vars(default).get(name), PretrainedConfig):
            values[name] = {"model_type": part.model_type, **tiny_fields(type(part), exceptions.pop(name, {}))}
    return {**values, **exceptions}


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def layer_kinds(default: PretrainedConfig, fields: dict[str, Any], num_layers: int | None) -> dict[str, Any]:
    """Return the number of layers and the lists of their kinds, in which each kind comes at least once."""
    count_name = next((name for name in LAYER_COUNTS if is_number(fields.get(name))), None)
    if count_name is None:
        return {}
    kinds = {
        name: list(dict.fromkeys(value))
        for name in fields
        if isinstance(value := vars(default).get(name), list) and (name == "no_rope_layers" or "_types" in name)
    }
    num_layers = num_layers or max([2, *map(len, kinds.values())])
    lists = {name: (part * num_layers)[:num_layers] for name, part in kinds.items() if len(part) > 1}
    return {count_name: num_layers, **lists}


def token_ids(fields: dict[str, Any]) -> dict[str, int]:
    """Return small ids of the tokens of text, and ids beyond the vocabulary for images and sounds, which never come."""
    special = [name for name in fields if name.endswith(("_token_id", "_token_index")) and name not in TEXT_TOKENS]
    text = {name: value for name, value in TEXT_TOKENS.items() if name in fields}
    return text | {name: VOCAB_SIZE + i for i, name in enumerate(special) if is_number(fields[name])}


def plain_rope(rope: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return rotary parameters, or those of each kind of layer, whose frequencies are not stretched."""
    if not rope or "rope_type" not in rope:
        return rope and {kind: plain_rope(part) if isinstance(part, dict) else part for kind, part in rope.items()}
    kind = rope["rope_type"] if rope["rope_type"] == "proportional" else "default"
    return {**rope, "rope_type": kind, "rope_theta": rope.get("rope_theta") or 10000.0}


def spread_weights(model: PreTrainedModel) -> None:
    """Draw weights so that greedy tokens differ from one position to the next, and nothing is all ones or all zeros.

    Strong layers, weak tokens and stronger positions keep a token from being its own likeliest successor. Norm weights,
    biases, and buffers such as e_score_correction_bias, move away from their first value, because a one or a zero would
    hide that an engine leaves them out.
    """
    embeddings = {module.weight: module for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, param in model.named_parameters():
        if param in embeddings:
            param.normal_(std=0.2 if embeddings[param].num_embeddings > VOCAB_SIZE else 0.05)
        elif param.dim() >= 2 and param.std() > 0:
            param.normal_(std=0.2)
        else:
            param.add_(torch.randn_like(param) * 0.1 + (4.0 if name.endswith("sinks") else 0.0))
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point() and buffer.min() == buffer.max():
            buffer.add_(torch.randn_like(buffer) * 0.5)


def load(folder: Path | str) -> PreTrainedModel:
    """Return transformers' own model of a folder in float32, with eager attention, which alone has soft caps and sinks.

    The model of a class that fails without an image is its model of text.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, config.architectures[0])
    model = cls.from_pretrained(folder, attn_implementation="eager").float().eval()
    return model.language_model if cls.__name__ == "Llama4ForConditionalGeneration" else model


@torch.no_grad()
def reference(folder: Path | str, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
    """Return what transformers answers greedily without any cache, one prompt after the other."""
    model = load(folder)
    return [uncached_answer(model, prompt, num_tokens) for prompt in prompts]


def uncached_answer(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> Answer:
    answer = Answer([], [])
    for _ in range(num_tokens):
        logits = model(input_ids=torch.tensor([prompt + answer.token_ids]), use_cache=False).logits[0, -1]
        logprobs = logits.float().log_softmax(-1)
        answer.token_ids.append(int(logprobs.argmax()))
        answer.logprobs.append(float(logprobs.max()))
    return answer


@torch.no_grad()
def reference_generate(folder: Path | str, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
    """Return what transformers' own `generate` answers greedily with its cache, one prompt after the other."""
    model = load(folder)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logprobs = torch.cat(out.logits).float().log_softmax(-1)  # (num_tokens, vocab_size)
        answers.append(Answer(out.sequences[0, len(prompt) :].tolist(), logprobs.max(-1).values.tolist()))
    return answers
