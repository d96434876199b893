"""Holds what all commands share: their parser, and the options of engine and sampling."""

import argparse
import json
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from itertools import takewhile
from typing import Any, NoReturn, get_args, get_origin

from nanoinfer.config import EngineConfig, only_values
from nanoinfer.errors import explain_unknown
from nanoinfer.sampling_params import FOREIGN_NAMES
from nanoinfer.structured_outputs import SWITCHES
from nanoinfer.vllm_names import LLM_NAMES

FOREIGN = {**FOREIGN_NAMES, **LLM_NAMES}
SAMPLING_OPTIONS = {"temperature": float, "top_p": float, "top_k": int}


def option_string(name: str) -> str:
    """Return how the command line spells an option."""
    return f"--{name.replace('_', '-')}"


class Layout(argparse.RawDescriptionHelpFormatter):
    """Puts the help of a command beside its name; argparse leaves two columns too few for that."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if action.nargs == argparse.PARSER:
            self._action_max_length += self._indent_increment


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, without the list of all options, and names what was probably meant."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options in the command that was given, before argparse asks for missing ones."""
        given = sys.argv[1:] if args is None else [*args]
        options = [word.partition("=")[0] for word in takewhile("--".__ne__, given) if re.match(r"--[^ ]+$", word)]
        known = self._option_string_actions
        unknown = [option for option in options if not any(name.startswith(option) for name in known)]
        if unknown and self._subparsers is None:  # else they are a command's
            self.refuse(unknown[0])
        parsed, left = super().parse_known_args(given, namespace)
        if left:
            self.refuse(left[0])
        return parsed, left

    def refuse(self, word: str) -> NoReturn:
        """Say what was probably meant by an argument."""
        known = {name.lstrip("-").replace("-", "_"): name for name in self._option_string_actions}
        foreign = {name: its for name, its in FOREIGN.items() if its in known or not isinstance(its, str)}
        name = word.lstrip("-").replace("-", "_")
        hint = explain_unknown(name, known, foreign) if word.startswith("-") else ""
        hint = re.sub(r"'(\w+)'", lambda quoted: known.get(quoted[1], quoted[0]), hint.rstrip("."))
        self.error(f"unrecognized arguments: {word}" + (f" ({hint})" if hint else ""))


def add_sampling_options(parser: argparse.ArgumentParser, when: str) -> None:
    """Add the commonest sampling options; options that are not given stay out of the result."""
    limit = f"{when}; none is up to the model's limit"
    parser.add_argument("--max-tokens", type=number_or_none, default=argparse.SUPPRESS, metavar="N", help=limit)
    for name, kind in SAMPLING_OPTIONS.items():
        parser.add_argument(option_string(name), type=kind, default=argparse.SUPPRESS, help=when)


def add_engine_options(group: Any, needs_model: bool = True, names: Collection[str] | None = None) -> None:
    """Add options for fields of EngineConfig, explained as there; what is not given stays out of the result.

    names: of the fields; None: all.
    """
    readers: dict[Any, tuple[Any, str | None]] = {
        int: (int, "N"),
        float: (float, "NUMBER"),
        Mapping: (json_object, "JSON"),
        tuple: (str, None),  # EngineConfig splits it
    }
    for field in fields(EngineConfig):
        if names is not None and field.name not in names:
            continue
        choices = only_values(field.type)
        kind = str if choices else (*get_args(field.type), field.type)[0]  # int for `int | None`
        options: dict[str, Any] = {"required": needs_model and field.default is MISSING, "default": argparse.SUPPRESS}
        explained, default = field.metadata["help"], field.default
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
            default = "on" if default else "off"
        else:
            reader, metavar = readers.get(get_origin(kind) or kind, (kind, None))
            options |= {"type": reader, "choices": choices or None, "metavar": metavar}
        if default not in (MISSING, None):
            explained += f" Default: {default}."
        group.add_argument(option_string(field.name), help=explained.replace("%", "%%"), **options)


def given_options(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the engine, and those of sampling, that were given."""
    given: dict[str, Any] = vars(args)
    options = {field.name: given[field.name] for field in fields(EngineConfig) if field.name in given}
    if switches := {name: True for name in SWITCHES if given.get(name)}:
        options["structured_outputs_config"] = {**(options.get("structured_outputs_config") or {}), **switches}
    return options, {name: value for name, value in given.items() if name in ("max_tokens", *SAMPLING_OPTIONS)}


def a_text(given: str) -> str:
    """Return an argument decoded as UTF-8; a locale such as C decodes it otherwise."""
    try:
        given.encode()
        return given
    except UnicodeEncodeError:  # it has bytes that were not read
        pass
    try:
        return os.fsencode(given).decode()
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{given!a:.200} is not UTF-8") from None


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(a_text(text))
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.200} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"""{text!r:.200} is no JSON object; give one such as '{{"name": 1}}'""")
    return value


def number_or_none(text: str) -> int | None:
    try:
        return None if text == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r:.200} is no number of tokens; give a whole number, or none for up to the model's limit"
        ) from None
