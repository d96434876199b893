"""How a request is told to stop, and what its text then is, through the whole engine."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoinfer import LLM, RequestOutput, SamplingParams, tiny_model_path

PROMPT = "<|im_start|>user\nlist all prime numbers within 100<|im_end|>\n<|im_start|>assistant\n"
PRIMES = "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_model_path(), device="cpu", kvcache_block_size=16) as llm:
        yield llm


def complete(llm: LLM, **options: object) -> RequestOutput:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 120} | options)  # type: ignore[arg-type]
    [output] = llm.generate(PROMPT, params, use_tqdm=False)
    assert llm.engine.block_manager.num_used_blocks == 0
    return output


@pytest.fixture(scope="module")
def whole(llm: LLM) -> RequestOutput:
    return complete(llm)


def test_without_stop_strings_the_whole_answer_comes_and_no_stop_reason(llm: LLM, whole: RequestOutput) -> None:
    assert (whole.text, whole.finish_reason, whole.outputs[0].stop_reason) == (PRIMES, "stop", None)
    options = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert complete(llm, **options).text == f"{PRIMES}<|im_end|>"


@pytest.mark.parametrize("stop", [", 11", "7, 11, 13"])
def test_the_text_ends_right_before_a_stop_string_and_the_ids_with_it(llm: LLM, stop: str) -> None:
    output = complete(llm, stop=["never", stop])
    assert output.text == PRIMES[: PRIMES.index(stop)]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert stop in llm.decode(output.token_ids)
    assert stop not in llm.decode(output.token_ids[:-1]), "no token after it is shown"
    assert complete(llm, stop=stop, include_stop_str_in_output=True).text == output.text + stop


def test_a_stop_string_complete_with_the_last_token_is_a_stop(llm: LLM) -> None:
    num_tokens = len(complete(llm, stop=", 11").token_ids)
    output = complete(llm, stop=", 11", max_tokens=num_tokens)
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", ", 11")
    output = complete(llm, stop=", 11", max_tokens=num_tokens - 1)
    assert output.finish_reason == "length"
    assert PRIMES.startswith(output.text)
    assert output.text == llm.decode(output.token_ids), "what was held back is shown in the end"


def test_a_stop_token_ends_the_completion_and_says_so(llm: LLM, whole: RequestOutput) -> None:
    ids = whole.token_ids
    stop = ids[7]
    output = complete(llm, stop_token_ids=[stop])
    assert output.token_ids == ids[: ids.index(stop) + 1]
    assert output.text == llm.decode(output.token_ids[:-1])
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert complete(llm, stop_token_ids=[stop], ignore_eos=True).token_ids == output.token_ids
    assert complete(llm, stop_token_ids=[stop], include_stop_str_in_output=True).text == llm.decode(output.token_ids)


def test_the_id_of_a_stop_token_is_the_reason_unless_it_is_the_tokenizers_eos(
    llm: LLM, whole: RequestOutput, tmp_path: Path
) -> None:
    eos, other = whole.token_ids[-1], whole.token_ids[7]
    assert eos == llm.tokenizer.eos_token_id
    assert complete(llm, stop_token_ids=[eos]).outputs[0].stop_reason is None
    assert complete(llm, stop_token_ids=[eos], ignore_eos=True).outputs[0].stop_reason == eos
    shutil.copytree(tiny_model_path(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, other]}))
    with LLM(tmp_path, device="cpu") as with_two:
        assert complete(with_two).outputs[0].stop_reason == other
        assert complete(with_two, ignore_eos=True).finish_reason == "length"


def test_without_detokenizing_there_are_ids_and_no_text(llm: LLM, whole: RequestOutput) -> None:
    output = complete(llm, detokenize=False, max_tokens=9)
    assert (output.text, output.token_ids) == ("", whole.token_ids[:9])


@pytest.mark.parametrize("overlap", [True, False])
def test_stop_strings_do_not_disturb_other_requests(overlap: bool) -> None:
    stops = [None, ", 11", ["31", "7", "23"], "no such text"]
    params = [SamplingParams(temperature=0, max_tokens=30, stop=stop) for stop in stops]
    with LLM(tiny_model_path(), device="cpu", overlap=overlap) as llm:
        outputs = llm.generate([PROMPT] * 4, params, use_tqdm=False)
    texts = [output.text for output in outputs]
    assert texts == [texts[0], PRIMES.split(", 11")[0], "2, 3, 5, ", texts[0]]
    assert PRIMES.startswith(texts[0])
