"""llm.chat: conversations by the tokenizer's own template, and those that no template can render."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nanoinfer import LLM, RequestError, RequestOutput, SamplingParams, tiny_model_path
from nanoinfer.text.chat import Template, render_chat
from nanoinfer.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=120)
SUM = [{"role": "user", "content": "What is 312 + 48?"}]
DIFFERENCE = [{"role": "user", "content": "What is 312 - 48?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu") as llm:
        yield llm


def chat(llm: LLM, messages: object, **options: object) -> list[RequestOutput]:
    return llm.chat(messages, GREEDY, use_tqdm=False, **options)  # type: ignore[arg-type]


def test_one_conversation_or_several_are_answered_in_their_order(llm: LLM) -> None:
    assert [output.text for output in chat(llm, SUM)] == ["312 + 48 = 360"]
    assert [output.text for output in chat(llm, [SUM, DIFFERENCE])] == ["312 + 48 = 360", "312 - 48 = 264"]
    assert chat(llm, []) == []


@pytest.mark.parametrize("options", [{}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_the_prompt_is_what_the_tokenizers_own_template_writes(llm: LLM, options: dict) -> None:
    [output] = chat(llm, SUM, **options)
    kwargs = {"add_generation_prompt": True} | options.get("chat_template_kwargs", {})
    assert output.prompt == llm.tokenizer.apply_chat_template(SUM, tokenize=False, **kwargs)
    ids = llm.tokenizer.apply_chat_template(SUM, tokenize=True, return_dict=False, **kwargs)
    assert output.prompt_token_ids == ids


def test_tools_and_the_generation_prompt_are_the_templates_business(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
    [output] = chat(llm, SUM, tools=[tool], add_generation_prompt=False)
    assert output.prompt is not None
    assert '"name": "add"' in output.prompt
    assert output.prompt.endswith("<|im_end|>\n")


def test_the_last_message_may_be_the_beginning_of_the_answer(llm: LLM) -> None:
    messages = [*SUM, {"role": "assistant", "content": "312 + 48"}]
    [output] = chat(llm, messages, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt is not None
    assert output.prompt.endswith("312 + 48")
    assert output.text == " = 360"
    with pytest.raises(RequestError, match="begins another; use add_generation_prompt=False with it"):
        chat(llm, messages, continue_final_message=True)


def test_of_several_templates_the_default_is_used_or_the_one_for_tools(tmp_path: Path) -> None:
    shutil.copytree(tiny_model_path(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].function.name }}"}
    listed = [{"name": name, "template": template} for name, template in templates.items()]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": listed}))
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
    with LLM(tmp_path, device="cpu") as llm:
        assert chat(llm, SUM)[0].prompt == SUM[0]["content"]
        assert chat(llm, SUM, tools=[tool])[0].prompt == "add"


def test_a_template_of_ones_own_replaces_the_tokenizers_and_may_know_other_roles(llm: LLM) -> None:
    messages = [{"role": "developer", "content": "What is 312 + 48?"}]
    template = "{{ messages[0].role }}: {{ messages[0].content }}{{ mark }}"
    [output] = chat(llm, messages, chat_template=template, chat_template_kwargs={"mark": "!"})
    assert output.prompt == "developer: What is 312 + 48?!"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("Hello", "messages is a str; give a list of messages such as {'role': 'user'"),
        ([[]], "conversation 0 is []; give a list of one message or more"),
        ([SUM, "Hello"], "conversation 1 is 'Hello'; give a list"),
        ([["Hello"]], "message 0 of conversation 0 is 'Hello'; give a dict"),
        (
            [{"content": "Hello"}],
            "message 0 of conversation 0 has role=None; give system, user, assistant, tool",
        ),
        (
            [*SUM, {"role": "usr", "content": "Hello"}],
            "message 1 of conversation 0 has role='usr', which the chat template leaves out; give system, user, ",
        ),
        (
            [*SUM, {"role": "assistant", "tool_calls": [{"function": "add"}]}],
            "message 1 of conversation 0 has tool_calls=[{'function': 'add'}]; give a list of calls such as {'type'",
        ),
        ([{"role": "user", "content": 3}], "message 0 of conversation 0 has content that is no text: 3; give a text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "message 0 of conversation 0 has content that is no text: [{'type': 'image_url'",
        ),
        ([*SUM, {"role": "user"}], "message 1 of conversation 0 has no content: {'role': 'user'}; give a text"),
    ],
)
def test_a_malformed_conversation_is_refused_by_place_and_value(llm: LLM, messages: object, said: str) -> None:
    with pytest.raises(RequestError) as error:
        chat(llm, messages)
    assert str(error.value).startswith(said)
    assert llm.is_finished()


PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"text": "two"}]}]


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ messages[0].content }}", "one\ntwo"),  # it would write the list as Python does
        ("{{ messages[0].content | trim }}", "one\ntwo"),
        ("{{ messages[0].content | tojson }}", '"one\\ntwo"'),
        ("{{ messages[0].content if messages[0].content is string else '' }}", "one\ntwo"),
        # Gemma 3 reads so of a system message.
        ("{{ messages[0].content if messages[0].content is string else messages[0].content[0].text }}", "one\ntwo"),
        ("{{ '<' + messages[0].content + '>' }}", "<one\ntwo>"),
        ("{% for part in messages[0].content if part.type == 'text' %}<{{ part.text }}>{% endfor %}", "<one><two>"),
        (
            "{% macro w(c) %}{% for part in c %}{{ part.text }}{% endfor %}{% endmacro %}{{ w(messages[0].content) }}",
            "onetwo",
        ),
    ],
)
def test_a_content_in_parts_is_a_list_where_the_template_reads_lists_and_else_lines(
    llm: LLM, template: str, prompt: str
) -> None:
    [output] = chat(llm, PARTS, chat_template=template)
    assert output.prompt == prompt


def test_whether_parts_are_read_is_found_for_each_role(llm: LLM) -> None:
    template = (
        "{{ messages[0].content | trim }}{% for m in messages[1:] %}|{% for part in m.content %}{{ part.text }}"
        "{% endfor %}{% endfor %}"
    )
    conversation = [{**PARTS[0], "role": "system"}, *PARTS]
    outputs = chat(llm, [conversation, conversation], chat_template=template)
    assert [output.prompt for output in outputs] == ["one\ntwo|onetwo"] * 2


def test_a_conversation_that_the_template_refuses_does_not_decide_how_the_next_one_is_read(llm: LLM) -> None:
    template = (
        "{% for m in messages %}{{ raise_exception('no') if m.role == 'tool' }}{% for part in m.content %}"
        "{{ part.text }}{% endfor %}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name + call.function.arguments }}{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    good = [*PARTS, {"role": "assistant", "content": "", "tool_calls": [call]}]
    bad = [*good, {"role": "tool", "content": ""}]
    outputs = chat(llm, [bad, good], chat_template=template, on_error="return")
    assert [output.error_kind for output in outputs] == ["invalid_messages", None]
    assert outputs[1].prompt == 'onetwoadd{"a": 1}'


WRITES_CALLS = {
    "items": "{% for name, value in call.arguments | items %}{{ name }}={{ value | tojson }}{% endfor %}",
    "tojson": "{{ call.arguments | tojson }}",
    "whole": "{{ call | tojson }}",
    "Qwen3": "{{ call.arguments if call.arguments is string else call.arguments | tojson }}",
    "joined": "{{ '<' + call.arguments + '>' }}",
    "printed": "{{ call.arguments }}",
}
ARGUMENTS = {
    "items": 'a=1b="ü"',
    "tojson": '{"a": 1, "b": "ü"}',
    "whole": '{"name": "add", "arguments": {"a": 1, "b": "ü"}}',
    "Qwen3": '{"a": 1, "b": "ü"}',
    "joined": '<{"a": 1, "b": "ü"}>',
    "printed": '{"a": 1, "b": "ü"}',
}


@pytest.mark.parametrize("content", [None, "", "Let me see."])
@pytest.mark.parametrize("arguments", ['{"a": 1, "b": "ü"}', {"a": 1, "b": "ü"}])
@pytest.mark.parametrize("kind", WRITES_CALLS)
def test_the_arguments_of_tool_calls_are_what_the_template_writes_out(
    llm: LLM, kind: str, arguments: object, content: str | None
) -> None:
    template = (
        "{% for m in messages %}{{ m.content + '|' }}{% for call in m.tool_calls or [] %}{% set call = call.function %}"
        f"{{{{ call.name }}}}: {WRITES_CALLS[kind]}{{% endfor %}}{{% endfor %}}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [*SUM, {"role": "assistant", "content": content, "tool_calls": [call]}]
    [output] = chat(llm, messages, chat_template=template)
    assert output.prompt == f"{SUM[0]['content']}|{content or ''}|add: {ARGUMENTS[kind]}"
    assert call["function"] == {"name": "add", "arguments": arguments}, "the user's messages stay as they are"


@pytest.mark.parametrize(
    ("arguments", "written"), [("", "{}"), (None, "{}"), ("null", "{}"), ("{}", "{}"), ("[1]", "[1]"), ("1e2", "100.0")]
)
def test_arguments_that_are_no_object_stay_what_they_are(llm: LLM, arguments: str | None, written: str) -> None:
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}]
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert chat(llm, messages, chat_template=template)[0].prompt == written


def test_arguments_that_are_no_json_are_refused_by_place_and_function(llm: LLM) -> None:
    messages = [*SUM, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": '}}]}]
    said = (
        r"message 1 of conversation 0 calls 'add' with arguments that are no JSON \(Expecting value.*: '{\"a\": '; give"
    )
    with pytest.raises(RequestError, match=said):
        chat(llm, messages)


@pytest.mark.parametrize("calls", [None, []])
def test_no_tool_calls_are_none_to_any_template(llm: LLM, calls: list | None) -> None:
    template = "{{ 'calls' if messages[0].tool_calls is defined else messages[0].content }}"
    messages = [{"role": "assistant", "content": "Hello", "tool_calls": calls}]
    assert chat(llm, messages, chat_template=template)[0].prompt == "Hello"


def test_calls_that_a_template_writes_beside_a_null_content_alone_are_not_lost() -> None:
    """As DeepSeek-V3's does, in versions of transformers that show templates a null."""

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        if messages[0]["content"] is not None:
            return str(messages[0]["content"])
        function = messages[0]["tool_calls"][0]["function"]
        return str(function["name"] + ": " + function["arguments"])

    call = {"function": {"name": "add", "arguments": '{"a":1}'}}
    conversation = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert Template(render, any_role=False).render(conversation, 0) == 'add: {"a":1}'


ROLES_OF_TEMPLATES = {
    "any": "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}",
    "developer": "{% for m in messages if m.role != 'ipython' %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "user": "{% for m in messages if m.role == 'user' %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}


@pytest.mark.parametrize(
    ("kind", "known"), [("any", {"developer", "ipython"}), ("developer", {"developer"}), ("user", set())]
)
def test_a_role_that_the_models_own_template_writes_is_known(
    llm: LLM, kind: str, known: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", ROLES_OF_TEMPLATES[kind])
    for role in ("developer", "ipython"):
        messages = [{"role": role, "content": [{"type": "text", "text": "Be kind."}]}, *SUM]
        if role in known:
            assert chat(llm, messages)[0].prompt == f"{role}: Be kind.\nuser: What is 312 + 48?\n"
        else:
            with pytest.raises(RequestError, match=f"role='{role}', which the chat template leaves out; give system"):
                chat(llm, messages)


@pytest.mark.parametrize(
    "name", ["add_generation_prompt", "continue_final_message", "tools", "chat_template", "tokenize", "messages"]
)
def test_a_keyword_that_is_not_the_templates_is_refused_by_name(llm: LLM, name: str) -> None:
    with pytest.raises(RequestError) as error:
        chat(llm, SUM, chat_template_kwargs={"enable_thinking": False, name: False})
    own = name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template")
    remedy = f"pass {name} to chat itself" if own else "leave it out"
    assert str(error.value) == f"chat_template_kwargs has {name!r}, which is not the template's to read; {remedy}"


@pytest.mark.parametrize("given", [1, True, [{}], [[1]], "a", {1: 2}])
def test_keywords_that_are_no_dict_are_refused(llm: LLM, given: object) -> None:
    with pytest.raises(RequestError) as error:
        chat(llm, SUM, chat_template_kwargs=given)
    expected = f"chat_template_kwargs={given!r} is no dict of names; give {{'enable_thinking': False}}, say"
    assert str(error.value) == expected


@pytest.mark.parametrize("choice", [None, "required"])
@pytest.mark.parametrize("tools", [5, True, "add", {"name": "add"}])
def test_tools_that_are_no_list_are_refused(llm: LLM, tools: object, choice: str | None) -> None:
    with pytest.raises(RequestError, match=r"is no list; give a list of functions, or of their JSON schemas"):
        chat(llm, SUM, tools=tools, tool_choice=choice)


def test_a_tool_without_a_schema_is_refused_whether_it_has_to_be_called_or_not(llm: LLM) -> None:
    for choice in (None, "required"):
        with pytest.raises(RequestError, match="no docstring"):
            chat(llm, SUM, tools=[lambda: 1], tool_choice=choice)


def test_a_template_in_a_file_of_its_own_is_read(tmp_path: Path) -> None:
    shutil.copytree(tiny_model_path(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "old {{ messages[0].content }}"}))
    assert Tokenizer(tmp_path).hf.chat_template == settings.pop("chat_template"), "the tokenizer's own comes first"
    path.write_text(json.dumps(settings))
    assert render_chat(Tokenizer(tmp_path), SUM) == "old What is 312 + 48?"
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    assert render_chat(Tokenizer(tmp_path), SUM) == "new What is 312 + 48?"


def test_what_the_template_refuses_is_a_request_error(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"cannot render conversation 0 \(no cats\); mend the messages"):
        chat(llm, SUM, chat_template="{{ raise_exception('no cats') }}")


def test_without_a_template_chat_says_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(tiny_model_path(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    with LLM(tmp_path, device="cpu") as llm:
        with pytest.raises(RequestError, match="no chat template; give one as chat_template, or use generate"):
            chat(llm, SUM)
        assert chat(llm, SUM, chat_template="{{ messages[0].content }}")[0].prompt == "What is 312 + 48?"


CHATML = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
ADD = {"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": {}}}


def test_tools_that_the_template_does_not_write_are_an_error(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the sum?"}]  # the name in a message is not the tool
    with pytest.raises(RequestError, match=r"does not write tools, .*chat_template that does.* by parse_response"):
        chat(llm, question, tools=[ADD], chat_template=CHATML)
    [output] = chat(llm, question, tools=[], chat_template=CHATML)
    assert output.prompt == "<user>What is the sum?"
    with_system = "{% if tools and messages[0].role == 'system' %}{{ tools }}{% endif %}" + CHATML
    system = [{"role": "system", "content": "Add."}, *question]
    assert "Adds." in str(chat(llm, system, tools=[ADD], chat_template=with_system)[0].prompt)
    with pytest.raises(RequestError, match="does not write tools"):  # seen in another kind of chat alone
        chat(llm, question, tools=[ADD], chat_template=with_system)


def test_whether_a_template_writes_tools_is_looked_up_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[Any] = []
    render = llm.tokenizer.apply_chat_template

    def noted(*args: Any, **options: Any) -> Any:
        rendered.append(options["tools"])
        return render(*args, **options)

    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", noted)
    for _ in range(3):
        chat(llm, [SUM] * 2, tools=[ADD], chat_template="{{ tools }}" + CHATML)
    assert rendered.count(None) == 1
    assert len(rendered) == 7


def test_earlier_calls_that_the_template_leaves_out_are_an_error(llm: LLM) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [*SUM, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "360"}]
    with pytest.raises(RequestError, match="conversation 0 has tool_calls, which the chat template leaves out; use a"):
        chat(llm, messages, chat_template=CHATML)
    assert '"add"' in str(chat(llm, messages)[0].prompt)
