"""Models that see give transformers' own answers to prompts with images, however these are scheduled."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.engine.engine import Recipient
from nanoinfer.errors import ModelError
from nanoinfer.images.processed import ProcessedPrompt
from nanoinfer.models import SUPPORTED
from nanoinfer.outputs import RequestOutput
from nanoinfer.runner import step_images
from nanoinfer.text.prompts import PreparedRequest
from tests.images.seeing_models import (
    FOUR,
    IS_5,
    MODELS,
    MORE,
    OTHERS,
    SPECIAL,
    answers_of_transformers,
    make_prompt,
    tiny_config,
    write_seeing,
)
from tests.models.tiny_transformers import Answer

NUM_TOKENS = 12
# The same image alone and twice, several, none, the whole prompt again, and one that parts after an image.
PROMPTS: list[list[int | str]] = [
    [20, "#1", 8],
    [20, "#2", 8],
    [20, "#1", 3, "#2", 5],
    [30],
    [20, "#1", 8],
    [3, "#1", 2, "#1", "#0", 6],
    [20, "#1", 12],
    [33, "#0", 1],
]
# Whole prompts at once; chunks that end within images; so few blocks that rows are preempted.
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in chunks": {"max_num_batched_tokens": 22, "max_num_seqs": 3},
    "preempted": {"max_num_seqs": 4},
}


def load(folder: Path, **options: Any) -> LLM:
    given = {"dtype": "float32", "model_impl": "transformers", "kvcache_block_size": 16}
    return LLM(folder, limit_mm_per_prompt={"image": 8}, **{**given, **options})


def impls(architecture: str) -> list[str]:
    """Return whose layers of text can follow what sees."""
    has_states = architecture.startswith("Qwen3_5")  # which only our own layers keep
    return [*["transformers"] * (not has_states), *["nanoinfer"] * (architecture in SUPPORTED)]


def run(llm: LLM, prompts: list[ProcessedPrompt], **options: Any) -> list[RequestOutput]:
    """Return the outputs of prompts whose images are processed."""
    params = SamplingParams(
        **{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 1, "detokenize": False} | options
    )
    recipient = Recipient([])
    for prompt, request_id in zip(prompts, llm.engine.reserved_ids.reserve(len(prompts)), strict=True):
        request = PreparedRequest(
            prompt=None, token_ids=prompt.token_ids, sampling_params=params, images=tuple(prompt.images)
        )
        llm.engine.add_request(request_id, request, recipient)
    while not llm.engine.is_finished():
        llm.engine.step()
    return sorted(recipient.outputs, key=lambda output: output.request_id)


def answers(outputs: list[RequestOutput]) -> list[Answer]:
    found = []
    for output in outputs:
        tokens, logprobs = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        assert logprobs is not None
        found.append(Answer(tokens, [one[token].logprob for token, one in zip(tokens, logprobs, strict=True)]))
    return found


def assert_close(found: list[Answer], expected: list[Answer]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)


Case = tuple[Path, list[ProcessedPrompt], list[Answer]]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Return what makes a checkpoint of a class, prompts for it, and transformers' answers to these, once."""

    @cache
    def make(architecture: str) -> Case:
        folder = tmp_path_factory.mktemp(architecture)
        write_seeing(architecture, folder)
        prompts = [make_prompt(architecture, parts) for parts in PROMPTS]
        return folder, prompts, answers_of_transformers(architecture, folder, prompts, NUM_TOKENS)

    return make


def assert_answers_as_transformers(case: Case, model_impl: str) -> None:
    folder, prompts, expected = case
    longest = max(len(prompt.token_ids) for prompt in prompts) + NUM_TOKENS
    for way, options in WAYS.items():
        if way == "preempted":  # as few blocks as the longest sequence needs
            options = {**options, "num_kvcache_blocks": longest // 16 + 1, "max_model_len": longest}
        with load(folder, model_impl=model_impl, **options) as llm:
            llm.engine.scheduler.reserved_tokens = 0
            outputs = run(llm, prompts)
            assert_close(answers(outputs), expected)
            assert [output.prompt_token_ids for output in outputs] == [prompt.token_ids for prompt in prompts]
            again = run(llm, prompts)  # with hits in the prefix cache
            assert_close(answers(again), expected)
            if way == "preempted":
                assert llm.get_metrics().num_preemptions > 0 or longest > 200  # few sequences run at once then
            else:
                assert sum(output.num_cached_tokens for output in again) > 50


@pytest.mark.parametrize(("architecture", "model_impl"), [(name, impl) for name in MODELS for impl in impls(name)])
def test_a_model_that_sees_answers_as_transformers_does(
    architecture: str, model_impl: str, case_of: Callable[[str], Case]
) -> None:
    assert_answers_as_transformers(case_of(architecture), model_impl)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", OTHERS)
def test_others_that_see_answer_as_transformers_does(architecture: str, case_of: Callable[[str], Case]) -> None:
    assert_answers_as_transformers(case_of(architecture), impls(architecture)[-1])


@pytest.mark.parametrize(("architecture", "model_impl"), [(name, impl) for name in SPECIAL for impl in impls(name)])
def test_more_classes_that_see_answer_as_transformers_does(architecture: str, model_impl: str, tmp_path: Path) -> None:
    """In chunks that end within images, with the same image again, and with hits in the prefix cache."""
    write_seeing(architecture, tmp_path)
    prompts = [make_prompt(architecture, parts) for parts in PROMPTS[1:4]]
    expected = answers_of_transformers(architecture, tmp_path, prompts, 3)
    with load(tmp_path, model_impl=model_impl, **WAYS["in chunks"]) as llm:
        for _ in range(2):
            assert_close(answers(run(llm, prompts, max_tokens=3)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "model_impl"), [(name, impl) for name in MORE for impl in impls(name)])
def test_more_classes_answer_as_transformers_does_however_prompts_are_scheduled(
    architecture: str, model_impl: str, case_of: Callable[[str], Case]
) -> None:
    assert_answers_as_transformers(case_of(architecture), model_impl)


@pytest.mark.skipif(not IS_5, reason="transformers 4 has not all of these")
@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("Blip2", {}, "Blip2Config names no image token"),
        (
            "Ernie4_5_VLMoe",
            {},
            "computes tokens of images by other weights than those of texts (moe_mm_token_type_ids)",
        ),
        ("HunYuanVL", {"text_config": FOUR}, "has positions of 4 numbers"),
        ("Janus", {}, "has no attention interface in transformers"),
        ("Kosmos2", {}, "cannot compute a text alone (ValueError: You have to specify either `pixel_values`"),
        ("Mllama", {}, "has layers of cross attention to images"),
        ("PaliGemma", {}, "tokens see other ones than those before them and those of their own image"),
    ],
)
def test_a_class_that_is_not_supported_is_refused_with_the_reason(
    name: str, overrides: dict[str, Any], said: str, tmp_path: Path
) -> None:
    tiny_config(f"{name}ForConditionalGeneration", **overrides).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=re.escape(said)):
        load(tmp_path, load_format="dummy")


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=["ranks", "replicas"])
def test_two_ranks_and_two_replicas_give_the_answers_of_transformers(
    options: dict[str, Any], case_of: Callable[[str], Case]
) -> None:
    folder, prompts, expected = case_of("Qwen3VLForConditionalGeneration")
    with load(folder, model_impl="nanoinfer", max_num_batched_tokens=40, device="cpu", **options) as llm:
        assert_close(answers(run(llm, prompts)), expected)
        assert_close(answers(run(llm, prompts)), expected)


@pytest.mark.parametrize("architecture", [*MODELS, *[name for name in MORE if name.startswith("Gemma4")]])
def test_the_largest_images_are_made_up_to_measure_their_memory(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_seeing(architecture, tmp_path)
    monkeypatch.setattr(step_images, "MAX_VALUES_AT_ONCE", 3 * 2**12)
    with load(tmp_path, model_impl=impls(architecture)[-1]) as llm:
        rows = llm.engine.check_open().model_runner.state.images
        found: list[Any] = []
        encode_largest = rows._encoder.encode_largest
        monkeypatch.setattr(rows._encoder, "encode_largest", lambda num: found.append(encode_largest(num)))
        kept = rows.reserve_largest()
    assert len(found) == 1  # and no error
    assert kept.shape[1] == (3 if architecture.startswith("Qwen3VL") else 1)
