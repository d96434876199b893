"""Every architecture against transformers: greedy tokens of random small models, in float32 on a CPU."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanoinfer import LLM, SamplingParams
from nanoinfer.errors import ModelError
from nanoinfer.models import REGISTRY
from nanoinfer.models.native_config import read_native_config

# Those for text and images have the text model of the class for text alone.
ARCHITECTURES = sorted(name for name in REGISTRY if name.endswith("ForCausalLM"))
LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
HYBRIDS = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
# Parts of the names of weights that stay in 16 bits, also where others are rounded.
SMALL_WEIGHTS = (
    ".gate.weight",
    "router.weight",
    "router.proj.weight",
    "router.scale",
    "per_expert_scale",
    "layer_scalar",
    "per_layer_projection.weight",
    "per_layer_model_projection.weight",
    "_gate.weight",
    "conv1d",
    "in_proj_ba",
    "in_proj_a.",
    "in_proj_b.",
    "A_log",
    "kv_b_proj",  # of latent attention
)
VOCAB_SIZE = 256
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# Prompts of these lengths cross blocks of 16 tokens, windows and each other; the first three together outgrow 7 blocks.
LENGTHS = (29, 30, 31, 1, 16, 40, 63, 90)


def draw_options(architecture: str, seed: int) -> dict[str, Any]:
    """Draw the sizes and switches of a small model: heads, biases, windows, partial rotary, what else there is."""
    rng = random.Random(f"{architecture} {seed}")
    group, num_kv_heads = rng.choice((1, 2, 3, 4, 8)), rng.choice((1, 2, 3))
    head_dim = rng.choice((8, 16, 24, 32))
    options: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": group * num_kv_heads * head_dim,
        "intermediate_size": rng.choice((32, 48, 80)),
        "num_hidden_layers": rng.choice((2, 3)),
        "num_attention_heads": group * num_kv_heads,
        "num_key_value_heads": num_kv_heads,
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": rng.choice((1e-6, 1e-5)),
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
    }
    window = rng.choice((None, 1, 7, 16, 50))
    if architecture == "LlamaForCausalLM":
        options |= {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
        if rng.random() < 0.5:
            options["head_dim"] = 8 + head_dim
        if rng.random() < 0.5:
            llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
            options["rope_scaling"] = {"rope_type": "llama3", "factor": 4.0, "rope_theta": 10000.0, **llama3}
    elif architecture == "MistralForCausalLM":
        options |= {"sliding_window": window, "head_dim": rng.choice((None, 16))}
    elif architecture == "Qwen2ForCausalLM":
        options |= {"use_sliding_window": window is not None, "sliding_window": window or 4096, "max_window_layers": 1}
    elif architecture == "Qwen3ForCausalLM":
        options |= {"use_sliding_window": window is not None, "sliding_window": window or 4096, "max_window_layers": 1}
        options |= {"head_dim": head_dim, "attention_bias": rng.random() < 0.5}
    elif architecture == "Qwen3MoeForCausalLM":
        sizes = {"moe_intermediate_size": rng.choice((8, 24)), "num_experts": rng.choice((3, 8))}
        options |= {"head_dim": head_dim, **sizes, "num_experts_per_tok": rng.choice((1, 2, 3))}
        options |= {"norm_topk_prob": rng.random() < 0.5, "decoder_sparse_step": rng.choice((1, 2))}
        options |= {"mlp_only_layers": rng.choice(([], [0]))}
    elif architecture == "MixtralForCausalLM":
        options |= {"sliding_window": window, "num_local_experts": rng.choice((2, 5)), "num_experts_per_tok": 2}
    elif architecture == "Phi3ForCausalLM":
        options |= {"sliding_window": window, "pad_token_id": 0}
        factor = rng.choice((1.0, 0.5))
        options["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}
    elif architecture == "Cohere2ForCausalLM":
        options |= {
            "attention_bias": rng.random() < 0.5,
            "layer_norm_eps": options.pop("rms_norm_eps"),
            "pad_token_id": 0,
        }
        options |= {"logit_scale": rng.choice((0.0625, 0.3, 1.0)), "sliding_window": window or 200}
        options |= {"num_hidden_layers": 4, "sliding_window_pattern": rng.choice((1, 2, 3, 4))}
        if rng.random() < 0.3:
            options |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] + ["sliding_attention"] * 2}
    elif architecture == "Gemma2ForCausalLM":
        options |= {"head_dim": rng.choice((8, 16, 32)), "attention_bias": rng.random() < 0.5}
        options["initializer_range"] = 0.05  # or scaled, tied embeddings would repeat the last token
        options |= {"query_pre_attn_scalar": rng.choice((6, 20, 64)), "sliding_window": window or 200}
        options |= {"attn_logit_softcapping": rng.choice((None, 0.2, 50.0))}  # scores are small here
        options |= {"final_logit_softcapping": rng.choice((None, 0.3, 30.0))}
        if rng.random() < 0.5:
            options |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] + ["sliding_attention"] * 2}
    elif architecture == "Gemma3ForCausalLM":
        options |= {"head_dim": rng.choice((8, 16, 32)), "attention_bias": seed > 1}
        options["initializer_range"] = 0.05  # or scaled, tied embeddings would repeat the last token
        options |= {"query_pre_attn_scalar": rng.choice((6, 20, 64)), "sliding_window": rng.choice((1, 7, 50, 200))}
        options |= {"num_hidden_layers": 4, "sliding_window_pattern": 2 + seed % 2}
        scaling = {"rope_type": "default"} if seed % 2 else {"rope_type": "linear", "factor": 4.0}
        sliding = {"rope_type": "default", "rope_theta": rng.choice((100.0, 10000.0))}
        options["rope_parameters"] = {"full_attention": {**scaling, "rope_theta": 1e6}, "sliding_attention": sliding}
    elif architecture.startswith("Gemma4"):
        options |= draw_gemma4_options(rng, head_dim)
        if architecture == "Gemma4ForCausalLM":
            options |= draw_gemma4_experts_and_inputs(rng)
            # transformers lets layers share caches only where they have inputs.
            options["num_kv_shared_layers"] *= options["hidden_size_per_layer_input"] > 0
    elif architecture == "SmolLM3ForCausalLM":
        options |= {"use_sliding_window": window is not None, "sliding_window": window or 4096, "pad_token_id": 0}
        options |= {"no_rope_layers": rng.choice((None, [1, 0, 1, 0])), "no_rope_layer_interval": rng.choice((2, 3))}
        options |= {"num_hidden_layers": 4, "attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
    elif architecture == "GraniteForCausalLM":
        options |= {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
        options |= {"embedding_multiplier": rng.choice((1.0, 12.0)), "residual_multiplier": rng.choice((0.22, 1.0))}
        options |= {"attention_multiplier": rng.choice((0.0625, 0.3)), "logits_scaling": rng.choice((1.0, 8.0))}
    elif architecture == "Ministral3ForCausalLM":
        options |= {"head_dim": head_dim, "sliding_window": window, "pad_token_id": 0}
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
        beta = rng.choice((0.1, 1.0))  # sequences outgrow the original length three times
        options["rope_parameters"] = {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": beta}
    elif architecture == "Glm4MoeForCausalLM":
        options |= {"head_dim": head_dim, "attention_bias": rng.random() < 0.5, "use_qk_norm": rng.random() < 0.5}
        options |= {"moe_intermediate_size": rng.choice((8, 24)), "n_routed_experts": 8, "num_experts_per_tok": 3}
        options |= {"n_shared_experts": rng.choice((1, 2)), "first_k_dense_replace": rng.choice((0, 1))}
        options |= {"n_group": (groups := rng.choice((1, 2, 4))), "topk_group": max(1, groups // 2 + groups % 2)}
        options |= {"norm_topk_prob": rng.random() < 0.5, "routed_scaling_factor": rng.choice((1.0, 2.5))}
        if groups == 4:
            options["topk_group"] = 2
    elif architecture in LATENT:
        options |= draw_latent_options(rng, architecture, options)
    elif architecture == "MiniMaxM2ForCausalLM":
        options |= {"head_dim": head_dim, "num_local_experts": rng.choice((3, 8)), "num_experts_per_tok": 2}
        factor = rng.choice((1.0, 0.5))
        options["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}
    elif architecture == "GptOssForCausalLM":
        options |= {"head_dim": head_dim, "num_local_experts": rng.choice((3, 8)), "num_experts_per_tok": 2}
        options |= {"sliding_window": window or 16, "attention_bias": rng.random() < 0.5}
        clamps = {"swiglu_limit": rng.choice((0.5, 7.0)), "swiglu_alpha": rng.choice((1.0, 1.702))}
        if hasattr(transformers.GptOssConfig(), "swiglu_alpha"):  # older ones compute with 7.0 and 1.702
            options |= clamps
        if rng.random() < 0.5:
            options |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
        options["rope_parameters"] = {**yarn, "truncate": rng.random() < 0.5}
    elif architecture == "SeedOssForCausalLM":
        options |= {"head_dim": head_dim, "attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
    elif architecture == "Exaone4ForCausalLM":
        options |= {"sliding_window": window, "pad_token_id": 0}
        options |= {"sliding_window_pattern": 2} if window else {"layer_types": ["full_attention"] * 3}
        options["num_hidden_layers"] = 3
    elif architecture == "Olmo2ForCausalLM":
        options |= {"attention_bias": rng.random() < 0.5, "pad_token_id": 0}
    elif architecture == "Olmo3ForCausalLM":
        options |= {"attention_bias": rng.random() < 0.5, "sliding_window": window or 4096, "pad_token_id": 0}
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
        sliding = {"rope_type": "default", "rope_theta": rng.choice((100.0, 1e4))}
        options["num_hidden_layers"] = 4
        options["rope_parameters"] = {"full_attention": yarn, "sliding_attention": sliding}
    elif architecture in HYBRIDS:
        options |= draw_hybrid_options(rng, head_dim)
    return options


def draw_gemma4_options(rng: random.Random, head_dim: int) -> dict[str, Any]:
    """Draw what all of Gemma 4 have: layers of two shapes, of which the last may read the caches of earlier ones."""
    types = rng.choice((["sliding_attention"] * 2 + ["full_attention"], ["sliding_attention", "full_attention"])) * 2
    num_global = rng.choice((None, 1))
    rotations = {"rope_type": "proportional", "partial_rotary_factor": rng.choice((0.25, 0.5)), "rope_theta": 1e6}
    return {
        "initializer_range": 0.05,  # or scaled, tied embeddings would repeat the last token
        "head_dim": head_dim,
        "global_head_dim": 2 * head_dim,
        "attention_k_eq_v": num_global is not None,
        "num_global_key_value_heads": num_global,
        "num_hidden_layers": len(types),
        "layer_types": types,
        "num_kv_shared_layers": rng.choice((0, len(types) // 2)),
        "use_double_wide_mlp": rng.random() < 0.5,
        "sliding_window": rng.choice((1, 7, 50, 200)),
        "attention_bias": rng.random() < 0.3,
        "final_logit_softcapping": rng.choice((None, 0.3, 30.0)),
        "rope_parameters": {
            "full_attention": rotations,
            "sliding_attention": {"rope_type": "default", "rope_theta": rng.choice((100.0, 10000.0))},
        },
    }


def draw_gemma4_experts_and_inputs(rng: random.Random) -> dict[str, Any]:
    """Draw what few of Gemma 4 have: experts beside the MLP, an embedding for each layer."""
    options: dict[str, Any] = {"hidden_size_per_layer_input": rng.choice((0, 8))}
    options |= {"vocab_size_per_layer_input": VOCAB_SIZE, "enable_moe_block": rng.random() < 0.5}
    return options | {"num_experts": rng.choice((3, 8)), "top_k_experts": 2, "moe_intermediate_size": 24}


def draw_latent_options(rng: random.Random, architecture: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Draw what models with latent attention have, whose heads have no groups. Their head_dim is not ours."""
    options = {"num_key_value_heads": sizes["num_attention_heads"], "kv_lora_rank": rng.choice((16, 40))}
    options |= {"qk_rope_head_dim": rng.choice((4, 8, 16)), "qk_nope_head_dim": rng.choice((8, 12))}
    options |= {"v_head_dim": rng.choice((8, 16, 24)), "q_lora_rank": rng.choice((None, 24))}
    options |= {"attention_bias": options["q_lora_rank"] is not None and rng.random() < 0.5}
    options |= {"moe_intermediate_size": rng.choice((8, 24)), "n_routed_experts": 8, "num_experts_per_tok": 3}
    options |= {"n_shared_experts": rng.choice((1, 2)), "routed_scaling_factor": rng.choice((1.0, 2.5))}
    options |= {"n_group": (groups := rng.choice((1, 2, 4))), "topk_group": 2 if groups == 4 else 1}
    if architecture == "Glm4MoeLiteForCausalLM":
        layers = ["sparse"] + ["dense"] * (sizes["num_hidden_layers"] - 1)
        options |= {"mlp_layer_types": rng.choice((None, layers))}
    else:
        options |= {"first_k_dense_replace": rng.choice((0, 1, 3))}
    if architecture == "DeepseekV2ForCausalLM":
        options |= {"topk_method": rng.choice(("greedy", "group_limited_greedy"))}
    else:
        options |= {"norm_topk_prob": rng.random() < 0.5, "rope_interleave": rng.random() < 0.7}
    if rng.random() < 0.6:
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
        options["rope_parameters"] = {
            **yarn,
            "mscale": rng.choice((0.7, 1.0)),
            "mscale_all_dim": rng.choice((0.7, 1.0)),
        }
    return options


def draw_hybrid_options(rng: random.Random, head_dim: int) -> dict[str, Any]:
    """Draw what hybrids of linear and full attention have; the fields of experts mean nothing to the dense one."""
    num_key_heads = rng.choice((2, 4))
    options = {"head_dim": 2 * head_dim, "num_hidden_layers": 4, "initializer_range": 0.05}
    options |= {"linear_num_key_heads": num_key_heads, "linear_num_value_heads": num_key_heads * rng.choice((1, 2, 3))}
    options |= {"linear_key_head_dim": rng.choice((8, 16)), "linear_value_head_dim": rng.choice((8, 12))}
    options |= {"linear_conv_kernel_dim": rng.choice((2, 4)), "attention_bias": rng.random() < 0.3}
    options |= {"moe_intermediate_size": 24, "num_experts": rng.choice((3, 8)), "num_experts_per_tok": 2}
    options |= {"shared_expert_intermediate_size": rng.choice((8, 16))}
    layer_types = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    options["layer_types"] = rng.choice((None, layer_types))
    return options


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """`checkpoint(architecture, seed)`: the folder of a random float32 model as transformers saves it."""

    def build(architecture: str, seed: int, **overrides: Any) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        save_random_model(folder, architecture, draw_options(architecture, seed) | overrides, seed)
        return folder

    return build


def save_random_model(folder: Path, architecture: str, options: dict[str, Any], seed: int) -> None:
    model_class = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**options))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        for name, param in model.named_parameters():
            if param.dim() == 1:  # or a norm or a bias that is left out would not be missed
                param.normal_(mean=1.0 if name.endswith("norm.weight") else 0.0, std=0.2)
        model.save_pretrained(folder)


def draw_prompts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def reference_tokens(folder: Path, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """Return what transformers takes next after each prompt and each beginning of its answer.

    These are the answers themselves if transformers, decoding greedily, would give them. A single forward pass for each
    prompt finds that out, without a cache of its own.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    results = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
        results.append(logits[len(prompt) - 1 :].argmax(-1).tolist())
    return results


def generate(folder: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    # All of the memory on a CPU would be a million blocks of so small a model, and their list takes a second to build.
    with LLM(folder, device="cpu", dtype="float32", num_kvcache_blocks=1000, **options) as llm:
        return [output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_those_of_transformers(
    checkpoint: Callable[..., Path], architecture: str, seed: int
) -> None:
    """In chunks; a second time, from cached prefixes; and in a cache so small that sequences are preempted."""
    folder, prompts = checkpoint(architecture, seed), draw_prompts(seed)
    options = {"max_model_len": 112, "kvcache_block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 3}
    expected = None
    for num_blocks, num_times in ((200, 2), (7, 1)):
        with LLM(folder, device="cpu", dtype="float32", num_kvcache_blocks=num_blocks, **options) as llm:
            llm.engine.scheduler.reserved_tokens = 0
            for _ in range(num_times):
                answers = [output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
                expected = expected or reference_tokens(folder, prompts, answers)
                assert answers == expected
            metrics = llm.get_metrics()
            if num_blocks == 7:  # which suffice where layers give blocks back
                assert metrics.num_preemptions or llm.engine.block_manager.num_tables > 1
            else:  # hybrids keep too few states for so many prompts
                assert metrics.cached_tokens or architecture in HYBRIDS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_give_the_tokens_of_transformers(checkpoint: Callable[..., Path], architecture: str) -> None:
    even = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    if architecture in LATENT:
        even["num_key_value_heads"] = 4
    folder, prompts = checkpoint(architecture, 0, **even), draw_prompts(0)
    answers = generate(folder, prompts, tensor_parallel_size=2, max_model_len=112)
    assert answers == reference_tokens(folder, prompts, answers)


def test_longrope_takes_the_factors_for_the_longest_sequence_that_the_engine_may_have(
    checkpoint: Callable[..., Path],
) -> None:
    """transformers chooses by the length of each sequence: the two agree where all are short or all are long."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors, "original_max_position_embeddings": 64}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None}
    extent = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    folder = checkpoint("Phi3ForCausalLM", 0, **sizes, **extent, rope_parameters={**rope, "partial_rotary_factor": 1.0})
    short, long = draw_prompts(0, (3, 17, 50)), draw_prompts(1, (65, 90, 130))
    for prompts, options, agrees in ((short, {"max_model_len": 64}, True), (long, {}, True), (short, {}, False)):
        answers = generate(folder, prompts, **options)
        assert (answers == reference_tokens(folder, prompts, answers)) is agrees


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_config_leaves_out_is_what_transformers_takes(architecture: str) -> None:
    """A config with its structural sizes alone means the same here and there, also as transformers writes it out."""
    sizes = {"vocab_size": 512, "hidden_size": 4096, "intermediate_size": 512, "num_hidden_layers": 30}
    sizes["num_attention_heads"] = 32
    if architecture == "DeepseekV2ForCausalLM":
        sizes["num_experts_per_tok"] = 6  # which it has no default for
    theirs = getattr(transformers, architecture).config_class(**sizes, pad_token_id=0)
    short = {"architectures": [architecture], **sizes}
    full = {**theirs.to_dict(), "architectures": [architecture]}
    assert read_native_config(short) == read_native_config(full)


@pytest.mark.parametrize(
    ("architecture", "entry", "message"),
    [
        ("Qwen3MoeForCausalLM", {"num_experts": 0}, "num_experts=0; it must be a whole number of at least 1"),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 0},
            "num_local_experts=0; it must be a whole number of at least 1",
        ),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok=9, more than its num_experts=8"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [True]}, "mlp_only_layers=[True]; it must be a list of layers"),
        (
            "Glm4MoeForCausalLM",
            {"n_group": 3},
            "n_group=3 and topk_group=1, which 128 experts, 8 for each token, cannot",
        ),
        ("Glm4MoeForCausalLM", {"n_group": 32}, "n_group=32 and topk_group=1, which 128 experts, 8 for each"),
        ("Glm4MoeForCausalLM", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1; it must be a whole number"),
        ("Glm4MoeForCausalLM", {"use_qk_norm": "yes"}, "use_qk_norm='yes'"),
        ("Cohere2ForCausalLM", {"use_qk_norm": True}, "use_qk_norm=True, which is not supported"),
        ("Cohere2ForCausalLM", {"use_parallel_block": False}, "use_parallel_block=False, which is not supported"),
        ("Cohere2ForCausalLM", {"position_embedding_type": "none"}, "position_embedding_type='none', which is not"),
        ("Cohere2ForCausalLM", {"layer_norm_eps": 0}, "layer_norm_eps=0; it must be a positive number"),
        ("Cohere2ForCausalLM", {"logit_scale": -1}, "logit_scale=-1; it must be a positive number"),
        ("Cohere2ForCausalLM", {"sliding_window": None}, "sliding_window=None; it must be a whole number"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0}, "attn_logit_softcapping=0; it must be a positive number"),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": "x"}, "final_logit_softcapping='x'; it must be a positive"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation='gelu', which is not supported"),
        ("Gemma2ForCausalLM", {"hidden_act": "silu"}, "hidden_act='silu', which is not supported"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True, which is not"),
        ("LlamaForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0, which is not supported"),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": 256}, "rotary_dim=256, more than a head's 128 dimensions"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5, which is not supported"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, which is not supported"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_field_and_value(
    architecture: str, entry: dict[str, Any], message: str
) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 2}
    with pytest.raises(ModelError) as error:
        read_native_config({"architectures": [architecture], "num_attention_heads": 8, **sizes, **entry})
    assert message in str(error.value)


def test_longrope_is_known_by_its_first_name() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 2}
    raw = {"architectures": ["Phi3ForCausalLM"], "num_attention_heads": 8, **sizes}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    first, later = (
        read_native_config({**raw, "rope_scaling": {"type": name, **factors}}) for name in ("su", "longrope")
    )
    assert first == later
    assert first.rope.rope_type == "longrope"
