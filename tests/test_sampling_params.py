"""SamplingParams: what is accepted, and what is refused with which words."""

import dataclasses
import math
from typing import Any

import pytest

from nanoinfer import RequestError, SamplingParams


def test_the_defaults_sample_up_to_64_tokens_from_the_models_own_distribution() -> None:
    assert SamplingParams() == SamplingParams(temperature=1.0, max_tokens=64, ignore_eos=False)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.0}, {"temperature": 2}, {"max_tokens": 1}])
def test_values_at_the_edge_of_their_range_are_accepted(options: dict[str, Any]) -> None:
    (name, value), *_ = options.items()
    assert getattr(SamplingParams(**options), name) == value


@pytest.mark.parametrize(
    ("options", "value_and_rule", "remedy"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be finite and at least 0", "use 0 for greedy"),
        ({"temperature": math.inf}, "temperature=inf must be finite", "use 0 for greedy"),
        ({"temperature": math.nan}, "temperature=nan must be finite", "use 0 for greedy"),
        ({"temperature": "1"}, "temperature='1' is not a number", "use 0 for greedy"),
        ({"temperature": None}, "temperature=None is not a number", "use 0 for greedy"),
        ({"temperature": True}, "temperature=True is not a number", "use 0 for greedy"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1", "one token or more"),
        ({"max_tokens": -5}, "max_tokens=-5 must be at least 1", "one token or more"),
        ({"max_tokens": 16.0}, "max_tokens=16.0 is not an int", "use a whole number"),
        ({"max_tokens": True}, "max_tokens=True is not an int", "use a whole number"),
        ({"ignore_eos": 1}, "ignore_eos=1 is not a bool", "use True or False"),
        ({"detokenize": None}, "detokenize=None is not a bool", "use True or False"),
        ({"skip_special_tokens": 0}, "skip_special_tokens=0 is not a bool", "use True or False"),
        ({"include_stop_str_in_output": ""}, "include_stop_str_in_output='' is not a bool", "use True or False"),
        ({"stop": ["a", ""]}, "stop=['a', ''] must be a string or a list of them, none empty", "use ['\\n'], say"),
        ({"stop": [1]}, "stop=[1] must be a string or a list of them", "use ['\\n'], say"),
        ({"stop": ""}, "stop='' must be a string or a list of them, none empty", "use ['\\n'], say"),
        ({"stop": 1}, "stop=1 must be a string or a list of them", "use ['\\n'], say"),
        ({"stop_token_ids": 0}, "stop_token_ids=0 must be a list of token ids", "use [0], say"),
        ({"stop_token_ids": [-1]}, "stop_token_ids=[-1] must be a list of token ids", "use [0], say"),
        ({"stop_token_ids": [True]}, "stop_token_ids=[True] must be a list of token ids", "use [0], say"),
        ({"stop": "a", "detokenize": False}, "stop='a' is found in text, and detokenize=False", "leave one out"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_rule_and_the_remedy(
    options: dict[str, Any], value_and_rule: str, remedy: str
) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**options)
    assert str(error.value).startswith(value_and_rule)
    assert remedy in str(error.value)


def test_a_refusal_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)


def test_an_unknown_option_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_sampling_params_never_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


def test_one_stop_string_or_several_and_stop_ids_become_tuples() -> None:
    assert (SamplingParams().stop, SamplingParams().stop_token_ids) == ((), ())
    assert SamplingParams(stop="\n\n").stop == ("\n\n",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3, 4]) == SamplingParams(
        stop=("a", "b"), stop_token_ids=(3, 4)
    )
    assert hash(SamplingParams(stop=["a"]))


@pytest.mark.parametrize(
    ("config", "params"),
    [
        ({}, SamplingParams()),
        ({"temperature": 0.6, "do_sample": True, "eos_token_id": 3}, SamplingParams(temperature=0.6)),
        ({"temperature": 0.6, "do_sample": False}, SamplingParams(temperature=0)),
        ({"max_new_tokens": 32, "temperature": None}, SamplingParams(max_tokens=32)),
    ],
)
def test_the_recommendation_of_a_generation_config(config: dict[str, Any], params: SamplingParams) -> None:
    assert SamplingParams.from_generation_config(config) == params


def test_a_recommendation_out_of_range_is_refused_like_any_other_value() -> None:
    with pytest.raises(RequestError, match="temperature=-1 must be finite and at least 0"):
        SamplingParams.from_generation_config({"temperature": -1})
