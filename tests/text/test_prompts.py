"""A prompt's way to token ids, and what is refused on it, with a tokenizer of seven words."""

import re
import signal
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoinfer import RequestError, SamplingParams, StructuredOutputsParams
from nanoinfer.text.arguments import Errors, report
from nanoinfer.text.prompts import PromptProcessor, pack_ids, split_whole
from nanoinfer.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import save_tokenizer

ONE, TWO, BOS = 4, 5, 1


@pytest.fixture
def prompts(tmp_path: Path) -> PromptProcessor:
    save_tokenizer(tmp_path)
    return PromptProcessor(Tokenizer(tmp_path), "a model", vocab_size=10, max_model_len=4)


def encode(prompts: PromptProcessor, given: list[Any], **options: Any) -> list[list[int]]:
    """The token ids of prompts; what is wrong with them is raised."""
    errors: Errors = {}
    encoded, _ = prompts.encode(dict(enumerate(given)), errors, **options)
    report(errors, len(given))
    return [*encoded.values()]


def test_texts_and_token_ids_may_be_mixed(prompts: PromptProcessor) -> None:
    given = [9, 8]
    encoded = encode(prompts, ["one", given, "two one"])
    given.append(3)  # the list is the user's, and a copy was taken
    assert encoded == [[BOS, ONE], [9, 8], [BOS, TWO, ONE]]
    assert encode(prompts, ["one"], add_special_tokens=False) == [[ONE]]
    assert encode(prompts, []) == []


def test_a_text_that_comes_repeatedly_is_tokenized_once_and_each_prompt_has_ids_of_its_own(
    prompts: PromptProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    original = prompts.require_tokenizer().encode
    monkeypatch.setattr(prompts.tokenizer, "encode", lambda texts, *args: asked.extend(texts) or original(texts, *args))
    first, _, third = encode(prompts, ["one", "two", "one"])
    assert asked == ["one", "two"]
    first.append(9)
    assert third == [BOS, ONE]


TRUNCATED = [
    (1, [[ONE], [7]]),
    (2, [[BOS, ONE], [8, 7]]),  # the BOS that the tokenizer adds stays
    (3, [[BOS, TWO, ONE], [9, 8, 7]]),
    (4, [[BOS, TWO, ONE], [9, 8, 7]]),  # one token less than the model takes leaves room for an answer
    (-1, [[BOS, TWO, ONE], [9, 8, 7]]),
]


@pytest.mark.parametrize(("number", "expected"), TRUNCATED)
def test_a_prompt_that_is_truncated_keeps_its_last_tokens(
    prompts: PromptProcessor, number: int, expected: list[list[int]]
) -> None:
    options = {"truncate_prompt_tokens": number}
    assert encode(prompts, ["one two two one", [5, 9, 8, 7]], tokenization_kwargs=options) == expected
    assert encode(prompts, ["two", [5]], tokenization_kwargs=options)[1] == [5]
    plain = {"truncate_prompt_tokens": 2, "add_special_tokens": False}
    assert encode(prompts, ["one two two one"], tokenization_kwargs=plain) == [[TWO, ONE]]


@pytest.mark.parametrize("number", [0, -2, 5, 1.0, True, "1"])
def test_a_wrong_number_of_tokens_to_keep_is_refused(prompts: PromptProcessor, number: object) -> None:
    message = f"truncate_prompt_tokens={number!r} must be a whole number of at least 1 and at most max_model_len=4"
    with pytest.raises(RequestError, match=message):
        encode(prompts, ["one"], tokenization_kwargs={"truncate_prompt_tokens": number})


def test_an_option_of_tokenizing_that_there_is_not_is_a_type_error(prompts: PromptProcessor) -> None:
    message = "tokenization_kwargs has no option 'truncate_prompt'; did you mean 'truncate_prompt_tokens'?"
    with pytest.raises(TypeError, match=re.escape(message)):
        encode(prompts, ["one"], tokenization_kwargs={"truncate_prompt": 1})


def test_an_empty_text_can_be_tokenized_but_not_served(prompts: PromptProcessor) -> None:
    assert prompts.encode_text("") == [BOS]
    with pytest.raises(RequestError, match="prompt 0 is empty; give at least one token"):
        encode(prompts, [""], add_special_tokens=False)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "is empty; give at least one token"),
        (None, "is a NoneType; give a string or a list of token ids"),
        ([1, "a"], "has 'a' among its token ids; give ints"),
        ([1, 10], r"has token id 10, outside the vocabulary; ids are 0 to 9"),
        ([1, 2, 3, 4], "has 4 tokens, and with one more exceeds max_model_len=4; shorten it to 3"),
        ("one two one two", "has 5 tokens, and with one more exceeds max_model_len=4"),
        ("a\ud800", "has a lone surrogate"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_by_its_place(
    prompts: PromptProcessor, prompt: object, message: str
) -> None:
    with pytest.raises(RequestError, match=rf"^prompt 1 {message}"):
        encode(prompts, [[1], prompt])


@pytest.mark.parametrize("item", [True, False, 2.0, float("nan"), None, "2", np.bool_(True), [2]], ids=repr)
def test_what_is_no_whole_number_is_refused_among_token_ids(prompts: PromptProcessor, item: object) -> None:
    with pytest.raises(RequestError, match=rf"^prompt 1 has {re.escape(repr(item))} among its token ids; give ints"):
        encode(prompts, [[1, 2], [2, item], [3]])


@pytest.mark.parametrize("token_id", [-1, 10, 2**31, -(2**31) - 1, 10**30])
def test_a_whole_number_of_any_size_outside_the_vocabulary_is_refused(prompts: PromptProcessor, token_id: int) -> None:
    with pytest.raises(RequestError, match=f"^prompt 1 has token id {token_id}, outside the vocabulary"):
        encode(prompts, [[1, 2], [2, token_id], [3]])


def test_ids_are_packed_as_int32_unless_there_is_something_else_among_them() -> None:
    ids = [0, 1, -1, 255, 256, 2**31 - 1, -(2**31), 150_000, 150_000]
    assert pack_ids(ids) == array("i", ids).tobytes()
    signal_1 = signal.Signals(1)  # an int of its own type, as True is
    items = 2**31, 10**30, True, signal_1, 1.0, None, "1", b"iiii", [1], (1,), np.int64(1), np.int32(1), object()
    for item in (*items, "", b"", (), []):  # the last are as long as an int where they are written out
        assert [pack_ids(given) for given in ([item], [item, 1], [1, 1, item], [1, item, 1])] == [None] * 4
    assert [pack_ids(given) for given in ([], (1,), "1", None, np.array([1]))] == [None] * 5


def test_whole_numbers_of_numpy_become_ints_beside_prompts_of_ints(prompts: PromptProcessor) -> None:
    errors: Errors = {}
    given: list[Any] = [[1, 2], [np.int64(3), np.uint8(4)], [], (0, 9)]
    params = [SamplingParams()] * len(given)
    requests = [*prompts.prepare(dict(enumerate(given)), params, [0] * len(given), errors).values()]
    assert [request.token_ids for request in requests] == [[1, 2], [3, 4], [], [0, 9]]
    assert {*map(type, requests[1].token_ids)} == {int}
    assert [*errors] == [2]
    for request in requests:
        assert request.packed_ids is None or array("i", request.packed_ids).tolist() == request.token_ids


def test_an_error_names_what_it_is_about(prompts: PromptProcessor) -> None:
    with pytest.raises(RequestError, match="completion 0 is empty"):
        encode(prompts, [[]], what="completion")


def test_without_a_tokenizer_token_ids_are_served_and_texts_are_not() -> None:
    prompts = PromptProcessor(None, "a model", vocab_size=10, max_model_len=4)
    assert encode(prompts, [[1, 2]]) == [[1, 2]]
    with pytest.raises(RequestError, match="a model has no tokenizer; give the prompt as a list of token ids"):
        encode(prompts, ["one"])
    for options, said in (
        ({"stop": "a"}, r"stop=\('a',\) is about text, and a model has no tokenizer; use stop_token_ids"),
        ({"bad_words": ["a"]}, r"bad_words=\('a',\) is about text, and a model has no tokenizer; use logit_bias"),
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, "structured_outputs=Str.* use allowed_token_ids"),
    ):
        with pytest.raises(RequestError, match=said):
            prompts.check_params(SamplingParams(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_minus_one_is_all_of_the_vocabulary(prompts: PromptProcessor, name: str) -> None:
    params = SamplingParams(**{name: -1})  # type: ignore[arg-type]
    assert prompts.check_params(params) == SamplingParams(**{name: 10})  # type: ignore[arg-type]
    few = SamplingParams(**{name: 2})  # type: ignore[arg-type]
    assert prompts.check_params(few) is few


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_no_more_logprobs_than_the_vocabulary_has_tokens(prompts: PromptProcessor, name: str) -> None:
    prompts.check_params(SamplingParams(**{name: 10}))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=f"{name}=11 is more than the vocabulary of 10 tokens"):
        prompts.check_params(SamplingParams(**{name: 11}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        ([1, 2, 3], ([1, 2], [3])),  # the prompt's tokens, and one more
        ([1, 9], ([1], [9])),  # a token across the border is the completion's
        ([9, 9], ([1, 2], [3])),  # nothing of the prompt is left: both by themselves
        ([], ([1, 2], [3])),  # they were not two texts
    ],
)
def test_a_whole_is_split_where_it_differs_from_the_prompt(
    whole: list[int], expected: tuple[list[int], list[int]]
) -> None:
    assert split_whole([1, 2], [3], whole) == expected
