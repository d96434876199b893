"""llm.chat: conversations by the tokenizer's own template, and those that no template can render."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoinfer import LLM, RequestError, RequestOutput, SamplingParams, tiny_model_path

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
            "message 0 of conversation 0 has role=None; give system, user, assistant, tool, or a chat_template",
        ),
        ([*SUM, {"role": "usr", "content": "Hello"}], "message 1 of conversation 0 has role='usr'; give system"),
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


def test_a_content_in_text_parts_is_one_text_to_any_template(llm: LLM) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "312 + 48?"}]
    assert chat(llm, [{"role": "user", "content": parts}])[0].text == "312 + 48 = 360"
    only_strings = "{% for m in messages %}{{ m.content if m.content is string else '' }}{% endfor %}"
    [output] = chat(llm, [{"role": "user", "content": parts}], chat_template=only_strings)
    assert output.prompt == "What is 312 + 48?"


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
