"""Tool calls that a model has to make: the form of an answer for `tool_choice`, as a structural tag."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanoinfer.errors import RequestError
from nanoinfer.responses.call_formats import Form, write_json
from nanoinfer.responses.families import Family
from nanoinfer.responses.parse import Template, schemas_of
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.structured_outputs import StructuredOutputsParams

EXAMPLE = '{"type": "function", "function": {"name": ...}}'


def chosen(tool_choice: Any, tools: Sequence[Any] | None) -> dict[str, Mapping[str, Any]] | None:
    """Return the schemas of the tools, one of which must be called, by name; None if the model decides.

    Raises RequestError for what is no choice, and for a tool that is not there.
    """
    if tool_choice in (None, "auto", "none"):  # the last is a wish: as in vLLM, the prompt has the tools all the same
        return None
    schemas = schemas_of(tools)
    if tool_choice == "required":
        if not schemas:
            raise RequestError("tool_choice='required' needs tools; give some, or leave it out")
        return schemas
    match tool_choice:
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in schemas:
                known = ", ".join(schemas) or "none"
                raise RequestError(f"tool_choice names the tool {name!r}, which is not among tools; there are {known}")
            return {name: schemas[name]}
    raise RequestError(f"tool_choice={tool_choice!r:.200} is not known; use 'auto', 'none', 'required' or {EXAMPLE}")


def constrain(
    params: SamplingParams, schemas: Mapping[str, Mapping[str, Any]], is_one: bool, template: Template | None, chat: Any
) -> SamplingParams:
    """Return parameters by which the answer calls tools. is_one: just once. chat: the chat template.

    Raises RequestError where it has a form of its own, and where no family says how calls are written.
    """
    if not isinstance(template, Family):
        raise RequestError(
            "tool_choice needs to know how this model writes tool calls, and its chat template does not tell; name its "
            "family, such as 'qwen3', as LLM(response_template=...), or as --response-template of run-batch"
        )
    if params.structured_outputs is not None:
        raise RequestError("there are tool_choice and structured_outputs; give one of them")
    form = _form(schemas, is_one, template, chat if isinstance(chat, str) else "")
    tag = {"type": "structural_tag", "format": form, "includes_thought": template.calls is None}
    return replace(params, structured_outputs=StructuredOutputsParams(structural_tag=tag))


def _form(schemas: Mapping[str, Mapping[str, Any]], is_one: bool, family: Family, chat: str) -> Form:
    """Return the form of one call or more."""
    if family.calls is None:
        return _harmony_form(schemas, family)
    way = next(way for way in family.calls.ways if way.mark in chat)
    begin, end = (way.begin, way.end) if way.is_each else ("", "")
    calls = [
        {"type": "tag", "begin": begin, "content": way.write(name, parameters), "end": end}
        for name, parameters in schemas.items()
    ]
    several = {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": way.separator,
        "at_least_one": True,
        "stop_after_first": is_one,
    }
    space: Form = {"type": "regex", "pattern": r"\n{0,2}"}  # after a thought
    if way.is_each:
        return {"type": "sequence", "elements": [space, several]}
    return {"type": "sequence", "elements": [space, _text(way.begin), several, _text(way.end)]}


def _harmony_form(schemas: Mapping[str, Mapping[str, Any]], family: Family) -> Form:
    """Return the form of a message of gpt-oss that calls a tool, perhaps after a thought."""
    calls = [
        write_json(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", parameters)
        for name, parameters in schemas.items()
    ]
    thought = [_text(family.reasoning_start), {"type": "any_text"}, _text(f"{family.reasoning_end}{family.turn_start}")]
    before = {"type": "optional", "content": {"type": "sequence", "elements": thought}}
    return {"type": "sequence", "elements": [before, {"type": "or", "elements": calls}]}


def _text(value: str) -> Form:
    return {"type": "const_string", "value": value}
