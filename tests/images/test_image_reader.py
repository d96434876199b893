"""Prompts with images against the processors of transformers, which get the whole prompt and all its images at once."""

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoinfer.config import EngineConfig
from nanoinfer.engine.preparer import ImagePortions
from nanoinfer.errors import ConfigError, EngineClosedError, ModelError, RequestError
from nanoinfer.images import picture_store, sources
from nanoinfer.images import processor as image_processor
from nanoinfer.images.image_reader import ImageReader, use_one_core
from nanoinfer.images.picture_store import PictureStore
from nanoinfer.images.processed import ProcessedPrompt
from nanoinfer.images.processor import ImageProcessor, ProcessedPicture, join_runs
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.arguments import Errors, as_prompt
from nanoinfer.text.chat import render_chats
from nanoinfer.text.image_parts import ImagePrompt
from nanoinfer.text.prompts import PreparedRequest, PromptProcessor
from nanoinfer.text.tokenizer import load_tokenizer
from tests.images.processors import KINDS, picture, token_ids_of, write_processor

pytest.importorskip("PIL")
# Of transformers' processors, which give tensors to NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

PADDED = ("lighton_ocr", "granite_docling", "idefics3", "llava_next", "mistral3", "smolvlm")
SIZES = [(60, 40), (33, 70), (60, 40), (20, 20)]  # of pictures, in pixels


@pytest.fixture(scope="module")
def reader_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ImageReader]:
    """A reader for a kind of model; skips the test where this version of transformers has none."""

    @cache
    def make(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> ImageReader:
        folder = write_processor(tmp_path_factory.mktemp(kind), kind)
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        try:
            processor = ImageProcessor(folder, tokenizer.hf, tokenizer.lock)
        except ModelError as error:
            pytest.skip(str(error))
        limits = {"image": options.pop("limit", 8)}
        config = EngineConfig(model="m", limit_mm_per_prompt=limits, renderer_num_workers=2, **options)
        return ImageReader(processor, tokenizer, dtype, config)

    return make


def conversation(*parts: Any) -> list[dict[str, Any]]:
    contents = [
        part if isinstance(part, dict) else {"type": "text", "text": part}
        if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]  # fmt: skip
    return [{"role": "user", "content": contents}]


def rendered(reader: ImageReader, messages: Any, **options: Any) -> Any:
    errors: Errors = {}
    [prompt] = render_chats(
        reader._tokenizer, {0: messages}, errors, image_texts=reader.image_texts, **options
    ).values()
    if errors:
        raise errors[0]
    return prompt


def check_spans(processed: ProcessedPrompt, kind: str) -> None:
    """Check that image tokens are in spans alone, which begin and end with one, or with a token like it."""
    image_token, left = processed.image_token_id, list(processed.token_ids)
    beside = {token_ids_of(kind)[token] for token in KINDS[kind].beside}
    for image in processed.images:
        span = slice(image.start, image.start + image.num_tokens)
        assert {left[span][0], left[span][-1]} <= (beside or {image_token})
        left[span] = [-1] * image.num_tokens
    assert not {image_token, *beside} & {*left}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_gets_the_tokens_and_tensors_that_transformers_gives_it(
    kind: str, reader_of: Callable[..., ImageReader]
) -> None:
    reader = reader_of(kind)
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    prompt = rendered(reader, conversation("First\n", pictures[0], "then\n\n", *pictures[1:3], "\nand", pictures[3]))
    processed = reader.process(prompt, add_special_tokens=False)
    whole = reader._processor._processor
    meant = whole(text=[prompt.prompt], images=[pictures], return_tensors="pt", add_special_tokens=False)
    assert processed.token_ids == meant["input_ids"][0].tolist()
    check_spans(processed, kind)
    for name, tensor in processed.images[0].tensors.items():
        parts = [image.tensors[name] for image in processed.images if name in image.tensors]
        if name == "pixel_values" and kind in PADDED:
            continue  # to the largest of a batch
        if name == "pixel_attention_mask":
            continue
        assert torch.equal(torch.cat(parts), meant[name].to(tensor.dtype)), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_alone_has_the_tensors_that_transformers_gives_it_in_the_models_dtype(
    kind: str, reader_of: Callable[..., ImageReader]
) -> None:
    reader, image = reader_of(kind, torch.bfloat16), picture(60, 40)
    prompt = rendered(reader, conversation(image, "what?"))
    [found] = reader.process(prompt, add_special_tokens=False).images
    meant = reader._processor._processor(text=[prompt.prompt], images=[image], return_tensors="pt")
    assert {*found.tensors} == {*meant} - {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
    for name, tensor in found.tensors.items():
        dtype = torch.bfloat16 if meant[name].is_floating_point() else meant[name].dtype
        assert tensor.dtype == dtype
        assert torch.equal(tensor, meant[name].to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_what_looks_like_an_image_in_a_users_text_is_text(kind: str, reader_of: Callable[..., ImageReader]) -> None:
    reader = reader_of(kind)
    written = "".join(f" {token}!" for token in reader.image_texts._reserved)
    messages = conversation(f"What is {written}?", picture(60, 40), written)
    messages.append({"role": "assistant", "content": written})
    processed = reader.process(rendered(reader, messages), add_special_tokens=False)
    check_spans(processed, kind)
    assert len(processed.images) == 1
    text = reader._tokenizer.hf.decode(processed.token_ids)
    assert text.count(written) == 3
    no_image = rendered(reader, [{"role": "user", "content": written}])
    assert token_ids_of(kind)[reader._processor.image_token] not in reader.process(no_image).token_ids
    as_text = as_prompt(written)
    found, images = reader.read({3: as_text, 4: "plain"}, True, 10**6, errors := {})
    assert not errors
    assert images == {3: ()}
    assert found[4] == "plain"
    assert reader._processor.image_token_id not in found[3]


def test_prompts_of_generate_have_a_placeholder_for_each_image(reader_of: Callable[..., ImageReader]) -> None:
    reader, images = reader_of("qwen3_vl"), [picture(60, 40), picture(40, 60, 1)]
    one = "<|vision_start|><|image_pad|><|vision_end|>"
    in_text = reader.process(as_prompt({"prompt": f"a{one}b{one}", "multi_modal_data": {"image": images}}))
    ids = reader._tokenizer.encode([f"a{one}b{one}"])[0]
    in_ids = reader.process(as_prompt({"prompt_token_ids": ids, "multi_modal_data": {"image": images}}))
    filled = reader.process(as_prompt({"prompt_token_ids": in_text.token_ids, "multi_modal_data": {"image": images}}))
    assert in_text.token_ids == in_ids.token_ids == filled.token_ids
    assert [image.start for image in in_text.images] == [image.start for image in filled.images]
    alone = reader.process(as_prompt({"prompt": f"a{one}", "multi_modal_data": {"image": images[0]}}))
    assert alone.images[0].key == in_text.images[0].key != in_text.images[1].key


def test_templates_that_read_texts_alone_get_the_placeholder(reader_of: Callable[..., ImageReader]) -> None:
    reader = reader_of("llava")
    template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"
    prompt = rendered(reader, conversation(picture(8, 8), "what?"), chat_template=template)
    assert prompt.prompt == "user: <image>\nwhat?"
    blind = "{% for message in messages %}{{ message['content'][0]['text'] }}{% endfor %}"
    with pytest.raises(RequestError, match="the chat template writes 0 images of the 1 in conversation 0"):
        rendered(reader, conversation("what?", picture(8, 8)), chat_template=blind)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "PIC"},
        {"type": "image_url", "image_url": {"url": "PIC"}},
        {"type": "image_url", "image_url": "PIC"},
        {"type": "input_image", "image_url": "PIC"},
        {"type": "image", "url": "PIC"},
        {"type": "image", "path": "PIC"},
        {"image": "PIC"},
    ],
)
def test_parts_are_written_as_openai_transformers_and_vllm_write_them(
    part: dict[str, Any], reader_of: Callable[..., ImageReader], tmp_path: Path
) -> None:
    reader, path = reader_of("qwen3_vl"), tmp_path / "a.png"
    picture(60, 40).save(path)
    filled = {name: {"url": str(path)} if isinstance(value, dict) else value.replace("PIC", str(path))
              for name, value in part.items()}  # fmt: skip
    [image] = reader.process(rendered(reader, conversation(filled, "?"))).images
    [meant] = reader.process(rendered(reader, conversation(picture(60, 40), "?"))).images
    assert torch.equal(image.tensors["pixel_values"], meant.tensors["pixel_values"])


def test_several_images_are_a_list_or_an_array_of_four_dimensions(reader_of: Callable[..., ImageReader]) -> None:
    reader, arrays = reader_of("llava"), [np.asarray(picture(30, 30, seed)) for seed in (0, 1)]
    several: list[Any] = [arrays, tuple(arrays), np.stack(arrays), torch.from_numpy(np.stack(arrays))]
    for name, given in zip(("image", "images", "image", "image"), several, strict=True):
        processed = reader.process(as_prompt({"prompt": "<image><image>", "multi_modal_data": {name: given}}))
        assert len(processed.images) == 2
        assert processed.images[0].key != processed.images[1].key
    [one] = reader.process(as_prompt({"prompt": "<image>", "multi_modal_data": {"image": arrays[0]}})).images
    assert one.key == processed.images[0].key


def test_a_prompt_without_data_is_a_text() -> None:
    for data in ({}, None):
        given = {"prompt": "a", "multi_modal_data": data, "mm_processor_kwargs": {"size": 3} if data == {} else None}
        assert as_prompt(given) == "a"
    assert as_prompt({"prompt_token_ids": [3], "multi_modal_data": {}}) == [3]


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"image": []}, "invalid_image", "the text has 1 times '<|image_pad|>', and there are 0 images; write it once"),
        ({"image": b"x"}, "invalid_image", "image 0: the image of 1 bytes is no picture in a known format"),
        ({"image": ["/no.png"]}, "invalid_image", "image 0: the image file '/no.png' is not there"),
        ({"image": [b""] * 9}, "too_many_images", "there are 9 images, more than limit_mm_per_prompt={'image': 8}"),
        ({"video": b""}, "invalid_image", "multi_modal_data has video, which is not read; leave it out"),
        ({"audio": b""}, "invalid_image", "multi_modal_data has sound, which is not read; leave it out"),
        ({"depth": b""}, "invalid_image", "multi_modal_data has ['depth']; give {'image': ...}"),
        (b"", "invalid_image", "multi_modal_data is a bytes; give {'image': ...}"),
    ],
)
def test_a_wrong_image_ends_its_own_prompt(
    given: Any, kind: str, said: str, reader_of: Callable[..., ImageReader]
) -> None:
    reader = reader_of("qwen3_vl")
    good = as_prompt({"prompt": "<|image_pad|>", "multi_modal_data": {"image": picture(60, 40)}})
    wrong = as_prompt({"prompt": "<|image_pad|>", "multi_modal_data": given})
    errors: Errors = {}
    found, images = reader.read({0: good, 1: wrong}, True, 10**6, errors)
    assert [*errors] == [1]
    assert [*images] == [0]
    assert found[1] == []
    assert errors[1].kind == kind
    assert str(errors[1]).startswith(f"prompt 1: {said}")


def test_a_size_that_the_processor_refuses_is_an_error_with_its_reason(reader_of: Callable[..., ImageReader]) -> None:
    prompt = as_prompt({"prompt": "<|image_pad|>", "multi_modal_data": {"image": picture(1000, 2)}})
    with pytest.raises(RequestError, match=r"image 0: the image of 1000 x 2 pixels cannot be processed .*200.*; crop"):
        reader_of("qwen3_vl").process(prompt)


def test_an_option_of_llm_that_the_processor_does_not_know_is_an_error_of_the_config(
    reader_of: Callable[..., ImageReader],
) -> None:
    reader = reader_of("llava")
    config = EngineConfig(model="m", limit_mm_per_prompt={"image": 1}, mm_processor_kwargs={"sise": 3})
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs has 'sise', which .* does not know; known are .*size"):
        ImageReader(reader._processor, reader._tokenizer, None, config)


def test_options_that_the_processor_refuses_are_named(reader_of: Callable[..., ImageReader]) -> None:
    reader = reader_of("llava")
    prompt = ImagePrompt("<image>", {"image": picture(60, 40)}, processor_kwargs={"size": {"depth": 3}})
    with pytest.raises(RequestError, match=r"; crop .* or mend mm_processor_kwargs=\{'size': \{'depth': 3\}\}$"):
        reader.process(prompt)


@pytest.mark.parametrize("part", [{"type": "video", "video": "a"}, {"type": "input_audio", "input_audio": {}}])
def test_parts_of_video_and_sound_are_refused_by_name(part: Any, reader_of: Callable[..., ImageReader]) -> None:
    with pytest.raises(RequestError, match=r"has a part with (video|sound), which is not read; leave it out"):
        rendered(reader_of("qwen3_vl"), conversation("a", part))


def test_a_part_without_an_image_says_what_to_give(reader_of: Callable[..., ImageReader]) -> None:
    reader = reader_of("qwen3_vl")
    for part in ({"type": "image"}, {"type": "image_url", "image_url": {}}, {"type": "image", "image": 1, "url": "a"}):
        with pytest.raises(RequestError, match=r"message 0 of conversation 0 has .*; give \{'(type|url)'") as error:
            rendered(reader, conversation(part))
        assert error.value.kind == "invalid_image"


def test_options_of_the_image_processor_count_for_one_call_or_for_all(reader_of: Callable[..., ImageReader]) -> None:
    image = picture(60, 40)
    prompts = [
        ImagePrompt("<image>", {"image": image}, processor_kwargs=options)
        for options in (None, {"do_normalize": False}, {"do_normalise": False}, 7)
    ]
    reader = reader_of("llava")
    [plain], [raw] = reader.process(prompts[0]).images, reader.process(prompts[1]).images
    assert plain.key != raw.key
    assert not torch.equal(plain.tensors["pixel_values"], raw.tensors["pixel_values"])
    with pytest.raises(RequestError, match=r"has 'do_normalise', which .* does not know; known are"):
        reader.process(prompts[2])
    with pytest.raises(RequestError, match="mm_processor_kwargs=7 is no dict of names"):
        reader.process(prompts[3])


def test_equal_pictures_are_processed_once(reader_of: Callable[..., ImageReader]) -> None:
    reader = reader_of("gemma3", torch.float16)
    [first] = reader.process(rendered(reader, conversation(picture(9, 9, seed=5)))).images
    [again] = reader.process(rendered(reader, conversation("other", picture(9, 9, seed=5)))).images
    assert first.key == again.key
    assert len(first.key) == 32
    assert first.tensors["pixel_values"] is again.tensors["pixel_values"]


def test_a_file_that_is_given_again_in_any_form_is_neither_decoded_nor_processed_again(
    reader_of: Callable[..., ImageReader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, path = reader_of("llava"), tmp_path / "a.png"
    picture(60, 40, seed=7).save(path)
    [first] = reader.process(rendered(reader, conversation({"type": "image", "image": str(path)}, "?"))).images
    monkeypatch.setattr(sources, "_decode", lambda *_: pytest.fail("it is decoded again"))
    for form in (path, path.read_bytes(), path.as_uri(), {"bytes": path.read_bytes(), "path": None}):
        part = {"type": "image", "image": form}
        [again] = reader.process(rendered(reader, conversation(part, "other"))).images
        assert again.key == first.key
        assert again.tensors["pixel_values"] is first.tensors["pixel_values"]


def test_pictures_of_one_size_have_texts_that_are_tokenized_once(
    reader_of: Callable[..., ImageReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, calls = reader_of("qwen3_vl")._processor, list[str]()
    texts = processor._texts
    tokenize = type(texts.tokenizer).__call__

    def counted(self: Any, text: Any, *args: Any, **options: Any) -> Any:
        calls.append(text)
        return tokenize(self, text, *args, **options)

    monkeypatch.setattr(type(texts.tokenizer), "__call__", counted)
    monkeypatch.setattr(texts, "_known", {})
    sizes = [(60, 40), (60, 40), (40, 40)]
    runs = [processor.process(picture(*size, seed), None, {}).runs for seed, size in enumerate(sizes)]
    assert len(calls) == 2
    assert runs[0] == runs[1] != runs[2]
    monkeypatch.setattr(image_processor, "MAX_TEXTS", 1)
    texts._known.clear()
    for size in sizes:
        processor.process(picture(*size), None, {})
    assert len(texts._known) == 1


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    folder = write_processor(tmp_path, "llava")
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match=r"cannot be loaded .transformers has no processor class for None.; check its"):
        ImageProcessor(folder, tokenizer.hf, tokenizer.lock)
    (folder / "processor_config.json").write_text('{"processor_class": "MyOwnProcessor"}')
    with pytest.raises(ModelError, match="transformers has no processor class MyOwnProcessor"):
        ImageProcessor(folder, tokenizer.hf, tokenizer.lock)
    (folder / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(ModelError, match=r"preprocessor_config.json|LlavaProcessor"):  # the class is that of the model
        ImageProcessor(folder, tokenizer.hf, tokenizer.lock)


def test_runs_of_a_token_are_joined() -> None:
    assert join_runs("aXXXbX", "X") == ("aXbX", (3, 1))
    assert join_runs("XX", "X") == ("X", (2,))
    assert join_runs("none", "X") == ("none", ())


def made_picture(num_values: int) -> ProcessedPicture:
    return ProcessedPicture("", (1,), {"pixel_values": torch.zeros(num_values, dtype=torch.float32)})


def test_a_picture_of_a_file_is_made_again_when_the_file_and_what_was_kept_are_gone(
    reader_of: Callable[..., ImageReader], tmp_path: Path
) -> None:
    from PIL import Image

    reader, path = reader_of("qwen3_vl"), tmp_path / "red.png"
    Image.new("RGB", (300, 200), (255, 0, 0)).save(path)
    [image] = reader.process(rendered(reader, conversation({"type": "image", "image": str(path)}))).images
    path.unlink()
    with reader.store._lock:
        reader.store._evict(reader.store._kept_bytes)
    assert image.make_tensors is not None
    again = image.make_tensors()
    assert again["pixel_values"] is not image.tensors["pixel_values"]
    assert {*again} == {*image.tensors}
    assert all(torch.equal(again[name], tensor) for name, tensor in image.tensors.items())
    [unsaved] = reader.process(rendered(reader, conversation(picture(60, 40)))).images
    assert unsaved.make_tensors is None  # nothing else has its pixels


def test_a_store_keeps_the_pictures_used_last_and_counts_those_that_others_hold(monkeypatch: Any) -> None:
    monkeypatch.setattr(picture_store, "MIN_AHEAD", 0)
    store = PictureStore(max_bytes=100)
    held = store.add(b"a", made_picture(10))
    store.add(b"b", made_picture(10))
    assert store.get(b"a") is held
    store.add(b"c", made_picture(10))  # b goes, which was used longest ago
    assert store.get(b"b") is None
    assert store.get(b"a") is held
    assert store.num_bytes == 80
    assert store.add(b"a", made_picture(10)) is held
    assert store.has_room(1), "c makes room"
    assert store.get(b"c") is None
    assert store.num_bytes == 40
    assert not store.has_room(3), "a is held"
    del held
    assert store.get(b"a") is None
    assert store.num_bytes == 0
    assert store.has_room(2)
    assert not store.has_room(3)
    kept = store.add(b"d", made_picture(30))
    assert store.get(b"d") is None, "it is larger than all that may be kept"
    assert kept.num_bytes == store.num_bytes == 120


# --- Portions of calls with images ---


class Room:
    """Stands in for a reader with room for some requests that nobody has taken."""

    num_workers = 2

    def __init__(self, num_requests: int) -> None:
        self.num_requests, self.alive = num_requests, weakref.WeakSet[Any]()

    def has_room(self, num_images: int) -> bool:
        return len(self.alive) + num_images <= self.num_requests


class Held:
    """Is an image that is counted until nobody holds it."""


def image_portions(
    room: Room, count: int, wrong: Sequence[int] = (), **options: Any
) -> tuple[ImagePortions, list[int]]:
    begun: list[int] = []

    def prepare(indices: Sequence[int], errors: Errors) -> list[PreparedRequest]:
        [index] = indices
        begun.append(index)
        if index in wrong:
            errors[index] = RequestError(f"prompt {index} is wrong", "invalid_image")
        room.alive.add(held := Held())
        return [PreparedRequest(prompt=str(index), token_ids=[1], sampling_params=SamplingParams(), images=(held,))]

    return ImagePortions(prepare, range(count), room, **options), begun  # type: ignore[arg-type]


def test_requests_with_images_come_in_order_and_no_more_are_ahead_than_there_is_room_for() -> None:
    room = Room(3)
    portions, begun = image_portions(room, 40)
    found: list[str | None] = []
    with portions:
        held = portions.take(wait=True)  # as the engine does
        for _ in range(100):
            held += portions.take()
        # What a thread has begun has no image yet that could be counted.
        assert len(begun) <= room.num_requests + 2 * room.num_workers
        while held:
            found += [request.prompt for request in held]
            held = []
            gc.collect()
            held = portions.take(wait=True)
            assert len(room.alive) <= room.num_requests + 2 * room.num_workers
    assert found == [str(index) for index in range(40)]


def test_an_engine_that_waits_gets_a_request_though_there_is_no_room() -> None:
    portions, _ = image_portions(Room(0), 3)
    with portions:
        assert portions.take() == []
        assert [request.prompt for _ in range(3) for request in portions.take(wait=True)] == ["0", "1", "2"]


def test_a_wrong_request_is_raised_in_its_turn_or_returned_in_its_place(caplog: pytest.LogCaptureFixture) -> None:
    portions, _ = image_portions(Room(9), 5, wrong=[3])
    with pytest.raises(RequestError, match="prompt 3 is wrong"):
        portions.take_all()
    portions, _ = image_portions(Room(9), 5, wrong=[3], on_error="return")
    requests = portions.take_all()
    assert [request.error and request.error.kind for request in requests] == [None] * 3 + ["invalid_image", None]
    assert "1 of 5 prompts come back with an error: prompt 3 is wrong" in caplog.text


def test_whoever_leaves_early_ends_the_preparing() -> None:
    portions, begun = image_portions(Room(1000), 1000)
    with portions:
        portions.take(wait=True)
    num_begun = len(begun)
    for thread in threading.enumerate():
        if thread.name.startswith("nanoinfer prompts with images"):
            thread.join(timeout=10)
    assert len(begun) <= num_begun + 2 * Room.num_workers < 1000


def test_host_memory_stays_flat_over_many_pictures(
    reader_of: Callable[..., ImageReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits, what the engine has and what is kept stay within the limit, beside what is being made."""
    limit, num_pictures = 2**20, 60
    monkeypatch.setattr(picture_store, "MIN_AHEAD", limit)
    reader = reader_of("qwen3_vl", torch.float64, mm_processor_cache_gb=limit / 2**30)
    processor = PromptProcessor(reader._tokenizer, "m", 300, 64, image_reader=reader)
    prompts: list[Any] = [
        ImagePrompt("<|image_pad|>", {"image": picture(64, 64, seed)}) for seed in range(num_pictures)
    ]
    params = [SamplingParams()] * num_pictures

    def prepare(indices: Sequence[int], errors: Errors) -> list[PreparedRequest]:
        given = {index: prompts[index] for index in indices}
        return [*processor.prepare(given, params, [0] * num_pictures, errors).values()]

    one = prepare([0], {})[0].images[0].tensors["pixel_values"].nbytes
    assert num_pictures * one > 10 * limit
    most, num_done, in_engine = 0, 0, deque[PreparedRequest]()
    with ImagePortions(prepare, range(num_pictures), reader) as portions:
        while num_done < num_pictures:
            in_engine += portions.take(wait=not in_engine)
            most = max(most, reader.store.num_bytes)
            in_engine.popleft()  # a step that answers one request
            num_done += 1
    assert limit / 2 < most <= limit + 2 * reader.num_workers * one
    assert reader.store.num_bytes <= limit


def test_threads_that_process_images_compute_alone_and_leave_the_number_of_others() -> None:
    before = torch.get_num_threads()
    with ThreadPoolExecutor(2, initializer=use_one_core) as threads:
        assert [*threads.map(lambda _: torch.get_num_threads(), range(2))] == [1, 1]
    with ThreadPoolExecutor(1) as others:
        assert others.submit(torch.get_num_threads).result() == before
    assert torch.get_num_threads() == before


def test_images_that_a_model_could_not_tell_apart_are_refused(reader_of: Callable[..., ImageReader]) -> None:
    pictures = [picture(60, 40), picture(60, 40, 1)]
    reader = reader_of("qwen3_vl")
    place, image_token_id = reader.image_texts.placeholder, reader._processor.image_token_id
    apart = reader.process(ImagePrompt(f"a{place}b{place}", {"image": pictures}), False)
    check_spans(apart, "qwen3_vl")
    with pytest.raises(RequestError, match="the tokens of image 1 are not together, or nothing is between"):
        reader.process(ImagePrompt(f"a{place}{place}", {"image": pictures}))
    cut = [*apart.token_ids[:2], 5, *apart.token_ids[2:]]  # within the first image
    assert cut[1] == cut[3] == image_token_id
    with pytest.raises(RequestError, match="the tokens of image 0 are not together"):
        reader.process(ImagePrompt(cut, {"image": pictures}))
    reader = reader_of("llava")
    place = reader.image_texts.placeholder
    assert len(reader.process(ImagePrompt(f"a{place}{place}", {"image": pictures})).images) == 2


def test_a_closed_reader_keeps_neither_pictures_nor_threads(tmp_path: Path) -> None:
    folder = write_processor(tmp_path, "llava")
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    processor = ImageProcessor(folder, tokenizer.hf, tokenizer.lock)
    reader = ImageReader(processor, tokenizer, None, EngineConfig(model="m", limit_mm_per_prompt={"image": 1}))
    prompt = ImagePrompt("a<image>", {"image": picture(60, 40)})
    reader.process(prompt)
    assert reader.store.num_bytes > 0
    threads = [*reader._threads._threads]
    assert threads
    reader.close()
    reader.close()
    gc.collect()
    assert reader.store.num_bytes == 0
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    with pytest.raises(EngineClosedError):
        reader.process(prompt)


# --- Options ---


def test_a_prompt_processor_without_images_says_what_to_do(reader_of: Callable[..., ImageReader]) -> None:
    processor = PromptProcessor(None, "m", 300, 64)
    given = as_prompt({"prompt": "a", "multi_modal_data": {"image": 1}})
    errors: Errors = {}
    processor.prepare({0: given}, [SamplingParams()], [0], errors)
    assert "prompt 0 has images, which are not read here; give LLM(limit_mm_per_prompt=" in str(errors[0])


def test_requests_have_their_images_and_whole_token_ids(reader_of: Callable[..., ImageReader]) -> None:
    reader = reader_of("qwen3_vl")
    processor = PromptProcessor(reader._tokenizer, "m", 300, 64, image_reader=reader)
    given = rendered(reader, conversation(picture(60, 40), "what?"))
    errors: Errors = {}
    params = [SamplingParams()] * 4
    long = rendered(reader, conversation(picture(60, 40), "what?" * 20))
    prompts: Any = {0: given, 1: "text", 2: long, 3: [token_ids_of("qwen3_vl")["<|image_pad|>"]]}
    requests = processor.prepare(prompts, params, [0] * 4, errors, add_special_tokens=False)
    assert [len(request.images) for request in requests.values()] == [1, 0, 1, 0]
    assert requests[0].prompt == given.prompt
    assert requests[0].token_ids == reader.process(given, False).token_ids
    assert [errors[index].kind for index in (2, 3)] == ["prompt_too_long", "invalid_image"]
    cut = processor.prepare(
        {2: long}, [SamplingParams()] * 3, [0] * 3, errors := {}, True, {"truncate_prompt_tokens": 9}
    )
    assert cut[2].token_ids == [] or errors
    assert "truncate_prompt_tokens would cut it; shorten its text" in str(errors[2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit_mm_per_prompt": 3}, "limit_mm_per_prompt=3 is no dict; use {'image': 4}, say"),
        ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt has image=-1; use a whole number of at least 0"),
        ({"limit_mm_per_prompt": {"video": 1}}, "limit_mm_per_prompt has video=1, and only images are read"),
        ({"mm_processor_kwargs": [1]}, "mm_processor_kwargs=[1] is no dict of names"),
        ({"allowed_media_domains": 7}, "allowed_media_domains=7 is no list of hosts; use ['example.org'], say"),
        ({"allowed_media_domains": ["http://a.b"]}, "allowed_media_domains has 'http://a.b', no host alone"),
    ],
)
def test_options_about_images_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(model="m", **options)
    assert str(error.value).startswith(said)


def test_images_are_seen_where_a_prompt_may_have_some() -> None:
    assert not EngineConfig(model="m").sees_images
    assert not EngineConfig(model="m", limit_mm_per_prompt={"image": 0, "video": 0}).sees_images
    assert EngineConfig(model="m", limit_mm_per_prompt={"image": 2, "video": 0}).sees_images
    assert EngineConfig(model="m", allowed_media_domains="A.org, b.org").allowed_media_domains == ("a.org", "b.org")
