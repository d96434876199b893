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
    ],
)
def test_an_option_out_of_range_is_refused_with_value_rule_and_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(model="m", **options)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": None, "num_kvcache_blocks": None},
        {
            "max_model_len": 2,
            "num_kvcache_blocks": 1,
            "gpu_memory_utilization": np.float32(0.5),
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
        },
        {"gpu_memory_utilization": 1},
        {"kvcache_block_size": 16},
        {"kvcache_block_size": 48},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
    ],
)
def test_values_at_the_edge_of_their_range_are_accepted(options: dict[str, Any]) -> None:
    config = EngineConfig(model="m", **options)
    assert {name: getattr(config, name) for name in options} == options


def test_a_refused_option_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        EngineConfig(model="m", max_num_seqs=0)


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("max_seqs", "max_num_seqs"),
        ("eager", "enforce_eager"),
        ("block_size", "kvcache_block_size"),
        ("num_gpu_blocks_override", "num_kvcache_blocks"),
    ],
)
def test_an_unknown_option_is_a_type_error_that_names_a_similar_one_and_lists_all(written: str, nearest: str) -> None:
    with pytest.raises(TypeError) as error:
        EngineConfig.from_options("m", {written: 1})
    assert str(error.value).startswith(f"LLM has no option {written!r}; did you mean {nearest!r}? Options: dtype, ")
    assert str(error.value).endswith(", seed")


@pytest.mark.parametrize("name", ["enable_lora", "trust_remote_code", "quantization"])
def test_an_option_that_vllm_has_and_nanoinfer_does_not_is_said_to_be_missing(name: str) -> None:
    with pytest.raises(
        TypeError, match=f"^LLM has no option {name!r}; nanoinfer does not support it. Options: dtype, "
    ):
        EngineConfig.from_options("m", {name: True})
    assert not {field.name for field in dataclasses.fields(EngineConfig)} & set(VLLM_NAMES)


def test_an_option_like_no_other_gets_the_list_alone() -> None:
    with pytest.raises(TypeError, match=r"^LLM has no option 'wishes'; Options: dtype, "):
        EngineConfig.from_options("m", {"wishes": True})


def test_every_option_is_explained_once_with_its_default() -> None:
    described = describe_options()
    assert "max_num_seqs=512: The most sequences that run at the same time.\n" in described
    for field in dataclasses.fields(EngineConfig):
        assert described.count(f"\n{field.name}") == (field.name != "model")
    assert described in (EngineConfig.__doc__ or "")


def test_known_options_arrive() -> None:
    config = EngineConfig.from_options("some/model", {"seed": 7, "max_num_seqs": 3})
    assert (config.model, config.seed, config.max_num_seqs) == ("some/model", 7, 3)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("dtype", torch.bfloat16, "bfloat16"),
        ("dtype", torch.float32, "float32"),
        ("device", torch.device("cpu"), "cpu"),
        ("device", torch.device("cuda", 1), "cuda:1"),
        ("model", Path("some") / "model", str(Path("some") / "model")),
    ],
)
def test_a_path_a_dtype_and_a_device_mean_what_they_say_as_strings(name: str, value: Any, meant: str) -> None:
    assert getattr(EngineConfig(**{"model": "m", name: value}), name) == meant


def test_a_model_path_is_kept_as_it_is() -> None:
    assert EngineConfig(model="torch.models/qwen3").model == "torch.models/qwen3"


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
    config = ModelConfig.from_dict({**QWEN3, **sizes})
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
    ("old", "new"),
    [
        (
            {"rope_theta": 1000000, "rope_scaling": None, "torch_dtype": "bfloat16"},
            {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "dtype": "bfloat16"},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}, "dtype": "float16"},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "torch_dtype": "float32"},
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}, "dtype": "float32"},
        ),
    ],
)
def test_the_spellings_of_transformers_4_and_5_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert ModelConfig.from_dict({**QWEN3, **old}) == ModelConfig.from_dict({**QWEN3, **new})


def test_rope_type_comes_before_its_old_name_type() -> None:
    rope = {"type": "linear", "rope_type": "yarn", "factor": 4.0}
    assert ModelConfig.from_dict({**QWEN3, "rope_scaling": rope}).rope == RopeConfig("yarn", 10000.0, {"factor": 4.0})


def test_a_config_of_qwen3_0_6b_is_read_field_by_field() -> None:
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    assert ModelConfig.from_dict(raw) == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        tie_word_embeddings=True,
        attention_bias=False,
        dtype="bfloat16",
        rope=RopeConfig("default", 1000000.0, {}),
    )


@pytest.mark.parametrize(
    ("rope_theta", "rope_scaling", "expected"),
    [
        (10000.0, None, RopeConfig("default", 10000.0, {})),
        (1000000.0, None, RopeConfig("default", 1000000.0, {})),
        (500000.0, {"rope_type": "linear", "factor": 2.0}, RopeConfig("linear", 500000.0, {"factor": 2.0})),
    ],
)
def test_what_transformers_itself_writes_is_read(
    rope_theta: float, rope_scaling: dict[str, Any] | None, expected: RopeConfig, tmp_path: Path
) -> None:
    from transformers import Qwen3Config

    theirs = Qwen3Config(
        **SIZES,
        architectures=["Qwen3ForCausalLM"],
        tie_word_embeddings=True,
        attention_bias=True,
        rms_norm_eps=1e-5,
        initializer_range=0.1,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
    )
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.from_folder(tmp_path)
    assert ours.architecture == "Qwen3ForCausalLM"
    for name, size in SIZES.items():
        assert getattr(ours, name) == size, name
    assert (ours.tie_word_embeddings, ours.attention_bias) == (True, True)
    assert (ours.rms_norm_eps, ours.initializer_range) == (1e-5, 0.1)
    assert ours.rope == expected
    assert ModelConfig.from_dict(theirs.to_dict()) == ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_that_transformers_writes_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import Qwen3Config

    Qwen3Config(**SIZES, torch_dtype=dtype).save_pretrained(tmp_path)
    assert ModelConfig.from_folder(tmp_path).dtype == str(dtype).removeprefix("torch.")


def test_defaults_stand_in_for_what_config_json_leaves_out() -> None:
    left_out = ("num_key_value_heads", "head_dim", "max_position_embeddings", "architectures")
    config = ModelConfig.from_dict({name: value for name, value in QWEN3.items() if name not in left_out})
    assert config.num_key_value_heads == 4  # every head its own
    assert config.head_dim == 128  # Qwen3's, not 32 / 4
    assert config.max_position_embeddings == 32768
    assert config.architecture == "(none)"
    assert config.dtype == "float32"
    assert config.rope == RopeConfig("default", 10000.0, {})


# --- ModelConfig: refusals ---


REQUIRED = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_size_is_refused_by_name(name: str) -> None:
    raw = {key: value for key, value in QWEN3.items() if key != name}
    with pytest.raises(ModelError, match=f"config.json has {name}=None; it must be a whole number of at least 1"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize("value", [0, -1, 1.5, "32", True])
def test_a_size_that_is_no_positive_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(ModelError) as error:
        ModelConfig.from_dict({**QWEN3, "hidden_size": value})
    assert str(error.value) == f"config.json has hidden_size={value!r}; it must be a whole number of at least 1"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window=True, which is not supported; use a model without it"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config={'quant_method': 'gptq'}, which",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', which is not supported"),
        ({"torch_dtype": "float64"}, "config.json has dtype='float64'; supported are float32, bfloat16, float16"),
        ({"dtype": "float8_e4m3fn"}, "config.json has dtype='float8_e4m3fn'; supported are float32, bfloat16, float16"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
    ],
)
def test_what_the_engine_would_have_to_ignore_is_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        ModelConfig.from_dict({**QWEN3, **entry})
    assert message in str(error.value)


def test_a_sliding_window_that_is_switched_off_is_accepted() -> None:
    config = ModelConfig.from_dict({**QWEN3, "use_sliding_window": False, "sliding_window": 4096})
    assert config == ModelConfig.from_dict(QWEN3)


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        ModelConfig.from_folder(tmp_path)
    assert str(error.value) == f"{tmp_path} has no config.json; give the folder of a Hugging Face checkpoint"


def test_another_architecture_is_refused_before_its_sizes_are_missed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "n_embd": 768}))
    with pytest.raises(ModelError) as error:
        ModelConfig.from_folder(tmp_path, supported=["Qwen3ForCausalLM"])
    assert str(error.value) == "architecture 'GPT2LMHeadModel' is not supported; supported are Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model-q4.gguf", "GGUF", "has only GGUF files; give the original checkpoint in safetensors, or make one by"),
        (
            "adapter_config.json",
            '{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}',
            "holds a LoRA adapter of 'Qwen/Qwen3-0.6B', not a model, and adapters are not supported; merge it into its",
        ),
    ],
)
def test_a_folder_of_another_kind_is_named_as_such(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError) as error:
        ModelConfig.from_folder(tmp_path)
    assert str(error.value).startswith(f"{tmp_path} {message}")


def test_a_config_json_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3)[:-1])
    with pytest.raises(ModelError) as error:
        ModelConfig.from_folder(tmp_path)
    assert "config.json is not valid JSON (" in str(error.value)
    assert str(error.value).endswith("download the file again")


@pytest.mark.parametrize("content", [b"[]", b"null", b"\xff\xfe{}"])
def test_a_config_json_that_is_no_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


# --- ModelConfig: limits ---


@pytest.mark.parametrize(
    ("rope_scaling", "limit"),
    [
        (None, 1024),
        ({"rope_type": "linear", "factor": 2.5}, 2560),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 1024),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            1024,
        ),
    ],
)
def test_the_longest_sequence_follows_from_the_rotary_type(rope_scaling: dict[str, Any] | None, limit: int) -> None:
    config = ModelConfig.from_dict({**QWEN3, "max_position_embeddings": 1024, "rope_scaling": rope_scaling})
    assert config.max_model_len == limit


@pytest.mark.parametrize(
    ("entry", "message"),
    [
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
    ],
    ids=str,
)
def test_a_value_that_makes_no_sense_is_named(entry: dict[str, Any], message: str) -> None:
    raw = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ModelError) as error:
        ModelConfig.from_dict({**raw, **entry})
    assert message in str(error.value)


def test_null_stands_for_the_default() -> None:
    raw = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
    names = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling")
    assert ModelConfig.from_dict({**raw, **dict.fromkeys(names)}) == ModelConfig.from_dict(raw)


def test_integers_of_numpy_are_integers() -> None:
    config = EngineConfig.from_options("model", {"max_num_seqs": np.int64(3)})
    assert type(config.max_num_seqs) is int
