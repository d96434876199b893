"""Conversations with thoughts and several calls, as chat templates read them."""

from typing import Any

import pytest

from nanoinfer import tiny_model_path
from nanoinfer.text.chat import render_chat
from nanoinfer.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}
# Reads calls as the template of gpt-oss does: one in a message, and no content beside a thought.
ONE_CALL = """\
{%- for m in messages -%}
    {%- if m.role == 'tool' -%}[{{ last.name }} {{ m.content }}]
    {%- elif m.tool_calls -%}
        {%- if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif -%}
        {%- set f = m.tool_calls[0].function -%}
        ({{ m.thinking }}{{ m.content }} {{ f.name }} {{ f.arguments | tojson }})
        {%- set last.name = f.name -%}
    {%- else -%}{{ m.content }}{% endif -%}
{%- endfor -%}"""
ONE_CALL = "{%- set last = namespace(name='') -%}" + ONE_CALL


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_model_path())


def call(name: str, number: int) -> dict[str, Any]:
    return {"id": f"id{number}", "type": "function", "function": {"name": name, "arguments": f'{{"n": {number}}}'}}


def result(number: int, **options: Any) -> dict[str, Any]:
    return {"role": "tool", "content": f"of {number}", "tool_call_id": f"id{number}", **options}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content", "thinking"])
def test_a_thought_has_the_name_that_the_template_reads(tokenizer: Tokenizer, name: str, read: str) -> None:
    template = "{% for m in messages %}<{{ m." + read + " }}>{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "Yes.", name: "Hm."}]
    assert render_chat(tokenizer, messages, chat_template=template) == "<><Hm.>"
    messages[1] |= {name: None}
    assert render_chat(tokenizer, messages, chat_template=template) == "<><>"


def test_several_calls_become_messages_where_the_template_writes_one_alone(tokenizer: Tokenizer) -> None:
    both = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call("f", 1), call("g", 2)]}
    written = 'Hi(Hm. f {"n": 1})[f of 1]( g {"n": 2})[g of 2]'
    messages = [USER, both, result(2), result(1)]
    assert render_chat(tokenizer, messages, chat_template=ONE_CALL) == written
    in_order = [{"role": "tool", "content": f"of {number}"} for number in (1, 2)]
    assert render_chat(tokenizer, [USER, both, *in_order], chat_template=ONE_CALL) == written
    left = [USER, both, result(2), result(3)]
    assert render_chat(tokenizer, left, chat_template=ONE_CALL) == 'Hi(Hm. f {"n": 1})( g {"n": 2})[g of 2][g of 3]'


def test_a_content_beside_a_thought_and_calls_joins_the_thought_where_the_template_has_no_place(
    tokenizer: Tokenizer,
) -> None:
    message = {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [call("f", 1)]}
    assert render_chat(tokenizer, [USER, message], chat_template=ONE_CALL) == 'Hi(Hm.\nI look. f {"n": 1})'
    message["tool_calls"].append(call("g", 2))
    written = 'Hi(Hm.\nI look. f {"n": 1})( g {"n": 2})'
    assert render_chat(tokenizer, [USER, message], chat_template=ONE_CALL) == written
