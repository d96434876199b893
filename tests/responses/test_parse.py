"""Answers to messages: what each family of models writes, cut anywhere, broken, fed in pieces, and typed by schemas."""

import importlib.util
import json
import random
import subprocess
import sys
import time

import pytest

from nanoinfer import RequestError
from nanoinfer.responses.families import ALL, family_named
from nanoinfer.responses.parse import begin, parse_response, schemas_of
from nanoinfer.responses.typed_arguments import arguments_text
from tests.responses.cases import CASES, TOOLS


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.text[:40]!r}")
def test_an_answer_is_split_into_thought_content_and_tool_calls(case):
    message = parse_response(case.text, case.family, prompt=case.prompt, tools=TOOLS)
    calls = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"] or ()]
    assert (message["content"], message["reasoning"], tuple(calls)) == (case.content, case.reasoning, case.calls)
    assert message["role"] == "assistant"
    assert all(one["type"] == "function" for one in message["tool_calls"] or ())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.text[:40]!r}")
def test_an_answer_that_is_cut_anywhere_loses_nothing(case):
    family = family_named(case.family)
    for end in range(len(case.text) + 1):
        splitter = begin(family, case.prompt)
        start = len(splitter.text)
        splitter.feed(case.text[:end])
        splitter.close()
        spans = splitter.spans
        assert [span.end for span in spans[:-1]] == [span.start for span in spans[1:]], "the spans tile the text"
        assert (spans[0].start, spans[-1].end) == (0, start + end) if spans else start + end == 0
        kept = "".join(splitter.text[max(span.start, start) : span.end] for span in spans if span.part)
        message = parse_response(case.text[:end], case.family, prompt=case.prompt, tools=TOOLS)
        shown = (message["content"] or "") + (message["reasoning"] or "")
        for span in spans:
            for name, arguments in span.calls:
                assert name in kept
                texts = [arguments] if isinstance(arguments, str) else [*arguments, *arguments.values()]
                assert all(text in kept or json.dumps(text) in kept or text == "{}" for text in texts)
            if span.part in ("content", "reasoning"):
                assert splitter.text[max(span.start, start) : span.end].strip("\n") in shown
            if span.part is None:
                assert is_mark(splitter.text[span.start : span.end], family)


def is_mark(text, family):
    """Whether a piece of text has nothing that a user would miss."""
    marks = [family.reasoning_start, family.reasoning_end, *family.turn_ends]
    marks += ["<|message|>", "<|start|>", "assistant", "<|channel|>", "<|end|>", "<|constrain|>"]
    marks += ["analysis", "commentary", "final", "json", "JSON", "code"] if family.name == "gpt-oss" else []
    for mark in marks:
        text = text.replace(mark, "")
    return not text.strip()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}: {case.text[:40]!r}")
def test_it_does_not_matter_in_which_pieces_an_answer_comes(case):
    whole = begin(family_named(case.family), case.prompt)
    whole.feed(case.text)
    whole.close()
    for size in (1, 2, 7):
        pieces = begin(family_named(case.family), case.prompt)
        for start in range(0, len(case.text), size):
            pieces.feed(case.text[start : start + size])
        pieces.close()
        assert pieces.spans == whole.spans


def pieces_of(family):
    """What a family's answers are made of, and some that they are not."""
    texts = [case.text for case in CASES if case.family == family.name]
    marks = [family.reasoning_start, family.reasoning_end, *family.turn_ends, "<|message|>", "<|channel|>final"]
    marks += [family.calls.start, family.calls.end] if family.calls else ["<|start|>assistant", " to=functions.f"]
    return [*marks, *texts, "a", "\n", '{"name": "f", "arguments": {}}', "{", "]", " "]


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_random_texts_raise_nothing_and_lose_nothing(family):
    draw, pieces = random.Random(family.name), pieces_of(family)
    for _ in range(300):
        text = "".join(draw.choices(pieces, k=draw.randrange(9)))
        prompt = draw.choice([None, f"{family.turn_start}{draw.choice(pieces)}", draw.choice(pieces)])
        splitter = begin(family, prompt)
        start = len(splitter.text)
        for at in range(0, len(text), 5):
            splitter.feed(text[at : at + 5])
        splitter.close()
        ends = [0, *(span.end for span in splitter.spans)]
        assert ends == [*(span.start for span in splitter.spans), len(splitter.text)]
        assert all(is_mark(splitter.text[span.start : span.end], family) for span in splitter.spans if not span.part)
        message = parse_response(text, family.name, prompt=prompt, tools=TOOLS)
        assert message["content"] is not None or message["tool_calls"]
        shown = "".join(filter(None, (message["content"], message["reasoning"])))
        for span in splitter.spans:
            if span.part in ("content", "reasoning"):
                assert splitter.text[max(span.start, start) : span.end].strip("\n") in shown
        for call in message["tool_calls"] or ():
            json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_a_long_broken_answer_takes_no_longer_than_it_should(family):
    start = family.calls.start if family.calls else "<|channel|>commentary to=functions.f<|message|>"
    end = family.calls.end if family.calls else "<|call|>"
    thought = f"{family.reasoning_start}{family.reasoning_end}"
    space = " " * 20_000
    calls = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}'
    texts = [start * 3000, f"{start}{{{end}" * 1500, family.reasoning_start * 3000, thought * 6000]
    texts += ["</parameter>" * 9000, f"a{space}<|message|>", f"<|channel|>{space}a b <|message|>", calls + 2 * space]
    texts += ["to=" * 9000 + "<|message|>"]
    texts += ["<tool_call><function=f><parameter=a>\n</parameter></tool_call>" * 1600, f"{start}{{oops\n{end}\n" * 3500]
    texts += [start * 12_000, start * 12_000 + thought, f"{start}\n" * 8000]
    for text in texts:
        began = time.perf_counter()
        parse_response(text, family.name, prompt=family.turn_start)
        assert time.perf_counter() - began < 1, text[:60]


def test_a_template_of_transformers_is_read_by_its_own_parser_if_there_is_one():
    template = {
        "start_anchor": "A:",
        "fields": {
            "thinking": {"open": "<t>", "close": "</t>"},
            "tool_calls": {"open": "<c>", "close": "</c>", "content": "json", "repeats": True},
            "content": {},
        },
    }
    if importlib.util.find_spec("transformers.utils.chat_parsing") is None:
        with pytest.raises(RequestError, match="install a newer one, or name a family"):
            parse_response("a", template)
        return
    call = '<c>{"name": "measure", "arguments": {"count": "42"}}</c>'
    message = parse_response(f"Hm.</t>One.{call}Two.", template, prompt="Q: <t> A:<t>", tools=TOOLS)
    assert (message["content"], message["reasoning"]) == ("One.\nTwo.", "Hm."), "text after a call replaces none before"
    assert message["tool_calls"][0]["function"] == {"name": "measure", "arguments": '{"count": 42}'}
    cut = f"One.{call[:20]}"
    assert parse_response(cut, template)["content"] == cut
    with pytest.raises(RequestError, match=r"is wrong .*mend it"):
        parse_response("a", {"fields": {}})


def test_without_a_template_the_content_is_the_whole_text():
    text = "<think>Hm.</think>Yes."
    assert parse_response(text) == {"role": "assistant", "content": text, "reasoning": None, "tool_calls": None}
    with pytest.raises(RequestError, match=r"pass tokenizer=llm\.tokenizer"):
        parse_response([1, 2], "qwen3")
    with pytest.raises(RequestError, match="'qwen4' is no family"):
        parse_response("a", "qwen4")


def test_the_ids_of_calls_differ_and_follow_from_prompt_and_answer():
    text = '<tool_call>{"name": "f"}</tool_call>' * 3
    [first, again, other] = [parse_response(text, "qwen3", prompt=prompt)["tool_calls"] for prompt in ("a", "a", "b")]
    assert first == again
    ids = {call["id"] for call in [*first, *other]}
    assert len(ids) == 6
    assert all(len(one) == 9 and one.isalnum() for one in ids)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "3.0", 3),
        ({"type": "integer"}, "3.5", "3.5"),
        ({"type": "integer"}, "1_000", "1_000"),
        ({"type": "int"}, "7", 7),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "3.0", 3.0),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "string"}, " 7 ", " 7 "),
        ({"type": "string"}, "null", "null"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({"$ref": "#/$defs/Size"}, '{"w": 1}', {"w": 1}),
        ({"$ref": "#/$defs/None"}, "[1]", [1]),
        ({"oneOf": [{"type": "array"}, {"type": "object"}]}, "[1, 2]", [1, 2]),
        ({}, "true", True),
        ({}, "words", "words"),
        ({"type": 7, "enum": 8, "anyOf": 9}, "x", "x"),
    ],
)
def test_a_text_becomes_what_the_schema_says(schema, text, value):
    parameters = {"properties": {"a": schema}, "$defs": {"Size": {"type": "object"}}}
    found = json.loads(arguments_text({"a": text}, parameters))["a"]
    assert (found, type(found)) == (value, type(value))
    if not isinstance(value, str):
        assert json.loads(arguments_text({"b": text}, parameters)) == {"b": text}, "the schema says nothing of it"


def test_arguments_that_are_json_stay_as_they_are_written():
    parameters = schemas_of(TOOLS)["measure"]
    written = '{"ratio":1.10,  "note": "\\u00e9", "count": 12345678901234567890, "big": 1e400}'
    assert arguments_text(written, parameters) == written
    assert arguments_text('{"count": "4", "ratio": 1.10}', parameters) == '{"count": 4, "ratio": 1.10}'
    assert arguments_text('{"maybe": "null", "note": "null"}', parameters) == '{"maybe": null, "note": "null"}'


def test_importing_the_package_imports_nothing_of_this():
    source = "import nanoinfer, sys; print([name for name in sys.modules if name.startswith('nanoinfer.responses')])"
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
