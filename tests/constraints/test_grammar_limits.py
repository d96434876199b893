"""What a grammar may cost: large ones work, too large ones are refused when compiled, and none takes for ever."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanoinfer import LLM, RequestError, SamplingParams, StructuredOutputsParams
from nanoinfer.constraints.constraints import Constraints
from nanoinfer.constraints.grammars import GrammarLibrary
from tests.constraints.helpers import VOCAB_SIZE, draw, encode, follow, is_possible, next_ids, start, tiny_tokenizer
from tests.constraints.helpers import new_constraints as new_constraints

pytest.importorskip("llguidance")

NULL = {"type": "null"}
MANY = 2500


def of(**options: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**options))


def an_object(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: NULL}, "required": [name], "additionalProperties": False}


def nested(depth: int, schema: dict[str, Any]) -> dict[str, Any]:
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


# --- large ones work ---


def test_a_choice_may_have_100_000_texts() -> None:
    texts = [f"{number}. The {number * 7919 % 10_007}th word" for number in range(100_000)]
    constraints, started = new_constraints(), time.monotonic()
    assert is_possible(constraints, texts[77_777], choice=texts)
    assert time.monotonic() - started < 30, "one second, where nothing else runs"
    assert not is_possible(constraints, "77777. The 1th word", choice=texts)
    for token_ids, reason, _ in draw(constraints, [of(choice=texts)] * 4, seed=1, max_tokens=60):
        assert (reason, tiny_tokenizer().decode(token_ids) in texts) == ("stop", True)


def test_a_choice_may_have_any_characters_and_begin_like_another() -> None:
    texts = [
        "",
        "a",
        "ab",
        "a\nb",
        "a/b",
        "//",
        "#",
        r"\d",
        "[x]",
        "a|b",
        "^$",
        "(?i)A",
        '"',
        "é",
        "日本",
        "\x00",
        "\t",
    ]
    constraints = new_constraints()
    for text in texts:
        assert is_possible(constraints, text, choice=[text]), text
        assert is_possible(constraints, text, choice=texts), text
        assert not is_possible(constraints, f"{text}?", choice=texts), text
    assert not is_possible(constraints, "7", choice=texts)


LARGE: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": [f"w{i}" for i in range(MANY)]}, "w2499"),
    "GBNF": ({"grammar": "root ::= " + " | ".join(f'"w{i}"' for i in range(MANY))}, "w2499"),
    "rules": ({"grammar": 'x: "(" x ")" | "y"\nstart: ' + " | ".join(f'"w{i}" x' for i in range(MANY))}, "w2499(y)"),
    "anyOf": ({"json": {"anyOf": [an_object(f"p{i}") for i in range(MANY)]}}, '{"p2499": null}'),
    "properties": (
        {"json": {"type": "object", "properties": {f"p{i}": NULL for i in range(MANY)}, "additionalProperties": False}},
        '{"p3": null, "p2499": null}',
    ),
    "enum": ({"json": {"enum": [f"word {i}" for i in range(30_000)]}}, '"word 29999"'),
    "tags": (
        {
            "structural_tag": {
                "structures": [{"begin": f"<f{i}>", "schema": NULL, "end": "</f>"} for i in range(MANY)],
                "triggers": ["<f"],
            }
        },
        "so <f2499>null</f>",
    ),
    "references": (
        {
            "json": {
                "$ref": "#/$defs/n0",
                "$defs": {
                    "n3000": NULL,
                    **{
                        f"n{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/n{i + 1}"}}}
                        for i in range(3000)
                    },
                },
            }
        },
        '{"a": {"a": {}}}',
    ),
}


@pytest.mark.parametrize("kind", LARGE)
def test_thousands_of_alternatives_are_followed_to_their_end(kind: str) -> None:
    options, text = LARGE[kind]
    assert is_possible(new_constraints(), text, **options)


# --- too large ones are refused before anything is queued ---


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"regex": "(a{1000}){1000}"}, "too many expressions"),
        ({"regex": "a{4294967295}"}, "too many expressions"),
        ({"grammar": 'root ::= "a"{1000000}'}, "Too many items"),
        (
            {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: "b"'},
            "many items",
        ),
        (
            {"grammar": "start: R0\n" + "".join(f'R{i}: "a" R{i + 1}\n' for i in range(9000)) + 'R9000: "b"'},
            "at most 5000",
        ),
        ({"grammar": "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000}, "nested too deep"),
        ({"grammar": '{"grammars": [{"json_schema": {"type": "null"}}]}'}, "Expected name"),
        ({"regex": "(" * 1000 + "a" + ")" * 1000}, "nested"),
        ({"json": {"anyOf": [an_object(f"p{i}") for i in range(10_000)]}}, "schema too large"),
        ({"json": {"type": "string", "maxLength": 2**63}}, "decimal literal"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_too_large_is_refused_with_the_librarys_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=f"(?si)structured_outputs .* cannot be compiled: .*{reason}"):
        start(new_constraints(), **options)


def test_a_schema_that_is_too_deep_even_to_be_shown_is_refused() -> None:
    with pytest.raises(RequestError, match="json=a dict that is too deep or too large to be shown is no JSON"):
        of(json=nested(5000, NULL))


def test_a_limit_that_is_met_later_is_an_error_of_that_text_with_the_librarys_reason() -> None:
    optional = "".join(f"({chr(97 + i % 26)})?" for i in range(1000))
    constraints = new_constraints()
    constraint = start(constraints, regex=f"xyz{optional}")
    follow(constraint, "xyz")
    for text in "abc":
        if not next_ids(constraints, constraint):
            break
        constraint.append(encode(text)[0])
    assert re.search(
        r"after \d tokens: lexer error: too many expressions.*; make the grammar simpler$", constraint.error
    )


# --- none takes for ever ---


@pytest.fixture
def slow_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Let the grammar of "slow" take until the test ends; the list says what was compiled."""
    compiled: list[Any] = []
    end, original = threading.Event(), GrammarLibrary.compile

    def compile(self: GrammarLibrary, wanted: StructuredOutputsParams) -> Any:
        compiled.append(wanted.regex)
        if wanted.regex == "slow":
            end.wait(60)
        return original(self, wanted)

    monkeypatch.setattr(GrammarLibrary, "compile", compile)
    yield compiled
    end.set()


def test_a_grammar_that_takes_too_long_is_an_error_of_its_requests_alone(slow_compile: list[Any]) -> None:
    message = re.escape(
        "structured_outputs regex='slow' takes over 0.2 s to compile; make it simpler, or raise grammar_timeout"
    )
    constraints = Constraints(tiny_tokenizer(), VOCAB_SIZE, frozenset(), grammar_timeout=0.2)
    for _ in range(2):
        with pytest.raises(RequestError, match=message):
            constraints.compile([of(regex="a"), of(regex="slow"), of(regex="b")])
    assert sorted(slow_compile) == ["a", "b", "slow"], "once each"
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "nanoinfer-grammar")


def test_prompts_whose_grammar_takes_too_long_come_back_with_an_error(slow_compile: list[Any]) -> None:
    params = [of(regex="[a-z]{3}"), of(regex="slow"), SamplingParams(max_tokens=2)]
    with LLM("tiny", device="cpu", grammar_timeout=0.5, max_model_len=64) as llm:
        outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False, on_error="return")
        assert [output.finish_reason for output in outputs] == ["stop", "error", "length"]
        assert "prompt 1: structured_outputs regex='slow' takes over 0.5 s" in outputs[1].outputs[0].error
        calls: list[Callable[[], Any]] = [lambda: llm.generate("b", params[1]), lambda: [*llm.stream("b", params[1])]]
        for call in calls:
            with pytest.raises(RequestError, match=r"takes over 0\.5 s to compile"):
                call()
    assert slow_compile.count("slow") == 1
