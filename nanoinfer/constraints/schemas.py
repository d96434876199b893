"""JSON schemas as dicts: what the grammar engine does not do with them itself."""

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

# Keywords that hold schemas by name, and those that hold one schema or a list of them.
NAMED = ("properties", "patternProperties", "$defs", "definitions")
DIRECT = ("additionalProperties", "additionalItems", "items", "prefixItems", "allOf", "anyOf", "oneOf")


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


def find_dead_end(schema: dict[str, Any], is_impossible: Callable[[dict[str, Any]], bool]) -> str | None:
    """Say where the engine would take a schema and then find no token for it, why, and what to do; None if nowhere.

    is_impossible: returns whether no object follows a schema; it is asked about some that `_only_patterns` makes.
    """
    places = dict(_reachable(schema))
    open_refs = {ref for part in _dicts(schema) if isinstance(ref := part.get("$ref"), str) and _resolve(schema, ref)}
    while finite := {ref for ref in open_refs if _may_end(_resolve(schema, ref), open_refs)}:
        open_refs -= finite
    for place, part in places.items():
        if not _may_end(part, open_refs):
            return f"at {place} needs a value that holds itself without end; make one of its parts optional"
        options = [*_list(part, "anyOf"), *_list(part, "oneOf")]
        for variant in [part, *({"allOf": [part, option]} for option in options)]:
            probe = _only_patterns(schema, variant)
            if probe is not None and is_impossible(probe):
                patterns = ", ".join(map(repr, probe["patternProperties"]))
                return (
                    f"at {place} has patternProperties ({patterns}) that allow no name but those in properties and "
                    "required; leave them out, and say in properties what they ask for"
                )
    return None


def _reachable(root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the root and all schemas that it leads to, each with its place, such as #/properties/name."""
    seen, waiting = {"#"}, [("#", root)]
    while waiting:
        place, schema = waiting.pop()
        yield place, schema
        children = []
        for keyword in ("properties", "patternProperties"):
            children += [(f"{place}/{keyword}/{name}", child) for name, child in _dict(schema, keyword).items()]
        for keyword in DIRECT:
            children += [(f"{place}/{keyword}/{index}", child) for index, child in enumerate(_list(schema, keyword))]
            children.append((f"{place}/{keyword}", schema.get(keyword)))
        if isinstance(ref := schema.get("$ref"), str):
            children.append((ref, _resolve(root, ref)))
        for place, child in reversed(children):
            if isinstance(child, dict) and place not in seen:
                seen.add(place)
                waiting.append((place, child))


def _only_patterns(root: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return a schema of the objects with a property that patterns allow and neither `properties` nor `required` lists.

    None where a schema has no patterns, or allows other properties too.
    """
    parts: list[Any] = []
    waiting: list[Any] = [schema]  # what holds at the same place: also by allOf, and by reference
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and not any(part is other for other in parts):
            parts.append(part)
            ref = part.get("$ref")
            waiting += [*_list(part, "allOf"), _resolve(root, ref) if isinstance(ref, str) else None]
    names = [name for part in parts for name in [*_dict(part, "properties"), *_list(part, "required")]]
    patterns = [name for part in parts for name, one in _dict(part, "patternProperties").items() if one is not False]
    if not patterns or not any(part.get("additionalProperties") is False for part in parts):
        return None
    return {
        "type": "object",
        "properties": dict.fromkeys(names, False),
        "patternProperties": dict.fromkeys(patterns, True),
        "additionalProperties": False,
        "minProperties": 1,
        "x-guidance": {"whitespace_flexible": False},  # so that nothing at all may follow the brace if no name may
    }


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
    if "object" in types and _object_may_end(schema, open_refs):
        return True
    first, rest = ("items", "additionalItems") if _list(schema, "items") else ("prefixItems", "items")  # old drafts
    num_items, items = schema.get("minItems"), [*_list(schema, first), schema.get(rest)]
    needed = items[:num_items] if isinstance(num_items, int) else []
    return "array" in types and all(_may_end(item, open_refs) for item in needed)


def _object_may_end(schema: dict[str, Any], open_refs: set[str]) -> bool:
    """Return whether some object of the schema needs none of `open_refs`."""
    properties = _dict(schema, "properties")
    unlisted = [*_dict(schema, "patternProperties").values(), schema.get("additionalProperties")]
    others_may_end = any(other is not False and _may_end(other, open_refs) for other in unlisted)
    if not all(
        _may_end(properties[name], open_refs) if name in properties else others_may_end
        for name in _list(schema, "required")
    ):
        return False
    needs_some = bool(schema.get("minProperties"))
    return not needs_some or others_may_end or any(_may_end(one, open_refs) for one in properties.values())


def _list(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _dict(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all dicts in a value of JSON, itself included."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, (dict, list)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _dicts(child)


def _resolve(root: dict[str, Any], ref: str) -> Any:
    """Return what a reference within the document points to; None for all others."""
    base = root.get("$id")
    ref = ref.removeprefix(base) if isinstance(base, str) else ref
    if ref not in ("", "#") and not ref.startswith("#/"):
        return next((one for one in _dicts(root) if ref in (one.get("$id"), f"#{one.get('$anchor')}")), None)
    found: Any = root
    for part in ref.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found
