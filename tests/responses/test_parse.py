"""Answers to messages: what each family of models writes, cut anywhere, broken, fed in pieces, and typed by schemas."""

import json

import pytest

from nanoinfer.responses.families import family_named
from nanoinfer.responses.parse import begin, parse_response
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
