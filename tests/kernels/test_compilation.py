"""Every kernel that an engine launches compiles for the GPUs that it may meet, within their shared memory.

No GPU is needed for this. Each case is an engine of its own, in a process of its own: see `compile_engine.py`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.compile_cases import CARDS, CASES, MODELS

pytest.importorskip("triton", minversion="3.6")

# Bytes that a program may have at most, by compute capability: CUDA C++ Programming Guide, "Compute Capabilities".
SHARED_MEMORY = {80: 163 * 2**10, 86: 99 * 2**10, 89: 99 * 2**10, 90: 227 * 2**10, 120: 99 * 2**10}
PARAMS = [
    pytest.param(*case, id=name, marks=() if name == "Hopper, 16 bits" else pytest.mark.slow)
    for name, case in {**CASES, **CARDS}.items()
]


def compiled(capability: int, **task: Any) -> list[dict[str, Any]]:
    """Return what `compile_engine` prints of each kernel.

    None takes more shared memory than there is, all fuse products and sums, and none reads what another kernel writes
    before it waits for that. Triton 3.9 warns where it is left to decide about fusing.
    """
    module = ["-W", "error:TRITON_DEFAULT_FP_FUSION", "-m", "tests.kernels.compile_engine"]
    command = [sys.executable, *module, json.dumps({"capability": capability, **task})]
    unset = {name: value for name, value in os.environ.items() if name != "TRITON_DEFAULT_FP_FUSION"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=unset, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY[capability] or not kernel["fuses"]]
    assert not [kernel for kernel in kernels if kernel["early"]]
    return kernels


@pytest.mark.parametrize(
    "capability", [pytest.param(gpu, marks=() if gpu == 90 else pytest.mark.slow) for gpu in SHARED_MEMORY]
)
@pytest.mark.parametrize(
    ("head_dim", "num_tokens"),
    [
        (128, 8),
        *(
            pytest.param(dim, most, marks=pytest.mark.slow)
            for dim, most in [(64, 16), (128, 16), (256, 4), (256, 16), (512, 4)]
        ),
    ],
)
def test_attention_from_several_tokens_a_row_compiles_within_shared_memory(
    capability: int, head_dim: int, num_tokens: int
) -> None:
    """In tiles of 16 to 64 queries; a full tile reads no prefix for several rows. Of heads of 512 32 are full."""
    kernels = compiled(capability, options={"head_dim": head_dim, "num_tokens": num_tokens})
    assert sum(kernel["kernel"] == "_paged_decode_kernel" for kernel in kernels) == (8 if num_tokens < 16 else 4)


def test_attention_within_segments_compiles_within_shared_memory() -> None:
    kernels = compiled(90, options={"lens": [300, 1, 64]})
    assert [kernel["kernel"] for kernel in kernels] == ["_segment_attention_kernel"] * 3  # one for each size of heads


def test_what_adapters_add_waits_for_the_parts_that_it_reads() -> None:
    """The kernel of gate and up alone, and that which also shrinks its results for the down projection."""
    kernels = [kernel["kernel"] for kernel in compiled(90, options={"num_adapted": [2, 200]})]
    assert kernels.count("_gated_kernel") == 2
    assert kernels.count("_shrink_kernel") == 2
    assert kernels.count("_expand_kernel") == 2


@pytest.mark.parametrize(("capability", "model", "options"), PARAMS)
def test_every_kernel_of_an_engine_compiles_within_shared_memory(
    capability: int, model: str, options: dict[str, Any]
) -> None:
    kernels = compiled(capability, config=MODELS[model], options=options)
    names = {kernel["kernel"] for kernel in kernels}
    assert "_best_group_kernel" in names
    is_gemma4, is_latent = model.startswith("Gemma 4"), model in ("GLM-4.7-Flash", "DeepSeek-V2-Lite")
    assert ({"_paged_prefill_kernel", "_paged_decode_kernel"} <= names) == (not is_latent)
    assert ({"_latent_prefill_kernel", "_norm_rope_store_latents_kernel"} <= names) == is_latent
    assert ("_latent_decode_kernel" in names) == (is_latent and capability != 90)
    assert ({"_store_and_absorb_kernel", "_values_of_sums_kernel"} <= names) == (is_latent and capability >= 90)
    assert ("_hopper_latent_decode_kernel" in names) == (is_latent and capability == 90)
    assert ("_norm_rope_store_kernel" in names) == (not is_gemma4 and not is_latent)
    assert ({"_qkv_norm_rope_store_kernel", "_scaled_norm_kernel"} <= names) == is_gemma4
    # The others have heads of 256, or sinks.
    has_kernel = model in ("Qwen3", "Qwen3-MoE", "Cohere2", "GLM-4.5")
    serves_hopper = capability == 90 and has_kernel
    assert ("_hopper_prefill_kernel" in names) == serves_hopper
    has_wide_experts = (model in ("Qwen3-MoE", "Qwen3.5-MoE", "GLM-4.5", "Gemma 4") or is_latent) and options.get(
        "quantization"
    ) != "fp8"
    assert ("_hopper_experts_kernel" in names) == (capability == 90 and has_wide_experts)
    has_adapters = "enable_lora" in options
    assert ({"_shrink_kernel", "_expand_kernel", "_gated_kernel"} <= names) == has_adapters
    if not options.get("quantization") and not model.endswith("-FP8"):
        assert ("_few_rows_product_kernel" in names) == (capability >= 90)
    elif model == "Qwen3":  # which has no products in 16 bits then
        assert "_few_rows_product_kernel" not in names
    assert ({"_convolve_kernel", "_prepare_chunks_kernel", "_pass_states_kernel", "_gated_norm_kernel"} <= names) == (
        model in ("Qwen3.5", "Qwen3.5-MoE")
    )
    assert ("_cap_logits_kernel" in names) == (model in ("Gemma 2", "Gemma 4"))
    has_experts = "MoE" in model or model in ("Gemma 4", "GLM-4.5", "gpt-oss") or is_latent
    assert ("_route_kernel" in names) == has_experts
    assert ("_gated_sum_kernel" in names) == (model == "Qwen3.5-MoE")
    in_8_bits = options.get("quantization") == "fp8" or model.endswith("-FP8")
    assert ("_fp8_product_kernel" in names) == (in_8_bits and capability >= 89)  # which others widen
    assert ("_gate_up_kernel" in names) == (in_8_bits and has_experts and capability >= 89)
    assert ("_hopper_fp8_experts_kernel" in names) == (in_8_bits and has_experts and capability == 90)
    in_4_bits = options.get("quantization") == "int4"
    assert ("_hopper_int4_kernel" in names) == (in_4_bits and capability == 90)  # which serves all of these steps
    assert ({"_few_rows_product_int4_kernel", "_widen_kernel"} <= names) == (in_4_bits and capability != 90)
    has_int4_experts = model == "gpt-oss" or (in_4_bits and model in ("Gemma 4", "Qwen3-MoE"))
    assert ("_hopper_int4_experts_kernel" in names) == (has_int4_experts and capability == 90)
