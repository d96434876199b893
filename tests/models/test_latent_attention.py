"""Latent attention: what the cache holds, and requests through `LLM` on a CPU. Its kernels: tests/kernels."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoinfer import LLM, SamplingParams
from nanoinfer.caches.kv_cache import KVCache, page_bytes
from nanoinfer.caches.kv_cache_layout import KVCacheLayout
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ConfigError, ModelError
from nanoinfer.layers.attention import latent
from nanoinfer.models.latent_attention import LatentExpansion
from nanoinfer.models.native_config import read_native_config
from tests.lora.adapters import merge, request, write_adapter
from tests.models.test_architectures import LATENT, checkpoint, draw_prompts, generate, reference_tokens
from tests.quantization.test_checkpoints import BLOCKS, round_weight

__all__ = ["checkpoint"]  # a fixture
SIZES = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 3}
SMALL: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "num_experts_per_tok": 2}
# Of GLM-4.7-Flash; its config.json has what the class takes for the rest.
FLASH = {"architectures": ["Glm4MoeLiteForCausalLM"], "vocab_size": 154880, "hidden_size": 2048}
FLASH |= {"intermediate_size": 10240, "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20}


def engine(folder: Path, **options: Any) -> LLM:
    options = {"max_model_len": 160, "kvcache_block_size": 16, "num_kvcache_blocks": 200, **options}
    return LLM(folder, device="cpu", dtype="float32", **options)


def num_layers(folder: Path) -> int:
    count: int = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    return count


def greedy(llm: LLM, prompts: list[list[int]], num_tokens: int = 8, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False, **options)]


def logprobs_of_prompt(folder: Path, prompt: list[int], **options: Any) -> Tensor:
    with engine(folder, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        [output] = llm.generate([prompt], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    return torch.tensor([row[token].logprob for row, token in rows])


def test_the_cache_holds_one_vector_of_576_numbers_for_all_heads_on_each_rank() -> None:
    config = read_native_config(FLASH)
    for tp in (TensorParallel(), TensorParallel(1, 4)):
        layout = KVCacheLayout.of(config, 1024, tp)
        assert len(layout.tables) == 1
        assert page_bytes(layout, 64, torch.bfloat16) == 47 * 64 * 576 * 2
    cache = KVCache(layout, 2, 64, torch.bfloat16, torch.device("cpu")).layer(layout.places[3])
    assert (cache.k.shape, cache.v.shape) == ((2, 1, 64, 576), (2, 1, 64, 512))
    assert cache.k.data_ptr() == cache.v.data_ptr()


@pytest.mark.parametrize("architecture", LATENT)
@pytest.mark.parametrize("seed", range(2))
def test_log_probabilities_of_prompts_equal_those_of_transformers(
    checkpoint: Callable[..., Path], architecture: str, seed: int
) -> None:
    folder, [prompt] = checkpoint(architecture, 10 + seed), draw_prompts(seed, (100,))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)[range(99), prompt[1:]]
    found = logprobs_of_prompt(folder, prompt, max_num_batched_tokens=48)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_prefill_expands_and_decode_absorbs(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, expanded = checkpoint("DeepseekV3ForCausalLM", 1, num_hidden_layers=2), []
    expand = LatentExpansion.forward

    def note(layer: LatentExpansion, latents: Tensor) -> Tensor:
        expanded.append(len(latents))
        return expand(layer, latents)

    monkeypatch.setattr(LatentExpansion, "forward", note)
    with engine(folder, max_num_batched_tokens=16) as llm:
        expanded.clear()
        greedy(llm, draw_prompts(0, (40,)))
    assert expanded == [16, 16, 32, 32, 40, 40], "contexts of the chunks, in two layers, and nothing in decode"


def test_few_heads_at_a_time_give_the_same(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, prompts = (
        checkpoint("DeepseekV3ForCausalLM", 0, num_attention_heads=6, num_key_value_heads=6),
        draw_prompts(0),
    )
    expected = generate(folder, prompts)
    monkeypatch.setattr(latent, "MAX_ABSORBED", 1)
    assert latent.LatentAttentionSpec(6, read_native_config(FLASH).latent_attention, 1.0).heads_at_once(9) == 1  # type: ignore[arg-type]
    assert generate(folder, prompts) == expected


@pytest.mark.parametrize("common", [32, 63])
def test_prefix_hits_are_found_by_block_and_by_token(checkpoint: Callable[..., Path], common: int) -> None:
    folder = checkpoint("Glm4MoeLiteForCausalLM", 2)
    [prefix, first, second] = draw_prompts(3, (common, 20, 31))
    prompts = [[*prefix, *first], [*prefix, *second]]
    with engine(folder) as llm:
        answers = [greedy(llm, [prompt])[0] for prompt in prompts]
        assert llm.get_metrics().cached_tokens == common
    assert answers == reference_tokens(folder, prompts, answers)


@pytest.mark.parametrize("architecture", LATENT)
def test_preempted_sequences_go_on_as_they_began(checkpoint: Callable[..., Path], architecture: str) -> None:
    folder, prompts = checkpoint(architecture, 0), draw_prompts(5, (40, 41, 42, 43))
    with engine(folder, num_kvcache_blocks=12, max_num_seqs=4) as llm:
        llm.engine.scheduler.reserved_tokens = 0  # type: ignore[attr-defined]
        answers = greedy(llm, prompts, num_tokens=24)
        assert llm.get_metrics().num_preemptions
    assert answers == reference_tokens(folder, prompts, answers)


@pytest.mark.parametrize("architecture", LATENT)
def test_layers_that_predict_several_tokens_are_passed_over(checkpoint: Callable[..., Path], architecture: str) -> None:
    folder, prompts = checkpoint(architecture, 3), draw_prompts(0)
    expected = generate(folder, prompts)
    tensors = load_file(folder / "model.safetensors")
    names, next_layer = [name for name in tensors if ".1.self_attn" in name], f"layers.{num_layers(folder)}."
    tensors |= {name.replace("layers.1.", next_layer): tensors[name].clone() for name in names}
    tensors[f"model.{next_layer}eh_proj.weight"] = torch.zeros(8, 8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert generate(folder, prompts) == expected


def test_weights_are_updated_and_memory_comes_back(checkpoint: Callable[..., Path]) -> None:
    """New weights take effect in prefill and in decode."""
    first, second = (
        checkpoint("DeepseekV3ForCausalLM", 0, **overrides) for overrides in ({}, {"initializer_range": 0.3})
    )
    prompts, model = draw_prompts(0, (30, 50)), transformers.AutoModelForCausalLM.from_pretrained(second).float()
    with engine(first) as llm:
        greedy(llm, prompts)
        llm.sleep()
        llm.wake_up()
        llm.update_weights(model.state_dict())
        answers = greedy(llm, prompts)
    assert answers == reference_tokens(second, prompts, answers)


# --- Fewer bits ---


def rounded_to_blocks(folder: Path, target: Path, **config: Any) -> Path:
    """Write FP8 with scales of blocks, as DeepSeek does, to `target`, and the weights that it stands for to `folder`.

    Routers stay in 16 bits without being named, as norms, embeddings and heads do.
    """
    tensors = load_file(folder / "model.safetensors")
    given, wide = {}, {}
    for name, tensor in tensors.items():
        is_linear = tensor.dim() == 2 and not any(part in name for part in ("embed", "lm_head", "mlp.gate.weight"))
        rounded, wide[name] = round_weight(name, tensor, BLOCKS) if is_linear else ({name: tensor}, tensor)
        given |= rounded
    save_file(given, target / "model.safetensors", {"format": "pt"})
    save_file(wide, folder / "model.safetensors", {"format": "pt"})
    quantization = {name: value for name, value in BLOCKS.items() if name != "modules_to_not_convert"}
    quantization |= {"quant_method": "fp8", "fmt": "e4m3", **config}
    raw = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, "quantization_config": quantization}))
    return target


BLOCK_SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128}
BLOCK_SIZES |= {"moe_intermediate_size": 128, "kv_lora_rank": 80, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64}
BLOCK_SIZES |= {"v_head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize("query_rank", [None, 128])
@pytest.mark.parametrize("size", [1, 2])
def test_fp8_in_blocks_as_deepseek_writes_it(
    checkpoint: Callable[..., Path], tmp_path: Path, query_rank: int | None, size: int
) -> None:
    """The last block of kv_a_proj_with_mqa, of 16 rows, is a part of one. Decode multiplies by kv_b_proj widened."""
    wide = checkpoint("DeepseekV3ForCausalLM", 0, **BLOCK_SIZES, q_lora_rank=query_rank, attention_bias=False)
    folder, prompts = rounded_to_blocks(wide, tmp_path), draw_prompts(0)
    answers = generate(folder, prompts, tensor_parallel_size=size)
    assert answers == generate(wide, prompts)


def test_new_weights_in_fp8_are_absorbed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    wide = checkpoint("DeepseekV3ForCausalLM", 0, **BLOCK_SIZES, q_lora_rank=None, attention_bias=False)
    folder, prompts = rounded_to_blocks(wide, tmp_path), draw_prompts(0)
    tensors = load_file(folder / "model.safetensors")
    with engine(folder) as llm:
        expected = greedy(llm, prompts)
        for name in tensors:
            if "kv_b_proj.weight_scale_inv" in name:
                llm.update_weights({name: tensors[name] / 4})
        assert greedy(llm, prompts) != expected
        llm.sleep(level=2)
        llm.wake_up()
        llm.update_weights(tensors)
        assert greedy(llm, prompts) == expected


def test_ranks_that_would_cut_a_block_of_scales_are_refused() -> None:
    fp8 = {"architectures": ["DeepseekV3ForCausalLM"], **SMALL, "num_attention_heads": 8, "quantization_config": BLOCKS}
    sizes = {"v_head_dim": 64, "qk_nope_head_dim": 192, "moe_intermediate_size": 512}
    config = read_native_config({**fp8, **sizes})
    config.check_tensor_parallel_size(4)
    with pytest.raises(ConfigError, match=r"the values of heads, 64 values, is no multiple of the 128 that share a"):
        config.check_tensor_parallel_size(8)
    with pytest.raises(ModelError, match="q_lora_rank, 100 values, is no multiple of the 128 that share a scale"):
        read_native_config({**fp8, "q_lora_rank": 100})


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_what_is_rounded_at_load_leaves_kv_b_proj_wide(checkpoint: Callable[..., Path], quantization: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "v_head_dim": 16, "q_lora_rank": 32}
    with engine(checkpoint("DeepseekV2ForCausalLM", 0, **sizes), quantization=quantization) as llm:
        attention = llm.engine.runner.model.model.layers[0].self_attn  # type: ignore[attr-defined]
        assert attention.kv_b_proj.weight.dtype == torch.float32
        assert attention.qkv_a_proj.weight.dtype != torch.float32
        assert [len(answer) for answer in greedy(llm, draw_prompts(0, (30, 50)))] == [8, 8]


# --- What is refused ---


@pytest.mark.parametrize(
    ("architecture", "entry", "message"),
    [
        ("DeepseekV3ForCausalLM", {"index_topk": 2048}, "index_topk=2048, which is not supported"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func='softmax', which is not supported"),
        ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}, "topk_method='greedy', which is not supported"),
        ("DeepseekV3ForCausalLM", {"attention_bias": True, "q_lora_rank": None}, "attention_bias=True; without q_lora"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 0}, "kv_lora_rank=0; it must be a whole number of at least 1"),
        ("DeepseekV3ForCausalLM", {"n_group": 3}, "n_group=3 and topk_group=4, which 256 experts"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "supported are greedy, group_limited_greedy"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob=True, which is not supported"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, "it must name dense or sparse for each of 3 layers"),
        ("Glm4MoeLiteForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, which is not supported"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_field_and_value(
    architecture: str, entry: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as error:
        read_native_config({"architectures": [architecture], **SMALL, **entry})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "latent attention keeps one vector of .* in 16 bits alone; leave kv_cache_dtype"),
        ({"attention_backend": "flash_attn"}, "'flash_attn' has no latent attention; leave attention_backend out"),
        ({"attention_backend": "triton"}, "'triton' runs on CUDA, and device is 'cpu'; use a GPU, or use"),
    ],
)
def test_options_that_latent_attention_lacks_are_refused(
    checkpoint: Callable[..., Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(checkpoint("DeepseekV3ForCausalLM", 0), **options)


def test_adapters_change_all_but_what_is_absorbed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    base, prompts = checkpoint("DeepseekV3ForCausalLM", 0, first_k_dense_replace=3, q_lora_rank=24), draw_prompts(0)
    adapter = write_adapter(base, tmp_path / "one", 0, r".*\.(q_a_proj|kv_a_proj_with_mqa|q_b_proj|o_proj)")
    absorbed = write_adapter(base, tmp_path / "two", 0, r".*\.kv_b_proj")
    expected = generate(merge(base, adapter, tmp_path / "merged"), prompts)
    with engine(base, enable_lora=True) as llm:
        assert greedy(llm, prompts, lora_request=request(adapter, 1)) == expected
        with pytest.raises(ModelError, match=r"it changes .*kv_b_proj, which is not supported for this model"):
            llm.add_lora(request(absorbed, 2))
