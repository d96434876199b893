"""Which schemas lead where no token is allowed, and where properties are forbidden."""

from typing import Any

import pytest

from nanoinfer.constraints.schemas import find_dead_end, forbid_additional_properties

SELF = {"$ref": "#"}
NODE = {"$ref": "#/$defs/node"}


def an_object(child: Any, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"child": child}, "required": [*required]}


HOLDS_NODE = an_object(NODE, "child")
NODES = {"node": HOLDS_NODE}
ENDLESS: dict[str, Any] = {"$defs": NODES}


def an_array(**keywords: Any) -> dict[str, Any]:
    return {"type": "array", **keywords}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (SELF, "#"),
        (an_object(SELF, "child"), "#"),
        (an_object(SELF), None),
        (an_object({"anyOf": [SELF, {"type": "null"}]}, "child"), None),
        (an_object({"anyOf": [SELF, an_object(SELF, "child")]}, "child"), "#"),
        (an_object({"allOf": [{"type": "object"}, SELF]}, "child"), "#"),
        (an_object(an_array(items=SELF), "child"), None),
        (an_object(an_array(items=SELF, minItems=1), "child"), "#"),
        (an_object(an_array(prefixItems=[SELF], minItems=1), "child"), "#"),
        (an_array(prefixItems=[{"type": "null"}, SELF], minItems=1), None),
        (an_array(items=[SELF], minItems=1), "#"),
        ({**an_object(SELF, "child"), "type": ["object", "null"]}, None),
        ({"properties": {"child": SELF}, "required": ["child"]}, None),  # a number will do
        ({"type": "object", "additionalProperties": SELF, "required": ["child"]}, "#"),
        ({"type": "object", "patternProperties": {"^c": SELF}, "additionalProperties": False, "minProperties": 1}, "#"),
        ({"type": "object", "patternProperties": {"^c": SELF}, "minProperties": 1}, None),
        ({**NODE, "$defs": {"node": an_object(NODE, "child")}}, "#"),
        ({**NODE, "$defs": {"node": an_object(NODE)}}, None),
        (an_object({"$ref": "https://example.com"}, "child"), None),
        (an_object({"$ref": "#/$defs/nowhere"}, "child"), None),
        ({"type": "object", "required": ["$ref"], "properties": {"$ref": {"const": "#"}}}, None),
        # A part that may be left out would end the text once it was begun.
        ({**an_object(NODE), **ENDLESS}, "#/properties/child"),
        ({**an_array(items=NODE), **ENDLESS}, "#/items"),
        ({**an_array(prefixItems=[{"type": "null"}, NODE]), **ENDLESS}, "#/prefixItems/1"),
        ({**an_array(items=[{"type": "null"}], additionalItems=NODE), **ENDLESS}, "#/additionalItems"),
        ({"anyOf": [{"type": "null"}, NODE], **ENDLESS}, "#/anyOf/1"),
        (an_array(items={**HOLDS_NODE, "type": ["null", "object"]}, **ENDLESS), "#/items/properties/child"),
        ({"$ref": "#/$defs/list", "$defs": {"list": an_array(items=NODE), **NODES}}, "#/$defs/list/items"),
        ({**an_array(items={"$ref": "#/else/n"}), "else": {"n": an_object({"$ref": "#/else/n"}, "child")}}, "#/items"),
        (an_array(items={"$ref": "#n", "x": {"$anchor": "n", **an_object({"$ref": "#n"}, "child")}}), "#/items"),
        ({"$id": "urn:list", **an_array(items={"$ref": "urn:list#/$defs/node"}), **ENDLESS}, "#/items"),
        ({"type": "null", **ENDLESS}, None),  # nothing leads there
    ],
)
def test_a_part_that_holds_itself_without_end_is_found_with_its_place(
    schema: dict[str, Any], place: str | None
) -> None:
    message = f"at {place} needs a value that holds itself without end; make one of its parts optional"
    assert find_dead_end(schema, lambda probe: False) == (place and message)


def closed(*patterns: str, **keywords: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "patternProperties": {pattern: {} for pattern in patterns},
        "additionalProperties": False,
        **keywords,
    }


@pytest.mark.parametrize(
    ("schema", "place", "names"),
    [
        (closed("^a$", properties={"a": {}}), "#", {"a"}),
        (closed("^[ab]$", properties={"a": {}}, required=["b"]), "#", {"a", "b"}),
        (an_array(items=closed("^a$")), "#/items", set()),
        ({"allOf": [{"properties": {"a": {}}}, closed("^a$")]}, "#", {"a"}),
        ({"properties": {"a": {}}, "anyOf": [{"type": "null"}, closed("^a$")]}, "#", {"a"}),
        ({"properties": {"a": {}}, "$ref": "#/$defs/o", "$defs": {"o": closed("^a$")}}, "#", {"a"}),
        ({"properties": {"a": {}}, "patternProperties": {"^a$": {}}}, None, set()),  # any other name may come
        (closed("^a$", patternProperties={"^a$": False}), None, set()),
    ],
)
def test_patterns_are_asked_for_a_name_that_is_not_listed(
    schema: dict[str, Any], place: str | None, names: set[str]
) -> None:
    asked: list[dict[str, Any]] = []

    def none_is_left(probe: dict[str, Any]) -> bool:
        asked.append(probe)
        return True

    found = find_dead_end(schema, none_is_left)
    assert bool(asked) == bool(place)
    if place:
        assert found is not None
        assert found.startswith(f"at {place} has patternProperties ('^")
        assert asked[0]["properties"] == dict.fromkeys(names, False)


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
        "anyOf": [{"properties": {"a": True, "properties": True}, **closed}, True],  # what stands beside it counts
        **closed,
    }
    assert "additionalProperties" not in schema


def test_references_that_multiply_are_refused_and_not_written_out() -> None:
    defs: dict[str, Any] = {f"n{i}": {"allOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 2} for i in range(40)}
    schema = {"$ref": "#/$defs/n0", "properties": {"a": {}}, "$defs": {**defs, "n40": {"properties": {"b": {}}}}}
    with pytest.raises(ValueError, match="disable_additional_properties meets too many references in allOf"):
        forbid_additional_properties(schema)
