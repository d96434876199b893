"""Lark, the language that the grammar engine reads: GBNF and vLLM's structural tags are translated into it."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nanoinfer.constraints.schema_numbers import check_numbers
from nanoinfer.errors import RequestError
from nanoinfer.structured_outputs import shorten

# The formats of structural tags that are translated, with what each must have and what it may have.
FORMATS: dict[str, tuple[set[str], set[str]]] = {
    "any_text": (set(), set()),
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, set()),
    "regex": ({"pattern"}, set()),
    "grammar": ({"grammar"}, set()),
    "sequence": ({"elements"}, set()),
    "or": ({"elements"}, set()),
    "optional": ({"content"}, set()),
    "star": ({"content"}, set()),
    "plus": ({"content"}, set()),
    "repeat": ({"content", "min", "max"}, set()),
    "tag": ({"begin", "content", "end"}, set()),
    "triggered_tags": ({"triggers", "tags"}, {"at_least_one", "stop_after_first"}),
    "tags_with_separator": ({"tags", "separator"}, {"at_least_one", "stop_after_first"}),
}
# Formats that may come without a type, as in xgrammar, since what they must have tells them from all others.
TOLD_BY_PARTS = ("tag", "triggered_tags", "tags_with_separator", "const_string", "json_schema")
SUFFIXES = {"optional": "?", "star": "*", "plus": "+"}
# Options that are written out with these values mean nothing.
WITHOUT_EFFECT = {
    "excludes": [],
    "style": "json",
    "any_order": False,
    "max_whitespace_cnt": None,
    "max_tokens": None,
    "max_chars": None,
}
MAX_RULES = 5_000  # of a grammar; the engine descends from rule to rule, and GBNF takes the square of their number
RULES = re.compile(r"^[ \t]*[?!]?[\w.-]+[^:\n]*:", re.MULTILINE)
GBNF_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#.*')


def from_grammar(text: str) -> str:
    """Return a grammar in GBNF or Lark as Lark. Raises ValueError for what cannot be translated or compiled."""
    from llguidance.gbnf_to_lark import any_to_lark

    if (num_rules := len(RULES.findall(text))) > MAX_RULES:
        raise ValueError(f"it has {num_rules} rules, and at most {MAX_RULES} can be compiled")
    parts, end = [], 0
    for found in re.finditer(r"%json\s*(?={)", text):
        try:
            schema, schema_end = json.JSONDecoder().raw_decode(text, found.end())
        except ValueError:
            continue  # the engine says what is wrong with it
        if (checked := check_numbers(schema)) != schema:
            parts += [text[end : found.end()], json.dumps(checked)]
            end = schema_end
    text = "".join([*parts, text[end:]])
    if "::=" in text:  # the converter wants all alternatives of a rule on one line
        without_comments = GBNF_TOKENS.sub(lambda found: "" if found[0].startswith("#") else found[0], text)
        text = re.sub(r"\s*\n\s*\|", " |", without_comments)
    try:
        return any_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # it raises nothing more exact
        raise ValueError(str(error)) from error


def from_regex(pattern: str) -> str:
    r"""Return an expression in Lark for a regular expression, where \d is 0 to 9, as in JSON Schema."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, 'd')}/"


def from_texts(texts: Sequence[str]) -> str:
    """Return an expression for one of some texts: the engine makes an automaton of it, whatever their number."""
    escaped = (re.sub(r"[^a-zA-Z0-9\x80-\U0010ffff]", lambda found: f"\\x{ord(found[0]):02x}", text) for text in texts)
    return f"/({'|'.join(escaped)})/"


def from_structural_tag(
    tag: dict[str, Any], special_tokens: Mapping[str, int], with_options: Callable[[dict[str, Any]], dict[str, Any]]
) -> str | dict[str, Any]:
    """Return a grammar of the engine for a structural tag.

    special_tokens: the added tokens of the tokenizer; where a text of the tag holds one, that token is meant.
    with_options: puts what the user says of white space and so on into a schema.
    Raises RequestError for what is wrong, or not supported, naming it.
    """
    writer = _Writer(special_tokens, with_options)
    start = writer.concatenate(writer.pieces(_format_of(tag)))
    lark = "\n".join(["%llguidance {}", f"start: {start}", *writer.rules, r"TEXT: /(.|\n)*/", ""])
    if not writer.grammars:
        return lark
    return {"grammars": [{"name": "main", "lark_grammar": lark}, *writer.grammars]}


def _format_of(tag: dict[str, Any]) -> Any:
    """Return the format of a structural tag, whose older form is one of triggered tags."""
    if "structures" not in tag:
        if tag.get("type", "structural_tag") != "structural_tag" or "format" not in tag:
            raise RequestError(
                f"structural_tag={shorten(tag)} is of no known form; give 'structures' and 'triggers', or type="
                "'structural_tag' and 'format'"
            )
        return tag["format"]
    structures, triggers = tag["structures"], tag.get("triggers")
    parts = {"begin", "schema", "end"}
    if not isinstance(structures, list) or not all(isinstance(one, dict) and parts <= one.keys() for one in structures):
        raise RequestError(f"structures={shorten(structures)} must be a list of dicts with begin, schema and end")
    tags = []
    for one in structures:
        schema = json.loads(one["schema"]) if isinstance(one["schema"], str) else one["schema"]
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Text(NamedTuple):
    """Describes a text, or one of several."""

    options: Sequence[str]


class _Lark(NamedTuple):
    """Holds an expression. One that is open ends in any text, so that nothing can follow it."""

    lark: str
    is_open: bool = False


class _AnyText(NamedTuple):
    """Stands for any text, up to the text that follows, if one does."""


_Piece = _Text | _Lark | _AnyText


class _Writer:
    """Writes the rules of a grammar as it translates the parts of a structural tag."""

    def __init__(
        self, special_tokens: Mapping[str, int], with_options: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []  # those that are written in a language of their own
        self._special_tokens, self._with_options = special_tokens, with_options
        names = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True)))
        self._special = re.compile(f"({names})" if names else "(?!)")

    def pieces(self, form: Any) -> list[_Piece]:
        """Return what a format is made of, from left to right."""
        kind = _type_of(form)
        if kind not in FORMATS:
            raise RequestError(
                f"structural_tag has the format {shorten(form)}, whose type is none of {', '.join(FORMATS)}; use these"
            )
        needed, known = FORMATS[kind]
        if missing := needed - form.keys():
            raise RequestError(f"structural_tag has a {kind} without {', '.join(sorted(missing))}: {shorten(form)}")
        for name, value in form.items():
            if name not in {"type", *needed, *known} and WITHOUT_EFFECT.get(name, form) != value:
                raise RequestError(f"structural_tag has {name}={shorten(value)} in {kind}; leave out {name}")
        if kind == "any_text":
            return [_AnyText()]
        if kind == "const_string":
            return [_Text([form["value"]])]
        if kind == "sequence":
            return [piece for element in _non_empty(form, "elements") for piece in self.pieces(element)]
        if kind == "tag":
            return self._tag(form, begin=form["begin"])
        if kind == "triggered_tags":
            return self._triggered_tags(form)
        return [_Lark(self._expression(kind, form))]

    def concatenate(self, pieces: list[_Piece]) -> str:
        """Return an expression for pieces side by side; any text ends with the text after it."""
        out = []
        for index, piece in enumerate(pieces):
            before = pieces[index - 1] if index else None
            if isinstance(before, _Lark) and before.is_open:
                raise RequestError("structural_tag has something after tags that may be left out; put these last")
            if isinstance(before, _AnyText) and not isinstance(piece, _Text):
                raise RequestError("structural_tag has any_text before something else than a text; put a text between")
            if isinstance(piece, _Lark):
                out.append(piece.lark)
            elif isinstance(piece, _Text):
                out.append(self._text(piece.options, after_any=isinstance(before, _AnyText)))
            elif index == len(pieces) - 1:
                out.append("TEXT")
        return " ".join(filter(None, out)) or '""'

    def _expression(self, kind: str, form: dict[str, Any]) -> str:
        if kind == "json_schema":
            schema = form["json_schema"]
            if not isinstance(schema, dict):
                raise RequestError(f"structural_tag has json_schema={shorten(schema)}; give a schema as a dict")
            return self._grammar("json_schema", self._with_options(schema))
        if kind == "regex":
            return self._rule(from_regex(_text(form, "pattern")))
        if kind == "grammar":
            return self._grammar("lark_grammar", from_grammar(_text(form, "grammar")))
        if kind == "or":
            return self._one_of([self.concatenate(self.pieces(one)) for one in _non_empty(form, "elements")])
        if kind == "tags_with_separator":
            tag = self._one_of([self.concatenate(self.pieces(one)) for one in _tags_of(form)])
            more = "" if form.get("stop_after_first") else f" ({self._text([form['separator']])} {tag})*"
            return f"({tag}{more}){'' if form.get('at_least_one') else '?'}"
        content = self._rule(self.concatenate(self.pieces(form["content"])))
        if kind in SUFFIXES:
            return f"{content}{SUFFIXES[kind]}"
        least, most = form["min"], form["max"]
        if not all(isinstance(bound, int) for bound in (least, most)) or not (0 <= least <= most or most == -1):
            raise RequestError(f"structural_tag repeats from min={least} to max={most}; use -1 for a max without end")
        return f"{content}{{{least},{'' if most == -1 else most}}}"

    def _tag(self, form: dict[str, Any], begin: str) -> list[_Piece]:
        """Return a tag's pieces; `begin` is what of its first text is still to come."""
        end = form["end"] if isinstance(form["end"], list) else [form["end"]]
        return [_Text([begin]), *self.pieces(form["content"]), _Text(end)]

    def _triggered_tags(self, form: dict[str, Any]) -> list[_Piece]:
        triggers, tags = _non_empty(form, "triggers"), _tags_of(form)
        for tag in tags:
            self.pieces(tag)  # says what is wrong with it
        whole = self._one_of([self.concatenate(self.pieces(tag)) for tag in tags])
        parts = []
        for trigger in triggers:
            begun = [tag for tag in tags if tag["begin"].startswith(trigger)]
            rests = [self.concatenate(self._tag(tag, tag["begin"][len(trigger) :])) for tag in begun]
            if rests:
                parts.append(f"{self._text([trigger], after_any=True)} {self._one_of(rests)}")
        for tag in tags:
            if not any(tag["begin"].startswith(trigger) for trigger in triggers):
                raise RequestError(
                    f"structural_tag has a tag that begins {shorten(tag['begin'])}, with none of triggers="
                    f"{shorten(triggers)}; add one"
                )
        triggered = self._one_of(parts)
        first, once = form.get("at_least_one"), form.get("stop_after_first")
        if once:
            return [_Lark(whole) if first else _Lark(f"({triggered} | TEXT)", is_open=True)]
        return [*([_Lark(whole)] if first else []), _Lark(f"{triggered}*"), _AnyText()]

    def _grammar(self, language: str, content: Any) -> str:
        name = f"grammar_{len(self.grammars)}"
        self.grammars.append({"name": name, language: content})
        return f"@{name}"

    def _one_of(self, expressions: list[str]) -> str:
        return self._rule(" | ".join(expressions))

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _text(self, options: Sequence[str], after_any: bool = False) -> str:
        """Return an expression for one of some texts, with any text before it if `after_any`."""
        if not all(isinstance(text, str) for text in options):
            raise RequestError(f"structural_tag has {shorten(options)} where a text must be; tokens are not supported")
        out = []
        for text in options:
            # Pieces of the text; those at odd places are special tokens.
            first, *rest = self._special.split(text) if text else [""]
            lark = [
                f"<[{self._special_tokens[token]}]>" if i % 2 == 0 else _quote(token) for i, token in enumerate(rest)
            ]
            head = _quote(first)
            if after_any and first:
                head = self._rule(f"TEXT {head}", "[lazy]")
            elif after_any:
                if not rest:
                    raise RequestError("structural_tag has any_text before an empty text; write what ends it")
                head = "TEXT"
            out.append(" ".join(filter(None, [head, *lark])))
        return self._one_of(out) if len(out) > 1 else out[0]


def _quote(text: str) -> str:
    return json.dumps(text) if text else ""


def _text(form: dict[str, Any], name: str) -> str:
    if not isinstance(form[name], str):
        raise RequestError(f"structural_tag has {name}={shorten(form[name])}; give a text")
    return str(form[name])


def _type_of(form: Any) -> Any:
    """Return the type of a format: as it says, or as its parts tell; None where they do not."""
    if not isinstance(form, dict) or "type" in form:
        return form.get("type") if isinstance(form, dict) else None
    return next((kind for kind in TOLD_BY_PARTS if FORMATS[kind][0] <= form.keys()), None)


def _tags_of(form: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tags of a format that has several; each may leave out its type."""
    tags = _non_empty(form, "tags")
    for tag in tags:
        if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
            raise RequestError(f"structural_tag has {shorten(tag)} among tags; give dicts with begin, content and end")
    return [{**tag, "type": "tag"} for tag in tags]


def _non_empty(form: dict[str, Any], name: str) -> list[Any]:
    value = form[name]
    if not isinstance(value, list) or not value:
        raise RequestError(f"structural_tag has {name}={shorten(value)}; give a list that is not empty")
    return value
