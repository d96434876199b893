"""Prompts in arrays and columns are the prompts in lists, whichever library they come from."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from nanoinfer import LLM, RequestError, SamplingParams, tiny_model_path
from nanoinfer.text.arguments import as_list_of_prompts
from nanoinfer.text.chat import as_conversations, render_chat

TEXTS = ["What is 2", "Sort 3"]
IDS = [[307, 287], [220]]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]


def objects(items: list[Any]) -> Any:
    """An object array, as in a column of lists that pandas has read from a file."""
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def arrow(chunked: bool) -> Callable[[list[Any]], Any]:
    def make(items: list[Any]) -> Any:
        pa = pytest.importorskip("pyarrow")
        return pa.chunked_array([items[:1], items[1:]]) if chunked else pa.array(items)

    return make


def column(layout: str | None) -> Callable[[list[Any]], Any]:
    def make(items: list[Any]) -> Any:
        dataset = pytest.importorskip("datasets").Dataset.from_dict({"items": items})
        return dataset.with_format(layout)["items"]

    return make


def series(items: list[Any]) -> Any:
    return pytest.importorskip("pandas").Series(items)


KINDS = {
    "tuple": tuple,
    "objects": objects,
    "pandas": series,
    "pandas of arrays": lambda items: series([objects(item) if isinstance(item, list) else item for item in items]),
    "arrow": arrow(chunked=False),
    "chunked arrow": arrow(chunked=True),
    "datasets": column(None),
    "datasets of arrays": column("numpy"),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu") as llm:
        yield llm


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompts", [TEXTS, IDS], ids=["texts", "ids"])
def test_a_column_of_texts_or_of_ids_is_a_list_of_them(kind: str, prompts: list[Any]) -> None:
    found = as_list_of_prompts(KINDS[kind](prompts))
    assert found == prompts
    assert all(isinstance(item, (str, list)) for item in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_conversations_is_a_list_of_them(kind: str, llm: LLM) -> None:
    if kind == "datasets of arrays":
        pytest.skip("NumPy has no array of dicts that `datasets` would make")
    tokenizer = llm.preparer.prompt_processor.require_tokenizer()
    found = [render_chat(tokenizer, conversation) for conversation in as_conversations(KINDS[kind](CHATS))]
    assert found == [render_chat(tokenizer, conversation) for conversation in CHATS]


def test_an_array_of_whole_numbers_is_one_prompt_and_one_of_two_dimensions_is_several() -> None:
    for of_ids in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), range(1, 4)):
        assert as_list_of_prompts(of_ids) == [[1, 2, 3]]  # type: ignore[arg-type]
    assert as_list_of_prompts(np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]  # type: ignore[arg-type]
    assert as_list_of_prompts(np.array(TEXTS)) == TEXTS  # type: ignore[arg-type]
    assert as_list_of_prompts([{"prompt_token_ids": np.array([1, 2])}, np.array([3])]) == [[1, 2], [3]]
    assert as_list_of_prompts({"prompt": "a", "multi_modal_data": None}) == ["a"]


class Series:
    """A column of numbers as pandas has it: it is no list and no sequence, and has `tolist` and `to_list`."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def tolist(self) -> list[Any]:
        return self.items

    to_list = tolist


@pytest.mark.parametrize("kind", ["stand-in", *(kind for kind in KINDS if kind not in ("tuple", "objects"))])
def test_a_column_of_whole_numbers_is_refused_with_what_to_give_instead(kind: str) -> None:
    column = (KINDS | {"stand-in": Series})[kind]([1, 2, 3])
    if isinstance(column, np.ndarray):
        pytest.skip("this version of `datasets` has arrays in place of columns")
    with pytest.raises(RequestError) as error:
        as_list_of_prompts(column)
    assert str(error.value) == (
        f"prompts is a {type(column).__name__} of whole numbers, [1, 2, 3]: give [[...], ...], a list of token ids for "
        "each prompt; or a list of the numbers, if they are one prompt's token ids"
    )
    assert as_list_of_prompts({"prompt_token_ids": column}) == as_list_of_prompts([column]) == [[1, 2, 3]]
    assert as_list_of_prompts((KINDS | {"stand-in": Series})[kind]([])) == []


@pytest.mark.parametrize("kind", ["tuple", "objects", "pandas"])
def test_a_column_of_sampling_params_has_one_for_each_prompt(kind: str, llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 3)]
    outputs = llm.generate(IDS, KINDS[kind](params), use_tqdm=False)
    assert [len(output.token_ids) for output in outputs] == [1, 3]


def test_generate_chat_and_score_take_arrays(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    for prompts in (TEXTS, IDS):
        expected = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        found = llm.generate(objects(prompts), params, use_tqdm=False)
        assert [output.token_ids for output in found] == expected
    expected = [output.token_ids for output in llm.chat(CHATS, params, use_tqdm=False)]
    assert [output.token_ids for output in llm.chat(objects(CHATS), params, use_tqdm=False)] == expected
    completions = np.array([" + 2", " 1"])
    scores = llm.score(np.array(TEXTS), completions, use_tqdm=False)  # type: ignore[arg-type]
    assert scores == llm.score(TEXTS, completions.tolist(), use_tqdm=False)


def test_generate_and_chat_truncate_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    keep = {"truncate_prompt_tokens": 2}
    whole, cut = (llm.generate(TEXTS, params, False, tokenization_kwargs=options) for options in (None, keep))
    assert [output.prompt_token_ids for output in cut] == [output.prompt_token_ids[-2:] for output in whole]
    assert [output.prompt for output in cut] == TEXTS
    whole, cut = (llm.chat(CHATS, params, False, tokenization_kwargs=options) for options in (None, keep))
    assert [output.prompt_token_ids for output in cut] == [output.prompt_token_ids[-2:] for output in whole]
