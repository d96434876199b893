"""speculative_config takes vLLM's options for its methods, and refuses what nanoinfer does not have, by name."""

from typing import Any

import pytest

from nanoinfer import LLM
from nanoinfer.config import EngineConfig
from nanoinfer.errors import ConfigError
from tests.models.test_architectures import save_random_model

SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}


def config_of(given: Any, **options: Any) -> Any:
    return EngineConfig("m", speculative_config=given, **options).speculative_config


def test_without_it_rows_have_one_token() -> None:
    assert config_of(None) is None
    assert EngineConfig("m").max_row_tokens == 1


def test_the_defaults_are_those_of_vllm() -> None:
    config = config_of({"method": "suffix"})
    assert config["num_speculative_tokens"] == config["suffix_decoding_max_tree_depth"] == 24
    assert (config["suffix_decoding_max_cached_requests"], config["suffix_decoding_max_spec_factor"]) == (10_000, 1.0)
    assert config["suffix_decoding_min_token_prob"] == 0.1
    config = config_of({"method": "ngram", "num_speculative_tokens": 3})
    assert (config["prompt_lookup_min"], config["prompt_lookup_max"]) == (5, 5)
    assert EngineConfig("m", speculative_config=config).max_row_tokens == 4


@pytest.mark.parametrize("name", ["prompt_lookup_min", "prompt_lookup_max"])
def test_one_of_the_lookup_sizes_stands_for_both(name: str) -> None:
    config = config_of({"method": "ngram", "num_speculative_tokens": 3, name: 2})
    assert (config["prompt_lookup_min"], config["prompt_lookup_max"]) == (2, 2)


def test_what_asks_for_nothing_else_is_accepted() -> None:
    """vLLM takes the method's name as the model, and tokens here are always those without proposals."""
    given = {"model": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "strict", "quantization": None}
    assert config_of(given)["method"] == "ngram"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", "speculative_config='ngram' is no dict; use {'method': 'suffix', 'num_speculative_tokens': 8}, say"),
        ({}, "speculative_config has no method; use {'method'"),
        (
            {"method": "eagle3"},
            "has method='eagle3', which nanoinfer does not have; use 'ngram' or 'suffix', which need",
        ),
        ({"model": "my/draft", **SUFFIX}, "has model='my/draft', and draft models are not supported; use {"),
        ({"method": "ngram"}, "has no num_speculative_tokens, which 'ngram' needs; use 8, say"),
        ({**SUFFIX, "num_speculative_tokens": 64}, "num_speculative_tokens=64; use a whole number from 1 to 63"),
        ({**SUFFIX, "num_speculative_tokens": True}, "num_speculative_tokens=True; use a whole number from 1 to 63"),
        (
            {**SUFFIX, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min=4, which is more than prompt_l",
        ),
        ({**SUFFIX, "suffix_decoding_max_cached_requests": -1}, "suffix_decoding_max_cached_requests=-1; use a whole"),
        ({**SUFFIX, "suffix_decoding_min_token_prob": 1.5}, "min_token_prob=1.5; use a number from 0.0 to 1.0; 0.1 is"),
        (
            {**SUFFIX, "disable_by_batch_size": 4},
            "no option 'disable_by_batch_size'; the times of steps decide how many",
        ),
        (
            {**SUFFIX, "num_speculativ_tokens": 4},
            "no option 'num_speculativ_tokens'; did you mean 'num_speculative_tok",
        ),
        ({**SUFFIX, "quantization": "fp8"}, "no option 'quantization'; nanoinfer does not support it"),
    ],
)
def test_anything_else_is_refused_with_the_remedy(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runner": "pooling"}, "runner='pooling' generates nothing to be proposed; leave speculative_config out"),
        (
            {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2},
            "2 processes that share a model must schedule the same steps",
        ),
    ],
)
def test_options_that_exclude_it_are_named(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(SUFFIX, **options)


def test_an_encoder_has_nothing_to_propose(tmp_path: Any) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    save_random_model(tmp_path, "BertModel", {**sizes, "vocab_size": 100}, seed=0)
    with pytest.raises(
        ConfigError, match=r"generates nothing \(.*\), and nothing can be proposed; leave speculative_config out"
    ):
        LLM(tmp_path, device="cpu", speculative_config=SUFFIX)
