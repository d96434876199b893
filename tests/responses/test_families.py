"""The table of families: by name, and by what a chat template holds."""

import json

import pytest

from nanoinfer import ConfigError, RequestError
from nanoinfer.config import EngineConfig
from nanoinfer.responses.families import ALL, family_named, family_of


@pytest.mark.parametrize("name", ["qwen3", "hermes", "deepseek-r1", "deepseek_r1", "gpt-oss", "GLM-4.5", "minimax-m2"])
def test_a_family_is_found_by_its_name(name):
    assert family_named(name) in ALL


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(RequestError, match=r"'qwen33' is no family .*did you mean 'qwen3'.* gpt-oss"):
        family_named("qwen33")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|im_start|>assistant' }} {{ '<tool_call>' }}", "qwen3"),
        ("{{ '<｜User｜>' }}{{ '<｜Assistant｜>' }}", "deepseek-r1"),
        ("<|start|>assistant<|channel|>final<|message|>", "gpt-oss"),
        ("[gMASK]<sop><tool_call><arg_key>", "glm-4.5"),
        ("]~b]ai <minimax:tool_call>", "minimax-m2"),
        ("[INST] [/INST] [TOOL_CALLS]", "mistral"),
        ("<|im_start|>user", None),
        ({"default": "<|im_start|> <tool_call>"}, None),
        (None, None),
    ],
)
def test_a_chat_template_tells_its_family_by_marks(template, name):
    family = family_of(template)
    assert (family and family.name) == name


def test_the_option_of_llm_is_a_family_or_a_dict_or_auto():
    template = {"fields": {"content": {}}, "start_anchor": "A:"}
    given = [None, "auto", "hermes", template, json.dumps(template)]
    found = [EngineConfig("m", response_template=value).response_template for value in given]
    assert found == [None, "auto", "qwen3", template, template]


@pytest.mark.parametrize("value", ["qwen33", "{1", "", 7, ["qwen3"]])
def test_another_value_of_the_option_is_refused(value):
    with pytest.raises(ConfigError, match="response_template"):
        EngineConfig("m", response_template=value)
