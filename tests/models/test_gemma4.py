"""Gemma 4: whole models with every switch against transformers, and the sizes of the published ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, SamplingParams
from nanoinfer.caches.kv_cache_layout import KVCacheLayout
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ConfigError, ModelError
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.gemma4 import Gemma4Attention
from nanoinfer.models.native_config import read_native_config
from tests.models.test_architectures import GREEDY, checkpoint, draw_prompts, generate, reference_tokens

__all__ = ["checkpoint"]  # a fixture
SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 6,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    "sliding_window": 7,
    "attention_bias": False,
    "tie_word_embeddings": True,
    # None of these:
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "final_logit_softcapping": 0.5,
}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
INPUTS = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
KINDS = {
    "dense": {},
    "keys as values": KEYS_AS_VALUES,
    "experts": {**KEYS_AS_VALUES, **EXPERTS},
    "inputs and shared caches": INPUTS,
    "everything": {**KEYS_AS_VALUES, **EXPERTS, **INPUTS, "attention_bias": True},
}
# As their config.json files have them.
COMMON: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 262144,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
}
LARGE = {**COMMON, "hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262144}
LARGE |= {"attention_k_eq_v": True}
PUBLISHED: dict[str, dict[str, Any]] = {
    "E2B": {
        **{**COMMON, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35},
        **{"num_attention_heads": 8, "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    },
    "E4B": {
        **{**COMMON, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 18},
    },
    "12B": {
        **{**LARGE, "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1},
        "architectures": ["Gemma4UnifiedForCausalLM"],
    },
    "26B-A4B": {
        **{**LARGE, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2},
        **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    },
    "31B": {
        **{**LARGE, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60},
        **{"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4},
    },
}


@pytest.fixture
def small(checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """`small(kind)`: the folder of a random model of that kind."""
    return lambda kind: checkpoint("Gemma4ForCausalLM", 0, **SMALL | KINDS[kind])


def config_of(name: str) -> ModelConfig:
    return read_native_config(PUBLISHED[name])


# --- whole models ---


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_those_of_transformers(small: Callable[[str], Path], kind: str) -> None:
    """In chunks, from cached prefixes, and after preemption, over tables of two shapes of pages."""
    folder, prompts = small(kind), draw_prompts(1, (29, 30, 16, 63, 90))
    prompts.append(prompts[-1][:70])
    options: dict[str, Any] = {"max_model_len": 112, "kvcache_block_size": 16, "max_num_batched_tokens": 48}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    for num_blocks in (200, 8):
        with LLM(
            folder, device="cpu", dtype="float32", num_kvcache_blocks=num_blocks, max_num_seqs=4, **options
        ) as llm:
            llm.engine.scheduler.reserved_tokens = 0
            for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
                ids = prompt + output.token_ids
                with torch.inference_mode():
                    logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
                assert output.token_ids == logprobs[len(prompt) - 1 : -1].argmax(-1).tolist()
                entries = (output.prompt_logprobs or [])[1:] + (output.outputs[0].logprobs or [])
                found = [entry[token].logprob for token, entry in zip(ids[1:], entries, strict=True)]
                expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
                assert found == pytest.approx(expected, abs=5e-5)
            again = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert max(output.num_cached_tokens or 0 for output in again) >= 64 or num_blocks == 8
            assert llm.engine.block_manager.num_tables > 1
            assert llm.get_metrics().num_used_blocks == 0


@pytest.mark.parametrize("kind", ["inputs and shared caches", "everything"])
def test_layers_without_keys_compute_the_last_token_of_a_chunk_alone(
    small: Callable[[str], Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole prompts, in chunks and after hits; all tokens where log-probabilities of the prompt are wanted."""
    folder, prompts = small(kind), draw_prompts(1, (29, 30, 16, 63, 90))
    prompts.append(prompts[-1][:70])
    sizes = list[tuple[int, bool, int]]()
    attend = Gemma4Attention.attend

    def noted(attention: Gemma4Attention, qkv: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        if step.attention.is_prefill:
            sizes.append((len(qkv), attention.k_norm is None, len(step.rows)))
        return attend(attention, qkv, step)

    monkeypatch.setattr(Gemma4Attention, "attend", noted)
    options: dict[str, Any] = {"max_model_len": 112, "kvcache_block_size": 16, "max_num_batched_tokens": 48}
    with LLM(folder, device="cpu", dtype="float32", num_kvcache_blocks=200, max_num_seqs=4, **options) as llm:
        for _ in range(2):  # again, from the prefix cache
            answers = [output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
            assert answers == reference_tokens(folder, prompts, answers)
        assert all(num == num_chunks for num, is_late, num_chunks in sizes if is_late)
        assert any(num > num_chunks for num, is_late, num_chunks in sizes if not is_late)
        params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0)
        sizes.clear()
        llm.generate([prompts[0]], params, use_tqdm=False)
        assert {(is_late, num) for num, is_late, _ in sizes} == {(False, 29), (True, 29)}


@pytest.mark.parametrize("kind", ["experts", "inputs and shared caches", "everything"])
def test_two_ranks_give_the_tokens_of_transformers(small: Callable[[str], Path], kind: str) -> None:
    """The ranks share the one KV head of layers without a window."""
    folder, prompts = small(kind), draw_prompts(0, (29, 90))
    answers = generate(folder, prompts, tensor_parallel_size=2, max_model_len=112)
    assert answers == reference_tokens(folder, prompts, answers)


@pytest.mark.parametrize(("kv_cache_dtype", "allowed"), [("int8", 0.01), ("fp8", 0.03)])
def test_a_cache_in_8_bits_gives_nearly_the_logprobs_of_one_in_32(
    small: Callable[[str], Path], kv_cache_dtype: str, allowed: float
) -> None:
    """Layers that share a cache read it rounded, like its owners."""
    folder, prompts = small("everything"), draw_prompts(0, (60, 90))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for dtype in ("auto", kv_cache_dtype):
        options = {"kv_cache_dtype": dtype, "max_num_batched_tokens": 32, "num_kvcache_blocks": 20}
        with LLM(folder, device="cpu", dtype="float32", max_model_len=112, kvcache_block_size=16, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        entries = [entry for output in outputs for entry in (output.prompt_logprobs or []) if entry]
        found.append(torch.tensor([next(iter(entry.values())).logprob for entry in entries]))
    error = (found[0] - found[1]).abs()
    assert 0 < error.mean() < allowed


def test_keys_and_values_that_a_sharing_layer_has_in_the_files_are_passed_over(
    small: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = small("inputs and shared caches")
    expected = generate(folder, [[1, 2, 3]])
    tensors = load_file(folder / "model.safetensors")
    assert not any(name.startswith("model.layers.3.self_attn.k") for name in tensors)
    tensors |= {f"model.layers.3.self_attn.{name}.weight": torch.zeros(32, 48) for name in ("k_proj", "v_proj")}
    tensors["model.layers.5.self_attn.k_norm.weight"] = torch.zeros(32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert generate(tmp_path, [[1, 2, 3]]) == expected


# --- sizes ---


@pytest.mark.parametrize(
    ("name", "heads_by_kind", "num_tables", "per_page"),
    [
        ("E2B", ((1, 256), (1, 512)), 3, (3, 6)),
        ("E4B", ((2, 256), (2, 512)), 4, (4, 8)),
        ("12B", ((8, 256), (1, 512)), 9, (20, 5)),
        ("26B-A4B", ((8, 256), (2, 512)), 6, (10, 5)),
        ("31B", ((16, 256), (4, 512)), 9, (14, 7)),
    ],
)
def test_the_published_sizes_have_pages_of_two_shapes(
    name: str, heads_by_kind: tuple[tuple[int, int], ...], num_tables: int, per_page: tuple[int, int]
) -> None:
    """per_page: how many layers a page holds of those without a window, and of those with one."""
    config = config_of(name)
    kinds = {(layer.num_key_value_heads, layer.head_dim) for layer in config.layers or ()}
    assert kinds == {*heads_by_kind}
    layout = KVCacheLayout.of(config, 65536, TensorParallel())
    assert len(layout.tables) == num_tables
    assert (len(layout.tables[0].layers), len(layout.tables[1].layers)) == per_page
    assert layout.tables[0].window is None
    assert len(layout.places) == config.num_hidden_layers


def test_the_last_layers_of_e2b_have_the_places_of_earlier_ones() -> None:
    config = config_of("E2B")
    assert [config.cache_layer(index) for index in (0, 13, 14, 15, 18, 19, 33, 34)] == [0, 13, 14, 13, 13, 14, 13, 14]
    places = KVCacheLayout.of(config, 4096, TensorParallel()).places
    assert len({*places}) == 15
    assert places[15:] == ((places[13],) * 4 + (places[14],)) * 4
    assert [config.of_layer(index).intermediate_size for index in (14, 15)] == [6144, 12288]
    assert config.layer_inputs is not None
    assert (config.layer_inputs.vocab_size, config.layer_inputs.size) == (262144, 256)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_is_the_same_as_transformers_writes_it_out(name: str) -> None:
    raw = dict(PUBLISHED[name])
    [architecture] = raw.pop("architectures")
    theirs = getattr(transformers, architecture).config_class(**raw).to_dict()
    assert "global_head_dim" not in theirs or "per_layer_config" not in theirs
    assert read_native_config({**theirs, "architectures": [architecture]}) == config_of(name)


def test_heads_that_are_all_alike_are_read_from_what_transformers_writes() -> None:
    raw = {**PUBLISHED["12B"], "global_head_dim": 256, "num_global_key_value_heads": 8}
    [architecture] = raw.pop("architectures")
    theirs = getattr(transformers, architecture).config_class(**raw).to_dict()
    config = read_native_config({**theirs, "architectures": [architecture]})
    assert {(layer.num_key_value_heads, layer.head_dim) for layer in config.layers or ()} == {(8, 256)}


@pytest.mark.parametrize(("name", "sizes"), [("12B", "1, 2, 4, 8"), ("26B-A4B", "1, 2, 4, 8"), ("E2B", "1, 2, 4, 8")])
def test_ranks_divide_heads_of_both_sizes(name: str, sizes: str) -> None:
    config = config_of(name)
    for size in (1, 2, 4, 8):
        config.check_tensor_parallel_size(size)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size=3 .*; use one of {sizes}"):
        config.check_tensor_parallel_size(3)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'; supported are vision"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu', which is not supported"),
        ({"num_kv_shared_layers": 47}, "a layer with each window must come before those that share"),
        ({"num_global_key_value_heads": 3}, "num_attention_heads=16 is no multiple of num_key_value_heads=3"),
        ({"global_head_dim": 511}, "head_dim=511 is odd"),
        ({"per_layer_config": {"5": {"intermediate_size": 8}}}, "it can have num_key_value_heads and head_dim alone"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts=5, more than its num_exp"),
    ],
)
def test_what_makes_no_sense_is_refused_by_field_and_value(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        read_native_config(PUBLISHED["12B"] | entry)
    assert message in str(error.value)
