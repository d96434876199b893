"""Reads tool calls in the formats of model families, and writes the forms that calls must have.

Arguments come as JSON, or as a text for each parameter, between tags of its name. A reader takes what it can and says
where it stopped, so that the rest is not lost.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanoinfer.responses.typed_arguments import DECODER, json_end, json_members, skip_space, types_of

Form = dict[str, Any]  # a format of a structural tag


class Call(NamedTuple):
    """A tool call as a model wrote it. arguments: JSON, or the text of each parameter by its name."""

    name: str
    arguments: str | dict[str, str]


# Reads calls from a position in a text on; returns them, and where they end.
Reader = Callable[[str, int], tuple[list[Call], int]]
# Returns the form of a call, given the function's name and the JSON schema of its parameters.
Writer = Callable[[str, Mapping[str, Any]], Form]


@dataclass(frozen=True, slots=True)
class Writing:
    """Says how calls are to be written. A family may have several ways; the chat template tells which.

    mark: a text in the chat template that tells this way; "" for what is written otherwise. begin, end: the texts
    around a call if `is_each`, else around all calls. separator: what stands between two. write: returns the form of
    one call, without these texts.
    """

    mark: str
    begin: str
    separator: str
    end: str
    is_each: bool
    write: Writer


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Says how tool calls are read and written.

    start, end: the texts around one call or several; end is "" where the calls tell by themselves where they end. read:
    reads what stands between. ways: how they are written; the last is for any chat template. bare_start: what a call
    begins with where models forget `start`; "" where they do not.
    """

    start: str
    end: str
    read: Reader
    ways: tuple[Writing, ...]
    bare_start: str = ""


def _as_call(members: Mapping[str, str]) -> Call | None:
    """Return the call that an object says: a name, and arguments or parameters, which may be JSON within a string."""
    name = DECODER.decode(members.get("name", "null"))
    if not isinstance(name, str) or not name:
        return None
    arguments = members.get("arguments", members.get("parameters", "{}"))
    inner = DECODER.decode(arguments) if arguments.startswith('"') else None
    if isinstance(inner, str) and json_members(inner.strip(), 0) is not None:
        arguments = inner.strip()
    return Call(name, "{}" if arguments == "null" else arguments)


# -------- JSON: {"name": ..., "arguments": {...}} ---------------------------------------------------------------------


def read_object(text: str, pos: int) -> tuple[list[Call], int]:
    """Read one object with a name and arguments."""
    pos = skip_space(text, pos)
    found = json_members(text, pos)
    call = found and _as_call(found[0])
    return ([call], found[1]) if found and call else ([], pos)


def write_object(name: str, parameters: Mapping[str, Any]) -> Form:
    return _sequence(f'\n{{"name": {json.dumps(name)}, "arguments": ', _schema(parameters), "}\n")


def read_hermes(text: str, pos: int) -> tuple[list[Call], int]:
    """Read a call of Qwen: an object, or a function in tags (Qwen3-Coder, Qwen3.5)."""
    pos = skip_space(text, pos)
    return read_function(text, pos) if text.startswith("<function=", pos) else read_object(text, pos)


# -------- Mistral: [{"name": ..., "arguments": {...}}], or name[ARGS]{...} --------------------------------------------

MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?={)")


def read_mistral(text: str, pos: int) -> tuple[list[Call], int]:
    """Read a list of objects, or one name with its arguments."""
    start = pos = skip_space(text, pos)
    if named := MISTRAL_NAME.match(text, pos):
        end = json_end(text, named.end())
        return ([], pos) if end is None else ([Call(named[1], text[named.end() : end])], end)
    if not text.startswith("[", pos) or (end := json_end(text, pos)) is None:
        return [], pos
    calls: list[Call] = []
    while text[pos] in "[,":
        found, pos = read_object(text, pos + 1)
        if not found:
            return [], start
        calls += found
        pos = skip_space(text, pos)
    return calls, end


def write_mistral_named(name: str, parameters: Mapping[str, Any]) -> Form:
    return write_json(f"[TOOL_CALLS]{name}[ARGS]", parameters)


def write_mistral(name: str, parameters: Mapping[str, Any]) -> Form:
    return _sequence(f'{{"name": {json.dumps(name)}, "arguments": ', _schema(parameters), "}")


# -------- DeepSeek: a name, a separator, and JSON, which R1 and V3 fence ----------------------------------------------

DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<fenced>[^\n<]+)\n```json\n|(?P<plain>[^\n<]+)<｜tool▁sep｜>)\s*"
)
DEEPSEEK_END = re.compile(r"\s*(?:```\s*)?<｜tool▁call▁end｜>")


def read_deepseek(text: str, pos: int) -> tuple[list[Call], int]:
    """Read calls, each between marks of its own."""
    calls: list[Call] = []
    while found := DEEPSEEK_CALL.match(text, pos):
        end = json_end(text, found.end())
        closed = None if end is None else DEEPSEEK_END.match(text, end)
        if closed is None:
            break
        calls.append(Call((found["fenced"] or found["plain"]).strip(), text[found.end() : end]))
        pos = closed.end()
    return calls, pos


def write_deepseek_plain(name: str, parameters: Mapping[str, Any]) -> Form:
    return _sequence(f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", _schema(parameters), "<｜tool▁call▁end｜>")


def write_deepseek(name: str, parameters: Mapping[str, Any]) -> Form:
    begin = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
    return _sequence(begin, _schema(parameters), "\n```<｜tool▁call▁end｜>")


# -------- Tags: a text for each parameter -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tags:
    """Says how calls are written whose parameters stand between tags.

    open: matches what precedes the parameters, with the function's name in its group. key: the same of a parameter.
    value_end, close: the texts that end a value, and a call. pad: what the value has on both sides. unclosed: matches
    the end of a value where models forget value_end; None where they do not.
    writes: the same for one call, with {} for a name: before the parameters, before a value, after it, and at the end.
    """

    open: "re.Pattern[str]"
    key: "re.Pattern[str]"
    value_end: str
    close: str
    pad: str
    writes: tuple[str, str, str, str]
    unclosed: "re.Pattern[str] | None" = None

    def read(self, text: str, pos: int) -> tuple[Call, int] | None:
        """Read one call; None where there is none, or not all of it."""
        opened = self.open.match(text, pos)
        if opened is None:
            return None
        arguments: dict[str, str] = {}
        at = opened.end()
        while key := self.key.match(text, at):
            for end, after in self._value_ends(text, key.end()):
                if self.key.match(text, after) or text.startswith(self.close, skip_space(text, after)):
                    value = text[key.end() : end]
                    break  # the text of a value may hold a tag, too
            else:
                return None
            arguments[key[1].strip()] = value.removeprefix(self.pad).removesuffix(self.pad) if self.pad else value
            at = after
        at = skip_space(text, at)
        if not text.startswith(self.close, at):
            return None
        return Call(opened[1].strip(), arguments), at + len(self.close)

    def _value_ends(self, text: str, pos: int) -> Iterator[tuple[int, int]]:
        """Yield the places where a value may end, and where the text behind its end begins."""
        end = text.find(self.value_end, pos)
        if self.unclosed is not None and (found := self.unclosed.search(text, pos, len(text) if end < 0 else end)):
            yield found.span()
        while end >= 0:
            yield end, end + len(self.value_end)
            end = text.find(self.value_end, end + 1)

    def write(self, name: str, parameters: Mapping[str, Any]) -> Form:
        """Return the form of one call, with the parameters in the order of the schema; strings are any text."""
        before, before_value, after_value, end = self.writes
        required = parameters.get("required") or ()
        parts: list[str | Form] = [before.format(name)]
        for key, schema in (parameters.get("properties") or {}).items():
            value = _value_form(schema, parameters)
            part = _sequence(before_value.format(key), value, after_value)
            parts.append(part if key in required else {"type": "optional", "content": part})
        return _sequence(*parts, end)


FUNCTION = Tags(
    open=re.compile(r"\s*<function=([^>\n]+)>"),
    key=re.compile(r"\s*<parameter=([^>\n]+)>"),
    value_end="</parameter>",
    close="</function>",
    pad="\n",
    writes=("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n"),
    unclosed=re.compile(r"\n(?=<parameter=[^>\n]+>\n|</function>\s*</tool_call>)"),
)
INVOKE = Tags(
    open=re.compile(r"""\s*<invoke name=["']?([^"'>\n]+)["']?>"""),
    key=re.compile(r"""\s*<parameter name=["']?([^"'>\n]+)["']?>"""),
    value_end="</parameter>",
    close="</invoke>",
    pad="",
    writes=('\n<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>"),
)
GLM = Tags(
    open=re.compile(r"\s*([^\s<]+)"),
    key=re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>"),
    value_end="</arg_value>",
    close="</tool_call>",
    pad="",
    writes=("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", ""),
)


def read_function(text: str, pos: int) -> tuple[list[Call], int]:
    """Read one function of Qwen3-Coder."""
    found = FUNCTION.read(text, pos)
    return ([found[0]], found[1]) if found else ([], pos)


def read_invokes(text: str, pos: int) -> tuple[list[Call], int]:
    """Read the calls of MiniMax."""
    calls: list[Call] = []
    while found := INVOKE.read(text, pos):
        calls.append(found[0])
        pos = found[1]
    return calls, pos


def read_glm(text: str, pos: int) -> tuple[list[Call], int]:
    """Read the call of GLM, up to the text that closes it."""
    found = GLM.read(text, pos)
    return ([found[0]], found[1] - len(GLM.close)) if found else ([], pos)


QWEN3_CALLS = CallFormat(
    "<tool_call>",
    "</tool_call>",
    read_hermes,
    (
        Writing("<function=", "<tool_call>", "\n", "</tool_call>", True, FUNCTION.write),
        Writing("", "<tool_call>", "\n", "</tool_call>", True, write_object),
    ),
    bare_start="<function=",
)
DEEPSEEK_CALLS = CallFormat(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    read_deepseek,
    (
        Writing("```json", "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>", False, write_deepseek),
        Writing("", "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>", False, write_deepseek_plain),
    ),
)
GLM_CALLS = CallFormat(
    "<tool_call>", "</tool_call>", read_glm, (Writing("", "<tool_call>", "\n", "</tool_call>", True, GLM.write),)
)
MINIMAX_CALLS = CallFormat(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    read_invokes,
    (Writing("", "<minimax:tool_call>", "", "\n</minimax:tool_call>", False, INVOKE.write),),
)
MISTRAL_CALLS = CallFormat(
    "[TOOL_CALLS]",
    "",
    read_mistral,
    (
        Writing("[ARGS]", "", "", "", True, write_mistral_named),
        Writing("", "[TOOL_CALLS] [", ", ", "]", False, write_mistral),
    ),
)


# -------- Forms -------------------------------------------------------------------------------------------------------


def _sequence(*parts: str | Form) -> Form:
    elements = [{"type": "const_string", "value": part} if isinstance(part, str) else part for part in parts]
    return {"type": "sequence", "elements": [one for one in elements if one.get("value") != ""]}


# JSON as chat templates write it, so that the next prompt has the same tokens.
SPACING = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


def _schema(parameters: Mapping[str, Any]) -> Form:
    return {"type": "json_schema", "json_schema": {"type": "object", **parameters, **SPACING}}


def write_json(begin: str, parameters: Mapping[str, Any]) -> Form:
    """Return the form of a text and the arguments as JSON."""
    return _sequence(begin, _schema(parameters))


def _value_form(schema: Any, parameters: Mapping[str, Any]) -> Form:
    """Return the form of one parameter's value: any text where it may be a string, else JSON."""
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if choices and all(isinstance(choice, str) for choice in choices):
        return {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in choices]}
    kinds = types_of(schema, parameters)
    if not kinds or "string" in kinds:
        return {"type": "any_text"}
    return {"type": "json_schema", "json_schema": {**definitions(parameters), **schema, **SPACING}}


def definitions(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a schema defines for references to it."""
    return {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
