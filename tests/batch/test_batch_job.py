"""run-batch: what goes in and comes out, what a job started again does, and what is refused."""

import gzip
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import nanoinfer
from nanoinfer import (
    LLM,
    CompletionOutput,
    Logprob,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    tiny_model_path,
)
from nanoinfer.__main__ import JOB_OPTIONS, main
from nanoinfer.batch import batch_job, job_files
from nanoinfer.batch.batch_job import Summary, run_batch
from nanoinfer.batch.job_files import BatchOutput
from nanoinfer.batch.openai_format import (
    CHAT_OPTIONS,
    EMBEDDING_FIELDS,
    FOREIGN_FIELDS,
    IGNORED,
    SAMPLING_FIELDS,
    parse_body,
    response_body,
)
from nanoinfer.config import ANSWERS_DEPEND_ON, EngineConfig
from nanoinfer.constraints.grammars import GrammarLibrary
from nanoinfer.engine.interrupts import Terminated, postponed_interrupt, terminable
from nanoinfer.engine.request_queue import Inbox
from nanoinfer.errors import JobError, RequestError, WorkerError

GREEDY = {"temperature": 0, "max_tokens": 8}
QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu", max_num_seqs=4, max_model_len=256) as llm:
        yield llm


def write(path: Path, *lines: Any) -> Path:
    """A JSONL file of objects, or of bytes as they are."""
    path.write_bytes(
        b"".join([line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines])
    )
    return path


def job(llm: LLM, path: Path, settings: dict[str, Any] | None = None, **options: Any) -> Summary:
    """Run the job of the input at `path`, with the output beside it."""
    load: Any = lambda: nullcontext(llm)  # noqa: E731 (`run_batch` would close it)
    return run_batch(load, path, path.with_suffix(".out"), settings=settings, use_tqdm=False, **options)


def records(path: Path) -> dict[str, dict[str, Any]]:
    """The records of the output of the job at `path`, by custom_id."""
    lines = [json.loads(line) for line in path.with_suffix(".out").read_text().splitlines()]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines), "no custom_id twice"
    return by_id


def drop_all_requests(llm: LLM) -> None:
    newest = llm.add_request([1])
    llm.abort([*range(newest + 1)])
    while not llm.is_finished():
        llm.step()


def errors(path: Path) -> dict[str, str]:
    return {name: record["error"]["message"] for name, record in records(path).items() if record["error"]}


# --- what goes in and comes out ---


def test_lines_in_openais_format_and_plain_ones_get_the_answers_of_chat_and_generate(llm: LLM, tmp_path: Path) -> None:
    chat = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions"}
    chat["body"] = {"model": "m", "messages": QUESTION, "stream": False, "user": "u", "top_p": None, **GREEDY}
    text = {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1, 2, 3,", **GREEDY}}
    plain_chat = {"custom_id": "plain", "messages": QUESTION, "max_completion_tokens": 3, "temperature": 0}
    path = write(tmp_path / "in.jsonl", chat, text, b"\n", plain_chat, {"prompt": [1, 2, 3], **GREEDY})
    summary = job(llm, path)
    assert (summary.num_lines, summary.num_done, summary.num_errors, summary.end) == (4, 4, 0, "finished")

    params = SamplingParams(**GREEDY)
    [expected] = llm.chat(QUESTION, params, use_tqdm=False)
    record = records(path)["chat"]
    assert record["error"] is None
    assert record["response"]["status_code"] == 200
    body = record["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": expected.text}
    assert body["choices"][0]["finish_reason"] == expected.finish_reason
    num_prompt, num_generated = len(expected.prompt_token_ids), len(expected.token_ids)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }
    assert body["usage"] == usage

    [text_output, ids_output] = llm.generate(["1, 2, 3,", [1, 2, 3]], params, use_tqdm=False)
    for custom_id, output in (("text", text_output), ("line-5", ids_output)):
        body = records(path)[custom_id]["response"]["body"]
        assert (body["object"], body["choices"][0]["text"]) == ("text_completion", output.text)
    assert records(path)["plain"]["response"]["body"]["usage"]["completion_tokens"] == 3


def test_what_a_line_leaves_out_is_as_the_job_says_and_else_as_the_model_recommends(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams] = []
    original = llm.preparer.prepare

    def prepare(prompts: Any, params: list[SamplingParams], **options: Any) -> Any:
        asked.extend(params)
        return original(prompts, params, **options)

    monkeypatch.setattr(llm.preparer, "prepare", prepare)
    path = write(tmp_path / "in.jsonl", {"prompt": [1]}, {"prompt": [1], "temperature": 0.5, "stop": "x"})
    job(llm, path, overrides={"max_tokens": 2})
    assert [(params.temperature, params.max_tokens, params.stop) for params in asked] == [
        (0.6, 2, ()),
        (0.5, 2, ("x",)),
    ]


def bodies(path: Path) -> dict[str, dict[str, Any]]:
    """The bodies of the answers of the job at `path`, by custom_id."""
    return {name: record["response"]["body"] for name, record in records(path).items()}


def test_a_line_with_several_prompts_has_a_choice_for_each_sample_of_each_in_their_order(
    llm: LLM, tmp_path: Path
) -> None:
    prompts = ["1, 2, 3,", [1, 2, 3], "Spell the word plum", "What is 3 + 4?", [5]]
    texts = {"custom_id": "texts", "prompt": prompts, "temperature": 0, "max_tokens": 20}
    samples = {"custom_id": "samples", "prompt": ["a", "b"], "n": 2, "seed": 5, "temperature": 1, "max_tokens": 4}
    alone = {"custom_id": "alone", "prompt": [[1, 2, 3]], **GREEDY}
    path = write(tmp_path / "in.jsonl", {"url": "/v1/completions", "body": texts | {"custom_id": None}}, samples, alone)
    summary = job(llm, path)
    assert (summary.num_done, summary.num_errors) == (3, 0)

    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    body = bodies(path)["line-1"]
    assert [choice["index"] for choice in body["choices"]] == [*range(5)]
    assert [choice["text"] for choice in body["choices"]] == [output.text for output in expected]
    num_in = sum(len(output.prompt_token_ids) for output in expected)
    num_out = sum(len(output.token_ids) for output in expected)
    usage = {"prompt_tokens": num_in, "completion_tokens": num_out, "total_tokens": num_in + num_out}
    assert body["usage"] == usage

    params = replace(llm.default_sampling_params, n=2, seed=5, temperature=1, max_tokens=4)
    sampled = [sample for output in llm.generate(["a", "b"], params, use_tqdm=False) for sample in output.outputs]
    body = bodies(path)["samples"]
    assert [choice["text"] for choice in body["choices"]] == [sample.text for sample in sampled]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len(bodies(path)["alone"]["choices"]) == 1


def test_equal_prompts_of_a_line_draw_different_samples_and_the_first_draws_as_if_it_were_alone(
    llm: LLM, tmp_path: Path
) -> None:
    def drawn(name: str, prompt: Any) -> list[str]:
        path = write(tmp_path / name, {"prompt": prompt, "temperature": 5, "max_tokens": 9})
        job(llm, path)
        return [choice["text"] for choice in bodies(path)["line-1"]["choices"]]

    several = drawn("several.jsonl", ["a"] * 4)
    assert len({*several}) == 4
    assert drawn("again.jsonl", ["a"] * 4) == several
    assert drawn("alone.jsonl", "a") == several[:1]


def test_echo_puts_the_prompt_and_its_log_probabilities_in_front(llm: LLM, tmp_path: Path) -> None:
    ids = llm.encode("<|im_end|>1, 2")
    texts = {"custom_id": "texts", "prompt": ["1, 2, 3,", ids], "echo": True, "logprobs": 2, **GREEDY}
    plain = {"custom_id": "plain", "prompt": "1, 2, 3,", "echo": True, **GREEDY}
    off = {"custom_id": "off", "prompt": "1, 2, 3,", "echo": False, "prompt_logprobs": 0, **GREEDY}
    both = {"custom_id": "both", "prompt": [[1, 2], [3]], "echo": True, "prompt_logprobs": 0, **GREEDY}
    path = write(tmp_path / "in.jsonl", texts, plain, off, both)
    job(llm, path)
    found = bodies(path)

    params = SamplingParams(**GREEDY, logprobs=2, prompt_logprobs=2)
    outputs = llm.generate(["1, 2, 3,", ids], params, use_tqdm=False)
    prompts = ["1, 2, 3,", "<|im_end|>1, 2"]
    for choice, output, prompt in zip(found["texts"]["choices"], outputs, prompts, strict=True):
        assert choice["text"] == prompt + output.text
        logprobs = choice["logprobs"]
        token_ids = output.prompt_token_ids + output.token_ids
        assert logprobs["tokens"] == [llm.decode(token_id, skip_special_tokens=False) for token_id in token_ids]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert output.prompt_logprobs is not None
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        numbers = [entry[token_id].logprob for entry, token_id in zip(entries, token_ids[1:], strict=True)]
        assert logprobs["token_logprobs"][1:] == pytest.approx(numbers, abs=1e-4)
        assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    num_in = sum(len(output.prompt_token_ids) for output in outputs)
    assert found["texts"]["usage"]["prompt_tokens"] == num_in
    assert found["texts"]["usage"]["completion_tokens"] == sum(len(output.token_ids) for output in outputs)

    assert found["plain"]["choices"][0]["text"] == "1, 2, 3," + outputs[0].text
    assert found["plain"]["choices"][0]["logprobs"] is None
    assert found["off"]["choices"][0]["text"] == outputs[0].text
    assert found["off"]["prompt_logprobs"][0] is None
    assert [len(entries) for entries in found["both"]["prompt_logprobs"]] == [2, 1], "a list for each prompt"
    assert all("prompt_logprobs" not in found[name] for name in ("texts", "plain")), "they were not asked for"


def test_an_echoed_prompt_of_a_line_that_names_tokens_has_log_probabilities(llm: LLM, tmp_path: Path) -> None:
    line = {"prompt": [1, 2, 3], "echo": True, "logprob_token_ids": [4, 5], "max_tokens": 2, "ignore_eos": True}
    path = write(tmp_path / "in.jsonl", line, {**line, "logprobs": 2})
    job(llm, path, overrides={"temperature": 0})
    found, both = [body["choices"][0]["logprobs"] for body in bodies(path).values()]
    assert found == both
    assert [number is None for number in found["token_logprobs"]] == [True, False, False, False, False]
    [output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    expected = [output.prompt_logprobs[1][2].logprob, output.prompt_logprobs[2][3].logprob]
    assert found["token_logprobs"][1:3] == pytest.approx(expected, abs=1e-4)


def test_an_echoed_prompt_without_log_probabilities_has_null_for_each_token() -> None:
    completion = CompletionOutput(0, "b", [7], "stop", logprobs=[{7: Logprob(-0.5, 1, "b")}])
    output = RequestOutput(0, "aa", [1, 2], 0, [completion])
    body = response_body([output], SamplingParams(logprobs=0), False, echo=lambda ids: "a" * len(ids))
    found = body["choices"][0]["logprobs"]
    assert (found["tokens"], found["token_logprobs"]) == (["a", "a", "b"], [None, None, -0.5])


def test_a_system_message_is_for_chats_that_have_none(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[dict[str, str]]] = []
    original = llm.preparer.prepare_chat

    def prepare_chat(said: Any, *args: Any, **options: Any) -> Any:
        asked.append(said)
        return original(said, *args, **options)

    monkeypatch.setattr(llm.preparer, "prepare_chat", prepare_chat)
    own = [QUESTION[0], {"role": "system", "content": "mine"}]
    lines = [{"messages": messages, **GREEDY} for messages in (QUESTION, own, [], ["x"])]
    path = write(tmp_path / "in.jsonl", *lines, {"prompt": "a", **GREEDY})
    job(llm, path, system="Be brief.")
    begun = [{"role": "system", "content": "Be brief."}]
    assert asked == [begun + QUESTION, own, [], [*begun, "x"]]
    assert "conversation 0 is []" in errors(path)["line-3"]
    assert "message 1 of conversation 0 is 'x'" in errors(path)["line-4"]
    for other, now in (({}, "not given"), ({"system": ""}, "''"), ({"system": "Be long."}, "'Be long.'")):
        with pytest.raises(
            JobError, match=f"made with other settings: system was 'Be brief.' and is {now}; go on with"
        ):
            job(llm, path, **other)
    assert job(llm, path, system="Be brief.").num_before == 5


def test_two_lines_with_one_custom_id_are_two_requests(llm: LLM, tmp_path: Path) -> None:
    line = {"custom_id": "a", "prompt": [1], **GREEDY}
    job(llm, write(tmp_path / "in.jsonl", line, line))
    lines = [json.loads(line) for line in (tmp_path / "in.out").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["a", "a"]
    assert len({line["id"] for line in lines}) == 2


def test_a_gzipped_input_is_read_and_a_damaged_one_refused_by_name(llm: LLM, tmp_path: Path) -> None:
    lines = [{"prompt": [index], **GREEDY} for index in range(9)]
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(write(tmp_path / "in.jsonl", *lines).read_bytes()))
    assert job(llm, path).num_done == 9
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(JobError, match=r"in\.jsonl\.gz cannot be read"):
        job(llm, path)


def test_a_model_without_a_tokenizer_answers_ids_with_ids(
    random_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    echo = {"prompt": [[1, 2]], "echo": True, "logprobs": 0, **GREEDY}
    path = write(tmp_path / "in.jsonl", {"prompt": [1, 2], **GREEDY}, {"messages": QUESTION}, {"prompt": "a"}, echo)
    with LLM(random_checkpoint(), device="cpu") as llm:
        job(llm, path)
        [expected] = llm.generate([1, 2], SamplingParams(**GREEDY), use_tqdm=False)
    answers = {name: record["response"] for name, record in records(path).items()}
    assert answers["line-1"]["body"]["choices"][0]["token_ids"] == expected.token_ids
    assert all("has no tokenizer" in errors(path)[name] for name in ("line-2", "line-3"))
    [echoed] = answers["line-4"]["body"]["choices"]
    assert (echoed["text"], echoed["token_ids"]) == ("", [1, 2, *expected.token_ids])
    assert echoed["logprobs"]["tokens"][:2] == ["token_id:1", "token_id:2"]


def test_answers_with_log_probabilities_are_valid_under_openais_types(llm: LLM, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    chat = {"custom_id": "chat", "messages": QUESTION, "logprobs": True, "top_logprobs": 2, **GREEDY}
    text = {"custom_id": "text", "prompt": "1, 2, 3,", "logprobs": 3, "n": 2, "temperature": 1, "max_tokens": 4}
    plain = {"custom_id": "plain", "messages": QUESTION, **GREEDY}
    several = {"custom_id": "several", "prompt": ["a", [1]], "echo": True, **GREEDY}
    path = write(tmp_path / "in.jsonl", chat, text, plain, several)
    job(llm, path)
    found_in = bodies(path)

    [choice] = ChatCompletion.model_validate(found_in["chat"]).choices
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    [expected] = llm.chat(QUESTION, SamplingParams(**GREEDY, logprobs=2), use_tqdm=False)
    assert "".join(token.token for token in tokens).startswith(expected.text)
    assert bytes(tokens[0].bytes or []) == tokens[0].token.encode()
    assert sum(token.logprob for token in tokens) == pytest.approx(expected.outputs[0].cumulative_logprob)
    assert all(token.top_logprobs[0].token == token.token for token in tokens), "greedy"
    assert [len(token.top_logprobs) for token in tokens] == [2] * len(tokens)

    for completed in Completion.model_validate(found_in["text"]).choices:
        found = completed.logprobs
        assert found is not None
        assert "".join(found.tokens or []) == completed.text
        assert [completed.text[offset] for offset in found.text_offset or []] == [token[0] for token in found.tokens]
        for token, number, best in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
            assert best[token] == number
            assert len(best) in (3, 4), "the token itself, where it is not among the likeliest three"
    assert ChatCompletion.model_validate(found_in["plain"]).choices[0].logprobs is None
    assert len(Completion.model_validate(found_in["several"]).choices) == 2


def test_a_token_that_cannot_be_and_one_without_text_are_still_valid_json() -> None:
    found = {3: Logprob(-math.inf, 9, None), 4: Logprob(0.0, 1, "\ufffd")}
    sample = CompletionOutput(0, "", [3], "length", logprobs=[found])
    output = RequestOutput(0, None, [1], 0, [sample])
    params = SamplingParams(logprobs=1)
    [chat] = response_body([output], params, is_chat=True)["choices"]
    best = {"token": "\ufffd", "logprob": 0.0, "bytes": None}
    token = {"token": "token_id:3", "logprob": -9999.0, "bytes": None, "top_logprobs": [best]}
    assert chat["logprobs"]["content"] == [token]
    [text] = response_body([output], params, is_chat=False)["choices"]
    assert text["logprobs"]["top_logprobs"] == [{"\ufffd": 0.0, "token_id:3": -9999.0}]


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"choice": ["a", "b"], "regex": None}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, {"regex": "a+"}),
    ],
    ids=str,
)
def test_the_form_of_an_answer_is_read_as_openai_and_vllm_write_it(
    given: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    body = parse_body({"messages": QUESTION, **given})
    assert body.get("structured_outputs") == (StructuredOutputsParams(**expected) if expected else None)
    assert "response_format" not in body


CHAT = {"messages": QUESTION}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    "fields",
    [
        {**CHAT, "stream": False, "stream_options": {"include_usage": True}, "store": True, "service_tier": "flex"},
        {**CHAT, "safety_identifier": "s", "metadata": {"a": "b"}, "user": "u", "prompt_cache_key": "k"},
        {**CHAT, "prompt_cache_retention": "24h", "prediction": {"type": "content", "content": "a"}},
        {**CHAT, "modalities": ["text"], "verbosity": "medium", "reasoning_effort": "medium"},
        {**CHAT, "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
        {**CHAT, "tools": TOOLS, "tool_choice": "none"},
        {**CHAT, "tool_choice": "none", "parallel_tool_calls": False},
        {**CHAT, "functions": [], "function_call": "none", "echo": False, "include_reasoning": True},
        {"prompt": "a", "best_of": 1, "suffix": "", "use_beam_search": False, "length_penalty": 1.0, "priority": 0},
        {"prompt": "a", "n": 3, "best_of": 3, "logprobs": False, "return_token_ids": False},
        {"input": "a", "user": "u", "model": "m"},
    ],
    ids=str,
)
def test_fields_that_say_what_is_so_anyway_are_passed_over(fields: dict[str, Any]) -> None:
    kept = {name: fields[name] for name in ("messages", "tools", "n", "input") if name in fields}
    assert parse_body(fields) == kept | ({"prompt": ["a"]} if "prompt" in fields else {}) | (
        {"input": ["a"]} if "input" in fields else {}
    )


def test_the_known_fields_are_listed_only_where_no_name_is_similar() -> None:
    with pytest.raises(RequestError) as error:
        parse_body({**CHAT, "max_new_tokens": 2})
    assert str(error.value) == "unknown fields: max_new_tokens (did you mean 'max_tokens'?)"
    with pytest.raises(RequestError, match=r"unknown fields: xyz; known are .*, tool_choice, tools, "):
        parse_body({**CHAT, "xyz": 2})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**CHAT, "tool_choice": "required"}, 'give tools to have one of them called; use "auto", or'),
        ({**CHAT, "tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls=false is not served: tool calls"),
        ({**CHAT, "reasoning_effort": "high"}, 'as chat_template_kwargs, such as {"reasoning_effort": "low"} or {"en'),
        ({**CHAT, "modalities": ["text", "audio"]}, 'modalities=["text", "audio"] is not served: answers are texts; '),
        ({**CHAT, "verbosity": "low"}, 'verbosity="low" is not served: ask for it in a message; use "medium", or'),
        ({**CHAT, "web_search_options": {"a": 1}}, "write what was found into a message; leave it out"),
        ({**CHAT, "functions": [{"name": "f"}]}, "is not served: give them as tools; leave it out"),
        ({"prompt": "a", "suffix": "b"}, "write the model's own tokens for a gap into the prompt; leave it out"),
        ({"prompt": "a", "n": 2, "best_of": 3}, "best_of=3 is not served: n samples are drawn, and all of them"),
        ({"prompt": "a", "guided_regex": "b"}, """did you mean '"structured_outputs": {"regex": ...}'?"""),
        (
            {"prompt": "a", "use_beam_search": True},
            "use_beam_search=true is not served: nanoinfer does not support it;",
        ),
        ({"input": "a", "dimension": 2}, "unknown fields: dimension (did you mean 'dimensions'?)"),
    ],
    ids=str,
)
def test_fields_that_would_change_an_answer_are_refused_with_what_a_file_has_for_it(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        parse_body(fields)


def test_every_field_of_openais_requests_is_served_passed_over_or_explained() -> None:
    pytest.importorskip("openai")
    from openai.types import completion_create_params, embedding_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    served = {*SAMPLING_FIELDS, *CHAT_OPTIONS, *EMBEDDING_FIELDS, "messages", "prompt", "echo"}
    read = {"max_completion_tokens", "response_format", "top_logprobs"}  # by another name
    for module in (completion_create_params, chat_create_params, embedding_create_params):
        kinds = [
            kind for name, kind in vars(module).items() if "CreateParams" in name and hasattr(kind, "__annotations__")
        ]
        names = {name for kind in kinds for name in kind.__annotations__}
        assert {"model", "user"} <= names
        assert names - served - read - IGNORED - {*FOREIGN_FIELDS} == set()


def test_a_bias_is_read_as_openai_writes_it() -> None:
    body = parse_body({"prompt": "a", "logit_bias": {"5": -100}})
    assert SamplingParams(logit_bias=body["logit_bias"]).logit_bias == {5: -100.0}


def test_all_log_probabilities_of_a_chat_can_be_asked_for(llm: LLM, tmp_path: Path) -> None:
    chat = {"messages": QUESTION, "logprobs": True, "top_logprobs": -1, **GREEDY, "max_tokens": 1}
    path = write(tmp_path / "in.jsonl", chat)
    job(llm, path)
    [choice] = records(path)["line-1"]["response"]["body"]["choices"]
    [token] = choice["logprobs"]["content"]
    assert len(token["top_logprobs"]) == 1024
    assert math.fsum(math.exp(entry["logprob"]) for entry in token["top_logprobs"]) == pytest.approx(1)


def test_the_summary_counts_the_answers_that_a_length_limit_cut(llm: LLM, tmp_path: Path) -> None:
    cut = {"prompt": "1, 2, 3,", "max_tokens": 1, "temperature": 0}
    text = {"prompt": '{"finish_reason": "length"}', "max_tokens": 250, "temperature": 0, "stop": [" ", ",", "1", "8"]}
    path = write(tmp_path / "in.jsonl", cut, {"messages": QUESTION, "max_tokens": 30, "temperature": 0}, cut, text)
    summary = job(llm, path)
    reasons = [choice["finish_reason"] for body in bodies(path).values() for choice in body["choices"]]
    assert summary.num_cut == reasons.count("length") >= 2
    assert "stop" in reasons
    assert f"0 with errors, {summary.num_cut} cut by max_tokens or max_model_len; " in str(summary)
    assert job(llm, path).num_cut == summary.num_cut, "those of all runs"


def test_without_max_tokens_an_answer_goes_on_to_the_models_limit(llm: LLM, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", {"prompt": [1] * 250, "temperature": 0, "ignore_eos": True})
    job(llm, path, overrides={"max_tokens": None})
    assert records(path)["line-1"]["response"]["body"]["usage"]["total_tokens"] == 256


def test_only_as_many_lines_are_in_the_engine_as_keep_it_busy(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "in.jsonl", *[{"prompt": [index], **GREEDY} for index in range(50)])
    collect = llm.queue.collect
    held: list[int] = []

    def counting_collect(inbox: Inbox) -> list[RequestOutput]:
        held.append(len(inbox.request_ids))
        return collect(inbox)

    monkeypatch.setattr(llm.queue, "collect", counting_collect)
    assert job(llm, path).num_done == 50
    assert max(held) == 8, "twice the rows"


def choosing(*choices: str, **options: Any) -> dict[str, Any]:
    return {"prompt": [1], **GREEDY, "structured_outputs": {"choice": choices}, **options}


def test_steps_go_on_while_a_grammar_is_compiled(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second line's grammar takes until the others are answered, or for a minute."""
    pytest.importorskip("llguidance")
    compile_now, collect = GrammarLibrary.compile, llm.queue.collect
    others_answered, waited = threading.Event(), []
    finished: list[str] = []

    def compile_slowly(library: GrammarLibrary, wanted: StructuredOutputsParams) -> Any:
        if wanted.choice == ("slow",):
            waited.append(others_answered.wait(60))
            assert threading.current_thread() is not threading.main_thread()
        return compile_now(library, wanted)

    def counting_collect(inbox: Inbox) -> list[RequestOutput]:
        outputs = collect(inbox)
        finished.extend(output.text for output in outputs)
        if len(finished) == 29:
            others_answered.set()
        return outputs

    monkeypatch.setattr(GrammarLibrary, "compile", compile_slowly)
    monkeypatch.setattr(llm.queue, "collect", counting_collect)
    plain = [{"prompt": [index], **GREEDY} for index in range(28)]
    path = write(tmp_path / "in.jsonl", choosing("first"), choosing("slow"), *plain)
    assert job(llm, path).num_errors == 0
    assert waited == [True]
    assert finished[-1] == "slow"
    assert "first" in finished[:-1]


def test_lines_whose_grammars_take_long_are_all_answered_and_bad_ones_are_errors(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    compile_now = GrammarLibrary.compile
    compiled: list[str] = []

    def compile_slowly(library: GrammarLibrary, wanted: StructuredOutputsParams) -> Any:
        time.sleep(0.02)
        compiled.append(str(wanted))
        return compile_now(library, wanted)

    monkeypatch.setattr(GrammarLibrary, "compile", compile_slowly)
    monkeypatch.setattr(batch_job, "MAX_AHEAD", 3)
    lines = [choosing(f"text {index % 7}") for index in range(20)]
    bad = [
        {"prompt": [1], "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
        {"prompt": "", "structured_outputs": {"regex": "a"}},
        {"prompt": "a", "structured_outputs": {"regex": "(a"}},
    ]
    path = write(tmp_path / "in.jsonl", *lines[:9], *bad, *lines[9:])
    summary = job(llm, path)
    assert (summary.num_done, summary.num_errors) == (23, 3)
    for message, found in zip(
        ("cannot be compiled", "is empty", "cannot be compiled"), errors(path).values(), strict=True
    ):
        assert message in found
    texts = [
        record["response"]["body"]["choices"][0]["text"] for record in records(path).values() if record["response"]
    ]
    assert sorted(texts) == sorted(f"text {index % 7}" for index in range(20))
    assert len(compiled) == 7 + 3, "each grammar once, whether it is right or wrong"


def test_a_line_whose_grammar_takes_too_long_is_an_error_of_that_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    compile_now, end = GrammarLibrary.compile, threading.Event()

    def compile_slowly(library: GrammarLibrary, wanted: StructuredOutputsParams) -> Any:
        if wanted.choice == ("slow",):
            end.wait(60)
        return compile_now(library, wanted)

    monkeypatch.setattr(GrammarLibrary, "compile", compile_slowly)
    path = write(tmp_path / "in.jsonl", choosing("a"), choosing("slow"), choosing("b"), {"prompt": [1], **GREEDY})
    with LLM(tiny_model_path(), device="cpu", max_model_len=64, grammar_timeout=0.5) as llm:
        summary = job(llm, path)
    end.set()
    assert (summary.num_done, summary.num_errors) == (4, 1)
    assert "takes over 0.5 s to compile; make it simpler, or raise grammar_timeout" in errors(path)["line-2"]


def test_the_json_of_all_lines_is_compact_and_closed_where_the_job_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 20]}}, "required": ["a"]}
    line = {"prompt": "a", "max_tokens": 30, "temperature": 2.0, "n": 8}
    line["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    path, switches = write(tmp_path / "in.jsonl", line), ("--disable-any-whitespace", "--disable-additional-properties")
    files = ("--model", "tiny", "--device", "cpu", "-i", path, "-o", path.with_suffix(".out"), "--max-model-len", 64)
    assert run_main(*files, *switches) == 0
    choices = records(path)["line-1"]["response"]["body"]["choices"]
    assert {choice["text"] for choice in choices} == {'{"a":1}', '{"a":20}'}
    assert run_main(*files, *switches) == 0, "it goes on with the same switches"
    for others in (switches[:1], switches[1:], ()):
        assert run_main(*files, *others) == 2
        assert "structured_outputs_config was {" in capsys.readouterr().err


def test_ctrl_c_while_the_first_grammar_is_compiled_stops_the_job_and_it_goes_on(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    compile_now = GrammarLibrary.compile

    def compile_slowly(library: GrammarLibrary, wanted: StructuredOutputsParams) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        return compile_now(library, wanted)

    path = write(tmp_path / "in.jsonl", choosing("never"), choosing("again"))
    with monkeypatch.context() as patch:
        patch.setattr(GrammarLibrary, "compile", compile_slowly)
        summary = job(llm, path)
    assert (summary.end, summary.num_done) == ("interrupted", 0)
    assert job(llm, path).num_done == 2


# --- bad lines ---

BAD_LINES = [
    (b"{", "the line is not valid JSON"),
    (b'"text"', "the line holds a str, not an object"),
    (b"\xff\xfe{}", "the line is not valid JSON"),
    (b'{"prompt": "a\xff"}', "the line is not valid JSON"),
    (b"[" * 100_000, "the line is not valid JSON"),
    (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
    (b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
    (b'{"prompt": [1], "temperature": NaN}', "temperature=nan must be finite"),
    (b'{"prompt": [1], "temperature": 1e999}', "temperature=inf must be finite"),
    (b'{"prompt": [1], "temperature": 1' + b"0" * 400 + b"}", "must be finite and at least 0"),
    (b'{"prompt": [1], "max_tokens": 1' + b"0" * 5000 + b"}", "the line is not valid JSON"),
    (b'{"prompt": [1' + b"0" * 400 + b"]}", "outside the vocabulary"),
    (b'{"prompt": "\\ud800"}', "has a lone surrogate"),
    ({"custom_id": 7, "prompt": "a"}, "custom_id=7 is not a string"),
    ({"prompt": "a", "messages": QUESTION}, "there is messages and prompt; give one of them"),
    ({"text": "a"}, "there is neither messages nor prompt nor input; give one of them"),
    ({"body": {"prompt": "a"}}, "url=None is not served; use /v1/chat/completions or /v1/completions"),
    ({"body": {"prompt": "a"}, "url": ["/v1/completions"]}, "url=['/v1/completions'] is not served; use"),
    ({"body": {"input": "a"}, "url": "/v1/moderations"}, "url='/v1/moderations' is not served; use /v1/chat/complet"),
    ({"body": {"prompt": "a"}, "url": "/v1/completions", "method": "GET"}, "method='GET' is not served; use 'POST'"),
    ({"body": {"prompt": "a"}, "url": "/v1/chat/completions"}, "there is prompt; give messages"),
    ({"body": "a", "url": "/v1/chat/completions"}, "body is a str, not an object"),
    *(
        (
            {"messages": QUESTION, "tools": tools, "tool_choice": "required"},
            f"tools={tools!r} is no list; give a list of",
        )
        for tools in (5, True, "add", {"name": "add"})
    ),
    *(
        ({"messages": QUESTION, "chat_template_kwargs": given}, f"chat_template_kwargs={given!r} is no dict of names")
        for given in (1, True, [{}], [[1]], "a")
    ),
    ({"body": {"prompt": "a"}, "url": "/v1/completions", "max_tokens": 3}, "unknown fields beside body: max_tokens"),
    ({"body": {"prompt": ""}, "url": "/v1/completions", "n": None, "model": "m"}, "prompt 0 is empty"),
    ({"prompt": "a", "max_tokens": 3, "max_completion_tokens": 3}, "there are max_tokens and max_completion_tokens"),
    ({"messages": {"role": "user", "content": "a"}}, "messages is a dict; give a list of messages"),
    ({"messages": []}, "conversation 0 is []; give a list of one message or more"),
    ({"messages": [{"role": "user"}]}, "message 0 of conversation 0 has no content"),
    ({"messages": QUESTION, "tools": 3}, "tools=3 is no list"),
    ({"messages": QUESTION, "tools": [3]}, "the chat template cannot render conversation 0"),
    ({"prompt": [1, "b"]}, "prompt 0 is a int; give a string or a list of token ids"),
    ({"prompt": ["a", [2], ["b"], ""]}, "prompt 2 has 'b' among its token ids"),
    ({"prompt": ["a", "b", ""]}, "prompt 2 is empty; give at least one token"),
    ({"prompt": [[1], [1] * 256]}, "prompt 1 has 256 tokens, and with one more exceeds max_model_len=256"),
    ({"prompt": []}, "prompt 0 is empty"),
    ({"prompt": ["a"] * 10001}, "10001 prompts with n=1 make more than 10000 choices; give fewer in a line"),
    ({"prompt": [[1], [2]], "n": 5001}, "2 prompts with n=5001 make more than 10000 choices"),
    ({"prompt": 3}, "prompts is a int; give a string, a list of token ids, or a list"),
    ({"prompt": "a", "echo": 1}, "echo=1 is not a bool; use true or false"),
    ({"messages": QUESTION, "echo": True}, "echo=true is not served: only prompts of /v1/completions come back; use"),
    ({"prompt": {"a": 1}}, "prompt 0 is a dict"),
    ({"prompt": ""}, "prompt 0 is empty"),
    ({"prompt": [5000]}, "prompt 0 has token id 5000, outside the vocabulary"),
    ({"prompt": [1] * 256}, "prompt 0 has 256 tokens, and with one more exceeds max_model_len=256"),
    (
        {"prompt": "a", "temprature": 0, "best_of": 2},
        "best_of=2 is not served: n samples are drawn, and all of them returned; use 1, or leave it out. "
        "unknown fields: temprature (did you mean 'temperature'?)",
    ),
    ({"prompt": "a", "max_new_tokens": 2}, "unknown fields: max_new_tokens (did you mean 'max_tokens'?)"),
    (
        {"prompt": "a", "logits_processors": ["f"]},
        "is not served: a file has no functions; use logit_bias, or generate",
    ),
    ({"prompt": "a", "logit_bias": {"b": 1}}, "logit_bias has 'b' in place of a token id"),
    ({"prompt": "a", "logit_bias": {"5000": 1}}, "logit_bias has token id 5000, outside the vocabulary"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format={'type': 'xml'}; served are the types text"),
    (
        {"prompt": "a", "response_format": {"type": "json_schema"}},
        "response_format={'type': 'json_schema'}; served are",
    ),
    ({"prompt": "a", "structured_outputs": "[a-z]"}, "structured_outputs='[a-z]' is not an object; give"),
    ({"prompt": "a", "structured_outputs": {"regexp": "a"}}, "structured_outputs={'regexp': 'a'}: "),
    (
        {"prompt": "a", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "there are structured_outputs and response_format; give one of them",
    ),
    (
        {"prompt": "a", "stream": True},
        "stream=true is not served: each answer is written once, when it is complete; use",
    ),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens=0 must be at least 1"),
    ({"prompt": "a", "stop": 3}, "stop=3 must be a string or a list of them"),
    ({"prompt": "a", "stop_token_ids": [2**32], "min_tokens": 1}, "stop_token_ids=[4294967296] must be a list of"),
    ({"prompt": "a", "n": 10**9}, "n=1000000000 must be at most 10000"),
]


def test_each_bad_line_gets_an_error_with_its_number_and_the_rest_goes_on(llm: LLM, tmp_path: Path) -> None:
    good = {"prompt": [1, 2, 3], **GREEDY}
    lines = [line + b"\n" if isinstance(line, bytes) else line for line, _ in BAD_LINES]
    path = write(tmp_path / "in.jsonl", good, *lines, good)
    summary = job(llm, path)
    assert (summary.num_done, summary.num_errors) == (len(BAD_LINES) + 2, len(BAD_LINES))
    for number, (_, message) in enumerate(BAD_LINES, start=2):
        record = records(path)[f"line-{number}"]
        assert record["response"] is None
        assert record["error"]["line"] == number
        assert message in record["error"]["message"]
        assert 0 < len(record["error"]["message"]) <= 1000
    last = f"line-{len(BAD_LINES) + 2}"
    assert records(path)["line-1"]["response"]["body"]["choices"] == records(path)[last]["response"]["body"]["choices"]
    assert llm.is_finished()


@pytest.mark.parametrize("place", ["parse_body", "params_to_echo", "response_body"])
def test_a_bug_that_a_line_meets_is_its_error_and_is_logged_once(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    original, calls = getattr(batch_job, place), itertools.count()

    def failing(*given: Any, **options: Any) -> Any:
        if next(calls) in (1, 2):
            raise KeyError(87)
        return original(*given, **options)

    monkeypatch.setattr(batch_job, "check_first_lines", lambda path: None)  # which parses, too
    monkeypatch.setattr(batch_job, place, failing)
    path = write(tmp_path / "in.jsonl", *[{"prompt": [1], "echo": True, **GREEDY}] * 5)
    summary = job(llm, path)
    assert (summary.num_done, summary.num_errors) == (5, 2)
    codes = [record["error"]["code"] for record in records(path).values() if record["error"]]
    assert codes == ["internal_error"] * 2
    assert all("KeyError: 87" in message for message in errors(path).values())
    [logged] = [record for record in caplog.records if record.exc_info]
    assert "which is a bug" in logged.message


def test_an_error_of_the_engine_is_none_of_a_line(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise WorkerError("a process has ended")

    monkeypatch.setattr(llm.preparer, "prepare", fail)
    with pytest.raises(WorkerError):
        job(llm, write(tmp_path / "in.jsonl", {"prompt": [1], **GREEDY}))


def test_a_line_too_long_is_an_error_without_being_held(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_files, "MAX_LINE_BYTES", 100)
    lines = [b'{"prompt": "' + b"a" * length + b'"}\n' for length in (5000, 20, 85, 86, 5000)]
    path = write(tmp_path / "in.jsonl", *lines, b'{"prompt": "b"}')
    job(llm, path, overrides=GREEDY)
    assert set(errors(path)) == {"line-1", "line-4", "line-5"}
    assert all("the line is longer than" in message for message in errors(path).values())
    assert set(records(path)) == {f"line-{number}" for number in range(1, 7)}


def test_logits_of_nan_are_an_error_of_their_line_alone(tmp_path: Path) -> None:
    shutil.copytree(tiny_model_path(), tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.embed_tokens.weight"][7, 0] = torch.nan  # the head too, being tied
    weights["lm_head.weight"] = torch.nan_to_num(weights["model.embed_tokens.weight"])
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model" / "model.safetensors")
    lines = [{"prompt": prompt, **GREEDY} for prompt in ([1, 2], [1, 7], [[1, 2], [1, 7], [1, 3]])]
    path = write(tmp_path / "in.jsonl", *lines)
    with LLM(tmp_path / "model", device="cpu") as llm:
        job(llm, path)
    assert errors(path) == dict.fromkeys(("line-2", "line-3"), "the logits are NaN or infinite after 0 tokens")
    assert records(path)["line-2"]["error"]["code"] == "nan_logits"


def test_more_errors_than_allowed_stop_the_job_and_stop_it_again(llm: LLM, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", *[{"prompt": "a", "max_tokens": -1}] * 1000, {"prompt": "a"})
    summary = job(llm, path, max_errors=3)
    assert (summary.end, summary.num_errors, summary.num_done) == ("too many errors", 4, 4)
    again = job(llm, path, max_errors=3)
    assert (again.end, again.num_errors, again.num_done) == ("too many errors", 4, 4)
    assert job(llm, path, max_errors=1000).end == "finished"


# --- started again ---


def test_a_job_cut_at_any_byte_goes_on_and_repeats_nothing(llm: LLM, tmp_path: Path) -> None:
    path = write(
        tmp_path / "in.jsonl", *[{"custom_id": f"{index} ü", "prompt": [index], **GREEDY} for index in range(9)]
    )
    job(llm, path)
    expected = {name: record["response"]["body"]["choices"] for name, record in records(path).items()}
    whole = (tmp_path / "in.out").read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [0, 1, 5, ends[0] - 1, ends[0], ends[0] + 1, *range(ends[3] + 2, ends[4], 97), ends[8] - 1]:
        (tmp_path / "in.out").write_bytes(whole[:cut])
        num_kept = sum(end <= cut for end in ends)
        summary = job(llm, path)
        assert (summary.num_before, summary.num_done) == (num_kept, 9)
        assert {name: record["response"]["body"]["choices"] for name, record in records(path).items()} == expected
        kept = whole[: ends[num_kept - 1]] if num_kept else b""
        assert (tmp_path / "in.out").read_bytes().startswith(kept)


def test_ctrl_c_writes_what_is_finished_and_the_job_goes_on(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "in.jsonl", *[{"prompt": [index], **GREEDY} for index in range(20)])
    original, returned = llm.queue.collect, []

    def collect(inbox: Inbox) -> list:
        if len(returned) == 12:
            os.kill(os.getpid(), signal.SIGINT)
        returned.append(original(inbox))
        return returned[-1]

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job has not
    with monkeypatch.context() as patch:
        patch.setattr(llm.queue, "collect", collect)
        summary = job(llm, path)
    signal.signal(signal.SIGINT, handler)
    num_finished = sum(map(len, returned))
    assert (summary.end, summary.num_done) == ("interrupted", num_finished)
    assert 0 < num_finished < 20
    assert len(records(path)) == num_finished
    drop_all_requests(llm)  # which closing the engine would have done
    assert job(llm, path).num_before == num_finished
    assert len(records(path)) == 20


@pytest.mark.parametrize("on_interrupt", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_stops_a_job_as_ctrl_c_does_even_where_that_is_ignored(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_interrupt: Any
) -> None:
    path = write(tmp_path / "in.jsonl", *[{"prompt": [index], **GREEDY} for index in range(20)])
    step, num_steps = llm.queue.step, []

    def stepping() -> None:
        num_steps.append(1)
        if len(num_steps) == 12:
            signal.raise_signal(signal.SIGTERM)
        step()

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        with monkeypatch.context() as patch, terminable():
            patch.setattr(llm.queue, "step", stepping)
            summary = job(llm, path)
    finally:
        signal.signal(signal.SIGINT, before[0])
    assert signal.getsignal(signal.SIGTERM) == before[1]
    assert summary.end == "terminated"
    assert 0 < summary.num_done == len(records(path)) < 20
    assert len(num_steps) == 12, "the step that ran was the last"
    drop_all_requests(llm)
    assert job(llm, path).num_before == summary.num_done


def test_within_a_step_ctrl_c_stays_ignored_and_sigterm_waits() -> None:
    passed = []

    def step(first: signal.Signals, second: signal.Signals) -> None:
        with terminable(), postponed_interrupt():
            with postponed_interrupt():
                signal.raise_signal(first)
            passed.append(first)
            signal.raise_signal(second)
            passed.append(second)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(Terminated):
            step(signal.SIGTERM, signal.SIGINT)
        step(signal.SIGINT, signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert passed == [signal.SIGTERM, signal.SIGINT, signal.SIGINT, signal.SIGINT]


def test_a_finished_job_needs_no_model_and_more_lines_may_be_added_at_its_end(llm: LLM, tmp_path: Path) -> None:
    lines = [{"prompt": [index], **GREEDY} for index in range(4)]
    job(llm, write(tmp_path / "in.jsonl", *lines[:2]))
    before = (tmp_path / "in.out").read_bytes()
    summary = run_batch(lambda: 1 / 0, tmp_path / "in.jsonl", tmp_path / "in.out")  # type: ignore[arg-type,return-value]
    assert (summary.num_before, summary.num_done) == (2, 2)
    assert (tmp_path / "in.out").read_bytes() == before
    assert job(llm, write(tmp_path / "in.jsonl", *lines)).num_before == 2


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (b'{"prompt": [1]}\n{"prompt": [3]}\n', {}, "in.out has the result of another line 2; go on with"),
        (b'\n{"prompt": [1]}\n{"prompt": [2]}\n', {}, "has the result of another line 2; go on with"),
        (b'{"prompt": [1]}\n', {}, "has 2 results, and the input has 1 of their lines"),
        (b'{"prompt": [1]}\n{"prompt": [2]}\n', {"seed": 5}, "made with other settings: seed was 0 and is 5; go on"),
    ],
)
def test_an_input_that_changed_is_refused_and_nothing_is_written(
    llm: LLM, tmp_path: Path, content: bytes, settings: dict[str, Any], message: str
) -> None:
    job(llm, write(tmp_path / "in.jsonl", b'{"prompt": [1]}\n{"prompt": [2]}'), overrides=GREEDY)
    before = (tmp_path / "in.out").read_bytes()
    with pytest.raises(JobError, match=message):
        job(llm, write(tmp_path / "in.jsonl", content), settings, overrides=GREEDY)
    assert (tmp_path / "in.out").read_bytes() == before


def test_without_the_file_of_settings_an_error_shows_those_of_now(llm: LLM, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", {"prompt": [1], **GREEDY})
    job(llm, path, {"seed": 5})
    (tmp_path / ".in.out.settings").unlink()
    message = (
        r"has the result of another line 1, or was made with other settings than \{.*'top_k': 3\}; go on with what"
    )
    with pytest.raises(JobError, match=message):
        job(llm, path, overrides={"top_k": 3})
    assert job(llm, path, {"seed": 5}).num_before == 1


def test_every_option_that_answers_depend_on_is_compared_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"dtype", "kv_cache_dtype", "quantization", "logprobs_mode", "seed"} <= {*ANSWERS_DEPEND_ON}
    shown = said(capsys, "run-batch", "--help")[1].partition("options:")[0]
    documented = (Path(__file__).parents[2] / "docs" / "batch.md").read_text().partition("## Stopped jobs")[2]
    for name in JOB_OPTIONS:
        assert f"--{name.replace('_', '-')}" in shown
        assert f"`--{name.replace('_', '-')}`" in documented


def test_the_options_of_two_configs_that_mean_the_same_are_the_same() -> None:
    plain = EngineConfig("a/b").settings_of_answers()
    same = EngineConfig("a//b/", seed=0, kv_cache_dtype="auto", max_num_seqs=3, max_model_len=9, device="cpu")
    assert plain == same.settings_of_answers() == {"model": "a/b"}
    other = EngineConfig("a", tokenizer="t/", dtype="float16", logprobs_mode="raw_logits", hf_overrides={"x": 1})
    assert other.settings_of_answers() == {
        "model": "a",
        "tokenizer": "t",
        "dtype": "float16",
        "logprobs_mode": "raw_logits",
        "hf_overrides": {"x": 1},
    }


# --- errors that are retried, and the first lines alone ---

GOOD, BAD = {"prompt": [1], **GREEDY}, {"prompt": [1] * 256, **GREEDY}


def test_lines_with_errors_are_done_again_and_their_results_replace_the_errors(llm: LLM, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", GOOD, BAD, b"{\n", {**GOOD, "custom_id": "x"})
    assert job(llm, path).num_errors == 2
    answers = [line for line in path.with_suffix(".out").read_bytes().splitlines(True) if b'"error": null' in line]
    path.with_suffix(".out").chmod(0o640)
    write(path, GOOD, BAD, GOOD, {**GOOD, "custom_id": "x"})  # a line is mended
    with pytest.raises(JobError, match="has the result of another line 3"):
        job(llm, path)
    with LLM(tiny_model_path(), device="cpu", max_model_len=300) as longer:
        summary = job(longer, path, retry_errors=True)
    assert (summary.num_before, summary.num_done, summary.num_errors) == (2, 4, 0)
    assert path.with_suffix(".out").read_bytes().startswith(b"".join(answers)), "answers stay, in their order"
    assert {*records(path)} == {"line-1", "line-2", "line-3", "x"}
    assert path.with_suffix(".out").stat().st_mode & 0o777 == 0o640
    before = path.with_suffix(".out").read_bytes()
    assert job(llm, path, retry_errors=True).num_before == 4, "there is nothing left to retry"
    assert path.with_suffix(".out").read_bytes() == before


def test_errors_that_stay_errors_are_written_once(llm: LLM, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", GOOD, BAD, BAD)
    job(llm, path)
    for _ in range(2):
        summary = job(llm, path, retry_errors=True)
        assert (summary.num_before, summary.num_done, summary.num_errors) == (1, 3, 2)
        assert {*errors(path)} == {"line-2", "line-3"}


def test_a_retry_that_is_killed_at_any_point_loses_no_answer(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "in.jsonl", GOOD, BAD, GOOD)
    job(llm, path)
    output = path.with_suffix(".out")
    whole = output.read_bytes()
    with pytest.raises(ZeroDivisionError):  # while the model is loaded
        run_batch(lambda: 1 / 0, path, output, retry_errors=True)  # type: ignore[arg-type,return-value]
    assert output.read_bytes() == whole
    with monkeypatch.context() as patch:  # while the output is copied, or the disk is full
        patch.setattr(job_files.os, "fsync", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job(llm, path, retry_errors=True)
        patch.setattr(job_files.os, "fsync", lambda _: os.close(-1))
        with pytest.raises(
            JobError, match=r"cannot be rewritten without its errors .*, and is as it was; make room for"
        ):
            job(llm, path, retry_errors=True)
    assert output.read_bytes() == whole
    (tmp_path / ".in.out.retry").write_bytes(whole)  # what a killed one left
    with monkeypatch.context() as patch:  # once the errors are gone
        patch.setattr(batch_job.Job, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job(llm, path, retry_errors=True)
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == ["line-1", "line-3"]
    assert not (tmp_path / ".in.out.retry").exists()
    assert (job(llm, path).num_before, *errors(path)) == (2, "line-2")


def test_no_other_job_takes_over_an_output_while_its_errors_are_retried(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b'{"id": "line-1-0123456789abcdef", "error": {}}\n')
    (tmp_path / "out").symlink_to("real")
    with BatchOutput(tmp_path / "out", retry_errors=True) as output:
        output.drop_errors()
        assert (tmp_path / "real").read_bytes() == b""
        assert (tmp_path / "out").is_symlink()
        with pytest.raises(JobError, match="another job is writing to"):
            BatchOutput(tmp_path / "out")


def test_a_limit_answers_the_first_lines_and_the_rest_may_follow(llm: LLM, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", GOOD, b"\n", BAD, GOOD, GOOD)
    summary = job(llm, path, limit=2)
    assert (summary.num_lines, summary.num_done, summary.num_errors, summary.end) == (2, 2, 1, "finished")
    assert {*records(path)} == {"line-1", "line-3"}
    summary = job(llm, path)
    assert (summary.num_lines, summary.num_before, summary.num_done) == (4, 2, 4)
    summary = job(llm, path, limit=1)
    assert (summary.num_lines, summary.num_before, summary.num_done) == (1, 1, 1)
    assert job(llm, path, limit=9).num_lines == 4
    with pytest.raises(JobError, match="limit=0 must be at least 1; leave it out for all lines"):
        job(llm, path, limit=0)


LINE_0 = b'{"id": "line-0-0123456789abcdef"}\n'


@pytest.mark.parametrize(
    "content", [b"a", b"\0" * 99, b'{"id": "line-x"}\n', b"{}\n", b'{"id": "batch"', LINE_0, b"\n"]
)
def test_a_file_that_is_no_output_of_a_job_is_refused_and_left_alone(llm: LLM, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in.out").write_bytes(content)
    with pytest.raises(
        JobError,
        match=r"in\.out (is no output|has a line at byte 0 that is no result) of a( batch)? job; choose another output",
    ):
        job(llm, write(tmp_path / "in.jsonl", {"prompt": [1]}))
    assert (tmp_path / "in.out").read_bytes() == content


def test_input_and_output_cannot_be_one_file_and_must_be_files(llm: LLM, tmp_path: Path) -> None:
    for path, message in ((tmp_path / "in.out", "are the same file"), (tmp_path / "no.jsonl", "cannot be read")):
        with pytest.raises(JobError, match=message):
            job(llm, path)
    with pytest.raises(JobError, match=r"out\.jsonl\.gz would not be gzipped; choose .*out\.jsonl$"):
        run_batch(lambda: llm, tmp_path / "in.jsonl", tmp_path / "out.jsonl.gz")
    with pytest.raises(JobError, match="cannot be written"):
        BatchOutput(tmp_path / "no" / "out.jsonl")
    with pytest.raises(JobError, match="is no file"):
        BatchOutput(Path("/dev/null"))
    os.mkfifo(tmp_path / "fifo.jsonl")
    with pytest.raises(JobError, match="cannot be read twice"):
        job(llm, tmp_path / "fifo.jsonl")
    with pytest.raises(JobError, match="max_errors=-1 must be at least 0"):
        job(llm, write(tmp_path / "in.jsonl", {"prompt": [1]}), max_errors=-1)


def test_a_file_of_requests_that_are_not_served_is_refused_before_the_model_is_loaded(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"custom_id": "a", "method": "POST", "url": "/v1/moderations", "body": {"input": "a", "model": "m"}}
    path = write(tmp_path / "in.jsonl", b"\n", other, other)
    message = r"^line 2 of .*in\.jsonl: url='/v1/moderations' is not served; use /v1/chat/completions or /v1/comp.*$"
    with pytest.raises(JobError, match=message):
        run_batch(lambda: 1 / 0, path, tmp_path / "in.out")  # type: ignore[arg-type,return-value]
    assert not (tmp_path / "in.out").exists()
    assert run_main("--model", tiny_model_path(), "-i", path, "-o", tmp_path / "in.out") == 2
    assert capsys.readouterr().err.count("\n") == 1
    path = write(tmp_path / "in.jsonl", {"prompt": [1], **GREEDY}, other)
    assert job(llm, path).num_errors == 1, "a line among others is an error of its own"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"text": "a"}] * 3, "line 1 of {}: there is neither messages nor prompt nor input; give one of them"),
        ([b"name,age\n", b"Ada,36\n"], "line 1 of {}: the line is not valid JSON"),
        ([b"[\n", b'{"prompt": "a"},\n', b"]\n"], "line 1 of {}: the line is not valid JSON"),
        ([b"\n", "text"], "line 2 of {}: the line holds a str, not an object"),
        ([{"prompt": "a", "temprature": 0}] * 200, "line 1 of {}: unknown fields: temprature"),
    ],
)
def test_a_file_whose_lines_are_no_requests_is_refused_at_the_first_before_the_model_is_loaded(
    tmp_path: Path, lines: list[Any], message: str
) -> None:
    path = write(tmp_path / "in.jsonl", *lines)
    with pytest.raises(JobError) as error:
        run_batch(lambda: 1 / 0, path, tmp_path / "in.out")  # type: ignore[arg-type,return-value]
    assert str(error.value).startswith(message.format(path))
    assert not (tmp_path / "in.out").exists()


def test_a_bad_line_before_good_ones_is_an_error_of_its_own(llm: LLM, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", b"{\n", {"text": "a"}, {"prompt": [1], **GREEDY})
    assert (job(llm, path).num_done, len(errors(path))) == (3, 2)


def test_the_summary_has_the_commonest_error_with_its_line_and_counts_duplicate_custom_ids(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [{"custom_id": name, "prompt": [1], **GREEDY} for name in ('a "quoted\\"', "b")]
    bad = [{"prompt": ""}, {"prompt": [5000]}, {"prompt": [5001]}, {"prompt": [5002], "custom_id": "line-1"}]
    path = write(tmp_path / "in.jsonl", *good[:1], *bad, *good, good[0])
    for num_before in (0, 8):
        summary = job(llm, path)
        assert (summary.num_before, summary.num_errors, summary.num_duplicates) == (num_before, 4, 2)
        assert summary.commonest_error == (
            "3 lines, the first is line 3: prompt 0 has token id 5000, outside the vocabulary; ids are 0 to 1023"
        )
        assert "4 with errors, 2 duplicate custom_ids, " in str(summary)
    write(path, *good)
    path.with_suffix(".out").unlink()
    summary = job(llm, path)
    assert (summary.num_duplicates, summary.commonest_error) == (0, None)
    assert "duplicate" not in str(summary)

    path = write(tmp_path / "one.jsonl", good[0], {"prompt": ""})
    options = ["--model", "tiny", "--device", "cpu", "--max-num-seqs", 2, "-i", path, "-o", tmp_path / "one.out"]
    assert run_main(*options) == 3
    assert "\nthe commonest error: line 2: prompt 0 is empty; " in capsys.readouterr().err


def test_an_input_that_loses_lines_while_the_job_runs_is_not_finished(llm: LLM, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", {"prompt": [1], **GREEDY}, {"prompt": [2], **GREEDY})

    def load() -> Any:
        write(path, {"prompt": [1], **GREEDY})
        return nullcontext(llm)

    with pytest.raises(JobError, match="had 2 lines when the job began, and 1 are done"):
        run_batch(load, path, path.with_suffix(".out"), use_tqdm=False)
    assert list(records(path)) == ["line-1"]


def test_a_full_disk_says_how_many_lines_are_done_and_the_same_job_goes_on(llm: LLM, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", *[{"prompt": [index], **GREEDY} for index in range(9)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))  # so many bytes a file, as if the disk were full then
        with pytest.raises(
            JobError, match=r"in.out cannot be written any more \(.*\); 3 lines are done: make room, and"
        ):
            job(llm, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    drop_all_requests(llm)
    assert job(llm, path).num_before == 3
    assert len(records(path)) == 9


@pytest.mark.parametrize("was_there", [False, True])
def test_a_job_that_never_began_leaves_no_file_behind(tmp_path: Path, was_there: bool) -> None:
    path = write(tmp_path / "in.jsonl", {"prompt": [1]})
    if was_there:
        (tmp_path / "out").touch()
    with pytest.raises(ZeroDivisionError):
        run_batch(lambda: 1 / 0, path, tmp_path / "out")  # type: ignore[arg-type,return-value]
    assert (tmp_path / "out").exists() == was_there


def test_an_output_that_a_failed_job_removes_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = job_files.fcntl.flock

    def remove_first(file: Any, how: int) -> None:
        (tmp_path / "out").unlink()
        lock(file, how)

    monkeypatch.setattr(job_files.fcntl, "flock", remove_first)
    with pytest.raises(JobError, match="another job is writing"):
        BatchOutput(tmp_path / "out")


def test_two_jobs_cannot_write_one_output(tmp_path: Path) -> None:
    first = BatchOutput(tmp_path / "out")
    with pytest.raises(JobError, match=r"another job is writing to .*out; wait for its end, or choose another"):
        BatchOutput(tmp_path / "out")
    first.close()
    BatchOutput(tmp_path / "out").close()


# --- the command line ---


def run_main(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_exit_code_says_what_became_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good.jsonl", {"prompt": [1], **GREEDY})
    bad = write(tmp_path / "bad.jsonl", {"prompt": [2], **GREEDY}, {"prompt": []}, {"prompt": []})
    options = ["--model", tiny_model_path(), "--device", "cpu", "--max-num-seqs", 2, "--no-overlap"]
    assert run_main(*options, "-i", good, "-o", tmp_path / "out1") == 0
    shown = capsys.readouterr().err
    assert "finished: 1 of 1 lines are done (0 before this run), 0 with errors" in shown
    assert re.search(
        r"^Generating: 1/1 req, prefill \d+ tok/s, decode \d+ tok/s, 00:\d\d passed, ", shown, re.MULTILINE
    )
    assert "\r" not in shown, "it is no terminal"
    assert run_main(*options, "-i", bad, "-o", tmp_path / "out2") == 3
    assert "and add --retry-errors to the command." in capsys.readouterr().err
    assert run_main(*options, "-i", bad, "-o", tmp_path / "out3", "--max-errors", 1) == 4
    assert "too many errors: " in capsys.readouterr().err
    assert run_main(*options, "-i", bad, "-o", tmp_path / "out1") == 2
    assert "has the result of another line 1" in capsys.readouterr().err
    changes = {
        "temperature was not given and is 0.5": ["--temperature", 0.5],
        "top_p was not given and is 0.5": ["--top-p", 0.5],
        "top_k was not given and is 5": ["--top-k", 5],
        "max_tokens was not given and is 'none'": ["--max-tokens", "none"],
        "system was not given and is 'a'": ["--system", "a"],
        "seed was 0 and is 1": ["--seed", 1],
        "dtype was 'auto' and is 'float32'": ["--dtype", "float32"],
        "load_format was 'auto' and is 'dummy'": ["--load-format", "dummy"],
        "kv_cache_dtype was 'auto' and is 'int8'": ["--kv-cache-dtype", "int8"],
        "quantization was not given and is 'fp8'": ["--quantization", "fp8"],
        "logprobs_mode was 'raw_logprobs' and is 'raw_logits'": ["--logprobs-mode", "raw_logits"],
        "hf_overrides was not given and is {'a': 1}, tokenizer was not given and is 'b'": [
            *("--tokenizer", "b", "--hf-overrides", '{"a": 1}')
        ],
    }
    for message, changed in changes.items():
        assert run_main(*options, "-i", good, "-o", tmp_path / "out1", *changed) == 2
        assert f"out1 was made with other settings: {message}; go on with what was used then" in capsys.readouterr().err
    same = ["--seed", 0, "--model", f"{tiny_model_path()}/", "--max-num-seqs", 3]
    assert run_main(*options, *same, "-i", good, "-o", tmp_path / "out1") == 0
    sampling = ["--top-k", 5, "--top-p", 0.5, "--system", "a"]
    assert run_main(*options, *sampling, "-i", good, "-o", tmp_path / "out5") == 0
    assert run_main(*options, *sampling[4:], *sampling[2:4], *sampling[:2], "-i", good, "-o", tmp_path / "out5") == 0
    for wrong in (
        ["--top-p", 2],
        ["--top-k", 0.5],
        ["--max-num-seqs", "x"],
        ["--dtype", "int8"],
        ["--max-num-seqs", 0],
        ["--max-tokens", 0],
        ["--no"],
    ):
        assert run_main(*options, "-i", good, "-o", tmp_path / "out4", *wrong) == 2


def test_a_dry_run_counts_what_the_job_would_do_and_names_its_errors_without_weights(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    lines: list[Any] = [
        {"prompt": [[1], [1] * 3, [1] * 4], "max_tokens": 5},
        {"messages": QUESTION, "n": 2, "temperature": 1, "max_tokens": 2},
        {"prompt": [2] * 250, "max_tokens": 99},
        {"input": [1, 2]},
        {"prompt": ""},
        b"{\n",
        BAD,
        {"prompt": [1], "structured_outputs": {"regex": "(a"}},
        {"prompt": [1], "stop_token_ids": [0], "tool_choice": "required"},
    ]
    path = write(tmp_path / "in.jsonl", *lines)
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path(), model, ignore=shutil.ignore_patterns("*.safetensors"))
    options = ["--model", model, "--max-model-len", 256, "-i", path, "--dry-run"]
    assert run_main(*options) == 3
    found = capsys.readouterr().out.splitlines()
    job(llm, path)
    assert {*found[:5]} == {f"{name.replace('-', ' ')}: {message}" for name, message in errors(path).items()}
    num_chat = len(llm.chat(QUESTION, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids)
    assert found[5] == "9 lines, 5 with errors"
    total = 1 + 3 + 4 + num_chat + 250 + 2
    assert found[6] == (
        f"6 prompts with {total} tokens: 1 to 250, {total / 6:.0f} on average; at most 25 tokens to generate"
    ), "5 for each of three prompts, 2 for each of two samples, and the 6 that fit"
    table = [line.split()[:3] for line in found[7:]]
    assert table == [
        ["tokens", "up", "to"],
        ["1", "1", "1"],
        ["2", "1", "2"],
        ["4", "2", "7"],
        ["16", "1", str(num_chat)],
        ["256", "1", "250"],
    ]
    assert [line.count("#") for line in found[8:]] == [20, 20, 40, 20, 20]
    assert {file.name for file in tmp_path.iterdir() if "out" in file.name} == {".in.out.settings", "in.out"}
    assert run_main(*options, "--limit", 4) == 0
    assert capsys.readouterr().out.startswith("4 lines, 0 with errors\n")
    assert run_main(*options, "--limit", 0) == 2
    schema = {"type": "object", "properties": {"a": {}}, "required": ["b"]}
    write(path, {"prompt": [1], "structured_outputs": {"json": schema}})
    assert run_main(*options) == 0
    assert run_main(*options, "--disable-additional-properties") == 3
    assert run_main(*options[:4], "-i", tmp_path / "none", "--dry-run") == 2


def test_a_job_with_worker_processes_is_stopped_by_a_sigterm_to_all_of_them(tmp_path: Path) -> None:
    """As job schedulers send it. The workers leave it to the first process."""
    path = write(tmp_path / "in.jsonl", *[{"prompt": [index % 50], "ignore_eos": True} for index in range(3000)])
    output = tmp_path / "out.jsonl"
    options = ["--model", "tiny", "--device", "cpu", "--tensor-parallel-size", "2", "--max-num-seqs", "4"]
    command = [sys.executable, "-m", "nanoinfer", "run-batch", "-i", str(path), "-o", str(output), *options]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    started = {"env": environment, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **started) as process:
        while process.poll() is None and not (output.exists() and output.stat().st_size):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
        shown = process.communicate(timeout=60)[1]
    assert process.returncode == 143, shown
    assert "terminated: " in shown
    assert "the same command goes on from here" in shown
    assert all(json.loads(line)["error"] is None for line in output.read_text().splitlines())


def test_a_job_that_fails_after_it_began_says_that_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"prompt": [1], **GREEDY}
    path = write(tmp_path / "in.jsonl", line, line)
    init = LLM.__init__

    def shorten(*args: Any, **options: Any) -> None:
        init(*args, **options)
        write(path, line)

    monkeypatch.setattr(LLM, "__init__", shorten)
    options = ["--model", tiny_model_path(), "--device", "cpu", "-i", path, "-o", tmp_path / "out"]
    assert run_main(*options) == 1
    assert "the input had 2 lines when the job began, and 1 are done" in capsys.readouterr().err
    write(path, line, line)
    monkeypatch.setattr(LLM, "__init__", init)
    monkeypatch.setattr(LLM, "default_sampling_params", property(lambda _: SamplingParams(top_k=-7)))
    assert run_main(*options) == 2, "nothing was done, since the model cannot be used"


def test_every_option_of_the_engine_is_one_of_the_command_with_its_explanation() -> None:
    arguments = [sys.executable, "-X", "importtime", "-m", "nanoinfer", "run-batch", "--help"]
    shown = subprocess.run(arguments, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    for field in fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')}" in shown.stdout
        assert field.metadata["help"].split()[0] in shown.stdout
    assert "The most sequences that run at the same time. Default: 512." in " ".join(shown.stdout.split())
    assert "{auto,float32,bfloat16,float16}" in shown.stdout
    assert "130  stopped by Ctrl-C" in shown.stdout
    assert "143  stopped by SIGTERM" in shown.stdout
    assert "torch" not in shown.stderr, "it is not imported to help"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "in.jsonl cannot be read ("), (b"text", "line 1 of in.jsonl: the line is not valid JSON")],
)
def test_a_wrong_input_is_noticed_before_pytorch_is_imported(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "in.jsonl").write_bytes(content)
    arguments = ["run-batch", "--model", "tiny", "-i", "in.jsonl", "-o", "out.jsonl"]
    command = [sys.executable, "-X", "importtime", "-m", "nanoinfer", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 2
    assert message in shown.stderr
    assert "torch" not in shown.stderr


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    """The exit code of a command, and what it printed."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    shown = capsys.readouterr()
    return ended.value.code, shown.out + shown.err


@pytest.mark.parametrize("command", [[], ["bench"]])
def test_help_has_a_line_for_each_command(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    _, listed = capsys.readouterr().out.split("\n  COMMAND\n")
    lines = listed.partition("\n\n")[0].splitlines()
    assert len(lines) >= 4
    assert all(re.fullmatch(r"    [a-z-]+ +[^ ].*", line) for line in lines)


def test_the_commands_own_help_names_each_command_once_and_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = said(capsys, "--help")
    assert code == 0
    assert len(re.findall(r"^ +run-batch\b", shown, re.MULTILINE)) == 1
    assert "nanoinfer run-batch --model Qwen/Qwen3-0.6B -i questions.jsonl" in shown
    assert said(capsys, "--version") == (0, f"nanoinfer {nanoinfer.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "nanoinfer: the following arguments are required: COMMAND; see nanoinfer --help"),
        ("run-batch --model m -i in", "the following arguments are required: -o/--output"),
        ("run-batch --model m -i in -o out --dtype int8", "argument --dtype: invalid choice: 'int8' (choose from"),
        ("run-batch --model m -i - -o out", "argument -i/--input: '-' is no file; a job needs files, so that it can"),
        ("run-batch --model m -i in -o -", "argument -o/--output: '-' is no file; a job needs files, so that it can"),
        (
            "run-batch --model m -i in -o out --max-tokens many",
            "argument --max-tokens: 'many' is no number of tokens; give a whole number, or none for up to the model's",
        ),
        (
            "run-batch --model m -i in -o out --temprature 0",
            "nanoinfer run-batch: unrecognized arguments: --temprature (did you mean --temperature?); see nanoinfer "
            "run-batch --help",
        ),
        ("run-batch --modle=m -i in -o out", "--modle (did you mean --model?); see nanoinfer run-batch --help"),
        ("run-batch --model m -i in -o out --max_tokens 3", "--max_tokens (did you mean --max-tokens?); see nanoinfer"),
        (
            "run-batch --model m -i in -o out --max-new-tokens 3",
            "(did you mean --max-tokens?); see nanoinfer run-batch",
        ),
        ("run-batch --model m -i in -o out --block-size 16", "(did you mean --kvcache-block-size?); see nanoinfer"),
        *(
            (
                f"run-batch --model m -i in -o out {option}",
                f"{option.split()[0]} (use the base model with enable_lora=True, and name the adapter in calls "
                "by lora_request=LoRARequest(name, id, folder), or merge the two with peft's merge_and_unload and give "
                "the folder where that is saved); see",
            )
            for option in ("--lora-modules a=b", "--lora-path a")
        ),
        (
            "run-batch --model m -i in -o out --wishes 3",
            "unrecognized arguments: --wishes; see nanoinfer run-batch --h",
        ),
        ("run-batch --model m -i in -o out more", "unrecognized arguments: more; see nanoinfer run-batch --help"),
        (
            "chat --modle m",
            "nanoinfer chat: unrecognized arguments: --modle (did you mean --model?); see nanoinfer chat",
        ),
        (
            "bench throughput --modle m",
            "nanoinfer bench throughput: unrecognized arguments: --modle (did you mean --model?); see nanoinfer bench "
            "throughput --help",
        ),
        ("bench host -x 3", "nanoinfer bench host: unrecognized arguments: -x; see nanoinfer bench host --help"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    code, shown = said(capsys, *arguments.split())
    assert code == 2
    assert message in shown
    assert shown.count("\n") == 1


def test_wrong_sampling_parameters_of_the_job_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="max_tokens=0"):
        run_batch(lambda: 1 / 0, tmp_path / "in", tmp_path / "out", overrides={"max_tokens": 0})  # type: ignore[arg-type,return-value]
    assert not (tmp_path / "out").exists()
