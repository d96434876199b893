"""hf_overrides: which fields of a config.json they replace, and which are refused because they change nothing."""

from typing import Any

import pytest

from nanoinfer.checkpoint.fields import override, read_overridden
from nanoinfer.checkpoint.model_config import ModelConfig, RopeConfig
from nanoinfer.errors import ConfigError, ModelError, NanoinferError
from nanoinfer.models.native_config import read_native_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
OLD = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "rope_theta": 1e6,
    "rope_scaling": {"type": "linear", "factor": 2.0},
}
# The same as transformers 5 writes it.
NEW = {name: value for name, value in OLD.items() if name not in ("torch_dtype", "rope_theta", "rope_scaling")}
NEW |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}


def read(raw: dict[str, Any], overrides: dict[str, Any] | None) -> ModelConfig:
    return read_overridden(raw, overrides, read_native_config)


def refusal(overrides: dict[str, Any], raw: dict[str, Any] = OLD) -> str:
    """The message with which these overrides are refused."""
    with pytest.raises(NanoinferError) as error:
        read(raw, overrides)
    assert isinstance(error.value, ValueError)
    return str(error.value)


# --- what is replaced ---


def test_a_field_is_replaced_and_the_others_stay() -> None:
    config = read(OLD, {"max_position_embeddings": 512, "num_hidden_layers": 1})
    assert config == read_native_config({**OLD, "max_position_embeddings": 512, "num_hidden_layers": 1})
    assert config.max_model_len == 1024, "linear scaling doubles it"
    assert read(OLD, None) == read(OLD, {}) == read_native_config(OLD)


def test_an_architecture_of_another_name_is_read_as_the_one_that_is_given() -> None:
    renamed = {**OLD, "architectures": ["OurFinetune"]}
    assert read(renamed, {"architectures": ["Qwen3ForCausalLM"]}) == read(OLD, None)


@pytest.mark.parametrize("raw", [OLD, NEW], ids=["transformers 4", "transformers 5"])
@pytest.mark.parametrize(
    ("in_one", "in_the_other"),
    [
        ({"rope_scaling": YARN}, {"rope_parameters": YARN}),
        ({"rope_scaling": None}, {"rope_parameters": None}),
        ({"rope_scaling": YARN, "rope_theta": 7.0}, {"rope_parameters": {**YARN, "rope_theta": 7.0}}),
        ({"rope_theta": 5.0}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}),
        ({"torch_dtype": "float16"}, {"dtype": "float16"}),
    ],
    ids=str,
)
def test_an_override_in_either_spelling_replaces_a_field_in_either_spelling(
    raw: dict[str, Any], in_one: dict[str, Any], in_the_other: dict[str, Any]
) -> None:
    assert read(raw, in_one) == read(raw, in_the_other) == read(OLD, in_one)
    assert read(raw, in_one) != read(raw, None)


@pytest.mark.parametrize("raw", [OLD, NEW], ids=["transformers 4", "transformers 5"])
def test_another_scaling_keeps_the_base_and_nothing_else_of_the_one_before(raw: dict[str, Any]) -> None:
    rope = read(raw, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}).rope
    assert (rope.theta, rope.rope_type, rope.parameters) == (1e6, "yarn", {"factor": 4.0})


def test_where_types_of_layers_have_rope_parameters_of_their_own_another_scaling_keeps_both_bases() -> None:
    sets = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e3}}
    new = {**NEW, "architectures": ["Gemma3ForCausalLM"], "rope_parameters": sets}
    linear = {"rope_type": "linear", "factor": 8.0}
    for overrides in ({"rope_scaling": linear}, {"rope_parameters": {"full_attention": linear}}):
        config = read(new, overrides)
        assert config.rope == RopeConfig("linear", 5e5, {"factor": 8.0})
        assert config.local_rope == RopeConfig("default", 5e3, {})
    assert read(new, {"rope_local_base_freq": 7.0}).local_rope == RopeConfig("default", 7.0, {})
    assert sets["full_attention"] == {"rope_type": "default", "rope_theta": 5e5}, "the file's own stay"
    message = "hf_overrides has rope_parameters.full_attention.fctor=8.0, which changes nothing"
    assert message in refusal(
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "fctor": 8.0}}}, new
    )


def test_a_dict_for_a_nested_config_replaces_fields_of_it_and_a_dict_elsewhere_all_of_it() -> None:
    raw = {"a": 1, "b": {"x": 1, "y": 2}, "text_config": {"size": 8, "rope_scaling": {"factor": 2, "type": "linear"}}}
    assert override(raw, {"b": {"x": 3}})["b"] == {"x": 3}
    nested = {"text_config": {"rope_scaling": {"factor": 4}, "new": 5}}
    merged = {"size": 8, "rope_scaling": {"factor": 4, "type": "linear"}, "new": 5}
    assert override(raw, nested) == {**raw, "text_config": merged}
    assert override({"a": 1}, nested) == {"a": 1, **nested}
    other_spelling = {"text_config": {"rope_parameters": {"factor": 4}}}
    assert override(raw, other_spelling)["text_config"] == {
        "size": 8,
        "rope_parameters": {"factor": 4, "type": "linear"},
    }
    assert raw["text_config"] == {"size": 8, "rope_scaling": {"factor": 2, "type": "linear"}}, "the file's own stay"


# --- what is refused ---


def test_a_value_that_config_json_may_not_have_is_refused_with_the_override() -> None:
    assert refusal({"head_dim": 63}).startswith("with hf_overrides={'head_dim': 63}, head_dim=63 is odd")
    assert "with hf_overrides={'vocab_size': None}, config.json has vocab_size=None" in refusal({"vocab_size": None})
    with pytest.raises(ModelError, match=r"with hf_overrides=.*config\.json has hidden_act='gelu', which is not supp"):
        read(OLD, {"hidden_act": "gelu"})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_position_embedings": 9}, "max_position_embedings=9, which changes nothing: nanoinfer does not read it"),
        ({"max_position_embedings": 9}, "; did you mean 'max_position_embeddings'? Else leave it out"),
        ({"rms_norm_epsilon": 1e-5}, "; did you mean 'rms_norm_eps'? Else"),
        ({"dtypes": "float16"}, "; did you mean 'dtype'? Else"),
        ({"architecture": "Qwen3ForCausalLM"}, "; did you mean 'architectures'? Else"),
        ({"use_cache": False}, "hf_overrides has use_cache=False, which changes nothing"),
        ({"eos_token_id": 7}, "hf_overrides has eos_token_id=7, which changes nothing"),
        ({"wishes": None}, "from this model's config.json; leave it out"),
        ({"text_config": {"hidden_size": 64}}, "hf_overrides has text_config.hidden_size=64, which changes nothing"),
        (
            {"rope_scaling": {**YARN, "atention_factor": 1.0}},
            "hf_overrides has rope_scaling.atention_factor=1.0",
        ),
        ({"rope_parameters": {**YARN, "beta_fst": 1.0}}, "; did you mean 'beta_fast'? Else"),
        ({"rope_theta": 7.0, "rope_scaling": {**YARN, "rope_theta": 8.0}}, "hf_overrides has rope_theta=7.0, which"),
        ({"torch_dtype": "float32", "dtype": "float16"}, "hf_overrides has torch_dtype='float32', which"),
    ],
    ids=str,
)
def test_an_override_that_changes_nothing_is_refused_by_name_with_a_similar_one(
    overrides: dict[str, Any], message: str
) -> None:
    assert message in refusal(overrides)
    assert message in refusal(overrides, NEW)
    with pytest.raises(ConfigError):
        read(OLD, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"max_position_embeddings": 1024},
        {"use_sliding_window": False},
        {"quantization_config": None},
        {"hidden_act": "silu"},
        {"rms_norm_eps": None},
        {"tie_word_embeddings": False},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
    ids=str,
)
def test_a_field_that_is_read_may_be_given_the_value_that_it_has(overrides: dict[str, Any]) -> None:
    assert read(OLD, overrides) == read(NEW, overrides) == read(OLD, None)
