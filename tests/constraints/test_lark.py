"""Structural tags, in both formats of vLLM: which texts they allow, and which of them are refused."""

import json
from typing import Any

import pytest

from nanoinfer import RequestError
from nanoinfer.constraints.constraints import Constraints
from tests.constraints.helpers import encode, follow, is_possible, new_constraints, next_ids, start

pytest.importorskip("llguidance")

ONE_INT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
LEGACY = {
    "structures": [
        {"begin": "<tool_call>\n", "schema": ONE_INT, "end": "\n</tool_call>"},
        {"begin": "<function=f>", "schema": json.dumps(ONE_INT), "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "integer"}, "end": "</function>"},
    ],
    "triggers": ["<tool_call>", "<function="],
}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def untyped(form: dict[str, Any]) -> dict[str, Any]:
    """The same without the types that its parts tell."""
    return {name: value for name, value in form.items() if name != "type"}


F, G = tag("<f>", INTEGER, "</f>"), tag("<g>", INTEGER, "</g>")
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": [F, G]}
SEPARATED = {"type": "tags_with_separator", "tags": [F, G], "separator": ", "}
CHOICE = {"type": "or", "elements": [text("yes"), text("no")]}


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return new_constraints()


@pytest.mark.parametrize(
    ("completion", "possible"),
    [
        ("", True),
        ("just text", True),
        ('let me see <tool_call>\n{"x": 1}\n</tool_call> and on', True),
        ('<function=f>{"x": 1}</function><function=g>5</function>', True),
        ('<tool_call>\n{"x": 1}', False),
        ('<tool_call>\n{"y": 1}\n</tool_call>', False),
        ('<function=g>{"x": 1}</function>', False),
        ("<function=h>", False),
        ("a <function", True),
    ],
)
def test_the_older_format_allows_any_text_and_tags_after_triggers(
    constraints: Constraints, completion: str, possible: bool
) -> None:
    assert is_possible(constraints, completion, structural_tag=LEGACY) == possible


@pytest.mark.parametrize(
    ("form", "possible", "impossible"),
    [
        (text("exactly"), ["exactly"], ["exactl", "exactly.", ""]),
        (INTEGER, ["12"], ["a"]),
        ({"type": "regex", "pattern": r"\d+/[a-c]"}, ["1/a"], ["1/d", "/a"]),
        ({"type": "grammar", "grammar": 'root ::= "a"\n | "b" root'}, ["bba"], ["b"]),
        (ANY, ["", "anything\nat all"], []),
        (CHOICE, ["yes", "no"], ["yesno", ""]),
        ({"type": "sequence", "elements": [text("a"), CHOICE, text("!")]}, ["ayes!"], ["a!", "ayes"]),
        ({"type": "optional", "content": CHOICE}, ["", "no"], ["nono"]),
        ({"type": "star", "content": CHOICE}, ["", "nonoyes"], ["non"]),
        ({"type": "plus", "content": CHOICE}, ["no", "nonoyes"], [""]),
        ({"type": "repeat", "content": CHOICE, "min": 1, "max": 2}, ["no", "yesno"], ["", "nonono"]),
        ({"type": "repeat", "content": CHOICE, "min": 2, "max": -1}, ["nonono"], ["no"]),
        (F, ["<f>12</f>"], ["<f></f>", "<f>12</f> "]),
        (tag("<f>", ANY, "</f>"), ["<f>a <b> c</f>", "<f></f>"], ["<f>a", "<f>a</f>b"]),
        (tag("<f>", ANY, ["</f>", "</g>"]), ["<f>a</g>", "<f>a</f>"], ["<f>a</h>"]),
        (tag("<think>", ANY, "</think>"), ["<think>hm</think>"], ["<think>hm"]),
        (
            {"type": "sequence", "elements": [tag("<think>", ANY, "</think>\n"), INTEGER]},
            ["<think>a\nb</think>\n12"],
            ["<think>a</think>12", "12"],
        ),
        (TRIGGERED, ["", "a <f>1</f> b <g>2</g>", "<f>1</f>"], ["<f>a", "<fx"]),
        ({**TRIGGERED, "at_least_one": True}, ["<f>1</f>", "<g>1</g> a <f>2</f>"], ["", "a <f>1</f>"]),
        ({**TRIGGERED, "stop_after_first": True}, ["a <f>1</f>", "a"], ["<f>1</f> b"]),
        ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, ["<g>1</g>"], ["a", "<g>1</g> "]),
        (
            {"type": "sequence", "elements": [TRIGGERED, text("END")]},
            ["a <f>1</f>END", "END"],
            ["a <f>1</f>", "a END b"],
        ),
        (SEPARATED, ["", "<f>1</f>", "<f>1</f>, <g>2</g>"], ["<f>1</f> <g>2</g>", "a"]),
        ({**SEPARATED, "at_least_one": True}, ["<f>1</f>"], [""]),
        ({**SEPARATED, "stop_after_first": True}, ["", "<f>1</f>"], ["<f>1</f>, <g>2</g>"]),
        ({**INTEGER, "style": "json", "any_order": False}, ["12"], ["a"]),
        # Without types, as in vLLM's tests.
        ({**TRIGGERED, "tags": [untyped(F), G]}, ["", "a <f>1</f> b <g>2</g>"], ["<f>a", "<g>a"]),
        ({**SEPARATED, "tags": [untyped(F), untyped(G)]}, ["<f>1</f>, <g>2</g>"], ["<f>1</f> <g>2</g>"]),
        (untyped(F), ["<f>12</f>"], ["<f></f>"]),
        (untyped({**TRIGGERED, "tags": [untyped(tag("<f>", untyped(INTEGER), "</f>"))]}), ["a <f>1</f>"], ["<f>a"]),
        (untyped(SEPARATED), ["", "<f>1</f>, <g>2</g>"], ["a"]),
        ({"type": "sequence", "elements": [untyped(text("a")), untyped(F)]}, ["a<f>1</f>"], ["a"]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_the_newer_format_is_made_of_parts(
    constraints: Constraints, form: dict[str, Any], possible: list[str], impossible: list[str]
) -> None:
    options = {"structural_tag": {"type": "structural_tag", "format": form}}
    assert [is_possible(constraints, one, **options) for one in possible] == [True] * len(possible)
    assert [is_possible(constraints, one, **options) for one in impossible] == [False] * len(impossible)


def test_the_type_of_the_whole_may_be_left_out(constraints: Constraints) -> None:
    assert is_possible(constraints, "yes", structural_tag={"format": CHOICE})


def test_a_tag_that_is_a_special_token_is_meant_as_one(constraints: Constraints) -> None:
    [begin], [end] = encode("<tool_call>"), encode("</tool_call>")
    constraint = start(constraints, structural_tag=LEGACY)
    assert begin in next_ids(constraints, constraint)
    follow(constraint, '<tool_call>\n{"x": 1}\n')
    assert next_ids(constraints, constraint) == {end}


def test_white_space_and_properties_of_the_schemas_are_as_the_switches_say(constraints: Constraints) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    options = {"structural_tag": json.dumps({"type": "structural_tag", "format": tag("<f>", ANY, "</f>")})}
    assert is_possible(constraints, "<f>a</f>", **options)
    form = tag("<f>", {"type": "json_schema", "json_schema": schema}, "</f>")
    options = {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}
    for completion in ('<f>{"x": 1}</f>', '<f>{"y":1}</f>'):
        assert is_possible(constraints, completion, **options)
    switches = {"disable_any_whitespace": True, "disable_additional_properties": True}
    for completion, possible in (('<f>{"x":1}</f>', True), ('<f>{"x": 1}</f>', False), ('<f>{"y":1}</f>', False)):
        assert is_possible(constraints, completion, **options, **switches) == possible


@pytest.mark.parametrize(
    ("structural_tag", "message"),
    [
        ({"x": 1}, "is of no known form; give 'structures' and 'triggers', or type='structural_tag' and 'format'"),
        ({**LEGACY, "triggers": ["<tool_call>"]}, "a tag that begins '<function=f>', with none of triggers="),
        ({**LEGACY, "triggers": []}, "triggers=[]; give a list that is not empty"),
        ({**LEGACY, "structures": [{"begin": "a"}]}, "must be a list of dicts with begin, schema and end"),
        ({"type": "token", "token": 5}, "whose type is none of any_text, const_string"),
        ({"type": "tag", "begin": "a"}, "has a tag without content, end"),
        ({**ANY, "excludes": ["a"]}, "has excludes=['a'] in any_text; leave out excludes"),
        ({**INTEGER, "style": "qwen_xml"}, "has style='qwen_xml' in json_schema"),
        (
            {**TRIGGERED, "tags": [text("<f>")]},
            "{'type': 'const_string', 'value': '<f>'} among tags; give dicts with beg",
        ),
        ({**SEPARATED, "tags": ["<f>"]}, "has '<f>' among tags; give dicts with begin, content and end"),
        ({**SEPARATED, "tags": [{"begin": "<f>"}]}, "has a tag without content, end: {'begin': '<f>', 'type': 'tag'}"),
        (
            {"type": "sequence", "elements": [untyped(CHOICE)]},
            "has the format {'elements': [{'type': 'const_string', '",
        ),
        (tag("a", ANY, ""), "has any_text before an empty text; write what ends it"),
        (tag("a", ANY, {"type": "token", "token": 5}), "where a text must be; tokens are not supported"),
        ({"type": "sequence", "elements": [ANY, INTEGER]}, "any_text before something else than a text"),
        ({"type": "sequence", "elements": []}, "elements=[]; give a list that is not empty"),
        ({"type": "repeat", "content": ANY, "min": 2, "max": 1}, "repeats from min=2 to max=1"),
        ({"type": "grammar", "grammar": "root ::= ("}, "Expected ')'"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"type": "json_schema", "json_schema": True}, "json_schema=True; give a schema as a dict"),
    ],
)
def test_what_is_wrong_or_not_supported_is_named(
    constraints: Constraints, structural_tag: dict[str, Any], message: str
) -> None:
    if "structures" not in structural_tag and "type" in structural_tag:
        structural_tag = {"type": "structural_tag", "format": structural_tag}
    with pytest.raises(RequestError) as error:
        start(constraints, structural_tag=structural_tag)
    assert message in str(error.value)
