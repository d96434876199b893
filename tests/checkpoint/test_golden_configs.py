"""What is read from the configs of all architectures, formats and poolings, compared with what was read before.

`python -m tests.checkpoint.test_golden_configs` writes the file anew. Its difference says what a change of the readers
changes: a config, an error, or which fields an override may replace.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.checkpoint.fields import read_overridden
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.errors import ConfigError, NanoinferError
from nanoinfer.models import SUPPORTED
from nanoinfer.models.native_config import read_native_config, read_native_folder

GOLDEN = Path(__file__).with_name("golden_configs.json")

SIZES = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
BOTH_ROPES = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
}
# Values for all fields that some architecture reads; each reads its own.
EVERY_FIELD = {
    **{"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 8192, "initializer_range": 0.1},
    **{"rms_norm_eps": 1e-4, "layer_norm_eps": 2e-4, "norm_eps": 3e-4, "tie_word_embeddings": True, "mlp_bias": True},
    **{"attention_bias": True, "rope_theta": 5e4, "rope_local_base_freq": 7e3, "torch_dtype": "bfloat16"},
    **{"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1, "sliding_window_pattern": 2},
    **{"no_rope_layers": [1, 1, 0, 1], "no_rope_layer_interval": 2, "rotary_dim": 32, "query_pre_attn_scalar": 100},
    **{"use_qk_norm": False, "logit_scale": 0.5, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    **{"logits_scaling": 4.0, "attention_multiplier": 0.25, "num_experts": 16, "num_experts_per_tok": 4},
    **{"moe_intermediate_size": 128, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    **{"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2},
    **{"shared_expert_intermediate_size": 96, "swiglu_limit": 5.0, "swiglu_alpha": 1.5, "linear_num_key_heads": 4},
    **{"linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 64},
    **{"linear_conv_kernel_dim": 3, "full_attention_interval": 2, "pad_token_id": 3, "type_vocab_size": 3},
    **{"hidden_activation": "gelu_pytorch_tanh", "local_attention": 64, "global_attn_every_n_layers": 2},
    **{"global_rope_theta": 3e4, "local_rope_theta": 4e3, "norm_bias": True, "classifier_bias": True},
    **{"classifier_activation": "relu", "eos_token_id": 7, "use_cache": True, "model_type": "any"},
}
# Fields that an override may name, beside those above.
OTHER_FIELDS = (
    *("architectures", "dtype", "layer_types", "hidden_act", "partial_rotary_factor", "attn_logit_softcapping"),
    *("final_logit_softcapping", "is_causal", "use_bidirectional_attention", "attention_out_bias", "num_labels"),
    *("id2label", "problem_type", "classifier_pooling", "classifier_from_token", "sentence_transformers"),
    *("n_routed_experts", "num_local_experts", "original_max_position_embeddings", "position_embedding_type"),
    *("is_decoder", "rotary_pct", "use_parallel_block", "use_gated_activation", "order_of_interleaved_layers"),
    "text_config.hidden_size",
    "text_config.dtype",
    "text_config.x",
    "rope_scaling.factor",
    "rope_parameters.rope_theta",
    "rope_parameters.beta_fst",
    "quantization_config.bits",
    "quantization_config.dataset",
    "quantization_config.fmt",
)
TEXT_TYPES = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
    "Mistral3ForConditionalGeneration": "ministral3",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
}
LAYER_TYPES = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
LINEAR_TYPES = ["linear_attention", "full_attention"] * 2
# By architecture: fields in which a config differs from one of sizes alone.
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("Llama", {"rope_parameters": {**YARN, "rope_theta": 3.0, "mscale": 0, "truncate": False}}),
    ("Llama", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}, "rope_theta": None}),
    ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_parameters": {"factor": 4.0}}),
    ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "num_key_value_heads": None, "head_dim": None}),
    ("Llama", {"sliding_window": 8, "layer_types": LAYER_TYPES, "num_experts": 8}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": LAYER_TYPES}),
    ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": None}),
    ("Qwen3", {"use_sliding_window": False, "sliding_window": 8}),
    ("Qwen3", {"use_sliding_window": False, "sliding_window": None, "layer_types": ["x"]}),
    ("Qwen3Moe", {"use_sliding_window": True, "max_window_layers": 2, "mlp_only_layers": [0]}),
    ("Mistral", {"sliding_window": None}),
    ("Mistral", {"sliding_window": 8, "layer_types": LAYER_TYPES}),
    ("Mixtral", {"num_local_experts": 4, "sliding_window": 8}),
    ("Ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}}),
    ("Ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("Phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}}),
    ("Phi3", {"partial_rotary_factor": 0.75, "sliding_window": 8, "original_max_position_embeddings": 64}),
    ("Phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("SmolLM3", {"no_rope_layers": [0, 1, 0, 1]}),
    ("SmolLM3", {"use_sliding_window": True, "sliding_window": 8}),
    ("SmolLM3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": LAYER_TYPES}),
    ("Cohere2", {"layer_types": LAYER_TYPES, "logit_scale": 0.25, "use_qk_norm": False}),
    ("Exaone4", {"sliding_window": None}),
    ("Exaone4", {"layer_types": LAYER_TYPES}),
    ("Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_act": "gelu_pytorch_tanh"}),
    ("Gemma3", {"rope_parameters": BOTH_ROPES}),
    ("Gemma3", {"rope_parameters": {**BOTH_ROPES, "rope_type": "default"}, "layer_types": LAYER_TYPES}),
    ("Gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 5e3}),
    ("Gemma3", {"rope_theta": {"global": 1e6, "local": 1e4}}),
    ("Gemma4", {"layer_types": LAYER_TYPES, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    ("Gemma4", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}),
    ("Gemma4", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}),
    ("Gemma4", {"per_layer_config": {"03": {"head_dim": 96, "num_key_value_heads": 2}}}),
    ("Olmo3", {"rope_scaling": YARN, "rope_theta": 5e5}),
    ("Olmo3", {"rope_parameters": BOTH_ROPES, "sliding_window": 8}),
    ("GptOss", {"rope_scaling": {**YARN, "truncate": True}, "num_local_experts": 4}),
    ("GptOss", {"rope_parameters": None, "layer_types": LAYER_TYPES}),
    ("Glm4Moe", {"n_routed_experts": 16, "n_shared_experts": 0, "first_k_dense_replace": 2, "use_qk_norm": True}),
    ("DeepseekV2", {"topk_method": "greedy", "num_experts_per_tok": 6, "q_lora_rank": None}),
    ("DeepseekV2", {"topk_method": "group_limited_greedy", "num_experts_per_tok": 6, "rope_scaling": YARN}),
    ("DeepseekV3", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "rope_interleave": False}),
    ("Glm4MoeLite", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}),
    ("MiniMaxM2", {"rotary_dim": 16, "num_local_experts": 8}),
    ("MiniMaxM2", {"partial_rotary_factor": 0.5}),
    ("Qwen3Next", {"layer_types": LINEAR_TYPES, "partial_rotary_factor": 0.5}),
    ("Qwen3_5", {"layer_types": ["full_attention"] * 4, "rope_parameters": {"partial_rotary_factor": 0.5}}),
)
ENCODER_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("BertModel", {"hidden_act": "relu", "tie_word_embeddings": True, "num_hidden_layers": None}),
    ("RobertaModel", {"pad_token_id": 5, "max_position_embeddings": 514, "type_vocab_size": 1}),
    ("XLMRobertaForSequenceClassification", {"id2label": {"0": "no", "1": "yes"}}),
    ("BertForTokenClassification", {"num_labels": 5, "problem_type": "single_label_classification"}),
    ("ModernBertModel", {"layer_types": LAYER_TYPES, "rope_parameters": BOTH_ROPES["sliding_attention"]}),
    ("ModernBertModel", {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}, "hidden_activation": "silu"}),
    ("ModernBertForSequenceClassification", {"classifier_pooling": "mean", "classifier_bias": True, "num_labels": 1}),
)
HEADS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Qwen3ForSequenceClassification", {"num_labels": 3, "pad_token_id": 9}),
    ("Qwen3ForSequenceClassification", {"id2label": {"0": "a"}, "problem_type": "regression"}),
    ("Qwen3ForSequenceClassification", {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}),
    ("LlamaForTokenClassification", {"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}),
    ("Gemma3TextForSequenceClassification", {"sbert_ce_default_activation_function": "torch.nn.Identity"}),
    ("MistralModel", {}),
    ("GemmaModel", {}),
)
# The fields with which a config of Qwen3 is refused.
ERRORS: tuple[dict[str, Any], ...] = (
    *({"hidden_size": value} for value in (None, 0, -1, 1.5, "32", True, 2**30)),
    *({name: None} for name in SIZES),
    *({"num_key_value_heads": value} for value in ("2", 3)),
    *({"head_dim": value} for value in (-64, 63)),
    *({"rms_norm_eps": value} for value in ("small", 1e31)),
    {"rope_theta": "x"},
    {"max_position_embeddings": 0},
    {"num_hidden_layers": 5000},
    {"tie_word_embeddings": "false"},
    *({"architectures": value} for value in ("Qwen3ForCausalLM", None, [], ["GPT2LMHeadModel"], ["T5EncoderModel"])),
    *({"rope_scaling": value} for value in ("linear", {"rope_type": "linear", "factor": "4"}, {"factor": 4})),
    {"rope_scaling": {"rope_type": "longrope", "short_factor": 1}},
    {"rope_parameters": BOTH_ROPES},
    {"rope_scaling": {"rope_type": "linear", "factor": 1e9}},
    {"partial_rotary_factor": 0.5},
    {"use_sliding_window": 1},
    *({"use_sliding_window": True, "sliding_window": value} for value in (0, "x")),
    {"use_sliding_window": True, "max_window_layers": -1},
    *({"use_sliding_window": True, "layer_types": value} for value in (["full_attention"], "x")),
    {"attn_logit_softcapping": 50.0},
    {"hidden_act": "gelu"},
    {"is_causal": False},
    {"torch_dtype": "float64"},
    {"quantization_config": 7},
    {"text_config": 3},
    {"id2label": ["a"], "architectures": ["Qwen3ForSequenceClassification"]},
    {"num_labels": 0, "architectures": ["Qwen3ForSequenceClassification"]},
    {"problem_type": "x", "architectures": ["Qwen3ForSequenceClassification"]},
    {"pad_token_id": "x", "architectures": ["Qwen3ForSequenceClassification"]},
    {"sentence_transformers": {"activation_fn": "os.x"}, "architectures": ["Qwen3ForSequenceClassification"]},
    *({"classifier_from_token": value} for value in ("x", ["a", "b", "c"])),
    {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": 1},
)
ERRORS_OF: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("Qwen3Moe", entry) for entry in ({"num_experts": 0}, {"mlp_only_layers": [True]}, {"norm_topk_prob": 1})),
    *(("Mixtral", entry) for entry in ({"num_local_experts": 0}, {"num_experts_per_tok": 9}, {"sliding_window": "x"})),
    *(("Glm4Moe", entry) for entry in ({"n_group": 3}, {"n_group": 32}, {"first_k_dense_replace": -1})),
    *(("Glm4Moe", entry) for entry in ({"use_qk_norm": "yes"}, {"n_shared_experts": "x"})),
    *(("Cohere2", entry) for entry in ({"use_qk_norm": True}, {"use_parallel_block": False}, {"layer_norm_eps": 0})),
    *(("Cohere2", entry) for entry in ({"position_embedding_type": "none"}, {"logit_scale": -1})),
    ("Cohere2", {"sliding_window": None}),
    *(("Gemma2", entry) for entry in ({"attn_logit_softcapping": 0}, {"final_logit_softcapping": "x"})),
    *(("Gemma2", entry) for entry in ({"hidden_activation": "gelu"}, {"hidden_act": "silu"})),
    ("Gemma2", {"use_bidirectional_attention": True}),
    ("Gemma3", {"rope_parameters": {"x": {}}}),
    ("Gemma3", {"rope_parameters": {"full_attention": {"factor": 2}}}),
    ("Gemma3", {"sliding_window": None}),
    ("Gemma3", {"attn_logit_softcapping": 30.0}),
    *(("Gemma4", {"per_layer_config": {key: {"head_dim": 8, "x": 1}}}) for key in ("x", "3")),
    *(("Gemma4", entry) for entry in ({"num_kv_shared_layers": 4}, {"use_bidirectional_attention": "all"})),
    ("Gemma4", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 9, "moe_intermediate_size": 32}),
    ("Granite", {"logits_scaling": 0}),
    ("Llama", {"final_logit_softcapping": 30.0}),
    ("Llama", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("Ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.5, "rope_type": "default"}}),
    *(("MiniMaxM2", {"rotary_dim": value}) for value in (256, 3)),
    *(("Phi3", {"partial_rotary_factor": value}) for value in (1.5, "x")),
    *(("SmolLM3", {"no_rope_layers": value}) for value in ([0, 1], [0, 1, 2, 1])),
    *(("Qwen3_5", entry) for entry in ({"layer_types": ["full_attention", "x"]}, {"linear_num_value_heads": 5})),
    *(("Qwen3_5", entry) for entry in ({"layer_types": ["linear_attention"] * 4}, {"linear_conv_kernel_dim": 0})),
    ("GptOss", {"swiglu_limit": -1}),
)
ENCODER_ERRORS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("BertModel", entry) for entry in ({"hidden_act": "x"}, {"is_decoder": True}, {"type_vocab_size": -1})),
    *(("BertModel", entry) for entry in ({"position_embedding_type": "x"}, {"layer_norm_eps": 0})),
    ("BertModel", {"quantization_config": {"quant_method": "fp8"}}),
    ("RobertaModel", {"max_position_embeddings": 2}),
    *(("ModernBertModel", {"layer_types": value}) for value in (["x"], LINEAR_TYPES)),
    ("ModernBertModel", {"rope_parameters": {"x": {}}}),
    ("ModernBertModel", {"rope_parameters": {"full_attention": YARN}}),
    *(("ModernBertModel", entry) for entry in ({"global_rope_theta": -1}, {"local_attention": 1})),
    ("ModernBertForSequenceClassification", {"classifier_pooling": "x"}),
    ("Mistral3ForConditionalGeneration", {"text_config": {"model_type": "llama"}}),
)
GROUP = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
IN_4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False, "actorder": "group"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
PACKED = {**COMPRESSED, "format": "pack-quantized"}


def compressed(of: Mapping[str, Any], weights: Any, inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {**of, "config_groups": {"group_0": group}}


BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
QUANTIZED: tuple[dict[str, Any], ...] = (
    {"quant_method": "fp8"},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"], "fmt": "e4m3"},
    {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["model.layers.0.mlp"], "version": 1},
    {"quant_method": "fp8", "weight_block_size": None, "kv_cache_scheme": "x", "expert_dtype": "fp8"},
    {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
    compressed(COMPRESSED, GROUP, TOKENS),
    compressed(COMPRESSED, GROUP | {"strategy": "tensor"}, TOKENS | {"strategy": "tensor", "dynamic": False}),
    compressed(COMPRESSED, GROUP | BLOCKS, TOKENS | {"strategy": "group", "group_size": 128}),
    compressed(PACKED, IN_4),
    compressed(PACKED, IN_4 | {"strategy": "channel", "group_size": None, "symmetric": True}),
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "modules_to_not_convert": ["mlp.gate"], "backend": "auto"},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False, "dataset": "c4"},
    {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True, "checkpoint_format": "gptq_v2"},
    {"quant_method": "gptq", "bits": 4, "dynamic": {r"-:.*layers\.0\..*": {}, "+:.*": {"bits": 4}}},
    {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [["self_attn.k_proj"], ["mlp.up_proj"]]},
    {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"},
    {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "backend": "auto_round:auto_awq"},
    {
        **{"quant_method": "intel/auto-round", "bits": 4, "group_size": 128, "act_bits": 16, "seqlen": 2048},
        "extra_config": {"model.layers.0.mlp": {"bits": 16}, ".*k_proj": {"bits": 16}, "lm_head": {"bits": 4}},
    },
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    # What is refused.
    {"quant_method": "hqq"},
    *({"quant_method": "fp8", **entry} for entry in ({"fmt": "e5m2"}, {"weight_block_size": [64, 64]}, {"x": 1})),
    *({"quant_method": "fp8", **entry} for entry in ({"scale_fmt": "x"}, {"modules_to_not_convert": ["re:("]})),
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
    {"quant_method": "fp8", "ignored_layers": "lm_head"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {**COMPRESSED, "format": "int-quantized"},
    COMPRESSED,
    compressed(COMPRESSED, None),
    *(compressed(COMPRESSED, GROUP | entry, TOKENS) for entry in ({"num_bits": 4}, {"strategy": "x"}, {"type": "int"})),
    compressed(COMPRESSED, GROUP, TOKENS | {"strategy": "tensor"}),
    compressed(COMPRESSED | {"transform_config": {"a": [{"location": "q_attn"}]}}, GROUP, TOKENS),
    compressed(PACKED, IN_4 | {"num_bits": 8}),
    compressed(PACKED, IN_4 | {"group_size": 16}),
    *({"quant_method": "awq", "bits": 4, **entry} for entry in ({}, {"group_size": 128, "version": "gemv"})),
    *({"quant_method": "awq", "bits": 4, "group_size": 32, **entry} for entry in ({"backend": "llm-awq"}, {"x": 1})),
    *(
        {"quant_method": "gptq", **entry}
        for entry in ({"bits": 8}, {"bits": 4, "sym": 1}, {"bits": 4, "lm_head": True})
    ),
    {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq", "format": "gptq_v2"},
    {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}},
    {"quant_method": "gptq", "bits": 4, "dynamic": "x"},
    {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "marlin"},
    {"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": {"a": {"bits": 8}}},
    {"quant_method": "mxfp4", "x": 1},
)
ST = "sentence_transformers."
POOLING = {"path": "1_Pooling", "type": f"{ST}models.Pooling"}
MODULES = [{"path": "", "type": f"{ST}models.Transformer"}, POOLING]
NORMALIZE = {"path": "2_Normalize", "type": f"{ST}models.Normalize"}
DENSE = {"path": "2_Dense", "type": f"{ST}models.Dense"}
LAST = {"1_Pooling/config.json": {"pooling_mode_lasttoken": True}}
SENTENCES = "config_sentence_transformers.json"
# The files beside a config.json; a class other than Qwen3ForCausalLM is under "architecture".
FOLDERS: tuple[dict[str, Any], ...] = (
    {},
    {"modules.json": [*MODULES, NORMALIZE], **LAST},
    {"modules.json": MODULES, "1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}},
    {"modules.json": MODULES, "1_Pooling/config.json": {"pooling_mode": ["cls"]}, "architecture": "BertModel"},
    {"architecture": "BertModel"},
    {"architecture": "BertForSequenceClassification", SENTENCES: {"model_type": "CrossEncoder"}},
    {"architecture": "Qwen3Model", SENTENCES: {"prompts": {"query": "Q: "}, "default_prompt_name": "query"}},
    {
        **{"modules.json": [*MODULES, DENSE], **LAST, SENTENCES: {"truncate_dim": 8}},
        "2_Dense/config.json": {"in_features": 256, "out_features": 3, "module_output_name": "scores"},
        "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": True, "modality_config": {"message": {}}},
    },
    {
        "modules.json": [MODULES[0], {"path": "1_LogitScore", "type": f"{ST}x.LogitScore"}],
        "1_LogitScore/config.json": {"true_token_id": 5, "false_token_id": 4},
    },
    {"architecture": "Qwen3ForSequenceClassification", SENTENCES: {"activation_fn": "torch.nn.Tanh"}},
    {"modules.json": MODULES, **LAST, "tokenizer_config.json": {"model_max_length": 512}},
    # What is refused.
    {"modules.json": MODULES},
    {"modules.json": MODULES, "1_Pooling/config.json": {"pooling_mode_max_tokens": True}},
    {"modules.json": MODULES[:1]},
    {"modules.json": [*MODULES, {"path": "../x", "type": f"{ST}models.Dense"}], **LAST},
    {"modules.json": [*MODULES, {"path": "x", "type": "mine.Dense"}], **LAST},
    {"modules.json": [*MODULES, {"path": "x", "type": f"{ST}models.CNN"}], **LAST},
    {"modules.json": [MODULES[0], NORMALIZE, POOLING], **LAST},
    {"modules.json": [*MODULES, NORMALIZE, DENSE], **LAST, "2_Dense/config.json": {}},
    {"modules.json": [*MODULES, DENSE], **LAST, "2_Dense/config.json": {"in_features": 3, "out_features": 3}},
    {"modules.json": MODULES, **LAST, SENTENCES: {"truncate_dim": 0}},
    {"modules.json": MODULES, **LAST, SENTENCES: {"prompts": {"query": 3}}},
    {"modules.json": MODULES, **LAST, SENTENCES: {"default_prompt_name": "x"}},
    {"modules.json": MODULES, **LAST, "sentence_bert_config.json": {"max_seq_length": "x"}},
    {"modules.json": MODULES, **LAST, "sentence_bert_config.json": {"transformer_task": "x"}},
    {"architecture": "Qwen3ForSequenceClassification", SENTENCES: {"activation_fn": "os.path"}},
)


def described(config: ModelConfig) -> dict[str, Any]:
    """The fields of a config that are not those of a Llama of these sizes."""
    values = asdict(config)
    for name in ("packed", "renamed") if config.quantization else ():
        values["quantization"].pop(name)
    common = asdict(read_native_config({"architectures": ["LlamaForCausalLM"], **SIZES}))
    return {name: value for name, value in values.items() if value != common[name]}


def outcome(raw: Mapping[str, Any], quantization: str | None = None) -> Any:
    """What is read, or the message with which it is refused."""
    try:
        return described(read_native_config(raw, quantization))
    except NanoinferError as error:
        return f"{type(error).__name__}: {error}"


def fields_read(raw: Mapping[str, Any]) -> set[str]:
    """The fields that an override may replace."""

    def is_read(path: str) -> bool:
        name, _, inner = path.partition(".")
        part = raw.get(name)
        if inner and not isinstance(part, dict):
            return False
        value = {inner: part.get(inner, 5)} if isinstance(part, dict) and inner else part
        try:
            read_overridden(raw, {name: value}, read_native_config)
        except ConfigError as error:
            return f"hf_overrides has {path}=" not in str(error)
        except NanoinferError:
            pass
        return True

    return {name for name in {*EVERY_FIELD, *SIZES, *OTHER_FIELDS} if is_read(name)}


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """All configs of which it is also recorded which fields are read."""
    for architecture in SUPPORTED:
        raw: dict[str, Any] = {"architectures": [architecture], **SIZES}
        yield architecture, raw
        yield f"{architecture} with every field", {**raw, **EVERY_FIELD}
        if architecture in TEXT_TYPES or architecture.startswith("Qwen3_5"):
            model_type = {"model_type": TEXT_TYPES[architecture]} if architecture in TEXT_TYPES else {}
            text = {**SIZES, **model_type, "tie_word_embeddings": True, "dtype": "float16"}
            yield (
                f"{architecture} with text_config",
                {"architectures": [architecture], "text_config": text, "tie_word_embeddings": False},
            )
    for family, fields in VARIANTS:
        yield f"{family} {fields}", {"architectures": [f"{family}ForCausalLM"], **SIZES, **fields}
    for architecture, fields in (*ENCODER_VARIANTS, *HEADS):
        yield f"{architecture} {fields}", {"architectures": [architecture], **SIZES, **fields}
    for config in QUANTIZED[:20]:
        yield (
            f"quantization {config}",
            {"architectures": ["Qwen3ForCausalLM"], **SIZES, "quantization_config": config},
        )


def errors() -> Iterator[tuple[str, dict[str, Any]]]:
    for fields in ERRORS:
        yield f"Qwen3 {fields}", {"architectures": ["Qwen3ForCausalLM"], **SIZES, **fields}
    for family, fields in ERRORS_OF:
        yield f"{family} {fields}", {"architectures": [f"{family}ForCausalLM"], **SIZES, **fields}
    for architecture, fields in ENCODER_ERRORS:
        yield f"{architecture} {fields}", {"architectures": [architecture], **SIZES, **fields}
    for config in QUANTIZED[20:]:
        raw = {"architectures": ["Qwen3ForCausalLM"], **SIZES, "quantization_config": config}
        yield f"quantization {config}", raw


def read_folder(folder: Path, files: Mapping[str, Any], runner: str) -> Any:
    raw = {"architectures": [files.get("architecture", "Qwen3ForCausalLM")], **SIZES}
    for name, content in {"config.json": raw, **files}.items():
        if name != "architecture":
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content))
    return read_native_folder(folder, runner=runner).pooling


def poolings() -> Iterator[tuple[str, Any]]:
    for files in FOLDERS:
        for runner in ("auto", "pooling", "generate"):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                try:
                    pooling = read_folder(folder, files, runner)
                    found: Any = None if pooling is None else asdict(pooling)
                except NanoinferError as error:
                    found = f"{type(error).__name__}: {error}"
                yield f"{runner} {files}", json.loads(json.dumps(found, default=str).replace(name, "FOLDER"))


@cache
def record() -> dict[str, Any]:
    """All that the golden file has. Of the fields that are read, Llama's has all, and others what differs."""
    reads = {name: fields_read(raw) for name, raw in variants()}
    common = reads["LlamaForCausalLM"]
    found: dict[str, Any] = {
        "configs": {name: outcome(raw) for name, raw in (*variants(), *errors())},
        "fields read": {
            name: " ".join(
                [*(f"+{one}" for one in sorted(found - common)), *(f"-{one}" for one in sorted(common - found))]
            )
            for name, found in reads.items()
        },
        "options": {
            f"{architecture} {option}": outcome({"architectures": [architecture], **SIZES}, option)
            for architecture in ("Qwen3ForCausalLM", "GptOssForCausalLM", "BertModel", "Qwen3MoeForCausalLM")
            for option in ("fp8", "int4")
        },
        "poolings": dict(poolings()),
    }
    found["fields read"]["LlamaForCausalLM"] = " ".join(sorted(common))
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("part", ["configs", "fields read", "options", "poolings"])
def test_what_is_read_is_what_was_read_before(part: str) -> None:
    golden, found = json.loads(GOLDEN.read_text())[part], record()[part]
    assert {name: found.get(name) for name in golden | found if found.get(name) != golden.get(name)} == {}


if __name__ == "__main__":
    parts = {
        part: "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in cases.items()) + "\n}"
        for part, cases in record().items()
    }
    GOLDEN.write_text("{\n" + ",\n".join(f"{json.dumps(part)}: {cases}" for part, cases in parts.items()) + "\n}\n")
