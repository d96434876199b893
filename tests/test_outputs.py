"""RequestOutput: attributes, and the keys that users of nano-vllm write."""

import dataclasses

import pytest

from nanoinfer import CompletionOutput, RequestOutput

FIRST = CompletionOutput(index=0, text=" four", token_ids=[19, 2], finish_reason="stop")
SECOND = CompletionOutput(index=1, text=" five", token_ids=[20], finish_reason="length")
OUTPUT = RequestOutput(
    request_id=7, prompt="2 + 2 =", prompt_token_ids=[17, 10, 17, 28], num_cached_tokens=0, outputs=[FIRST, SECOND]
)


def test_attributes_and_keys_are_those_of_the_first_completion() -> None:
    assert (OUTPUT.text, OUTPUT.token_ids, OUTPUT.finish_reason) == (" four", [19, 2], "stop")
    assert (OUTPUT["text"], OUTPUT["token_ids"], OUTPUT["finish_reason"]) == (" four", [19, 2], "stop")


@pytest.mark.parametrize("name", ["tokens", "prompt", "__class__", "outputs"])
def test_any_other_key_is_an_error_that_lists_the_keys(name: str) -> None:
    with pytest.raises(KeyError, match=f"{name}.*use 'text', 'token_ids' or 'finish_reason'"):
        OUTPUT[name]


def test_outputs_never_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FIRST.text = ""  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        OUTPUT.prompt = ""  # type: ignore[misc]
