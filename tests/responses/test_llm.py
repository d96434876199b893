"""Messages of an LLM, parts of its streams, and calls that it has to make; the tiny model writes what it must."""

import asyncio
import copy
import doctest
import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoinfer import LLM, CompletionOutput, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from nanoinfer.batch.batch_job import run_batch
from nanoinfer.text.response_reader import ResponseReader

QUESTION = [{"role": "user", "content": "What is 312 + 48?"}]
PLAIN = {"role": "assistant", "content": "312 + 48 = 360", "reasoning": None, "tool_calls": None}
GREEDY = SamplingParams(temperature=0, max_tokens=40)
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}},
    {"type": "function", "function": {"name": "now", "description": "Says when.", "parameters": {"type": "object"}}},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": "true"}}\n</tool_call>'
THOUGHT = f"<think>\n1 + 2\n</think>\n\nIt is 3.\n{CALL}"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", device="cpu", max_model_len=1024, kvcache_block_size=16) as llm:
        yield llm


def writing(text: str, **options: Any) -> SamplingParams:
    """Return sampling parameters with which the model writes a text, whatever it is."""
    form = {"type": "const_string", "value": text}
    tag = {"type": "structural_tag", "format": form, "includes_thought": True}
    wanted = StructuredOutputsParams(structural_tag=tag)
    return SamplingParams(temperature=0, max_tokens=200, structured_outputs=wanted, **options)


def ask(llm: LLM, params: SamplingParams, messages: list[Any] = QUESTION, **options: Any) -> RequestOutput:
    [output] = llm.chat(messages, params, use_tqdm=False, **options)
    return output


def test_the_message_of_a_plain_answer_is_its_text(llm: LLM) -> None:
    output = ask(llm, GREEDY)
    assert output.message == output.outputs[0].message == PLAIN
    [generated] = llm.generate(output.prompt, GREEDY, use_tqdm=False)
    assert generated.message == PLAIN
    assert CompletionOutput(0, "<think>a</think>b", [1], "stop").message["content"] == "<think>a</think>b"


def test_a_message_has_thought_content_and_typed_calls_apart_and_is_made_when_it_is_asked_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr("nanoinfer.text.response_reader.message_of", lambda *given: made.append(given) or {"role": "a"})
    unread = ask(llm, writing(THOUGHT), tools=TOOLS)
    assert made == []
    assert unread.message is unread.message
    assert len(made) == 1
    monkeypatch.undo()

    output = ask(llm, writing(THOUGHT), tools=TOOLS)
    assert output.text == THOUGHT
    message = output.message
    assert (message["content"], message["reasoning"]) == ("It is 3.", "1 + 2")
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 3, "b": true}'}
    again = ask(llm, writing(THOUGHT), tools=TOOLS).message
    assert again == message, "ids too: they follow from prompt and answer"


def test_a_message_survives_pickling_and_copies_and_changes_no_comparison(llm: LLM) -> None:
    output = ask(llm, writing(THOUGHT), tools=TOOLS)
    for other in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert other == output
        assert other.message == output.message
        assert other.message["reasoning"] == "1 + 2"
    assert "message" not in output.to_dict()


def test_the_stop_is_no_part_of_a_message(llm: LLM) -> None:
    assert ask(llm, writing(THOUGHT, stop="is 3")).message["content"] == "It "
    kept = ask(llm, writing(THOUGHT, stop="is 3", include_stop_str_in_output=True)).message
    assert kept["content"] == "It is 3"
    [equals] = llm.encode(" =")
    stopped = ask(llm, SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[equals]))
    assert stopped.message["content"] == stopped.text == "312 + 48"
    ended = ask(llm, GREEDY)
    assert ended.token_ids[-1] == llm.tokenizer.eos_token_id
    assert ended.message == PLAIN


def test_every_sample_and_every_way_to_ask_has_messages(llm: LLM) -> None:
    finished = []
    params = SamplingParams(temperature=1, seed=1, max_tokens=40, n=2)
    output = ask(llm, params, on_finish=lambda output: finished.append(output.message))
    contents = [sample.message["content"] for sample in output.outputs]
    assert contents == [sample.text for sample in output.outputs]
    assert finished == [output.message]
    chat, text = llm.add_chat_request(QUESTION, writing(THOUGHT), tools=TOOLS), llm.add_request("a", writing(THOUGHT))
    found = {}
    while not llm.is_finished():
        found |= {output.request_id: output.message for output in llm.step()}
    assert found[chat]["reasoning"] == "1 + 2"
    assert found[text]["content"] == THOUGHT
    [refused] = llm.chat([[{"role": "user"}]], GREEDY, use_tqdm=False, on_error="return")
    assert refused.message["content"] == ""


def test_no_other_thread_gets_the_output_of_a_chat_before_it_is_known_to_be_one(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect, stepping = llm._response_reader.expect, threading.Thread(target=lambda: outputs.extend(run_steps(llm)))
    outputs: list[RequestOutput] = []

    def expect_late(request_id: int, tools: Any) -> int:
        stepping.start()
        stepping.join(timeout=0.3)  # long enough for all steps, if they could run
        return expect(request_id, tools)

    monkeypatch.setattr(llm._response_reader, "expect", expect_late)
    llm.add_chat_request(QUESTION, writing("<think>\na\n</think>\n\nb"))
    stepping.join()
    assert [output.message["content"] for output in outputs] == ["b"]


def run_steps(llm: LLM) -> Iterator[RequestOutput]:
    while not llm.is_finished():
        yield from llm.step()


def test_the_next_prompt_is_that_of_the_template_and_hits_the_prefix_cache(llm: LLM) -> None:
    llm.reset_prefix_cache()
    output = ask(llm, writing(CALL), tools=TOOLS)
    result = {"role": "tool", "tool_call_id": output.message["tool_calls"][0]["id"], "content": "5"}
    messages = [*QUESTION, output.message, result]
    after = ask(llm, GREEDY, messages, tools=TOOLS)
    own = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 3, "b": True}}}],
    }
    assert after.prompt == llm.tokenizer.apply_chat_template(
        [*QUESTION, own, result], tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert after.num_cached_tokens >= output.num_prompt_tokens // 16 * 16, "the model wrote a text where true belongs"

    llm.reset_prefix_cache()
    first = ask(llm, writing("<think>\nHm.\n</think>\n\nYes."))
    asked_again = [*QUESTION, first.message, {"role": "user", "content": "Why?"}]
    again = ask(llm, GREEDY, asked_again)
    assert "Hm." not in again.prompt, "the template drops thoughts before the last question"
    assert again.num_cached_tokens == first.num_prompt_tokens // 16 * 16, "whole blocks, where texts part within one"
    plain = ask(llm, GREEDY)
    whole = plain.num_prompt_tokens + plain.num_generated_tokens
    assert ask(llm, GREEDY, [*QUESTION, plain.message, *QUESTION]).num_cached_tokens >= whole - 1


def test_chunks_say_the_part_of_the_answer_that_they_belong_to(llm: LLM) -> None:
    prompt = ask(llm, GREEDY).prompt
    chunks = list(llm.stream(prompt, writing(THOUGHT)))
    texts: dict[Any, str] = {}
    for chunk in chunks:
        texts[chunk.part] = texts.get(chunk.part, "") + chunk.text
    assert texts == {None: "<think></think>", "reasoning": "\n1 + 2\n", "content": "\n\nIt is 3.\n", "tool_calls": CALL}
    assert [chunk.part for chunk in reversed(chunks)] == [chunk.part for chunk in chunks][::-1], "asked in any order"
    assert pickle.loads(pickle.dumps(chunks[1])).part == "reasoning"
    opened = {(one.index, one.part) for one in llm.stream([f"{prompt}<think>\n", prompt], writing("Hm"))}
    assert opened == {(0, "reasoning"), (1, "content")}

    async def parts() -> list[Any]:
        return [chunk.part async for chunk in llm.astream(prompt, writing(THOUGHT))]

    assert asyncio.run(parts()) == [chunk.part for chunk in chunks]


@pytest.mark.parametrize("name", [None, "add"])
def test_a_required_tool_is_called(llm: LLM, name: str | None) -> None:
    choice = "required" if name is None else {"type": "function", "function": {"name": name}}
    params = SamplingParams(temperature=1, seed=1, max_tokens=100)
    messages = [
        output.message
        for output in llm.chat([QUESTION] * 4, params, tools=TOOLS[:1], tool_choice=choice, use_tqdm=False)
    ]
    for message in messages:
        assert message["content"] is None
        for call in message["tool_calls"]:
            assert call["function"]["name"] == "add"
            arguments = json.loads(call["function"]["arguments"])
            assert arguments.keys() == {"a", "b"}
            assert arguments["a"] in range(10)
    if name is not None:
        assert [len(message["tool_calls"]) for message in messages] == [1] * 4
    with pytest.raises(RequestError, match="give one of them"):
        ask(llm, writing("a"), tools=TOOLS, tool_choice="required")


def test_a_template_that_the_llm_is_given_counts() -> None:
    with LLM("tiny", device="cpu", max_model_len=512, response_template="gpt-oss") as llm:
        text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
        message = ask(llm, writing(text)).message
        assert (message["content"], message["reasoning"]) == ("Yes.", "Hm.")


def test_that_auto_finds_no_family_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = ResponseReader("auto", SimpleNamespace(tokenizer=None))  # type: ignore[arg-type]
    with caplog.at_level("WARNING", logger="nanoinfer"):
        assert reader.template is reader.template is None
    assert [record.message.count("name a family, such as qwen3") for record in caplog.records] == [1]


def test_the_page_about_answers_prints_what_it_shows() -> None:
    page = Path(__file__).parents[2] / "docs" / "responses.md"
    results = doctest.testfile(str(page), module_relative=False)
    assert results.attempted > 10
    assert results.failed == 0


@pytest.mark.parametrize("is_asked", [False, True])
def test_answers_in_files_have_reasoning_and_tool_calls_if_the_job_asks_for_them(
    is_asked: bool, tmp_path: Path
) -> None:
    lines = [
        {"messages": QUESTION, "tools": TOOLS, "structured_outputs": {"structural_tag": form}, "max_tokens": 200}
        for form in [json.loads(str(writing(THOUGHT).structured_outputs.structural_tag))]
    ]
    named = {"type": "function", "function": {"name": "add"}}
    lines += [{"messages": QUESTION, "tools": TOOLS, "tool_choice": named, "max_tokens": 60}]
    lines += [{"messages": QUESTION, "temperature": 0, "max_tokens": 40}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    option = {"response_template": "auto"} if is_asked else {}
    run_batch(
        lambda: LLM("tiny", device="cpu", max_model_len=1024, **option),
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
        use_tqdm=False,
    )
    written = (tmp_path / "out.jsonl").read_text().splitlines()
    records = sorted(map(json.loads, written), key=lambda one: one["custom_id"])
    bodies = [record["response"]["body"] for record in records]
    thought, called, plain = [body["choices"][0] for body in bodies]
    assert plain["message"] == {"role": "assistant", "content": "312 + 48 = 360"}
    assert called["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert (called["message"]["content"], called["finish_reason"]) == (None, "tool_calls")
    if not is_asked:
        assert thought["message"] == {"role": "assistant", "content": THOUGHT}
        return
    message = thought["message"]
    assert (message["content"], thought["finish_reason"]) == ("It is 3.", "tool_calls")
    assert message["reasoning"] == message["reasoning_content"] == "1 + 2"
    pytest.importorskip("openai")
    from openai.types.chat import ChatCompletion

    for body in bodies:
        ChatCompletion.model_validate(body, strict=True)
    [call] = ChatCompletion.model_validate(bodies[0]).choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"a": 3, "b": True}
