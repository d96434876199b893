"""JSON schemas as dicts: what the grammar engine does not do with them itself."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

# Keywords that hold schemas by name, and those that hold one schema or a list of them.
NAMED = ("properties", "patternProperties", "$defs", "definitions")
DIRECT = ("additionalProperties", "items", "prefixItems", "allOf", "anyOf", "oneOf")


def forbid_additional_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy where every schema that lists properties allows no others, unless it says which."""
    copy = dict(schema)
    for keyword in NAMED:
        if isinstance(copy.get(keyword), dict):
            copy[keyword] = {name: _forbid_in(child) for name, child in copy[keyword].items()}
    for keyword in DIRECT:
        if keyword in copy:
            child = copy[keyword]
            copy[keyword] = list(map(_forbid_in, child)) if isinstance(child, list) else _forbid_in(child)
    if "properties" in copy or "patternProperties" in copy:
        copy.setdefault("additionalProperties", False)
    return copy


def _forbid_in(schema: Any) -> Any:
    return forbid_additional_properties(schema) if isinstance(schema, dict) else schema


def is_endless(schema: dict[str, Any]) -> bool:
    """Return whether every value that follows the schema would hold itself without end, as far as can be seen."""
    refs = {ref for ref in _find_refs(schema) if _resolve(schema, ref) is not None}
    finite: set[str] = set()
    while found := {ref for ref in refs - finite if _may_end(_resolve(schema, ref), refs - finite)}:
        finite |= found
    return not _may_end(schema, refs - finite)


def _may_end(schema: Any, open_refs: set[str]) -> bool:
    """Return whether some value of the schema needs none of `open_refs`."""
    if not isinstance(schema, dict):
        return True
    if schema.get("$ref") in open_refs or not all(_may_end(part, open_refs) for part in _list(schema, "allOf")):
        return False
    for keyword in ("anyOf", "oneOf"):
        options = _list(schema, keyword)
        if options and not any(_may_end(option, open_refs) for option in options):
            return False
    if "enum" in schema or "const" in schema:
        return True
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    if not {*types} <= {"object", "array"}:
        return True  # a text or a number will do
    required, properties = _list(schema, "required"), schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    num_items = schema.get("minItems", 0)
    items = _list(schema, "prefixItems")
    if isinstance(num_items, int) and num_items > len(items):
        items = [*items, schema.get("items")]
    return ("object" in types and all(_may_end(properties.get(name), open_refs) for name in required)) or (
        "array" in types and all(_may_end(item, open_refs) for item in (items if num_items else []))
    )


def _list(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _find_refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for child in value.values():
            yield from _find_refs(child)
    elif isinstance(value, list):
        for child in value:
            yield from _find_refs(child)


def _resolve(root: Any, ref: str) -> Any:
    """Return what a reference within the document points to; None for all others."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    found = root
    for part in ref.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found
