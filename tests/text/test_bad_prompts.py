"""Calls in which some prompts cannot be served: all are named at once, or come back in their places."""

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nanoinfer import LLM, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams, tiny_model_path
from nanoinfer.engine.engine import Engine

NAN = float("nan")
SHORT = SamplingParams(temperature=0, max_tokens=4)
GOOD: list[Any] = ["What is 2", [307, 287]]
BAD: list[tuple[Any, str]] = [
    (NAN, "is a float; give a string or a list of token ids, or {'prompt': either}, in place of nan"),
    (None, "is a NoneType; give a string"),
    (7, "is a int; give a string"),
    (b"text", "is a bytes; give a string"),
    (
        {"text": "a"},
        "is a dict; give a string or a list of token ids, or {'prompt': either}, in place of {'text': 'a'}",
    ),
    (
        {"prompt_token_ids": [1], "multi_modal_data": {"image": 1}},
        "has images, which are not read here; give LLM(limit_mm_per_prompt={'image': 4}), say, if the model sees",
    ),
    (
        {"prompt": "a", "multi_modal_data": {"image": 1}, "cache_salt": "b"},
        "has 'cache_salt' beside 'prompt', which is a whole prompt; leave 'cache_salt' out",
    ),
    ({"prompt": "a", "cache_salt": "b", "lora": 1}, "has 'cache_salt', 'lora' beside 'prompt', which is a whole"),
    ("", "is empty; give at least one token"),
    ([], "is empty; give at least one token"),
    ([1, NAN], "has nan among its token ids; give ints"),
    ([1, 5000], "has token id 5000, outside the vocabulary; ids are 0 to 1023"),
    ([1] * 64, "has 64 tokens, and with one more exceeds max_model_len=64; shorten it to 63"),
    ("1 " * 10_000, "has 20000 characters, and max_model_len tokens hold"),
    ("a\ud800", "has a lone surrogate, which is no character: 'a\\ud800'; decode its bytes as UTF-8"),
]


KINDS = [
    *["not_a_prompt"] * 8,
    *["empty_prompt"] * 2,
    *["invalid_token_id"] * 2,
    *["prompt_too_long"] * 2,
    "not_unicode",
]  # of BAD


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu", max_model_len=64) as llm:
        yield llm


def errors(outputs: list[RequestOutput]) -> list[str | None]:
    return [output.outputs[0].error for output in outputs]


def test_one_bad_prompt_is_an_error_of_its_own(llm: LLM) -> None:
    for prompt, said in BAD:
        with pytest.raises(RequestError) as error:
            llm.generate([*GOOD, prompt], SHORT, use_tqdm=False)
        assert str(error.value).startswith(f"prompt 2 {said}")
    assert llm.is_finished()


def test_of_many_bad_prompts_the_first_ten_are_named_with_their_values_and_all_are_counted(llm: LLM) -> None:
    column: list[Any] = ["What is 2"] * 200
    column[7::10] = [NAN, None, 3.5, *[""] * 17]
    with pytest.raises(RequestError) as error:
        llm.generate(column, SHORT, use_tqdm=False)
    first, *lines = str(error.value).splitlines()
    assert first == (
        "20 of 200 prompts cannot be served; mend them, or let a call with on_error='return' answer the rest:"
    )
    assert [line.split()[1] for line in lines[:-1]] == [str(index) for index in range(7, 107, 10)]
    assert [line.rpartition(" ")[2] for line in lines[:3]] == ["nan", "None", "3.5"]
    assert lines[-1] == "  and 10 more"
    assert llm.is_finished()


def test_bad_prompts_come_back_in_their_places_and_the_rest_is_answered(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    expected = llm.generate(GOOD, SHORT, use_tqdm=False)
    prompts = [GOOD[0], *(prompt for prompt, _ in BAD), GOOD[1]]
    outputs = llm.generate(prompts, SHORT, use_tqdm=False, on_error="return")
    assert [outputs[0].text, outputs[-1].text] == [output.text for output in expected]
    assert [outputs[0].finish_reason, outputs[-1].finish_reason] == ["length", "length"]
    for place, (output, (prompt, said)) in enumerate(zip(outputs[1:-1], BAD, strict=True), 1):
        assert (output.text, output.token_ids, output.finish_reason) == ("", [], "error")
        assert (output.outputs[0].error or "").startswith(f"prompt {place} {said}")
        assert output.prompt == (prompt if isinstance(prompt, str) else None)
    assert [output.request_id for output in outputs] == [*range(outputs[0].request_id, outputs[-1].request_id + 1)]
    assert f"{len(BAD)} of {len(prompts)} prompts come back with an error" in caplog.text
    assert llm.is_finished()


def test_a_call_in_which_nothing_can_be_served_runs_no_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Engine, "step")
    outputs = llm.generate([NAN, ""], SamplingParams(n=3), use_tqdm=False, on_error="return")
    assert [[sample.finish_reason for sample in output.outputs] for output in outputs] == [["error"] * 3] * 2


def test_priorities_options_and_callbacks_stay_with_their_prompts(llm: LLM) -> None:
    prompts = [NAN, "What is 2", "", "Sort 3", None]
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (1, 2, 3, 4, 5)]
    told: list[RequestOutput] = []
    options: dict[str, Any] = {"priority": [0, 0, 0, 9, 0], "on_finish": told.append, "on_error": "return"}
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    assert [len(output.token_ids) for output in outputs] == [0, 2, 0, 4, 0]
    assert [error is None for error in errors(outputs)] == [False, True, False, True, False]
    assert sorted(output.request_id for output in told) == [output.request_id for output in outputs]
    assert [output.finish_reason for output in told] == ["error"] * 3 + ["length"] * 2, "bad ones are told of first"


def test_options_that_the_model_cannot_serve_are_errors_of_their_prompts(llm: LLM) -> None:
    form = StructuredOutputsParams(regex="(")
    bad = [SamplingParams(logprobs=5000), SamplingParams(structured_outputs=form), SamplingParams(logit_bias={5000: 1})]
    params = [bad[0], SHORT, bad[1], bad[1], bad[2], SHORT]
    prompts = ["What is 2"] * 5 + [""]
    found = errors(llm.generate(prompts, params, use_tqdm=False, on_error="return"))
    assert found[1] is None
    for index, said in {
        0: "logprobs=5000 is more",
        2: "structured_outputs regex",
        3: "structured_outputs regex",
        4: "logit_bias has token id 5000",
    }.items():
        assert (found[index] or "").startswith(f"prompt {index}: {said}")
    assert found[5] == "prompt 5 is empty; give at least one token"
    with pytest.raises(
        RequestError, match=r"3 of 6 prompts cannot be served(.|\n)*prompt 0: logprobs(.|\n)*prompt 4: lo"
    ):
        llm.generate(prompts, params, use_tqdm=False)
    with pytest.raises(RequestError, match="2 of 4 prompts cannot be served"):
        llm.generate(prompts[1:5], [*params[1:4], SHORT], use_tqdm=False)


def test_options_for_all_prompts_that_cannot_be_served_are_one_error(llm: LLM) -> None:
    for params, said in (
        (SamplingParams(logprobs=5000), "logprobs=5000 is more than the vocabulary"),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")),
            "structured_outputs regex='(' cannot be compiled",
        ),
    ):
        with pytest.raises(RequestError) as error:
            llm.generate(GOOD, params, use_tqdm=False)
        assert str(error.value).startswith(said)
        assert errors(llm.generate(GOOD, params, False, on_error="return")) == [str(error.value)] * 2


def test_a_text_on_which_the_tokenizer_fails_is_found_among_the_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    encode = tokenizer.encode

    def fail(texts: list[str], *args: Any) -> list[list[int]]:
        if "Sort 3" in texts:
            raise RequestError("the tokenizer cannot encode a prompt (panic); shorten it")
        return encode(texts, *args)

    monkeypatch.setattr(tokenizer, "encode", fail)
    found = errors(llm.generate(["What is 2", "Sort 3"], SHORT, use_tqdm=False, on_error="return"))
    assert found == [None, "prompt 1: the tokenizer cannot encode a prompt (panic); shorten it"]


def test_bad_conversations_come_back_in_their_places(llm: LLM) -> None:
    good = [{"role": "user", "content": "What is 312 + 48?"}]
    template = (
        "{% if '!' in messages[0].content %}{{ raise_exception('no shouting') }}{% endif %}{{ messages[0].content }}"
    )
    conversations: list[Any] = [
        NAN,
        good,
        [],
        [{"role": "usr", "content": "Hello"}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "Hello!"}],
    ]
    options: dict[str, Any] = {"use_tqdm": False, "chat_template": template}
    conversations[3][0]["role"] = 3
    outputs = llm.chat(conversations, SHORT, on_error="return", **options)
    [expected] = llm.chat(good, SHORT, **options)
    assert outputs[1].text == expected.text
    found = errors(outputs)
    said = [
        "conversation 0 is nan; give a list of one message or more",
        None,
        "conversation 2 is []; give",
        "message 0 of conversation 3 has role=3; give",
        "prompt 4 has a lone surrogate",
        "message 0 of conversation 5 has no content",
        "the chat template cannot render conversation 6 (no shouting); mend",
    ]
    for error, start in zip(found, said, strict=True):
        assert error is start or (error or "").startswith(start or "nothing")
    with pytest.raises(RequestError) as raised:
        llm.chat(conversations, SHORT, **options)
    assert str(raised.value).splitlines()[0].startswith("6 of 7 prompts cannot be served")
    assert [line.strip() for line in str(raised.value).splitlines()[1:]] == [error for error in found if error]


def test_an_on_error_that_is_not_known_is_refused(llm: LLM) -> None:
    for on_error in ("ignore", None, True):
        options: dict[str, Any] = {"use_tqdm": False, "on_error": on_error}
        calls: list[Callable[[], Any]] = [
            lambda: llm.generate("a", SHORT, **options),  # noqa: B023
            lambda: llm.chat([{"role": "user", "content": "a"}], SHORT, **options),  # noqa: B023
            lambda: llm.score("a", "b", **options),  # noqa: B023
            lambda: llm.embed("a", **options),  # noqa: B023
        ]
        for call in calls:
            with pytest.raises(RequestError, match=f"on_error={on_error!r} is not known; use 'raise', or 'return'"):
                call()


def test_asyncio_has_it_too(llm: LLM) -> None:
    told: list[RequestOutput] = []

    async def ask() -> list[RequestOutput]:
        nothing = await llm.agenerate([NAN], SHORT, on_error="return")
        return nothing + await llm.agenerate(["", "What is 2"], SHORT, on_error="return", on_finish=told.append)

    outputs = asyncio.run(ask())
    assert [output.finish_reason for output in outputs] == ["error", "error", "length"]
    assert [output.finish_reason for output in told] == ["error", "length"]


def test_scores_name_all_bad_pairs(llm: LLM) -> None:
    with pytest.raises(
        RequestError, match=r"2 of 3 prompts cannot be served(.|\n)*prompt 0 is a float(.|\n)*prompt 2 is"
    ):
        llm.score([NAN, "a", None], ["b"] * 3, use_tqdm=False)
    assert not math.isnan(llm.score("a", "b", use_tqdm=False)[0].total)


def test_bad_pairs_come_back_in_their_places_too(llm: LLM) -> None:
    prompts, completions = ["What is 2", *(prompt for prompt, _ in BAD), "Sort 3"], ["b"] * (len(BAD) + 2)
    outputs = llm.score(prompts, completions, use_tqdm=False, on_error="return")
    assert [outputs[0], outputs[-1]] == llm.score(["What is 2", "Sort 3"], ["b", "b"], use_tqdm=False)
    for index, (output, (_, said), kind) in enumerate(zip(outputs[1:-1], BAD, KINDS, strict=True), 1):
        assert (output.token_ids, output.logprobs, output.is_greedy, output.error_kind) == ([], [], False, kind)
        assert (output.error or "").startswith(f"prompt {index} {said}")
        assert math.isnan(output.total)
    [first, second] = llm.score(["a", "a"], ["", "b"], use_tqdm=False, on_error="return")
    assert (first.error, second.error) == ("completion 0 is empty; give at least one token", None)


@pytest.mark.parametrize("is_async", [False, True])
def test_bad_texts_come_back_in_the_places_of_their_embeddings(llm: LLM, is_async: bool) -> None:
    given = [*GOOD, *(prompt for prompt, _ in BAD), "Sort 3"]
    if is_async:
        outputs = asyncio.run(llm.aembed(given, on_error="return"))
    else:
        outputs = llm.embed(given, on_error="return", use_tqdm=False)
    longest = KINDS.index("prompt_too_long")  # a prompt of 64 tokens fits where nothing is generated
    kinds: list[str | None] = [*KINDS]
    kinds[longest] = None
    assert [output.error_kind for output in outputs] == [None, None, *kinds, None]
    assert [output.prompt for output in outputs] == [text if isinstance(text, str) else None for text in given]
    for output in outputs:
        assert np.isnan(output.embedding).all() == (output.error is not None)
        assert output.embedding.shape == outputs[0].embedding.shape
    rows = outputs.to_dicts()
    assert rows[2]["error"].startswith("prompt 2 is a float")
    assert rows[2].keys() == rows[0].keys()


def test_an_error_has_a_kind_that_is_the_same_whatever_the_prompt(llm: LLM) -> None:
    given = [prompt for prompt, _ in BAD]
    outputs = llm.generate(given, SHORT, use_tqdm=False, on_error="return")
    assert [output.error_kind for output in outputs] == KINDS
    for prompt, kind in zip(given, KINDS, strict=True):
        with pytest.raises(RequestError) as error:
            llm.generate(["a", prompt], SHORT, use_tqdm=False)
        assert error.value.kind == kind
    chats: list[Any] = [[], [{"role": "nobody", "content": "a"}], [{"role": "user", "content": "a"}]]
    found = llm.chat(chats, SHORT, use_tqdm=False, on_error="return")
    assert [output.error_kind for output in found] == ["invalid_messages", "invalid_messages", None]

    def fail(token_ids: list[int], logits: Any) -> Any:
        raise ValueError("no")

    def spoil(token_ids: list[int], logits: Any) -> Any:
        return logits * NAN

    params = [
        SamplingParams(logit_bias={5000: 1}),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")),
        SamplingParams(logits_processors=[fail]),
        SamplingParams(logits_processors=[spoil]),
    ]
    outputs = llm.generate(["a"] * 4, params, use_tqdm=False, on_error="return")
    kinds = ["invalid_sampling_params", "invalid_sampling_params", "logits_processor", "nan_logits"]
    assert [output.error_kind for output in outputs] == kinds
