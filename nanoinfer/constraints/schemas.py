"""Rewrites JSON schemas, as dicts, where the grammar engine does not support them as they are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

# Keywords that hold schemas by name, and those that hold one schema or a list of them.
NAMED = ("properties", "patternProperties", "$defs", "definitions")
DIRECT = ("additionalProperties", "additionalItems", "items", "prefixItems", "allOf", "anyOf", "oneOf")
TOGETHER = ("allOf", "anyOf", "oneOf")  # of these, the ones whose schemas describe the same value
LISTING = ("properties", "patternProperties")
Names = Mapping[str, dict[str, None]]  # of properties, or patterns of names, by a keyword of LISTING
NO_NAMES: Names = {}
NO_REFS: frozenset[str] = frozenset()
MAX_WRITTEN_OUT = 1000  # references


def forbid_additional_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy where every schema that lists properties allows no others, unless it says which.

    Schemas that describe one object together (by allOf, by reference or by options) allow what any of them lists.
    Raises ValueError where these have too many references.
    """
    return dict(_Closer(schema).close(schema))


class _Closer:
    """Closes the parts of a schema."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root, self._num_written_out = root, 0

    def close(self, schema: Any, beside: Names = NO_NAMES, refs: frozenset[str] = NO_REFS) -> Any:
        """Return a closed copy. beside: what others list of the same object. refs: the references that led here."""
        if not isinstance(schema, dict):
            return schema
        own, ref = _own_names(schema), schema.get("$ref")
        if isinstance(ref, str) and (own or beside) and ref not in refs and _resolve(self._root, ref) is not None:
            return self.close(self._with_reference_written_out(schema), beside, refs | {ref})
        copy = dict(schema)
        for keyword in NAMED:
            if isinstance(copy.get(keyword), dict):
                copy[keyword] = {name: self.close(child) for name, child in copy[keyword].items()}
        for keyword in DIRECT:
            if keyword in copy and keyword not in TOGETHER:
                child = copy[keyword]
                copy[keyword] = list(map(self.close, child)) if isinstance(child, list) else self.close(child)
        parts, options = _list(schema, "allOf"), [*_list(schema, "anyOf"), *_list(schema, "oneOf")]
        of_parts, of_options = [*map(self._names, parts)], _union(*map(self._names, options))
        if parts:
            others = [_union(*of_parts[:index], *of_parts[index + 1 :]) for index in range(len(parts))]
            copy["allOf"] = [
                self.close(part, _union(beside, own, of_options, names), refs)
                for part, names in zip(parts, others, strict=True)
            ]
        for keyword in ("anyOf", "oneOf"):
            if _list(schema, keyword):
                names = _union(beside, own, *of_parts)
                copy[keyword] = [self.close(option, names, refs) for option in schema[keyword]]
        if own and "additionalProperties" not in copy:
            for keyword, its in _union(beside, *of_parts, of_options).items():
                copy[keyword] = {**dict.fromkeys([*own.get(keyword, ()), *its], True), **_dict(copy, keyword)}
            copy["additionalProperties"] = False
        return copy

    def _with_reference_written_out(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema with the target of its reference, which has other schemas beside it in other places."""
        self._num_written_out += 1
        if self._num_written_out > MAX_WRITTEN_OUT:
            raise ValueError("disable_additional_properties meets too many references in allOf; leave one of both out")
        rest = {keyword: child for keyword, child in schema.items() if keyword != "$ref"}
        return {**rest, "allOf": [*_list(schema, "allOf"), _resolve(self._root, schema["$ref"])]}

    def _names(self, schema: Any) -> Names:
        """Return the names that schemas of the same object as this one list, by keyword."""
        return _union(*map(_own_names, _together(self._root, schema, TOGETHER)))


def _own_names(schema: dict[str, Any]) -> Names:
    return {keyword: dict.fromkeys(its) for keyword in LISTING if isinstance(its := schema.get(keyword), dict)}


def _union(*several: Names) -> Names:
    union: dict[str, dict[str, None]] = {}
    for names in several:
        for keyword, its in names.items():
            union.setdefault(keyword, {}).update(its)
    return union


def _together(root: dict[str, Any], schema: Any, keywords: Sequence[str]) -> list[dict[str, Any]]:
    """Return a schema and those that hold at the same place by its reference and by these keywords."""
    found: dict[int, dict[str, Any]] = {}  # by id
    waiting: list[Any] = [schema]
    for part in waiting:
        if isinstance(part, dict) and id(part) not in found:
            found[id(part)] = part
            waiting += [one for keyword in keywords for one in _list(part, keyword)]
            if isinstance(ref := part.get("$ref"), str):
                waiting.append(_resolve(root, ref))
    return [*found.values()]


def find_dead_end(schema: dict[str, Any], is_impossible: Callable[[dict[str, Any]], bool]) -> str | None:
    """Say where the engine would take a schema and then find no token for it, why, and what to do; None if nowhere.

    is_impossible: returns whether no object follows a schema; it is asked about some that `_only_patterns` makes.
    """
    places = dict(_reachable(schema))
    open_refs = _open_refs(schema)
    has_patterns = any("patternProperties" in part for part in all_dicts(schema))
    for place, part in places.items():
        if not _may_end(part, open_refs):
            return f"at {place} needs a value that holds itself without end; make one of its parts optional"
        options = [*_list(part, "anyOf"), *_list(part, "oneOf")]
        for variant in [part, *({"allOf": [part, option]} for option in options)] if has_patterns else []:
            probe = _only_patterns(schema, variant)
            if probe is not None and is_impossible(probe):
                patterns = ", ".join(map(repr, probe["patternProperties"]))
                return (
                    f"at {place} has patternProperties ({patterns}) that allow no name but those in properties and "
                    "required; leave them out, and say in properties what they ask for"
                )
    return None


def _open_refs(schema: dict[str, Any]) -> set[str]:
    """Return the references to schemas whose values all hold themselves without end."""
    refs = {ref for part in all_dicts(schema) if isinstance(ref := part.get("$ref"), str)}
    targets = {ref: target for ref in sorted(refs) if (target := _resolve(schema, ref))}
    users: dict[str, list[str]] = {}  # by reference, those whose target uses it
    for ref, target in targets.items():
        for part in all_dicts(target):
            if isinstance(used := part.get("$ref"), str):
                users.setdefault(used, []).append(ref)
    open_refs, waiting = {*targets}, [*targets]
    while waiting:
        ref = waiting.pop()
        if ref in open_refs and _may_end(targets[ref], open_refs):
            open_refs.remove(ref)
            waiting += users.get(ref, ())
    return open_refs


def _reachable(root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the root and all schemas that it leads to, each with its place, such as #/properties/name."""
    seen, waiting = {"#"}, [("#", root)]
    while waiting:
        place, schema = waiting.pop()
        yield place, schema
        children = []
        for keyword in LISTING:
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
    parts = _together(root, schema, ["allOf"])
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


def all_dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all dicts in a value of JSON, itself included."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, (dict, list)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from all_dicts(child)


def _resolve(root: dict[str, Any], ref: str) -> Any:
    """Return what a reference within the document points to; None for all others."""
    base = root.get("$id")
    ref = ref.removeprefix(base) if isinstance(base, str) else ref
    if ref not in ("", "#") and not ref.startswith("#/"):
        return next((one for one in all_dicts(root) if ref in (one.get("$id"), f"#{one.get('$anchor')}")), None)
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
