"""Requests with images beside all else that requests ask for: nobody but the scheduler knows of virtual ids."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nanoinfer
from nanoinfer import LLM, ConfigError, ModelError
from nanoinfer.images.image_engine import ImageEngine
from nanoinfer.images.processed import ProcessedImage, ProcessedPrompt
from nanoinfer.models.images import ImageContent
from nanoinfer.runner.step_images import ImageRows
from tests.images.seeing_models import (
    IMAGE,
    answers_of_transformers,
    logits_of_transformers,
    make_prompt,
    write_seeing,
)
from tests.images.test_seeing_models import NUM_TOKENS, answers, assert_close, load, run

MODEL = "Qwen3VLForConditionalGeneration"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeing")
    write_seeing(MODEL, path)
    return path


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with load(folder, model_impl="nanoinfer") as llm:
        yield llm


def engine_of(llm: LLM) -> ImageEngine:
    assert isinstance(llm.engine, ImageEngine)
    return llm.engine


def image_rows(llm: LLM) -> ImageRows:
    rows = engine_of(llm).check_open().model_runner.state.images  # type: ignore[attr-defined]
    assert isinstance(rows, ImageRows)
    return rows


def test_log_probabilities_of_a_prompt_name_the_image_token(llm: LLM, folder: Path) -> None:
    prompt = make_prompt(MODEL, [6, "#1", 4])
    expected = logits_of_transformers(MODEL, folder, prompt).log_softmax(-1)
    [output] = run(llm, [prompt], prompt_logprobs=1)
    assert output.prompt_logprobs is not None
    for place, token_id in enumerate(prompt.token_ids[1:], start=1):
        [own, *_] = output.prompt_logprobs[place]  # type: ignore[misc]
        assert own == token_id
        found = output.prompt_logprobs[place][token_id].logprob  # type: ignore[index]
        assert found == pytest.approx(float(expected[place - 1, token_id]), abs=2e-4)


def test_penalties_count_the_image_token(llm: LLM, folder: Path) -> None:
    """A penalty that reached for a virtual id would read beyond the logits."""
    prompt = make_prompt(MODEL, [6, "#1", 4])
    logits = logits_of_transformers(MODEL, folder, prompt)[-1]
    seen = torch.zeros_like(logits, dtype=torch.bool).index_fill(0, torch.tensor(prompt.token_ids), True)
    expected = torch.where(seen, torch.where(logits > 0, logits / 3, logits * 3), logits)
    [output] = run(llm, [prompt], repetition_penalty=3.0, max_tokens=1, logprobs=5)
    assert output.outputs[0].token_ids == [int(expected.argmax())]


def test_a_bias_of_the_image_token_is_about_that_token(llm: LLM) -> None:
    [output] = run(llm, [make_prompt(MODEL, [6, "#1", 4])], max_tokens=2, logit_bias={IMAGE: 100.0})
    assert output.outputs[0].token_ids == [IMAGE, IMAGE]


def test_samples_and_repeats_share_one_encoding(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encoder = image_rows(llm)._encoder
    encode = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda images: encoded.append(len(images)) or encode(images))
    prompts = [make_prompt(MODEL, [6, "#1", 4]), make_prompt(MODEL, [9, "#1", "#1", 4], seed=1)]
    run(llm, prompts, n=3, temperature=1.0)
    assert encoded == [1]


def test_images_whose_rows_were_dropped_are_encoded_again(llm: LLM, folder: Path) -> None:
    image_rows(llm)._max_tokens = 1
    prompts = [make_prompt(MODEL, parts) for parts in ([20, "#1", 30, "#2", 8], [7, "#0", "#1", 4])]
    llm.engine.scheduler.max_num_batched_tokens = 16
    assert_close(answers(run(llm, prompts)), answers_of_transformers(MODEL, folder, prompts, NUM_TOKENS))
    assert len(image_rows(llm)._encoded) <= 1


def fail_for(llm: LLM, monkeypatch: pytest.MonkeyPatch, prompt: ProcessedPrompt) -> list[int]:
    """Have what sees fail for the first image of a prompt; return how many images each of its calls has."""
    calls: list[int] = []
    encoder = image_rows(llm)._encoder
    bad, encode = prompt.images[0].tensors["pixel_values"], encoder.encode

    def checked(images: Sequence[ImageContent]) -> list[torch.Tensor]:
        calls.append(len(images))
        if any(image.tensors["pixel_values"] is bad for image in images):
            raise IndexError("index 7 is\n out of bounds")
        return encode(images)

    monkeypatch.setattr(encoder, "encode", checked)
    return calls


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}, {"overlap": False}], ids=str)
def test_an_image_that_cannot_be_encoded_ends_its_own_requests_alone(
    options: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [make_prompt(MODEL, parts) for parts in ([20, "#1", 8], [30], [7, "#2", 9])]
    bad = make_prompt(MODEL, [20, "#0", 30])
    twice = replace(make_prompt(MODEL, [9, "#1", 3, "#0", 4]))
    twice.images[1] = replace(twice.images[1], tensors=bad.images[0].tensors)
    prompts = [good[0], bad, good[1], twice, good[2]]
    with load(folder, model_impl="nanoinfer", **options) as llm:
        calls = fail_for(llm, monkeypatch, bad)
        outputs = run(llm, prompts)
        ends = [(one.outputs[0].finish_reason, one.outputs[0].error_kind) for one in outputs]
        assert ends == [("length", None), ("error", "invalid_image")] * 2 + [("length", None)]
        reason = "cannot be encoded (IndexError: index 7 is out of bounds); crop it, or change its size"
        assert [one.outputs[0].error for one in outputs if one.error] == [f"image 0 {reason}", f"image 1 {reason}"]
        assert all(one.outputs[0].token_ids == [] for one in outputs if one.error)
        assert_close(
            answers([one for one in outputs if not one.error]),
            answers_of_transformers(MODEL, folder, good, NUM_TOKENS),
        )
        assert calls.count(1) >= 3  # each by itself
        monkeypatch.undo()  # nothing that was computed of it is found later
        assert_close(answers(run(llm, [bad])), answers_of_transformers(MODEL, folder, [bad], NUM_TOKENS))


def test_all_samples_and_the_stream_of_a_request_end_with_its_image(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = make_prompt(MODEL, [20, "#0", 30])
    fail_for(llm, monkeypatch, bad)
    [output] = run(llm, [bad], n=3, temperature=1.0)
    assert [(one.finish_reason, one.token_ids) for one in output.outputs] == [("error", [])] * 3
    assert llm.engine.is_finished()


def test_a_prompt_whose_positions_cannot_be_counted_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    count = image_rows(llm)._encoder.positions
    text, good, bad = (make_prompt(MODEL, parts) for parts in ([20], [7, "#0", 9], [20, "#0", 30]))

    def count_some(token_ids: Sequence[int], images: Sequence[ImageContent]) -> torch.Tensor:
        if len(token_ids) == len(bad.token_ids):
            raise ValueError("no such grid")
        return count(token_ids, images)

    monkeypatch.setattr(image_rows(llm)._encoder, "positions", count_some)
    outputs = [output.outputs[0] for output in run(llm, [text, good, bad])]
    assert [output.finish_reason for output in outputs] == ["length", "length", "error"]
    reason = "(ValueError: no such grid); crop one, or change its size"
    assert outputs[2].error == f"the positions of its images cannot be counted {reason}"


def test_positions_that_failed_in_a_step_that_failed_end_nobody_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such grid")

    with monkeypatch.context() as patch:
        patch.setattr(image_rows(llm)._encoder, "positions", fail)
        patch.setattr(engine_of(llm).check_open(), "sample", fail)
        with pytest.raises(ValueError, match="no such grid"):
            run(llm, [make_prompt(MODEL, [20, "#0", 30])])
    engine_of(llm).abort([*engine_of(llm)._requests])
    [output] = run(llm, [make_prompt(MODEL, [7, "#1", 9])])
    assert output.outputs[0].finish_reason == "length", "it has the row of the other one"


def test_a_model_that_is_not_supported_is_an_error_of_the_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(_: Any) -> list[torch.Tensor]:
        raise ModelError("leave images out")

    monkeypatch.setattr(image_rows(llm)._encoder, "encode", encode)
    with pytest.raises(ModelError, match="leave images out"):
        run(llm, [make_prompt(MODEL, [20, "#0", 30])])


def test_pixels_are_let_go_once_encoded_and_made_again_where_an_image_is_encoded_again(llm: LLM, folder: Path) -> None:
    image_rows(llm)._max_tokens = 1  # rows are dropped with each step
    llm.engine.scheduler.max_num_batched_tokens = 16
    held, made = engine_of(llm).check_open()._held_images, list[bytes]()  # type: ignore[attr-defined]
    prompts = [make_prompt(MODEL, parts) for parts in ([20, "#1", 30, "#2", 8], [7, "#0", "#1", 4])]

    def made_again(image: ProcessedImage) -> ProcessedImage:
        return replace(image, make_tensors=lambda: made.append(image.key) or image.tensors)  # type: ignore[func-returns-value]

    again = [replace(prompt, images=[made_again(image) for image in prompt.images]) for prompt in prompts]
    num_with_pixels: list[int] = []
    end = llm.on_step(lambda _: num_with_pixels.append(sum("pixel_values" in one.tensors for one in held.values())))
    assert_close(answers(run(llm, again)), answers_of_transformers(MODEL, folder, prompts, NUM_TOKENS))
    end()
    assert made
    assert num_with_pixels[0] == 2  # of three images, as the first step encodes one
    assert 0 in num_with_pixels[:-NUM_TOKENS]


def test_images_whose_pixels_cannot_be_made_again_end_their_requests_alone(llm: LLM) -> None:
    image_rows(llm)._max_tokens = 1  # rows are dropped with each step
    llm.engine.scheduler.max_num_batched_tokens = 16

    def fail() -> dict[str, torch.Tensor]:
        raise MemoryError("no room")

    good = make_prompt(MODEL, [20, "#3", 8])
    bad = [make_prompt(MODEL, parts) for parts in ([20, "#1", 30, "#2", 8], [7, "#0", "#1", 4])]
    for prompt in bad:
        prompt.images[:] = [replace(image, make_tensors=fail) for image in prompt.images]
    ended = [output.outputs[0] for output in run(llm, [good, *bad])]
    assert ended[0].finish_reason == "length"
    errors = [one.error for one in ended if one.error is not None]
    assert errors
    assert all("cannot be encoded (MemoryError: no room); crop it" in error for error in errors)
    assert llm.engine.is_finished()


def test_nothing_is_held_once_requests_have_ended(llm: LLM) -> None:
    engine, runner = engine_of(llm), llm.engine.check_open()
    run(llm, [make_prompt(MODEL, [20, "#1", 8]), make_prompt(MODEL, [5, "#1", "#2", 8])])
    assert len(runner._held_images) == 0
    assert len(image_rows(llm)._encoded) == 0
    assert [image.num_users for image in engine.virtual_ids._known.values()] == [0, 0]  # cached blocks have them


def test_an_aborted_request_lets_go_of_its_images(llm: LLM) -> None:
    from nanoinfer.engine.engine import Recipient
    from nanoinfer.sampling_params import SamplingParams
    from nanoinfer.text.prompts import PreparedRequest

    engine, recipient = engine_of(llm), Recipient([])
    prompt = make_prompt(MODEL, [20, "#1", 8])
    request = PreparedRequest(
        prompt=None,
        token_ids=prompt.token_ids,
        sampling_params=SamplingParams(max_tokens=50, ignore_eos=True),
        images=tuple(prompt.images),
    )
    [request_id] = engine.reserved_ids.reserve(1)
    engine.add_request(request_id, request, recipient)
    engine.step()
    assert len(engine.check_open()._held_images) == 1  # type: ignore[attr-defined]
    engine.abort([request_id])
    assert len(engine.check_open()._held_images) == 0  # type: ignore[attr-defined]


def test_the_token_of_images_without_an_image_is_text(llm: LLM, folder: Path) -> None:
    prompt = replace(make_prompt(MODEL, [12]), token_ids=[9, IMAGE, 17, IMAGE, IMAGE, 30])
    assert_close(answers(run(llm, [prompt])), answers_of_transformers(MODEL, folder, [prompt], NUM_TOKENS))


@pytest.mark.parametrize("level", [1, 2])
def test_what_sees_sleeps_and_is_updated_with_the_rest(level: int, llm: LLM, folder: Path) -> None:
    from safetensors.torch import load_file

    prompts = [make_prompt(MODEL, [20, "#1", 8])]
    expected = answers(run(llm, prompts))
    llm.sleep(level=level)
    llm.wake_up()
    if level == 2:
        llm.update_weights(load_file(folder / "model.safetensors"))
    assert_close(answers(run(llm, prompts)), expected)


def test_random_weights_see_too(folder: Path) -> None:
    with load(folder, model_impl="nanoinfer", load_format="dummy") as llm:
        assert len(run(llm, [make_prompt(MODEL, [20, "#1", 8])])[0].outputs[0].token_ids) == NUM_TOKENS


def test_a_folder_without_the_weights_of_what_sees_is_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    texts = {name: tensor for name, tensor in weights.items() if "visual" not in name}
    save_file(texts, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match="no weights of what sees images"):
        load(tmp_path, model_impl="nanoinfer")


def test_proposals_end_where_an_image_would_begin(folder: Path) -> None:
    prompts = [make_prompt(MODEL, ["#1", 3, "#1", 3], seed=seed) for seed in (0, 1)]
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with load(folder, model_impl="nanoinfer", speculative_config=speculation) as llm:
        proposer = llm.engine.proposer
        proposed: list[list[int]] = []
        propose = proposer._proposer.propose
        proposer._proposer.waits = lambda _: True
        proposer._proposer.propose = lambda seqs: [proposed.append([*ids]) or ids for ids in forced(seqs)]

        def forced(seqs: list[Any]) -> list[list[int]]:
            propose(seqs)
            return [seq.token_ids[2:6].tolist() for seq in seqs]  # as if the sequence went on as it began

        assert_close(answers(run(llm, prompts)), answers_of_transformers(MODEL, folder, prompts, NUM_TOKENS))
        assert max(map(max, proposed)) >= 256  # they would have reached into an image


def test_a_model_that_sees_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM do not read; leave it out"):
        load(nanoinfer.tiny_model_path(), model_impl="auto")
