"""Whole calls with pictures: from messages to texts, against transformers' processor and model."""

import base64
import gc
import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from nanoinfer import LLM, RequestError, SamplingParams
from nanoinfer.batch.batch_job import run_batch
from nanoinfer.errors import ModelError
from nanoinfer.images.processor import load_processor
from tests.images.processors import KINDS, picture, token_ids_of, write_processor
from tests.models.tiny_transformers import spread_weights

pytest.importorskip("PIL")
# Of transformers' processors, which give tensors to NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
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
        text_config={**text_fields("qwen3_vl"), "rope_parameters": ROPE},
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


MODELS: dict[str, Callable[[], Any]] = {"qwen3_vl": qwen3_vl, "llava": llava, "gemma3": gemma3}


class Loaded(NamedTuple):
    kind: str
    folder: Path
    llm: LLM
    model: Any  # of transformers

    def answer(self, text: str, pictures: list[Any]) -> list[int]:
        """Return what transformers answers greedily to a prompt with placeholders."""
        processor = load_processor(self.folder, self.llm.preparer.prompt_processor.require_tokenizer().hf)
        inputs = processor(text=[text], images=[pictures], return_tensors="pt", add_special_tokens=False)
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
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps({**line, "temperature": 0, "max_tokens": 4}) for line in lines))
    answers = tmp_path / "out.jsonl"

    class Kept:
        def __enter__(self) -> LLM:
            return loaded.llm

        def __exit__(self, *_: object) -> None:
            pass

    summary = run_batch(lambda: Kept(), path, answers, use_tqdm=False)  # type: ignore[arg-type,return-value]
    assert (summary.num_done, summary.num_errors) == (40, 1)
    records = {record["custom_id"]: record for record in map(json.loads, answers.read_text().splitlines())}
    assert records["line-8"]["error"]["code"] == "invalid_image"
    conversations = [line["messages"] for line in lines[:3]]
    meant = loaded.llm.chat(conversations, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    found = [records[f"line-{number}"]["response"]["body"]["choices"][0]["message"]["content"] for number in (1, 2, 3)]
    assert found == [output.text for output in meant]
