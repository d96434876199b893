"""What a user may ask for, and how mistakes are named."""

import dataclasses
import json
import pickle
import re
from typing import Any

import pytest

from nanoinfer import ConfigError, RequestError
from nanoinfer.config import EngineConfig
from nanoinfer.structured_outputs import SWITCHES, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}


def test_a_schema_may_be_text_a_dict_or_a_pydantic_model() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Person", name=(str, ...))
    assert StructuredOutputsParams(json=SCHEMA) == StructuredOutputsParams(json=json.dumps(SCHEMA, indent=2))
    assert json.loads(str(StructuredOutputsParams(json=model).json))["required"] == ["name"]


@pytest.mark.parametrize(("extra", "says"), [("forbid", False), ("allow", True), ("ignore", None), (None, None)])
def test_a_pydantic_model_is_open_or_closed_as_its_own_config_says(extra: str | None, says: bool | None) -> None:
    pydantic = pytest.importorskip("pydantic")
    config = pydantic.ConfigDict(extra=extra) if extra else None
    pet = pydantic.create_model("Pet", __config__=config, name=(str, ...))
    owner = pydantic.create_model("Owner", __config__=config, pets=(list[pet], ...))  # type: ignore[valid-type]
    schema = json.loads(str(StructuredOutputsParams(json=owner).json))
    assert [schema.get("additionalProperties"), schema["$defs"]["Pet"].get("additionalProperties")] == [says, says]


@pytest.mark.parametrize(
    ("config", "switches"),
    [
        (None, None),
        ({}, None),
        ({"disable_any_whitespace": False}, None),
        ({"disable_additional_properties": True, "disable_any_whitespace": True}, [*SWITCHES]),
        ({"backend": "guidance", "disable_fallback": True, "reasoning_parser": "", "enable_in_reasoning": False}, None),
    ],
)
def test_switches_of_all_requests_are_read_as_vllm_writes_them(config: Any, switches: Any) -> None:
    assert EngineConfig("m", structured_outputs_config=config).structured_outputs_config == (
        switches and dict.fromkeys(switches, True)
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("x", "structured_outputs_config='x' is no dict; use {'disable_any_whitespace': True}, say"),
        (
            {"disable_any_whitespaces": True},
            "no option 'disable_any_whitespaces'; did you mean 'disable_any_whitespace'?",
        ),
        ({"disable_any_whitespace": 1}, "structured_outputs_config has disable_any_whitespace=1, no bool"),
        ({"backend": "xgrammar"}, "no option 'backend'; llguidance compiles all grammars; use 'auto' or 'guidance'"),
    ],
)
def test_a_wrong_config_of_all_requests_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig("m", structured_outputs_config=config)


@pytest.mark.parametrize("seconds", [0, -1, True, "60", float("nan"), None])
def test_a_time_limit_of_grammars_is_a_number_of_seconds(seconds: Any) -> None:
    assert EngineConfig("m", grammar_timeout=0.5).grammar_timeout == 0.5
    with pytest.raises(ConfigError, match=r"grammar_timeout=.* must be seconds, above 0"):
        EngineConfig("m", grammar_timeout=seconds)


def test_the_order_of_a_schemas_keys_stays() -> None:
    assert [*json.loads(str(StructuredOutputsParams(json=SCHEMA).json))["properties"]] == ["b", "a"]


def test_equal_ones_have_one_hash_and_survive_a_copy_to_another_process() -> None:
    one, other = StructuredOutputsParams(choice=["a", "b"]), StructuredOutputsParams(choice=("a", "b"))
    assert {one: 1} == {other: 1}
    tag = StructuredOutputsParams(structural_tag={"structures": [], "triggers": []}, disable_any_whitespace=True)
    assert pickle.loads(pickle.dumps(tag)) == tag
    assert dataclasses.replace(tag, disable_any_whitespace=False).kind == "structural_tag"


def test_json_object_false_asks_for_nothing() -> None:
    assert StructuredOutputsParams(json_object=False, regex="a").kind == "regex"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has nothing; give it just one of json, regex, choice, grammar, json_object, structural_tag"),
        ({"json": SCHEMA, "regex": "a"}, "has json and regex together; give it just one"),
        ({"json": "{"}, "json='{' is no JSON (Expecting property name"),
        ({"json": "[1]"}, "must be a JSON schema, as text or as a dict"),
        ({"json": {"const": float("nan")}}, "is no JSON (Out of range float values"),
        ({"json": {"const": {1, 2}}}, "is no JSON (Object of type set"),
        ({"json": int}, "json=<class 'int'> must be a JSON schema"),
        ({"regex": ""}, "regex='' is not a text; give a string that is not empty"),
        ({"regex": 5}, "regex=5 is not a text"),
        ({"choice": []}, "choice=[] must be a list of strings; use ['yes', 'no'], say"),
        ({"choice": "yes"}, "choice='yes' must be a list of strings"),
        ({"choice": [1]}, "choice=[1] must be a list of strings"),
        ({"json_object": "yes"}, "json_object='yes' is not a bool; use True"),
        ({"structural_tag": "[]"}, "structural_tag='[]' must be a dict with"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace=1 is not a bool"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace is about JSON, and regex is none"),
        (
            {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "whitespace_pattern=' ' exclude each other; leave one of them out",
        ),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        StructuredOutputsParams(**options)
    assert message in str(error.value)


def test_long_values_are_cut_in_messages() -> None:
    with pytest.raises(RequestError) as error:
        StructuredOutputsParams(json="{" + "x" * 10_000)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("guided_json", "did you mean 'json'?"),
        ("regx", "did you mean 'regex'?"),
        ("choices", "did you mean 'choice'?"),
        ("backend", "nanoinfer does not support it"),
    ],
)
def test_a_misspelt_name_is_met_with_the_one_that_was_meant(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"StructuredOutputsParams has no option '{name}'") as error:
        StructuredOutputsParams(**{name: "x"})
    assert hint in str(error.value)
