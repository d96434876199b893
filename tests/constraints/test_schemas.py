"""Which schemas have no end, and where properties are forbidden."""

from typing import Any

import pytest

from nanoinfer.constraints.schemas import forbid_additional_properties, is_endless

SELF = {"$ref": "#"}
NODE = {"$ref": "#/$defs/node"}


def an_object(child: Any, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"child": child}, "required": [*required]}


@pytest.mark.parametrize(
    ("schema", "endless"),
    [
        (SELF, True),
        (an_object(SELF, "child"), True),
        (an_object(SELF), False),
        (an_object({"anyOf": [SELF, {"type": "null"}]}, "child"), False),
        (an_object({"anyOf": [SELF, an_object(SELF, "child")]}, "child"), True),
        (an_object({"allOf": [{"type": "object"}, SELF]}, "child"), True),
        (an_object({"type": "array", "items": SELF}, "child"), False),
        (an_object({"type": "array", "items": SELF, "minItems": 1}, "child"), True),
        (an_object({"type": "array", "prefixItems": [SELF], "minItems": 1}, "child"), True),
        ({**an_object(SELF, "child"), "type": ["object", "null"]}, False),
        ({"properties": {"child": SELF}, "required": ["child"]}, False),  # a number will do
        ({**NODE, "$defs": {"node": an_object(NODE, "child")}}, True),
        ({**NODE, "$defs": {"node": an_object(NODE)}}, False),
        ({**an_object(NODE), "$defs": {"node": an_object(NODE, "child")}}, False),
        (an_object({"$ref": "https://example.com"}, "child"), False),
        (an_object({"$ref": "#/$defs/nowhere"}, "child"), False),
        ({"type": "object", "required": ["$ref"], "properties": {"$ref": {"const": "#"}}}, False),
    ],
)
def test_a_schema_is_endless_if_every_value_holds_itself(schema: dict[str, Any], endless: bool) -> None:
    assert is_endless(schema) == endless


def test_properties_are_forbidden_wherever_a_schema_lists_some_and_in_a_copy() -> None:
    schema = {
        "properties": {"a": {"type": "array", "items": {"properties": {}}}, "properties": {"type": "null"}},
        "$defs": {"d": {"patternProperties": {"x": {}}}, "open": {"properties": {}, "additionalProperties": {}}},
        "enum": [{"properties": 1}],
        "anyOf": [{"properties": {}}, True],
    }
    closed = {"additionalProperties": False}
    assert forbid_additional_properties(schema) == {
        "properties": {"a": {"type": "array", "items": {"properties": {}, **closed}}, "properties": {"type": "null"}},
        "$defs": {"d": {"patternProperties": {"x": {}}, **closed}, "open": schema["$defs"]["open"]},  # type: ignore[index]
        "enum": [{"properties": 1}],
        "anyOf": [{"properties": {}, **closed}, True],
        **closed,
    }
    assert "additionalProperties" not in schema
