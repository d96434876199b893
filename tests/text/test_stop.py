"""How a request is told to stop, and what its text then is, through the whole engine."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanoinfer import LLM, RequestError, RequestOutput, SamplingParams, tiny_model_path

PROMPT = "<|im_start|>user\nlist all prime numbers within 100<|im_end|>\n<|im_start|>assistant\n"
PRIMES = "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97"


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no overlap"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu", overlap=request.param, kvcache_block_size=16) as llm:
        yield llm


def complete(llm: LLM, **options: object) -> RequestOutput:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 120} | options)  # type: ignore[arg-type]
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    assert llm.engine.block_manager.num_used_blocks == 0
    return output


def test_without_stop_strings_the_whole_answer_comes_and_no_stop_reason(llm: LLM) -> None:
    output = complete(llm)
    assert (output.text, output.finish_reason, output.outputs[0].stop_reason) == (PRIMES, "stop", None)


@pytest.mark.parametrize("stop", [", 31", "9, 31, 3", "29, 31, 37, 41, 43"])
def test_the_text_ends_right_before_a_stop_string_and_the_ids_with_it(llm: LLM, stop: str) -> None:
    output = complete(llm, stop=stop)
    assert output.text == PRIMES[: PRIMES.index(stop)]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert stop in llm.decode(output.token_ids)
    assert stop not in llm.decode(output.token_ids[:-1]), "no token after it is shown"


def test_the_stop_string_may_stay_in_the_text(llm: LLM) -> None:
    output = complete(llm, stop=["never", ", 31"], include_stop_str_in_output=True)
    assert output.text == PRIMES[: PRIMES.index(", 31") + 4]


def test_the_first_of_several_stop_strings_counts(llm: LLM) -> None:
    assert complete(llm, stop=["31", "13", "23"]).text == "2, 3, 5, 7, 11, "


def test_a_stop_string_complete_with_the_last_token_is_a_stop(llm: LLM) -> None:
    num_tokens = len(complete(llm, stop=", 31").token_ids)
    output = complete(llm, stop=", 31", max_tokens=num_tokens)
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", ", 31")
    output = complete(llm, stop=", 31", max_tokens=num_tokens - 1)
    assert output.finish_reason == "length"
    assert PRIMES.startswith(output.text)
    assert output.text == llm.decode(output.token_ids), "what was held back is shown in the end"


def test_a_stop_token_ends_the_completion_and_says_so(llm: LLM) -> None:
    ids = complete(llm).token_ids
    stop = ids[7]
    output = complete(llm, stop_token_ids=[stop])
    assert output.token_ids == ids[: ids.index(stop) + 1]
    assert output.text == llm.decode(output.token_ids[:-1])
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert complete(llm, stop_token_ids=[stop], ignore_eos=True).token_ids == output.token_ids
    assert complete(llm, stop_token_ids=[stop], include_stop_str_in_output=True).text == llm.decode(output.token_ids)


def test_special_tokens_are_shown_when_asked_for(llm: LLM) -> None:
    options = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert complete(llm, **options).text == f"{PRIMES}<|im_end|>"


def test_without_detokenizing_there_are_ids_and_no_text(llm: LLM) -> None:
    output = complete(llm, detokenize=False)
    assert (output.text, output.token_ids) == ("", complete(llm).token_ids)


def test_stop_strings_do_not_disturb_other_requests(llm: LLM) -> None:
    stops = [None, ", 31", "7", "no such text"]
    params = [SamplingParams(temperature=0, max_tokens=120, stop=stop) for stop in stops]
    outputs = llm.generate([PROMPT] * 4, params, use_tqdm=False)
    assert [output.text for output in outputs] == [PRIMES, PRIMES.split(", 31")[0], "2, 3, 5, ", PRIMES]


def test_stop_strings_without_a_tokenizer_are_refused(random_checkpoint: Callable[..., Path]) -> None:
    with LLM(random_checkpoint(), device="cpu") as llm:
        with pytest.raises(RequestError, match=r"stop=\('a',\) is found in text, and .* has no tokenizer; use"):
            llm.generate([[1]], SamplingParams(stop="a"), use_tqdm=False)
        assert llm.is_finished()
