"""Arguments of tool calls: JSON as models write it, and texts that become what a tool's schema says."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

DECODER = json.JSONDecoder(strict=False, parse_constant=lambda name: _refuse(name))  # models write newlines in strings
SPACE = re.compile(r"\s*")
MAX_REFERENCES = 8  # within one another
OF_PYTHON = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
ALIASES = {kind.__name__: name for kind, name in OF_PYTHON.items()}  # which some write for JSON Schema's names


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def skip_space(text: str, pos: int) -> int:
    """Return where the white space from `pos` on ends."""
    return SPACE.match(text, pos).end()  # type: ignore[union-attr]


def json_end(text: str, pos: int) -> int | None:
    """Return where the JSON value at `pos` ends; None where there is none, or not all of it."""
    try:
        return DECODER.raw_decode(text, pos)[1]
    except (ValueError, RecursionError):
        return None


def json_members(text: str, pos: int) -> tuple[dict[str, str], int] | None:
    """Return the members of the JSON object at `pos`, as they are written, and where it ends; None if it is broken."""
    if not text.startswith("{", pos) or (end := json_end(text, pos)) is None:
        return None
    found: dict[str, str] = {}
    pos = skip_space(text, pos + 1)
    while text[pos] != "}":
        name, pos = DECODER.raw_decode(text, pos)
        pos = skip_space(text, skip_space(text, pos) + 1)  # over the colon
        value_end = DECODER.raw_decode(text, pos)[1]
        found[name] = text[pos:value_end]
        pos = skip_space(text, value_end)
        if text[pos] == ",":
            pos = skip_space(text, pos + 1)
    return found, end


def types_of(schema: Any, parameters: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the types that a parameter's schema allows, by JSON Schema's names; empty where it does not say.

    parameters: the schema that it is a part of, where references lead.
    """
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return set()
    given = schema.get("type")
    kinds = [given] if isinstance(given, str) else _items(given)
    found = {ALIASES.get(kind, kind) for kind in kinds if isinstance(kind, str)}
    if not found:
        values = [*_items(schema.get("enum")), *([schema["const"]] if "const" in schema else ())]
        found = {OF_PYTHON.get(type(value), "null") for value in values}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        target: Any = parameters
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        found |= types_of(target, parameters, depth + 1)
    for union in ("anyOf", "oneOf", "allOf"):
        for choice in _items(schema.get(union)):
            found |= types_of(choice, parameters, depth + 1)
    return found | {"null"} if found and schema.get("nullable") else found


def _items(value: Any) -> list[Any]:
    """Return a list as it is, and an empty one for whatever else a schema may hold in its place."""
    return value if isinstance(value, list) else []


def arguments_text(arguments: str | Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """Return arguments as JSON text, with the types of the schema `parameters`.

    JSON stays as it is written, but for strings where the schema wants something else. Texts become what the schema
    says; where it says nothing of a parameter, a string.
    """
    properties = parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    if not isinstance(arguments, str):
        values = {
            name: typed(value, types_of(properties[name], parameters)) if name in properties else value
            for name, value in arguments.items()
        }
        return dump(values)
    if (found := json_members(arguments, 0)) is None or found[1] < len(arguments):
        return _strict(arguments)
    texts = dict(found[0])
    for name, text in texts.items():
        kinds = types_of(properties.get(name), parameters)
        if text.startswith('"') and kinds and "string" not in kinds:
            texts[name] = dump(typed(DECODER.decode(text), kinds))
    if texts == found[0]:
        return _strict(arguments)
    return _strict(f"{{{', '.join(f'{dump(name)}: {text}' for name, text in texts.items())}}}")


def typed(text: str, kinds: set[str]) -> Any:
    """Return a text as a value of one of the types, or as it is where it is none. No types: any JSON but a string."""
    stripped = text.strip()
    if stripped == "None" and "null" in kinds:
        return None
    if stripped in ("True", "False") and "boolean" in kinds:
        return stripped == "True"
    try:
        value = DECODER.decode(stripped)
    except (ValueError, RecursionError):
        return text
    match value:
        case None:
            own = {"null"}
        case bool():
            own = {"boolean"}
        case int():
            own = {"integer", "number"}
        case float() if not math.isfinite(value):
            return text
        case float():
            own = {"number", "integer"} if value.is_integer() else {"number"}
            if own & kinds == {"integer"}:
                value = int(value)
        case list():
            own = {"array"}
        case dict():
            own = {"object"}
        case _:
            return text
    return value if own & kinds or not kinds else text


def dump(value: Any) -> str:
    """Return a value as JSON text, which can be written as UTF-8."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which a model has escaped
        return json.dumps(value)
    return text


def _strict(text: str) -> str:
    """Return JSON text as every parser reads it: a model may have written a line break within a string."""
    try:
        json.loads(text)
    except ValueError:
        return dump(DECODER.decode(text))
    except RecursionError:
        pass
    return text
