"""Every kernel that an engine launches compiles for the GPUs that it may meet, within their shared memory.

No GPU is needed for this. Each case is an engine of its own, in a process of its own: see `compile_engine.py`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", minversion="3.6")

# Bytes that a program may have at most, by compute capability: CUDA C++ Programming Guide, "Compute Capabilities".
SHARED_MEMORY = {80: 163 * 2**10, 86: 99 * 2**10, 89: 99 * 2**10, 90: 227 * 2**10}
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
    },
    "Qwen3.5-MoE": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **SIZES,
        **EXPERTS,
        "num_hidden_layers": 2,
        "head_dim": 256,
        "full_attention_interval": 2,
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
slow = pytest.mark.slow
CASES = [
    pytest.param(90, "Qwen3", {}, id="Hopper, 16 bits"),
    pytest.param(89, "Gemma 3", {"kv_cache_dtype": "int8"}, id="Ada, heads of 256, int8 cache", marks=slow),
    pytest.param(90, "Gemma 3", {}, id="Hopper, heads of 256", marks=slow),
    pytest.param(90, "Qwen3.5", {}, id="Hopper, linear attention", marks=slow),
    pytest.param(86, "Qwen3.5", {}, id="Ampere, linear attention", marks=slow),
    pytest.param(90, "Qwen3", {**FP8, "kv_cache_dtype": "fp8"}, id="Hopper, FP8", marks=slow),
    pytest.param(90, "Qwen3-MoE", {**FP8, "kv_cache_dtype": "int8"}, id="Hopper, FP8 experts", marks=slow),
    pytest.param(90, "Qwen3-MoE", {}, id="Hopper, experts", marks=slow),
    pytest.param(89, "Qwen3-MoE", {**FP8, "kv_cache_dtype": "fp8"}, id="Ada, FP8 experts", marks=slow),
    pytest.param(89, "Qwen3", {}, id="Ada, 16 bits", marks=slow),
    pytest.param(80, "Qwen3-MoE", {"kv_cache_dtype": "int8"}, id="Ampere, experts, int8 cache", marks=slow),
    *(
        pytest.param(gpu, "Qwen3", {"quantization": "int4"}, id=f"{gpu}, 4 bits", marks=slow)
        for gpu in (80, 86, 89, 90)
    ),
    pytest.param(86, "Qwen3-MoE", {"quantization": "int4"}, id="Ampere, experts in 4 bits", marks=slow),
    pytest.param(80, "Gemma 3", {}, id="Ampere, heads of 256", marks=slow),
    pytest.param(90, "Gemma 2", {}, id="Hopper, soft caps", marks=slow),
    pytest.param(86, "Gemma 2", {"kv_cache_dtype": "int8"}, id="Ampere, soft caps, int8 cache", marks=slow),
    pytest.param(90, "Cohere2", {}, id="Hopper, attention beside the MLP", marks=slow),
    pytest.param(90, "Qwen3-MoE", {"quantization": "int4"}, id="Hopper, experts in 4 bits", marks=slow),
    pytest.param(90, "gpt-oss", {}, id="Hopper, sinks, MXFP4", marks=slow),
    pytest.param(90, "Qwen3.5-MoE", {}, id="Hopper, a shared expert with a gate", marks=slow),
    pytest.param(90, "GLM-4.5", FP8, id="Hopper, experts scored by sigmoids, FP8", marks=slow),
    pytest.param(86, "GLM-4.5", {}, id="Ampere, experts scored by sigmoids", marks=slow),
    pytest.param(86, "gpt-oss", {"kv_cache_dtype": "int8"}, id="Ampere, sinks, MXFP4, int8 cache", marks=slow),
]


@pytest.mark.parametrize(("capability", "model", "options"), CASES)
def test_every_kernel_of_an_engine_compiles_within_shared_memory(
    capability: int, model: str, options: dict[str, Any]
) -> None:
    task = json.dumps({"capability": capability, "config": MODELS[model], "options": options})
    command = [sys.executable, "-m", "tests.kernels.compile_engine", task]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    names = {kernel["kernel"] for kernel in kernels}
    assert {"_paged_prefill_kernel", "_paged_decode_kernel", "_norm_rope_store_kernel", "_best_group_kernel"} <= names
    # The others have heads of 256, or sinks.
    has_kernel = model in ("Qwen3", "Qwen3-MoE", "Cohere2", "GLM-4.5")
    serves_hopper = capability == 90 and has_kernel
    assert ("_hopper_prefill_kernel" in names) == serves_hopper
    has_wide_experts = model in ("Qwen3-MoE", "Qwen3.5-MoE", "GLM-4.5") and options.get("quantization") != "fp8"
    assert ("_hopper_experts_kernel" in names) == (capability == 90 and has_wide_experts)
    assert ("_few_rows_product_kernel" in names) == (capability == 90 and model == "Qwen3" and not options)
    assert ({"_convolve_kernel", "_prepare_chunks_kernel", "_pass_states_kernel", "_gated_norm_kernel"} <= names) == (
        model in ("Qwen3.5", "Qwen3.5-MoE")
    )
    assert ("_cap_logits_kernel" in names) == (model == "Gemma 2")
    has_experts = model in ("Qwen3-MoE", "Qwen3.5-MoE", "GLM-4.5", "gpt-oss")
    assert ("_route_kernel" in names) == has_experts
    assert ("_gated_sum_kernel" in names) == (model == "Qwen3.5-MoE")
    in_4_bits = options.get("quantization") == "int4"
    assert ("_hopper_int4_kernel" in names) == (in_4_bits and capability == 90)  # which serves all of these steps
    assert ({"_few_rows_product_int4_kernel", "_widen_kernel"} <= names) == (in_4_bits and capability != 90)
    has_int4_experts = model == "gpt-oss" or (in_4_bits and model == "Qwen3-MoE")
    assert ("_hopper_int4_experts_kernel" in names) == (has_int4_experts and capability == 90)
    assert not [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY[capability]]
