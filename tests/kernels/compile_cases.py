"""The engines whose kernels `test_compilation.py` compiles and `test_chosen_kernels.py` lists."""

from typing import Any

SIZES = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "norm_topk_prob": True}
LINEAR = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}  # fewer than by default: states take memory
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"], **SIZES},
    "Qwen3-MoE": {"architectures": ["Qwen3MoeForCausalLM"], **SIZES, **EXPERTS},
    "Gemma 3": {
        "architectures": ["Gemma3ForCausalLM"],
        **SIZES,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 100,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Gemma 2": {
        "architectures": ["Gemma2ForCausalLM"],
        **SIZES,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 100,
    },
    "Cohere2": {"architectures": ["Cohere2ForCausalLM"], **SIZES, "num_hidden_layers": 4, "sliding_window": 100},
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        **SIZES,
        "hidden_size": 480,  # no whole blocks of 128
        "intermediate_size": 416,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_local_experts": 8,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "Qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        **SIZES,
        "num_hidden_layers": 2,
        "head_dim": 256,
        "full_attention_interval": 2,
        **LINEAR,
    },
    "Qwen3.5-MoE": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **SIZES,
        **EXPERTS,
        "num_hidden_layers": 2,
        "head_dim": 256,
        "full_attention_interval": 2,
        **LINEAR,
        "shared_expert_intermediate_size": 512,
    },
    "GLM-4.5": {
        "architectures": ["Glm4MoeForCausalLM"],
        **SIZES,
        **EXPERTS,
        "num_hidden_layers": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
}
FP8 = {"quantization": "fp8"}
# By name: a compute capability, a model of those above, and options of the engine.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "Hopper, 16 bits": (90, "Qwen3", {}),
    "Ada, heads of 256, int8 cache": (89, "Gemma 3", {"kv_cache_dtype": "int8"}),
    "Hopper, heads of 256": (90, "Gemma 3", {}),
    "Hopper, linear attention": (90, "Qwen3.5", {}),
    "Ampere, linear attention": (86, "Qwen3.5", {}),
    "Hopper, FP8": (90, "Qwen3", {**FP8, "kv_cache_dtype": "fp8"}),
    "Hopper, FP8 experts": (90, "Qwen3-MoE", {**FP8, "kv_cache_dtype": "int8"}),
    "Hopper, experts": (90, "Qwen3-MoE", {}),
    "Ada, FP8 experts": (89, "Qwen3-MoE", {**FP8, "kv_cache_dtype": "fp8"}),
    "Ada, 16 bits": (89, "Qwen3", {}),
    "Ampere, experts, int8 cache": (80, "Qwen3-MoE", {"kv_cache_dtype": "int8"}),
    **{f"{gpu}, 4 bits": (gpu, "Qwen3", {"quantization": "int4"}) for gpu in (80, 86, 89, 90)},
    "Ampere, experts in 4 bits": (86, "Qwen3-MoE", {"quantization": "int4"}),
    "Ampere, heads of 256": (80, "Gemma 3", {}),
    "Hopper, soft caps": (90, "Gemma 2", {}),
    "Ampere, soft caps, int8 cache": (86, "Gemma 2", {"kv_cache_dtype": "int8"}),
    "Hopper, attention beside the MLP": (90, "Cohere2", {}),
    "Hopper, experts in 4 bits": (90, "Qwen3-MoE", {"quantization": "int4"}),
    "Hopper, sinks, MXFP4": (90, "gpt-oss", {}),
    "Hopper, a shared expert with a gate": (90, "Qwen3.5-MoE", {}),
    "Hopper, experts scored by sigmoids, FP8": (90, "GLM-4.5", FP8),
    "Ampere, experts scored by sigmoids": (86, "GLM-4.5", {}),
    "Ampere, sinks, MXFP4, int8 cache": (86, "gpt-oss", {"kv_cache_dtype": "int8"}),
}
