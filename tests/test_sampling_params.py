"""SamplingParams: what is accepted, and what is refused with which words."""

import dataclasses
import inspect
import math
import pickle
from typing import Any

import numpy as np
import pytest

from nanoinfer import RequestError, SamplingParams, StructuredOutputsParams
from nanoinfer.sampling_params import FOREIGN_NAMES, check_against_model


@pytest.mark.parametrize(
    "options",
    [
        *[{"temperature": value} for value in (0, 0.0, 2)],
        *[{name: 1} for name in ("max_tokens", "n", "top_k", "top_p", "min_p", "logprobs", "prompt_logprobs")],
        *[{name: 0} for name in ("top_k", "min_p", "seed", "min_tokens", "logprobs", "prompt_logprobs")],
        *[{"top_k": -1}, {"seed": -(2**63)}, {"seed": 2**63 - 1}, {"min_tokens": 64}, {"top_p": 1e-9}],
        *[{"presence_penalty": -2}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1e-3}, {"n": 1000}],
        *[{"logprobs": -1}, {"prompt_logprobs": -1}, {"logprobs": 151_936}, {"spaces_between_special_tokens": False}],
    ],
)
def test_values_at_the_edge_of_their_range_are_accepted(options: dict[str, Any]) -> None:
    (name, value), *_ = options.items()
    assert getattr(SamplingParams(**options), name) == value


@pytest.mark.parametrize(
    ("options", "value_and_rule", "remedy"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be finite and at least 0", "use 0 for greedy"),
        ({"temperature": math.inf}, "temperature=inf must be finite", "use 0 for greedy"),
        ({"temperature": math.nan}, "temperature=nan must be finite", "use 0 for greedy"),
        ({"temperature": 10**400}, f"temperature={10**400} must be finite", "use 0 for greedy"),
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
        ({"n": 0}, "n=0 must be at least 1", "one sample or more"),
        ({"n": 2, "temperature": 0}, "n=2 samples at temperature=0 are all the same", "use n=1, or a temperature"),
        ({"n": 1.5}, "n=1.5 is not an int", "use a whole number of at least 1"),
        ({"top_k": -2}, "top_k=-2 must be at least -1", "use 0 for all tokens"),
        ({"top_k": 0.5}, "top_k=0.5 is not an int", "use a whole number of at least 0"),
        ({"top_p": 0}, "top_p=0 must be above 0 and at most 1", "use 1 for all tokens"),
        ({"top_p": 1.01}, "top_p=1.01 must be above 0 and at most 1", "use 1 for all tokens"),
        ({"top_p": math.nan}, "top_p=nan must be above 0", "use 1 for all tokens"),
        ({"top_p": "0.9"}, "top_p='0.9' is not a number", "use 1 for all tokens"),
        ({"min_p": -0.1}, "min_p=-0.1 must be at least 0 and at most 1", "use 0 for all tokens"),
        ({"seed": 2**63}, f"seed={2**63} must be at most {2**63 - 1}", "it must fit in 64 bits"),
        ({"seed": -(2**63) - 1}, f"seed={-(2**63) - 1} must be at least {-(2**63)}", "use None for any"),
        ({"seed": 1.0}, "seed=1.0 is not an int", "use a whole number"),
        ({"min_tokens": -1}, "min_tokens=-1 must be at least 0", "use 0 for no such limit"),
        ({"min_tokens": 65}, "min_tokens=65 must be at most max_tokens=64", "lower min_tokens, or raise max_tokens"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5 must be between -2 and 2", "use 0 for none"),
        ({"frequency_penalty": -3}, "frequency_penalty=-3 must be between -2 and 2", "use 0 for none"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be between 0.001 and 1000", "use 1 for none"),
        ({"repetition_penalty": 10**400}, f"repetition_penalty={10**400} must be between", "use 1 for none"),
        ({"n": 10_001}, "n=10001 must be at most 10000", "ask again"),
        ({"repetition_penalty": None}, "repetition_penalty=None is not a number", "use 1 for none"),
        ({"logprobs": -2}, "logprobs=-2 must be at least -1", "or -1 for all of the vocabulary"),
        ({"logprobs": False}, "logprobs=False is not an int", "use a whole number of at least 0"),
        ({"prompt_logprobs": -2}, "prompt_logprobs=-2 must be at least -1", "use None for none"),
        ({"spaces_between_special_tokens": 1}, "spaces_between_special_tokens=1 is not a bool", "use True or False"),
        ({"logit_bias": [5]}, "logit_bias=[5] must be a dict from token ids to numbers", "use {0: -100}, say"),
        ({"logit_bias": {"a": 1}}, "logit_bias has 'a' in place of a token id", "use whole numbers from 0 on"),
        ({"logit_bias": {-1: 1}}, "logit_bias has -1 in place of a token id", "use whole numbers from 0 on"),
        ({"logit_bias": {5: math.inf}}, "logit_bias has inf for token 5", "use a finite number"),
        ({"logit_bias": {5: -math.inf}}, "logit_bias has -inf for token 5", "-100 to all but forbid the token"),
        ({"logit_bias": {5: math.nan}}, "logit_bias has nan for token 5", "use a finite number"),
        ({"logit_bias": {5: 10**400}}, f"logit_bias has {10**400} for token 5", "use a finite number"),
        ({"logit_bias": {5: "1"}}, "logit_bias has '1' for token 5", "use a finite number"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty", "use None for all tokens"),
        ({"allowed_token_ids": 3}, "allowed_token_ids=3 must be a list of token ids", "use [0], say"),
        ({"allowed_token_ids": [3, -1]}, "allowed_token_ids=[3, -1] must be a list of token ids", "use [0], say"),
        ({"bad_words": "no"}, "bad_words='no' must be a list of strings, none empty or blank", "use ['no'], say"),
        ({"bad_words": ["no", " "]}, "bad_words=['no', ' '] must be a list of strings", "use ['no'], say"),
        ({"bad_words": [3]}, "bad_words=[3] must be a list of strings", "use ['no'], say"),
        ({"logits_processors": print}, f"logits_processors={print} must be a list of functions", "use [lambda"),
        ({"logits_processors": ["f"]}, "logits_processors=['f'] must be a list of functions", "use [lambda"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs={'json': {}} is a dict", "use StructuredOutputsPa"),
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


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("temprature", "did you mean 'temperature'? "),
        ("max_new_tokens", "did you mean 'max_tokens'? "),
        ("num_return_sequences", "did you mean 'n'? "),
        ("repetition_detection", "nanoinfer does not support it. "),
        ("guided_decoding", "did you mean 'structured_outputs'? "),
        ("guided_json", "did you mean 'structured_outputs=StructuredOutputsParams(json=...)'? "),
        ("min_new_tokens", "did you mean 'min_tokens'? "),
        ("use_beam_search", "nanoinfer does not support it. "),
        ("truncate_prompt_tokens", "did you mean 'tokenization_kwargs of generate and chat'? "),
        ("wishes", ""),
    ],
)
def test_an_unknown_option_is_a_type_error_that_names_what_was_meant(written: str, hint: str) -> None:
    with pytest.raises(TypeError) as error:
        SamplingParams(**{written: 1})
    assert str(error.value).startswith(f"SamplingParams has no option {written!r}; {hint}Options: temperature, ")


def test_a_field_of_vllm_or_transformers_that_says_what_is_so_anyway_is_accepted() -> None:
    so_anyway = {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
    so_anyway |= {"do_sample": True, "num_beams": 1, "guided_decoding": None, "extra_args": {}, "skip_clone": False}
    assert SamplingParams(top_p=0.5, **so_anyway) == SamplingParams(top_p=0.5)
    with pytest.raises(TypeError, match="did you mean 'structured_outputs=StructuredOutputsParams"):
        SamplingParams(guided_json={})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="temperature=0 is greedy decoding; use True, or leave it out"):
        SamplingParams(do_sample=False)  # type: ignore[call-arg]


def test_the_signature_that_help_shows_has_every_option() -> None:
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert list(inspect.signature(SamplingParams).parameters) == names
    assert not set(names) & set(FOREIGN_NAMES), "what nanoinfer has is no other library's"


def test_min_tokens_must_leave_a_token_to_generate() -> None:
    for options, number in (
        ({"stop_token_ids": [0, 1, 2]}, 4),
        ({"stop_token_ids": [0, 1, 2], "ignore_eos": True}, 4),  # it ends nothing, and is forbidden all the same
        ({"allowed_token_ids": [3]}, 1),
    ):
        message = f"min_tokens=3 forbids all stop tokens at first, and these are all {number} tokens that may be drawn"
        with pytest.raises(RequestError, match=message):
            check_against_model(SamplingParams(min_tokens=3, **options), vocab_size=4, stop_token_ids={3})
    for params in (
        SamplingParams(stop_token_ids=[0, 1, 2, 3]),  # without min_tokens the first token ends it
        SamplingParams(stop_token_ids=[0, 1, 7], min_tokens=3),  # 7 is no token
        SamplingParams(allowed_token_ids=[2, 3], min_tokens=3),
    ):
        check_against_model(params, vocab_size=4, stop_token_ids={3})


def test_no_max_tokens_is_no_limit_and_a_seed_of_minus_one_is_none_as_in_vllm() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=1000).max_tokens is None
    assert SamplingParams(seed=-1) == SamplingParams(seed=None)


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


def test_the_rules_for_tokens_are_kept_as_tuples_and_a_dict_and_what_is_empty_is_none() -> None:
    params = SamplingParams(
        logit_bias={"5": 1, np.int64(7): np.float32(0.5)},  # type: ignore[dict-item]
        allowed_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        bad_words=["no", "never mind"],
        logits_processors=[max],
    )
    assert params.logit_bias == {5: 1.0, 7: 0.5}
    assert [*map(type, params.logit_bias)] == [int, int]
    assert params.allowed_token_ids == (3, 4)
    assert params.bad_words == ("no", "never mind")
    assert params.logits_processors == (max,)
    assert SamplingParams(logit_bias={}, bad_words=[], logits_processors=[], stop=[]) == SamplingParams()


def test_params_with_rules_for_tokens_can_be_compared_hashed_pickled_and_changed() -> None:
    params = SamplingParams(
        logit_bias={5: 1},
        allowed_token_ids=[5],
        bad_words=["no"],
        logits_processors=[max],
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
    )
    assert pickle.loads(pickle.dumps(params)) == params
    changed = dataclasses.replace(params, logit_bias={"5": 2})
    assert changed != params
    assert dataclasses.replace(changed, logit_bias={5: 1}) == params
    assert len({params, changed, dataclasses.replace(params)}) == 2


def test_true_is_one_log_probability_as_in_vllm() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert [(type(value), value) for value in (params.logprobs, params.prompt_logprobs)] == [(int, 1)] * 2


@pytest.mark.parametrize("options", [{"logit_bias": {4: 1}}, {"allowed_token_ids": [0, 4]}])
def test_an_id_outside_the_vocabulary_is_refused_by_name(options: dict[str, Any]) -> None:
    [name] = options
    check_against_model(SamplingParams(**options), vocab_size=5, stop_token_ids=())
    with pytest.raises(RequestError, match=f"{name} has token id 4, outside the vocabulary; ids are 0 to 3"):
        check_against_model(SamplingParams(**options), vocab_size=4, stop_token_ids=())


# The public fields of vllm.SamplingParams in vLLM 0.26.0, with their defaults.
FIELDS_OF_VLLM = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": "RequestOutputKind.CUMULATIVE",
    "skip_clone": False,
    "output_text_buffer_length": 0,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "routed_experts_prompt_start": 0,
    "bad_words": None,
    "skip_reading_prefix_cache": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
}


def test_every_field_has_vllms_name_and_default_or_is_known_to_differ() -> None:
    ours = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert ours.keys() - FIELDS_OF_VLLM.keys() == {"logits_processors"}  # vLLM has them for all requests of an LLM
    different = {name for name in ours.keys() & FIELDS_OF_VLLM.keys() if ours[name] != FIELDS_OF_VLLM[name]}
    assert different == {"max_tokens"}


def test_every_field_of_vllms_that_is_missing_is_an_error_that_says_so() -> None:
    ours = [field.name for field in dataclasses.fields(SamplingParams)]
    for name in FIELDS_OF_VLLM.keys() - {*ours}:
        with pytest.raises(TypeError, match="nanoinfer does not support it"):
            SamplingParams(**{name: 1})
        if name != "output_kind":  # which is for servers
            assert SamplingParams(**{name: FIELDS_OF_VLLM[name]}) == SamplingParams(), "vLLM's default asks for nothing"


@pytest.mark.parametrize(
    ("config", "params"),
    [
        ({}, SamplingParams()),
        ({"temperature": 0.6, "do_sample": True, "eos_token_id": 3}, SamplingParams(temperature=0.6)),
        ({"temperature": 0.6, "do_sample": False}, SamplingParams(temperature=0)),
        (
            {"top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05, "num_beams": 4},
            SamplingParams(top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05),
        ),
        ({"max_new_tokens": 32, "temperature": None}, SamplingParams(max_tokens=32)),
    ],
)
def test_the_recommendation_of_a_generation_config(config: dict[str, Any], params: SamplingParams) -> None:
    assert SamplingParams.from_generation_config(config) == params


def test_a_recommendation_out_of_range_is_refused_like_any_other_value() -> None:
    with pytest.raises(RequestError, match="temperature=-1 must be finite and at least 0"):
        SamplingParams.from_generation_config({"temperature": -1})
