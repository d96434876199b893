"""EngineConfig: what a user may ask for. ModelConfig: config.json in its spellings, and what is refused."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoinfer.checkpoint.model_config import ModelConfig, RopeConfig
from nanoinfer.config import VLLM_NAMES, EngineConfig, describe_options
from nanoinfer.errors import ConfigError, ModelError
from nanoinfer.models import SUPPORTED, get_model_class
from nanoinfer.models.config_fields import read_windows
from nanoinfer.models.native_config import read_native_config, read_native_folder

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], **SIZES}


# --- EngineConfig ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8' is not known; use one of auto, float32, bfloat16, float16"),
        ({"dtype": None}, "dtype='None' is not known; use one of auto, float32, bfloat16, float16"),
        (
            {"attention_backend": "xformers"},
            "attention_backend='xformers' is not known; use one of auto, flash_attn, triton, torch",
        ),
        ({"kv_cache_dtype": "e5m2"}, "kv_cache_dtype='e5m2' is not known; use one of auto, fp8, fp8_e4m3, int8"),
        ({"load_format": "gguf"}, "load_format='gguf' is not known; use one of auto, safetensors, dummy"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be a whole number of at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be a whole number of at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs=True must be a whole number of at least 1"),
        ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens=1.5 must be a whole number of at least 1"),
        ({"max_num_batched_tokens": None}, "max_num_batched_tokens=None must be a whole number of at least 1"),
        ({"kvcache_block_size": -16}, "kvcache_block_size=-16 must be a whole number of at least 1"),
        ({"kvcache_block_size": 100}, "kvcache_block_size=100 is no multiple of 16; use 96"),
        ({"kvcache_block_size": 1}, "kvcache_block_size=1 is no multiple of 16; use 16"),
        ({"max_model_len": 0}, "max_model_len=0 must be a whole number of at least 1"),
        ({"max_model_len": 1}, "max_model_len=1 has no room for a prompt and a completion; use at least 2"),
        ({"max_model_len": "4096"}, "max_model_len='4096' must be a whole number of at least 1"),
        ({"num_kvcache_blocks": 0}, "num_kvcache_blocks=0 must be a whole number of at least 1"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching=1 is not a bool; use True or False"),
        ({"enforce_eager": "yes"}, "enforce_eager='yes' is not a bool; use True or False"),
        ({"seed": 0.5}, "seed=0.5 is not an int of 64 bits; use a whole number such as 0"),
        ({"seed": None}, "seed=None is not an int of 64 bits; use a whole number such as 0"),
        ({"seed": True}, "seed=True is not an int of 64 bits; use a whole number such as 0"),
        ({"seed": 2**63}, f"seed={2**63} is not an int of 64 bits; use a whole number such as 0"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0 must lie in (0, 1]; 0.9 suits"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization=90 must lie in (0, 1]; 0.9 suits"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization=nan must lie in (0, 1]; 0.9 suits"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization='0.9' must lie in (0, 1]; 0.9 suits"),
        ({"revision": 2}, "revision=2 is no text; use a string that is not empty"),
        ({"tokenizer": ""}, "tokenizer='' is no text; use a string that is not empty"),
        ({"download_dir": True}, "download_dir=True is no text; use a string that is not empty"),
        (
            {"hf_overrides": '{"head_dim": 64}'},
            "hf_overrides='{\"head_dim\": 64}' is no dict; use one such as {'max_position_embeddings': 8192}",
        ),
        (
            {"hf_overrides": {"dtype": torch.float16}},
            "hf_overrides has what JSON cannot hold (Object of type dtype is not JSON serializable); use values as in",
        ),
    ],
)
def test_an_option_out_of_range_is_refused_with_value_rule_and_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(model="m", **options)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": None, "num_kvcache_blocks": None, "seed": -(2**63), "kvcache_block_size": 16},
        {"max_model_len": 2, "num_kvcache_blocks": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"gpu_memory_utilization": 1, "kvcache_block_size": 48, "seed": 2**63 - 1},
        {"gpu_memory_utilization": np.float32(0.5)},
        {"revision": "refs/pr/1", "tokenizer": "org/name", "download_dir": "/tmp", "hf_overrides": {"a": {"b": [1]}}},
        {"revision": None, "tokenizer": None, "download_dir": None, "hf_overrides": {}},
    ],
)
def test_values_at_the_edge_of_their_range_are_accepted(options: dict[str, Any]) -> None:
    config = EngineConfig(model="m", **options)
    assert {name: getattr(config, name) for name in options} == options


ADAPTERS = (
    "use the base model with enable_lora=True, and name the adapter in calls by lora_request=LoRARequest(name, id, "
    "folder), or merge the two with peft's merge_and_unload and give the folder where that is saved."
)


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("gpu_memory_utilisation", "did you mean 'gpu_memory_utilization'? "),
        ("tensor_parallel", "did you mean 'tensor_parallel_size'? "),
        ("max_seqs", "did you mean 'max_num_seqs'? "),
        ("eager", "did you mean 'enforce_eager'? "),
        ("block_size", "did you mean 'kvcache_block_size'? "),
        ("num_gpu_blocks_override", "did you mean 'num_kvcache_blocks'? "),
        *((name, f"{ADAPTERS} ") for name in ("lora_modules", "lora_local_path", "peft", "lora_paths")),
        ("enable_prompt_adapter", "nanoinfer does not support it. "),
        ("trust_remote_code", "nanoinfer does not support it. "),
        ("hf_override", "did you mean 'hf_overrides'? "),
        ("wishes", ""),
    ],
)
def test_an_unknown_option_is_a_type_error_that_names_a_similar_one_and_lists_all(written: str, hint: str) -> None:
    with pytest.raises(TypeError) as error:
        EngineConfig.from_options("m", {written: True})
    assert str(error.value).startswith(f"LLM has no option {written!r}; {hint}Options: dtype, ")
    assert str(error.value).endswith(", seed")
    assert not {field.name for field in dataclasses.fields(EngineConfig)} & set(VLLM_NAMES)


@pytest.mark.parametrize(
    ("written", "value", "hint"),
    [
        (
            "enable_chunked_prefill",
            False,
            "prompts above max_num_batched_tokens are always computed in chunks; use True, or leave it out. ",
        ),
        ("torch_dtype", "bfloat16", "did you mean 'dtype'? "),
        ("guided_json", {"a": 1}, "did you mean 'structured_outputs=StructuredOutputsParams(json=...) of SamplingPar"),
        ("rope_scaling", {"factor": 2.0}, "did you mean \"hf_overrides={'rope_scaling': ...}\"? "),
        ("swap_space", 4, "preempted sequences are computed again, and nothing is swapped; use 0, or leave it out. "),
        ("disable_log_stats", False, "get_metrics has the statistics, and nothing logs them; use True, or leave it"),
        ("speculative_model", "draft", "did you mean 'speculative_config'? "),
        ("pipeline_parallel_size", 2, "nanoinfer does not support it. "),
        ("task", "embed", "runner='pooling' embeds, and a head is what the architecture says; use 'auto' or 'gene"),
        ("logits_processors", [max], "functions of one request are SamplingParams(logits_processors=[...]). "),
    ],
)
def test_an_option_of_vllm_is_refused_with_the_reason_where_it_asks_for_something_else(
    written: str, value: Any, hint: str
) -> None:
    with pytest.raises(TypeError) as error:
        EngineConfig.from_options("m", {written: value})
    assert str(error.value).startswith(f"LLM has no option {written!r}; {hint}")


def test_an_option_of_vllm_that_says_what_is_so_anyway_is_accepted() -> None:
    so_anyway = {
        "enable_chunked_prefill": True,
        "enable_sleep_mode": True,
        "trust_remote_code": False,
        "skip_tokenizer_init": False,
        "tokenizer_mode": "auto",
        "pipeline_parallel_size": 1,
        "disable_log_stats": True,
        "swap_space": 0,
        "cpu_offload_gb": 0.0,
        "task": "generate",
        "limit_mm_per_prompt": {},
        "speculative_config": None,
        "torch_dtype": None,
    }
    assert EngineConfig.from_options("m", {**so_anyway, "seed": 3}) == EngineConfig(model="m", seed=3)
    with pytest.raises(TypeError, match="LLM has no option 'wishes'"):
        EngineConfig.from_options("m", {"wishes": None})


def test_every_option_is_explained_once_with_its_default() -> None:
    described = describe_options()
    assert "max_num_seqs=512: The most sequences that run at the same time.\n" in described
    for field in dataclasses.fields(EngineConfig):
        assert described.count(f"\n{field.name}=") == (field.name != "model")
    assert described in (EngineConfig.__doc__ or "")


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("dtype", torch.bfloat16, "bfloat16"),
        ("device", torch.device("cuda", 1), "cuda:1"),
        ("model", Path("some") / "model", str(Path("some") / "model")),
        ("model", "torch.models/qwen3", "torch.models/qwen3"),
        ("tokenizer", Path("some") / "words", str(Path("some") / "words")),
        ("download_dir", Path("some") / "folder", str(Path("some") / "folder")),
    ],
)
def test_a_path_a_dtype_and_a_device_mean_what_they_say_as_strings(name: str, value: Any, meant: str) -> None:
    assert getattr(EngineConfig(**{"model": "m", name: value}), name) == meant


def test_options_never_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="m").seed = 1  # type: ignore[misc]


# --- ModelConfig: over how many ranks ---


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mlp", "fitting"),
    [(4, 2, 640, [1, 2, 4]), (6, 3, 12, [1, 3, 6]), (32, 8, 12288, [1, 2, 4, 8, 16, 32]), (4, 1, 10, [1, 2])],
)
def test_a_model_is_split_over_sizes_that_divide_it_and_others_are_refused_with_these(
    heads: int, kv_heads: int, mlp: int, fitting: list[int]
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": mlp}
    config = read_native_config({**QWEN3, **sizes})
    for size in range(1, 40):
        if size in fitting:
            config.check_tensor_parallel_size(size)
            continue
        with pytest.raises(ConfigError) as error:
            config.check_tensor_parallel_size(size)
        assert str(error.value) == (
            f"tensor_parallel_size={size} cannot split num_attention_heads={heads}, num_key_value_heads={kv_heads} and "
            f"intermediate_size={mlp} of this model; use one of {', '.join(map(str, fitting))}"
        )


# --- ModelConfig: spellings ---


@pytest.mark.parametrize(
    ("scaling", "parameters", "dtype"),
    [
        (None, {"rope_type": "default"}, "bfloat16"),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}, "float16"),
        ({"type": "dynamic", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}, "float32"),
        ({"rope_type": "yarn", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}, "float32"),
        ({"type": "linear", "rope_type": "yarn", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}, "float32"),
    ],
)
def test_the_spellings_of_transformers_4_and_5_mean_the_same(
    scaling: dict[str, Any] | None, parameters: dict[str, Any], dtype: str
) -> None:
    old = {"rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": dtype}
    new = {"rope_parameters": {"rope_theta": 5e5, **parameters}, "dtype": dtype}
    assert read_native_config({**QWEN3, **old}) == read_native_config({**QWEN3, **new})


def test_a_config_of_qwen3_0_6b_is_read_field_by_field() -> None:
    sizes = {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }
    others = {"hidden_act": "silu", "max_window_layers": 28, "model_type": "qwen3", "rope_scaling": None}
    others |= {"rope_theta": 1000000, "sliding_window": None, "torch_dtype": "bfloat16", "use_sliding_window": False}
    rope = RopeConfig("default", 1000000.0, {})
    assert read_native_config({"architectures": ["Qwen3ForCausalLM"], **sizes, **others}) == ModelConfig(
        architecture="Qwen3ForCausalLM",
        dtype="bfloat16",
        rope=rope,
        rotary_dim=128,
        attention_scale=128**-0.5,
        windows=(None,) * 28,
        unrotated=(False,) * 28,
        **sizes,
    )


@pytest.mark.parametrize(
    ("rope_theta", "rope_scaling", "dtype"),
    [
        (10000.0, None, torch.float32),
        (1000000.0, None, torch.float16),
        (500000.0, {"rope_type": "linear", "factor": 2.0}, torch.bfloat16),
    ],
)
def test_what_transformers_itself_writes_is_read(
    rope_theta: float, rope_scaling: dict[str, Any] | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    from transformers import Qwen3Config

    flags = {"tie_word_embeddings": True, "attention_bias": True, "rms_norm_eps": 1e-5, "initializer_range": 0.1}
    rope = {"rope_theta": rope_theta, "rope_scaling": rope_scaling}
    theirs = Qwen3Config(**SIZES, **flags, **rope, architectures=["Qwen3ForCausalLM"], torch_dtype=dtype)
    theirs.save_pretrained(tmp_path)
    ours = read_native_folder(tmp_path)
    assert (ours.architecture, ours.dtype) == ("Qwen3ForCausalLM", str(dtype).removeprefix("torch."))
    assert {name: getattr(ours, name) for name in SIZES | flags} == SIZES | flags
    factor = {"factor": 2.0} if rope_scaling else {}
    assert ours.rope == RopeConfig("linear" if rope_scaling else "default", rope_theta, factor)
    assert read_native_config(theirs.to_dict()) == ours


def test_defaults_stand_in_for_what_config_json_leaves_out() -> None:
    left_out = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    rest = {name: value for name, value in QWEN3.items() if name not in left_out}
    config = read_native_config({**rest, "num_attention_heads": 64})
    assert config.num_key_value_heads == 32  # Qwen3's, not a KV head for each query head
    assert config.head_dim == 128  # Qwen3's, not hidden_size / num_attention_heads
    assert config.max_position_embeddings == 32768
    assert config.dtype == "float32"
    assert config.rope == RopeConfig("default", 10000.0, {})


# --- ModelConfig: refusals ---


REQUIRED = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_size_is_refused_by_name(name: str) -> None:
    raw = {key: value for key, value in QWEN3.items() if key != name}
    with pytest.raises(ModelError, match=f"config.json has {name}=None; it must be a whole number of at least 1"):
        read_native_config(raw)


def test_a_sliding_window_that_is_switched_off_is_accepted() -> None:
    config = read_native_config({**QWEN3, "use_sliding_window": False, "sliding_window": 4096})
    assert config == read_native_config(QWEN3)


def test_a_field_counts_where_an_architecture_reads_it_and_not_because_it_has_a_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llama, raw = get_model_class("LlamaForCausalLM"), {**QWEN3, "architectures": ["LlamaForCausalLM"]}
    monkeypatch.setattr(llama, "config_defaults", {"sliding_window": 4})
    assert read_native_config(raw).windows == (None, None)
    monkeypatch.setattr(llama, "config_readers", {"windows": read_windows})
    assert read_native_config(raw).windows == (4, 4)
    assert read_native_config({**raw, "sliding_window": 8}).windows == (8, 8)


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        read_native_folder(tmp_path)
    assert str(error.value) == f"{tmp_path} has no config.json; give the folder of a Hugging Face checkpoint"


def test_another_architecture_is_refused_before_its_sizes_are_missed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "n_embd": 768}))
    with pytest.raises(ModelError) as error:
        read_native_folder(tmp_path)
    assert str(error.value) == f"architecture 'GPT2LMHeadModel' is not supported; supported are {', '.join(SUPPORTED)}"


@pytest.mark.parametrize(
    ("architecture", "fields", "what"),
    [
        ("Gemma3nForConditionalGeneration", {}, "a model that reads images or sound beside text; nanoinfer runs the"),
        ("LlavaForConditionalGeneration", {"vision_config": {"a": 1}}, "take a text model of the same family"),
        ("Phi4MMForCausalLM", {"audio_config": {"a": 1}}, "a model that reads images or sound beside text"),
        ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "an encoder-decoder, which reads its prompt with"),
        ("T5ForConditionalGeneration", {}, "an encoder-decoder, "),
        ("WhisperForConditionalGeneration", {}, "an encoder-decoder, "),
        ("MarianMTModel", {"is_encoder_decoder": True}, "an encoder-decoder, "),
        ("BertForMaskedLM", {}, "an encoder like BERT, which fills in masked words and generates no text; run it with"),
        ("BertForPreTraining", {}, "an encoder like BERT, "),
        ("DistilBertModel", {}, "a model without a language-model head, as for embeddings; run it with sentence-tr"),
        ("T5EncoderModel", {"is_encoder_decoder": True}, "a model without a language-model head, "),
        ("GPT2Model", {}, "a model without a language-model head, as for embeddings; "),
        ("GPT2ForSequenceClassification", {}, "a classifier, which generates no text; run it with transformers' pip"),
        ("BartForSequenceClassification", {"is_encoder_decoder": True}, "a classifier, which generates no text; "),
        (
            "AlbertForTokenClassification",
            {},
            "a classifier, which generates no text; run it with transformers' pipeline",
        ),
        ("LlamaForRewardModel", {}, "a reward model, which scores texts and generates none; "),
    ],
)
def test_a_model_of_another_kind_is_named_as_what_it_is_with_what_to_do(
    architecture: str, fields: dict[str, Any], what: str
) -> None:
    with pytest.raises(ModelError) as error:
        read_native_config({"architectures": [architecture], **fields})
    assert str(error.value).startswith(f"architecture {architecture!r} is not supported: it is a")
    assert what in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model-q4.gguf", "GGUF", "has only GGUF files; give the original checkpoint in safetensors, or make one by"),
        (
            "adapter_config.json",
            '{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}',
            f"holds a LoRA adapter of 'Qwen/Qwen3-0.6B', not a model; {ADAPTERS[:-1]}",
        ),
    ],
)
def test_a_folder_of_another_kind_is_named_as_such(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError) as error:
        read_native_folder(tmp_path)
    assert str(error.value).startswith(f"{tmp_path} {message}")


@pytest.mark.parametrize("content", [b"[]", b"null"])
def test_a_config_json_that_is_no_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_native_folder(tmp_path)


# --- ModelConfig: limits ---


@pytest.mark.parametrize(
    ("rope_scaling", "limit"),
    [
        (None, 1024),
        ({"rope_type": "linear", "factor": 2.5}, 2560),
        ({"rope_type": "dynamic", "factor": 2.5}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 1024),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "original_max_position_embeddings": 128}, 1024),
    ],
)
def test_the_longest_sequence_follows_from_the_rotary_type(rope_scaling: dict[str, Any] | None, limit: int) -> None:
    assert read_native_config({**QWEN3, "rope_scaling": rope_scaling}).max_model_len == limit


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        *(
            ({"hidden_size": value}, f"config.json has hidden_size={value!r}; it must be a whole number of at least 1")
            for value in (0, -1, 1.5, "32", True)
        ),
        ({"num_key_value_heads": "2"}, "num_key_value_heads='2'; it must be a whole number of at least 1"),
        ({"head_dim": -64}, "head_dim=-64; it must be a whole number of at least 1"),
        ({"head_dim": 63}, "head_dim=63 is odd"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'; it must be a positive number"),
        ({"rope_theta": "x"}, "rope_theta='x'; it must be a positive number"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0; it must be a whole number of at least 1"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false'; it must be true or false"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures='Qwen3ForCausalLM'; it must be a list of names"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'; one set of numbers for all layers is supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor='4'; it must be a positive number"),
        ({"rope_scaling": {"factor": 4}}, "and no rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "one set of numbers for all layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, which is not supported"),
        ({"use_sliding_window": 1}, "use_sliding_window=1; it must be true or false"),
        (
            {"use_sliding_window": True, "sliding_window": 0},
            "sliding_window=0; it must be a whole number of at least 1",
        ),
        (
            {"use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers=-1; it must be a whole number of at",
        ),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "it must name sliding_attention or full_"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0, which is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config with quant_method='hqq', which is"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', which is not supported"),
        ({"torch_dtype": "float64"}, "config.json has dtype='float64'; supported are float32, bfloat16, float16"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
    ],
    ids=str,
)
def test_a_value_that_makes_no_sense_or_is_not_supported_is_named(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        read_native_config({**QWEN3, **entry})
    assert message in str(error.value)


def test_null_stands_for_the_default_or_for_none_at_all() -> None:
    names = ("rms_norm_eps", "rope_theta", "rope_scaling")
    assert read_native_config({**QWEN3, **dict.fromkeys(names)}) == read_native_config(QWEN3)
    config = read_native_config({**QWEN3, "num_key_value_heads": None, "head_dim": None})
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)  # a KV head for each query head; 32 / 4


def test_known_options_arrive_and_integers_of_numpy_are_integers() -> None:
    config = EngineConfig.from_options("some/model", {"seed": 7, "max_num_seqs": np.int64(3)})
    assert (config.model, config.seed, config.max_num_seqs) == ("some/model", 7, 3)
    assert type(config.max_num_seqs) is int
