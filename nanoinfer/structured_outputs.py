"""Describes the form that a text must have. It is checked here, and compiled when a request asks for it."""

import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nanoinfer.errors import NOT_SUPPORTED, ConfigError, Foreigners, RequestError, check_names, with_checked_names

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
JSON_KINDS = ("json", "json_object", "structural_tag")  # those that the switches for JSON act on
SWITCHES = ("disable_any_whitespace", "disable_additional_properties")
MAX_SHOWN = 200  # characters of a value in a message

FOREIGN_NAMES: Foreigners = {
    **{f"guided_{name}": name for name in (*KINDS, "whitespace_pattern")},
    **dict.fromkeys(("schema", "json_schema"), "json"),
    "pattern": "regex",
    "choices": "choice",
    **dict.fromkeys(("ebnf", "gbnf", "lark"), "grammar"),
    "backend": None,
}
# What structured_outputs_config of vLLM has beside SWITCHES, and the values that say what is so anyway.
FOREIGN_CONFIG: Foreigners = {
    "backend": (("auto", "guidance"), "llguidance compiles all grammars"),
    "disable_fallback": ((True, False), "there is one backend"),
    "enable_in_reasoning": ((False,), NOT_SUPPORTED),
    "reasoning_parser": (("",), "response_template of LLM names the family of models"),
    "reasoning_parser_plugin": None,
}


@with_checked_names(FOREIGN_NAMES)
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    r"""Says what form the whole text of a completion has, by one of the first six.

    json: a JSON schema, as text, as a dict, or a pydantic model class; kept as text. The text is JSON of that schema.
    regex: a regular expression that matches the whole text, without look-around; \d is 0 to 9.
    choice: strings; the text is one of them. Kept as a tuple.
    grammar: a context-free grammar, in GBNF (`root ::= ...`, llama.cpp's and vLLM's) or in Lark (`start: ...`).
    json_object: True for any JSON object.
    structural_tag: free text with parts that follow a schema, as text or a dict, in either of vLLM's two formats:
        {"structures": [{"begin", "schema", "end"}], "triggers": [...]} or {"type": "structural_tag", "format": ...}.
        Kept as text. With "includes_thought": true in it, it is the form of a thought and the answer after it
        together; with false, of what follows the thought, where the model is known to think.

    disable_any_whitespace: write JSON without white space between its parts.
    disable_additional_properties: no properties but those that the schema names, except where it says otherwise.
    whitespace_pattern: a regular expression for the white space between the parts of JSON, as r"[ \n]?".

    Raises RequestError (a ValueError) unless just one of the first six is given, and of its type.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            has = f"{' and '.join(given)} together" if given else "nothing"
            raise RequestError(f"StructuredOutputsParams has {has}; give it just one of {', '.join(KINDS)}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise RequestError(f"{name}={shorten(value)} is not a text; give a string that is not empty")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={shorten(getattr(self, name))} is not a bool; use True or False")
        if self.json_object not in (None, True):
            raise RequestError(f"json_object={shorten(self.json_object)} is not a bool; use True")
        if self.json is not None:
            schema = self.json
            if isinstance(schema, type) and hasattr(schema, "model_json_schema"):  # a pydantic model
                schema = schema.model_json_schema()
            object.__setattr__(self, "json", _to_text("json", schema, "a JSON schema, as text or as a dict"))
        if self.structural_tag is not None:
            what = 'a dict with "structures" and "triggers", or with "type" and "format", or its JSON'
            object.__setattr__(self, "structural_tag", _to_text("structural_tag", self.structural_tag, what))
        if self.choice is not None:
            choice = self.choice
            if not isinstance(choice, (list, tuple)) or not choice or not all(isinstance(one, str) for one in choice):
                raise RequestError(f"choice={shorten(choice)} must be a list of strings; use ['yes', 'no'], say")
            object.__setattr__(self, "choice", tuple(choice))
        self._check_switches()

    @property
    def kind(self) -> str:
        """Return which of KINDS it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def includes_thought(self) -> bool | None:
        """Return whether it holds from the first token on, or after a thought; None where it does not say so."""
        return None if self.structural_tag is None else _includes_thought(str(self.structural_tag))

    def __str__(self) -> str:
        return f"structured_outputs {self.kind}={shorten(getattr(self, self.kind))}"

    def _check_switches(self) -> None:
        given = [name for name in (*SWITCHES, "whitespace_pattern") if getattr(self, name)]
        if given and self.kind not in JSON_KINDS:
            raise RequestError(f"{given[0]} is about JSON, and {self.kind} is none; leave it out")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError(
                f"disable_any_whitespace=True and whitespace_pattern={self.whitespace_pattern!r} exclude each other; "
                "leave one of them out"
            )


def switches_of_all(config: Any) -> dict[str, bool] | None:
    """Return the SWITCHES that are on in structured_outputs_config of `LLM`, or None. Raises ConfigError."""
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError(f"structured_outputs_config={shorten(config)} is no dict; use {{'{SWITCHES[0]}': True}}, say")
    try:
        given = check_names("structured_outputs_config", config, SWITCHES, FOREIGN_CONFIG)
    except TypeError as error:
        raise ConfigError(str(error)) from None
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ConfigError(f"structured_outputs_config has {name}={shorten(value)}, no bool; use True or False")
    return {name: True for name in SWITCHES if given.get(name)} or None


def shorten(value: object) -> str:
    """Return the repr of a user's value, cut to what a message can hold."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # it is nested too deep, or has a number of too many digits
        return f"a {type(value).__name__} that is too deep or too large to be shown"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


@lru_cache  # many requests have the same
def _includes_thought(structural_tag: str) -> bool | None:
    try:
        given = json_format.loads(structural_tag).get("includes_thought")
    except (ValueError, RecursionError, AttributeError):  # what is wrong with it is said when it is compiled
        return None
    return given if isinstance(given, bool) else None


def _to_text(name: str, value: object, what: str) -> str:
    """Return a JSON object, given as text or as a mapping, as text; the order of its keys stays."""
    try:
        loaded = json_format.loads(value) if isinstance(value, str) else value
        if isinstance(loaded, Mapping):
            return json_format.dumps(dict(loaded), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name}={shorten(value)} is no JSON ({error}); give {what}") from error
    raise RequestError(f"{name}={shorten(value)} must be {what}")
