"""Whole calls with pictures: from messages to texts, against transformers' processor and model."""

import asyncio
import base64
import gc
import io
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from inspect import signature
from pathlib import Path
from threading import current_thread
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from nanoinfer import LLM, RequestError, SamplingParams, StructuredOutputsParams
from nanoinfer.batch.batch_job import Summary, run_batch
from nanoinfer.errors import ModelError
from nanoinfer.images.processor import load_processor
from tests.images.processors import KINDS, picture, token_ids_of, write_processor
from tests.images.seeing_models import ROPE_FIELD
from tests.models.tiny_transformers import spread_weights

pytest.importorskip("PIL")
# Of transformers' processors, which give tensors to NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def text_fields(kind: str) -> dict[str, Any]:
    ids = token_ids_of(kind)
    return {
        "vocab_size": max(ids.values()) + 1,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "eos_token_id": ids["<|im_end|>"],
        "bos_token_id": None,
        "pad_token_id": 0,
    }


def qwen3_vl() -> Any:
    ids = token_ids_of("qwen3_vl")
    config = transformers.Qwen3VLConfig(
        text_config={**text_fields("qwen3_vl"), "rope_theta": ROPE["rope_theta"], ROPE_FIELD: ROPE},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 8,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(**VISION, image_size=32, patch_size=8)
    text = transformers.LlamaConfig(**text_fields("llava"))
    image_token = token_ids_of("llava")["<image>"]
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=image_token)
    return transformers.LlavaForConditionalGeneration(config)


def gemma3() -> Any:
    ids = token_ids_of("gemma3")
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**VISION, image_size=32, patch_size=8),
        text_config=transformers.Gemma3TextConfig(
            **text_fields("gemma3"), layer_types=["sliding_attention", "full_attention"], sliding_window=12
        ),
        image_token_index=ids["<image_soft_token>"],
        mm_tokens_per_image=16,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        tie_word_embeddings=False,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def gemma4() -> Any:
    """Return a model as E2B and E4B: inputs of layers, shared caches, and a part that hears."""
    ids = token_ids_of("gemma4")
    text = {
        **text_fields("gemma4"),
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "sliding_window": 12,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": max(ids.values()) + 1,
        "use_bidirectional_attention": "vision",
    }
    vision = {**VISION, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 64}
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32},
        image_token_id=ids["<|image|>"],
        boi_token_id=ids["<|image>"],
        eoi_token_id=ids["<image|>"],
        video_token_id=ids["<|video|>"],
        audio_token_id=ids["<|audio|>"],
        tie_word_embeddings=False,
    )
    return transformers.Gemma4ForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {"qwen3_vl": qwen3_vl, "llava": llava, "gemma3": gemma3}
pytestmark = [pytestmark, pytest.mark.skipif(not hasattr(transformers, "Qwen3VLConfig"), reason="transformers 4.57")]
if hasattr(transformers, "Gemma4Config"):
    MODELS["gemma4"] = gemma4


class Loaded(NamedTuple):
    kind: str
    folder: Path
    llm: LLM
    model: Any  # of transformers

    def inputs(self, text: str, pictures: list[Any]) -> dict[str, torch.Tensor]:
        """Return what transformers' processor makes of a prompt with placeholders."""
        processor = load_processor(self.folder, self.llm.preparer.prompt_processor.require_tokenizer().hf)
        given = {"images": [pictures]} if pictures else {}
        inputs = {**processor(text=[text], return_tensors="pt", add_special_tokens=False, **given)}
        if "token_type_ids" not in signature(self.model.forward).parameters:  # transformers 4 makes them of all texts
            inputs.pop("token_type_ids", None)
        return inputs

    def answer(self, text: str, pictures: list[Any]) -> list[int]:
        """Return what transformers answers greedily to a prompt with placeholders."""
        inputs = self.inputs(text, pictures)
        tokens = self.model.generate(**inputs, do_sample=False, max_new_tokens=8, eos_token_id=None)
        return tokens[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def loaded_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def load(kind: str) -> Loaded:
        folder = write_processor(tmp_path_factory.mktemp(kind), kind)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = MODELS[kind]().float()
            spread_weights(model)
            model.get_output_embeddings().weight[256:] = 0  # special tokens are not drawn
        model.save_pretrained(folder)
        try:
            llm = LLM(folder, device="cpu", dtype="float32", limit_mm_per_prompt={"image": 3}, max_model_len=512)
        except ModelError as error:
            pytest.skip(str(error))
        return Loaded(kind, folder, llm, type(model).from_pretrained(folder, attn_implementation="eager").eval())

    yield load
    load.cache_clear()


def placeholder(kind: str) -> str:
    return KINDS[kind].placeholder or KINDS[kind].image_token


@pytest.mark.parametrize("kind", MODELS)
def test_a_chat_with_pictures_is_answered_as_transformers_answers_it(kind: str, loaded_of: Any) -> None:
    loaded = loaded_of(kind)
    pictures = [picture(60, 40), picture(33, 70, 1), picture(60, 40)]
    texts = ["what is it?", "and this ", " or that"]
    conversations = []
    for count in (1, 2, 3, 0):
        parts: list[dict[str, Any]] = []
        for image, text in zip(pictures[:count], texts[:count], strict=True):
            parts += [{"type": "image", "image": image}, {"type": "text", "text": text}]
        conversations.append([{"role": "user", "content": parts or "no picture"}])
    outputs = loaded.llm.chat(conversations, GREEDY, use_tqdm=False)
    for count, output in zip((1, 2, 3), outputs, strict=False):
        assert output.prompt is not None
        assert output.prompt.count(placeholder(kind)) == count
        assert output.outputs[0].token_ids == loaded.answer(output.prompt, pictures[:count])
    again = loaded.llm.chat(conversations, GREEDY, use_tqdm=False)
    assert [one.text for one in again] == [one.text for one in outputs]
    assert len({one.text for one in outputs}) > 1


def with_picture(text: str, *pictures: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(pictures)}}


BROKEN = with_picture(f"{PLACE}a", b"broken")


def test_completions_after_pictures_are_scored_as_transformers_scores_them(loaded_of: Any) -> None:
    loaded, one, two = loaded_of("qwen3_vl"), picture(60, 40), picture(33, 70, 1)
    prompts: list[Any] = [with_picture(f"a{PLACE}b", one), with_picture(f"{PLACE}or{PLACE}?", two, one), "no picture"]
    completions = ["yes", "no!", "maybe"]
    scores = loaded.llm.score(prompts, completions, use_tqdm=False)
    for prompt, completion, score in zip(prompts, completions, scores, strict=True):
        given = prompt if isinstance(prompt, dict) else with_picture(prompt)
        inputs = loaded.inputs(given["prompt"] + completion, given["multi_modal_data"]["image"])
        with torch.no_grad():
            logprobs = loaded.model(**inputs).logits[0].log_softmax(-1)[-len(completion) - 1 : -1]
        expected = logprobs.gather(1, torch.tensor(score.token_ids)[:, None])[:, 0].tolist()
        assert len(score.token_ids) == len(completion)
        assert score.logprobs == pytest.approx(expected, abs=2e-4)
        assert score.is_greedy == (logprobs.argmax(-1).tolist() == score.token_ids)
    again = loaded.llm.score(prompts[0], completions, use_tqdm=False)  # one prompt for all, found in the prefix cache
    assert again[0].total == pytest.approx(scores[0].total, abs=1e-4)
    good, bad = loaded.llm.score([prompts[0], BROKEN], completions[:2], use_tqdm=False, on_error="return")
    assert (good.error, bad.error_kind) == (None, "invalid_image")
    with pytest.raises(RequestError, match="completion 0 has images, which are not read here; give them to a prompt"):
        loaded.llm.score("a", [prompts[0]], use_tqdm=False)


def test_forms_of_answers_to_pictures_are_kept(loaded_of: Any) -> None:
    loaded, pictures = loaded_of("qwen3_vl"), [picture(60, 40, seed) for seed in range(4)]
    letters = StructuredOutputsParams(choice=["x", "y"])
    outputs = loaded.llm.generate(
        [with_picture(f"{PLACE}?", one) for one in pictures],
        replace(GREEDY, structured_outputs=letters, ignore_eos=False, logprobs=1),
        use_tqdm=False,
    )
    for one, output in zip(pictures, outputs, strict=True):
        with torch.no_grad():
            logits = loaded.model(**loaded.inputs(f"{PLACE}?", [one])).logits[0, -1]
        x, y = (loaded.llm.tokenizer.encode(letter)[0] for letter in "xy")
        assert output.text == ("x" if logits[x] > logits[y] else "y")
        assert output.outputs[0].logprobs is not None
        drawn = output.outputs[0].token_ids[0]
        expected = float(logits.log_softmax(-1)[drawn])
        assert output.outputs[0].logprobs[0][drawn].logprob == pytest.approx(expected, abs=2e-4)
    schema = StructuredOutputsParams(json={"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]})
    messages = [{"role": "user", "content": [{"type": "image", "image": pictures[0]}, {"type": "text", "text": "?"}]}]
    params = SamplingParams(n=3, max_tokens=40, structured_outputs=schema, seed=1)
    [output] = loaded.llm.chat(messages, params, use_tqdm=False)
    assert all(json.loads(one.text)["n"] in (1, 22) for one in output.outputs)


def test_pictures_are_embedded_as_transformers_sees_them(loaded_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, one, two = loaded_of("qwen3_vl"), picture(60, 40), picture(33, 70, 1)
    prompts: list[Any] = [
        with_picture(f"a{PLACE}b", one),
        "a text",
        with_picture(f"{PLACE}or{PLACE}?", two, one),
        BROKEN,
    ]
    expected = []
    for prompt in prompts[:3]:
        given = prompt if isinstance(prompt, dict) else with_picture(prompt)
        inputs = loaded.inputs(given["prompt"], given["multi_modal_data"]["image"])
        with torch.no_grad():
            state = loaded.model.model(**inputs).last_hidden_state[0, -1]
        expected.append((state / state.norm()).tolist())
    options = {"limit_mm_per_prompt": {"image": 3}, "max_model_len": 512}
    with LLM(loaded.folder, device="cpu", dtype="float32", runner="pooling", **options) as pooling:
        for llm in (loaded.llm, pooling):
            for _ in range(2):
                outputs = llm.embed(prompts, use_tqdm=False, on_error="return")
                assert [output.error_kind for output in outputs] == [None, None, None, "invalid_image"]
                for output, values in zip(outputs, expected, strict=False):
                    assert output.outputs.embedding.tolist() == pytest.approx(values, abs=2e-4)
                assert outputs[0].prompt == prompts[0]["prompt"]
            [awaited] = asyncio.run(llm.aembed(prompts[2]))
            assert awaited.outputs.embedding.tolist() == pytest.approx(expected[2], abs=2e-4)
        with pytest.raises(RequestError, match="prompt 0 has images, and truncate_prompt_tokens would cut it"):
            pooling.embed(prompts[0], use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 4})

        def encode(_: Any) -> Any:
            raise ValueError("no")

        encoder = pooling.engine.check_open().model_runner.state.images._encoder
        monkeypatch.setattr(encoder, "encode", encode)
        failed, text = pooling.embed([with_picture(f"z{PLACE}", one), "a text"], use_tqdm=False)
        assert (failed.error_kind, text.error) == ("invalid_image", None)
        assert failed.error == "image 0 cannot be encoded (ValueError: no); crop it, or change its size"


def test_wrong_pictures_come_back_in_their_places(loaded_of: Any) -> None:
    llm = loaded_of("qwen3_vl").llm
    one = "<|vision_start|><|image_pad|><|vision_end|>"
    prompts: list[Any] = [
        {"prompt": f"{one}a", "multi_modal_data": {"image": image}}
        for image in (picture(40, 40), b"broken", "/not/there.png", picture(1000, 2), picture(30, 30))
    ]
    prompts.append({"prompt": one * 4, "multi_modal_data": {"image": [picture(8, 8)] * 4}})
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    kinds = [output.outputs[0].error_kind for output in outputs]
    assert kinds == [None, *["invalid_image"] * 3, None, "too_many_images"]
    assert all(output.text for output in outputs if output.error is None)
    with pytest.raises(RequestError, match="prompt 1: image 0: the image of 6 bytes is no picture"):
        llm.generate(prompts[:2], GREEDY, use_tqdm=False)
    assert llm.is_finished()


def test_a_closed_llm_keeps_no_pictures(loaded_of: Any) -> None:
    prompt = {"prompt": placeholder("llava"), "multi_modal_data": {"image": picture(40, 40)}}
    with LLM(loaded_of("llava").folder, device="cpu", limit_mm_per_prompt={"image": 1}, max_model_len=512) as llm:
        llm.generate(prompt, GREEDY, use_tqdm=False)
        reader: Any = llm.preparer.prompt_processor.image_reader
        assert reader.store.num_bytes > 0
    gc.collect()
    assert reader.store.num_bytes == 0


def answer_file(llm: LLM, lines: list[dict[str, Any]], folder: Path) -> tuple[Summary, dict[str, Any]]:
    """Answer a file of requests; return what became of it, and its records by custom_id."""
    path, answers = folder / "in.jsonl", folder / "out.jsonl"
    path.write_text("\n".join(json.dumps({**line, "temperature": 0, "max_tokens": 4}) for line in lines))
    summary = run_batch(lambda: nullcontext(llm), path, answers, use_tqdm=False)  # type: ignore[arg-type,return-value]
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    return summary, {record["custom_id"]: record for record in records}


def test_prompts_of_a_file_have_pictures_that_no_step_waits_for(
    loaded_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = loaded_of("qwen3_vl").llm
    prompts = []
    for seed in range(5):
        picture(40, 40, seed).save(tmp_path / f"{seed}.png")
        one = {"prompt": f"{PLACE}a", "multi_modal_data": {"image": str(tmp_path / f"{seed}.png")}}
        prompts.append(one)
    prompts[3]["multi_modal_data"] = {"image": "/not/there.png"}
    threads = set()
    prepare = llm.preparer.prepare
    monkeypatch.setattr(
        llm.preparer, "prepare", lambda *given, **named: threads.add(current_thread()) or prepare(*given, **named)
    )
    summary, records = answer_file(llm, [{"prompt": one} for one in prompts], tmp_path)
    assert (summary.num_done, summary.num_errors) == (5, 1)
    assert current_thread() not in threads
    assert records["line-4"]["error"]["code"] == "invalid_image"
    meant = llm.generate(prompts[:3], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    found = [records[f"line-{number}"]["response"]["body"]["choices"][0]["text"] for number in (1, 2, 3)]
    assert found == [output.text for output in meant]


def test_a_file_of_requests_has_pictures(loaded_of: Any, tmp_path: Path) -> None:
    loaded = loaded_of("qwen3_vl")
    urls = []
    for seed in range(40):
        file = io.BytesIO()
        picture(40, 40, seed).save(file, "PNG")
        urls.append(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
    urls[7] = "https://example.org/a.png"
    lines = [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]} for url in urls
    ]
    summary, records = answer_file(loaded.llm, lines, tmp_path)
    assert (summary.num_done, summary.num_errors) == (40, 1)
    assert records["line-8"]["error"]["code"] == "invalid_image"
    conversations = [line["messages"] for line in lines[:3]]
    meant = loaded.llm.chat(conversations, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    found = [records[f"line-{number}"]["response"]["body"]["choices"][0]["message"]["content"] for number in (1, 2, 3)]
    assert found == [output.text for output in meant]
