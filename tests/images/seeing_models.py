"""Small random models that see, prompts with images for them, and transformers' own answers."""

import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from nanoinfer.images.processed import ProcessedImage, ProcessedPrompt
from tests.models.tiny_transformers import Answer, spread_weights, tiny_fields

IMAGE = 250  # the image token's id
BEGIN, END = 248, 249
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
IS_5 = VERSION >= (5, 0)
FIRST_VERSIONS = {"Aria": (5, 24)}  # before it, its layers need numbers where there are only shapes
TEXT = {
    **({} if IS_5 else {"rope_theta": 10000.0}),
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ROPE_FIELD = "rope_parameters" if IS_5 else "rope_scaling"


@dataclass(frozen=True)
class Picture:
    """Holds an image as a processor makes it: a model's inputs for it, and what stands for it in prompts."""

    tensors: Mapping[str, Tensor]
    token_ids: tuple[int, ...]


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def square(seed: int, size: int, num_tokens: int) -> Picture:
    """Return an image of fixed size."""
    return Picture({"pixel_values": noise(seed, 1, 3, size, size)}, (IMAGE,) * num_tokens)


def patches(seed: int, patch_values: int, merge: int) -> Picture:
    """Return an image of the sizes that Qwen's processors make, of (4 or more) x (4 or more) patches."""
    height, width = [(4, 6), (6, 4), (8, 4)][seed % 3]
    tensors = {
        "pixel_values": noise(seed, height * width, patch_values),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }
    return Picture(tensors, (IMAGE,) * (height * width // merge**2))


@dataclass(frozen=True)
class Seeing:
    """Says how to make a small model of a class, and images for it.

    picture: makes an image of a seed. types: the name of transformers' argument that says which tokens are images.
    """

    make: Callable[[], Any]
    picture: Callable[[int], Picture]
    types: str | None = None


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(**VISION, image_size=24, patch_size=8)
    text = transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    return transformers.LlavaForConditionalGeneration(config)


QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 251,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 1,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
}


def qwen2_5_vl() -> Any:
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, ROPE_FIELD: {**ROPE, "mrope_section": [2, 3, 3]}},
        vision_config={**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
        **QWEN_IDS,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> Any:
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, ROPE_FIELD: {**ROPE, "mrope_section": [2, 3, 3]}},
        vision_config={**QWEN_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **QWEN_IDS,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def gemma3() -> Any:
    """Return a model whose windows are shorter than its images."""
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    # transformers 4 lets images see beyond the window.
    text = {**TEXT, "num_hidden_layers": 3, "layer_types": layer_types, "sliding_window": 12 if IS_5 else 24}
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**VISION, image_size=32, patch_size=8),
        text_config=transformers.Gemma3TextConfig(**text, query_pre_attn_scalar=16),
        image_token_index=IMAGE,
        mm_tokens_per_image=16,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}


def qwen3_vl_moe() -> Any:
    config = transformers.Qwen3VLMoeConfig(
        text_config={**TEXT, **EXPERTS, ROPE_FIELD: {**ROPE, "mrope_section": [2, 3, 3]}},
        vision_config={**QWEN_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **QWEN_IDS,
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def qwen3_5(name: str = "Qwen3_5", **others: Any) -> Any:
    """Return a model whose layers have linear attention, but one, which rotates half of its dimensions."""
    rope = {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    layer_types = ["linear_attention", "full_attention", "linear_attention"]
    layers = {"num_hidden_layers": 3, "layer_types": layer_types, "rope_parameters": rope}
    config = getattr(transformers, f"{name}Config")(
        text_config={**TEXT, **linear, **layers, **others},
        vision_config={**QWEN_VISION, "num_position_embeddings": 64},
        **QWEN_IDS,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def mistral3() -> Any:
    vision = transformers.PixtralVisionConfig(**VISION, image_size=32, patch_size=4, head_dim=16)
    config = transformers.Mistral3Config(
        vision_config=vision,
        text_config=transformers.MistralConfig(**TEXT, sliding_window=None),
        image_token_index=IMAGE,
        spatial_merge_size=2,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def rows_and_breaks(seed: int) -> Picture:
    """Return an image as Pixtral's processor makes it, with a token after each row."""
    height, width = [(2, 3), (3, 2), (4, 3)][seed % 3]  # in merged patches of 8 pixels
    pixels = noise(seed, 1, 3, 8 * height, 8 * width)
    token_ids = (*((IMAGE,) * width + (241,)) * (height - 1), *(IMAGE,) * width, 242)
    return Picture({"pixel_values": pixels, "image_sizes": torch.tensor([[8 * height, 8 * width]])}, token_ids)


def tiny(architecture: str, **overrides: Any) -> Any:
    """Return a small model of a class."""
    return getattr(transformers, architecture)(tiny_config(architecture, **overrides))


def tiny_config(architecture: str, **overrides: Any) -> Any:
    """Return the config of a small model of a class by the rules of `tiny_fields`."""
    config_class = getattr(transformers, architecture).config_class
    fields = tiny_fields(config_class, overrides)
    image_tokens = dict.fromkeys(fields.keys() & {"image_token_id", "image_token_index"}, IMAGE)
    return config_class(**{**fields, **image_tokens, "architectures": [architecture]})


def tiles(seed: int, num_tiles: int, num_tokens: int, sizes: list[int] | None = None) -> Picture:
    """Return an image that is cut into tiles of 32 x 32. sizes: of the whole image, if the model is told."""
    tensors = {"pixel_values": noise(seed, 1, num_tiles, 3, 32, 32)}
    if sizes is not None:
        tensors["image_sizes"] = torch.tensor([sizes])
    return Picture(tensors, (IMAGE,) * num_tokens)


def square_patches(seed: int, size: int, merge: int) -> Picture:
    """Return an image of the sizes that PaddleOCR-VL's processor makes: each patch is a picture of its own."""
    picture = patches(seed, 3 * size * size, merge)
    pixels = picture.tensors["pixel_values"].unflatten(1, (3, size, size))
    return Picture({**picture.tensors, "pixel_values": pixels}, picture.token_ids)


def merged(seed: int, patch_size: int, merge: int) -> Picture:
    """Return an image of any size, of which the model is told, with a token for each merged patch."""
    height, width = [(2, 3), (3, 2), (4, 3)][seed % 3]
    sides = [patch_size * merge * height, patch_size * merge * width]
    tensors = {"pixel_values": noise(seed, 1, 3, *sides), "image_sizes": torch.tensor([sides])}
    return Picture(tensors, (IMAGE,) * (height * width))


def with_mask(picture: Picture, name: str, *shape: int) -> Picture:
    """Return an image with a mask of which parts are real: all."""
    return Picture({**picture.tensors, name: torch.ones(1, *shape, dtype=torch.bool)}, picture.token_ids)


def aria(seed: int) -> Picture:
    return with_mask(square(seed, 32, 4), "pixel_mask", 32, 32)


def granite_docling(seed: int) -> Picture:
    num_tiles = 1 + seed % 3
    return with_mask(tiles(seed, num_tiles, num_tiles), "pixel_attention_mask", num_tiles)


def idefics2(seed: int) -> Picture:
    height, width = [(32, 24), (24, 32), (16, 32)][seed % 3]
    picture = Picture({"pixel_values": noise(seed, 1, 1, 3, height, width)}, (IMAGE,) * 8)
    return with_mask(picture, "pixel_attention_mask", 1, height, width)


def ovis2(seed: int) -> Picture:
    """Return an image before and after which the model reads something of its own."""
    return Picture({"pixel_values": noise(seed, 1, 3, 32, 32)}, (241, *(IMAGE,) * 16, 242, 245))


def emu3(seed: int) -> Picture:
    """Return an image that becomes tokens of a codebook, with one more at the end of each row."""
    height, width = [(4, 6), (6, 4), (4, 4)][seed % 3]
    tensors = {"pixel_values": noise(seed, 1, 3, height, width), "image_sizes": torch.tensor([[height, width]])}
    return Picture(tensors, (IMAGE,) * (height // 2 * (width // 2 + 1)))


def video_llama3(seed: int) -> Picture:
    picture = patches(seed, 3 * 8 * 8, 2)
    return Picture({**picture.tensors, "image_merge_sizes": torch.tensor([2])}, picture.token_ids)


def deepseek_ocr2(seed: int) -> Picture:
    """Return an image that may be cut into tiles beside the whole, and has 144 tokens for each, and one."""
    num_tiles = seed % 2
    tensors = {"pixel_values": noise(seed, 1, 3, 32, 32), "num_local_patches": torch.tensor([num_tiles])}
    if num_tiles:
        tensors["pixel_values_local"] = noise(seed + 9, num_tiles, 3, 32, 32)
    return Picture(tensors, (IMAGE,) * (1 + 144 * (1 + num_tiles)))


def placed_patches(seed: int, patch_values: int, per_token: int) -> Picture:
    """Return an image as Gemma 4's processor makes it: patches with their places, filled up to a fixed number."""
    side = math.isqrt(per_token)
    height, width = [(2, 3), (3, 2), (2, 4)][seed % 3]
    places = [[x, y] for y in range(height * side) for x in range(width * side)]
    pixels = torch.zeros(1, 8 * per_token, patch_values)
    pixels[:, : len(places)] = noise(seed, 1, len(places), patch_values).sigmoid()
    places += [[-1, -1]] * (8 * per_token - len(places))
    return Picture({"pixel_values": pixels, "image_position_ids": torch.tensor([places])}, (IMAGE,) * (height * width))


def of_rules(name: str, picture: Callable[[int], Picture], types: str | None = None, **overrides: Any) -> Seeing:
    return Seeing(partial(tiny, f"{name}ForConditionalGeneration", **overrides), picture, types)


THREE = {ROPE_FIELD: {**ROPE, "mrope_section": [3, 3, 2]}}
FOUR = {"head_dim": 128, "rope_parameters": {**ROPE, "mrope_section": [16, 16, 16, 16]}}
KINDS_OF_LAYERS = ["sliding_attention", "full_attention"]
THREE_OF_EACH = {"rope_parameters": {kind: {**ROPE, "mrope_section": [3, 3, 2]} for kind in KINDS_OF_LAYERS}}
THREE_OF_HALF = {ROPE_FIELD: {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
CODES = {
    "<image>": IMAGE,
    "<|extra_200|>": 199,
    **{f"<|visual token {code:06d}|>": 200 + code for code in range(8)},
}
CODEBOOK = {
    "codebook_size": 8,
    "base_channels": 32,
    "channel_multiplier": [1, 2],
    "num_res_blocks": 1,
    "hidden_size": 64,
    "attn_resolutions": [3],
}
GEMMA4 = {  # in windows, images see all of themselves; the last two layers read the cache of the first two
    "num_hidden_layers": 4,
    "layer_types": KINDS_OF_LAYERS * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
    "sliding_window": 12,
    "use_bidirectional_attention": "vision",
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
LONG = {"max_position_embeddings": 2048}
TYPES = "mm_token_type_ids"
SQUARE_PATCHES = {"image_size": [32, 32], "patch_size": [8, 8]}
PINPOINTS = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}
CROPPED = {"num_tiles": 5, "num_tokens": 88, "sizes": [64, 64]}
QWEN_PICTURE = partial(patches, patch_values=48, merge=2)
GLM_PICTURE = partial(patches, patch_values=2 * 3 * 8 * 8, merge=2)
MODELS: dict[str, Seeing] = {
    "LlavaForConditionalGeneration": Seeing(llava, partial(square, size=24, num_tokens=9)),
    "Qwen2_5_VLForConditionalGeneration": Seeing(qwen2_5_vl, QWEN_PICTURE, "mm_token_type_ids"),
    "Qwen3VLForConditionalGeneration": Seeing(qwen3_vl, QWEN_PICTURE, "mm_token_type_ids"),
    "Qwen3_5ForConditionalGeneration": Seeing(qwen3_5, QWEN_PICTURE, "mm_token_type_ids"),
    "Mistral3ForConditionalGeneration": Seeing(mistral3, rows_and_breaks),
    "Gemma3ForConditionalGeneration": Seeing(gemma3, partial(square, size=32, num_tokens=16), "token_type_ids"),
    "SmolVLMForConditionalGeneration": of_rules("SmolVLM", partial(tiles, num_tiles=2, num_tokens=8)),
}
if not IS_5:  # transformers 4 has not the one, and writes a config of the other without its class
    del MODELS["Qwen3_5ForConditionalGeneration"], MODELS["Qwen2_5_VLForConditionalGeneration"]
OTHERS: dict[str, Seeing] = {  # which take long to test, all together
    "Qwen3VLMoeForConditionalGeneration": Seeing(qwen3_vl_moe, QWEN_PICTURE, "mm_token_type_ids"),
    "Qwen3_5MoeForConditionalGeneration": Seeing(
        partial(qwen3_5, "Qwen3_5Moe", shared_expert_intermediate_size=48, **EXPERTS),
        QWEN_PICTURE,
        "mm_token_type_ids",
    ),
    "AyaVisionForConditionalGeneration": of_rules("AyaVision", partial(square, size=32, num_tokens=4)),
    "Cohere2VisionForConditionalGeneration": of_rules("Cohere2Vision", partial(square, size=32, num_tokens=4)),
    "GlmOcrForConditionalGeneration": of_rules("GlmOcr", GLM_PICTURE, "mm_token_type_ids", text_config=THREE),
    "Glm4vForConditionalGeneration": of_rules("Glm4v", GLM_PICTURE, "mm_token_type_ids", text_config=THREE),
    "GotOcr2ForConditionalGeneration": of_rules("GotOcr2", partial(square, size=32, num_tokens=1)),
    "Idefics3ForConditionalGeneration": of_rules("Idefics3", partial(tiles, num_tiles=2, num_tokens=8)),
    "InternVLForConditionalGeneration": of_rules(
        "InternVL",
        partial(square, size=32, num_tokens=4),
        vision_config=SQUARE_PATCHES,
    ),
    "LlavaNextForConditionalGeneration": of_rules("LlavaNext", partial(tiles, **CROPPED), **PINPOINTS),
    "LlavaOnevisionForConditionalGeneration": of_rules("LlavaOnevision", partial(tiles, **CROPPED), **PINPOINTS),
    "PaddleOCRVLForConditionalGeneration": of_rules(
        "PaddleOCRVL", partial(square_patches, size=8, merge=2), "mm_token_type_ids", text_config=THREE
    ),
    "Qwen2VLForConditionalGeneration": of_rules("Qwen2VL", GLM_PICTURE, "mm_token_type_ids", text_config=THREE),
}
MORE: dict[str, Seeing] = {  # from version 5 on
    f"{name}ForConditionalGeneration": of_rules(name, picture, types, **overrides)
    for name, picture, types, overrides in (
        ("Aria", aria, None, {"projector_patch_to_query_dict": {16: 4}}),
        ("CohereCompass", GLM_PICTURE, TYPES, {"text_config": THREE_OF_EACH}),
        (
            "DeepseekOcr2",
            deepseek_ocr2,
            None,
            {
                "vision_config": {"sam_config": {"downsample_channels": [64, 64]}},
                "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2} | LONG,
            },
        ),
        ("Emu3", emu3, None, {"vocabulary_map": CODES, "vq_config": CODEBOOK}),
        ("Exaone4_5_", GLM_PICTURE, None, {}),
        ("Gemma4", partial(placed_patches, patch_values=3 * 8 * 8, per_token=9), TYPES, {"text_config": GEMMA4}),
        ("Gemma4Unified", partial(placed_patches, patch_values=3 * 24 * 24, per_token=1), TYPES, {}),
        ("Glm46V", GLM_PICTURE, TYPES, {"text_config": THREE}),
        ("Glm4vMoe", GLM_PICTURE, TYPES, {"text_config": THREE_OF_HALF}),
        ("GraniteDocling", granite_docling, None, {"vision_config": {"deepstack_visual_indexes": [0, 1]}}),
        ("HyperCLOVAXVisionV2", GLM_PICTURE, None, {}),
        ("Idefics2", idefics2, None, {"perceiver_config": {"resampler_n_latents": 8}}),
        ("Kimi_K25", partial(square_patches, size=8, merge=2), None, {"projection_hidden_size": 64}),
        ("LightOnOcr", partial(merged, patch_size=8, merge=2), None, {}),
        (
            "Llama4",
            partial(square, size=32, num_tokens=4),
            None,
            {
                "vision_config": {"intermediate_size": 256},
                "text_config": {"floor_scale": 512, "attention_chunk_size": 32},
            },
        ),
        ("LlavaNextVideo", partial(tiles, **CROPPED), None, PINPOINTS),
        ("MuseGlimmer", GLM_PICTURE, None, {"out_hidden_size": 256, "projector_hidden_size": 64}),
        ("Ovis2", ovis2, None, {"visual_indicator_token_ids": [241, 242, 243, 244, 245]}),
        ("QianfanOCR", partial(square, size=32, num_tokens=4), None, {"vision_config": SQUARE_PATCHES}),
        ("Step3p7", partial(square, size=32, num_tokens=1), None, {"text_config": {"sliding_window": 20}}),
        ("VideoLlama3", video_llama3, None, {}),
        ("VipLlava", partial(square, size=32, num_tokens=16), None, {"vision_feature_layers": [-1, -2]}),
    )
    if FIRST_VERSIONS.get(name, (5, 0)) <= VERSION and hasattr(transformers, f"{name}ForConditionalGeneration")
}
# Those of MORE that have something which no other class has; the rest takes long to test, all together.
SPECIAL = tuple(
    f"{name}ForConditionalGeneration"
    for name in (
        *("Aria", "CohereCompass", "DeepseekOcr2", "Gemma4", "Gemma4Unified", "GraniteDocling"),
        *("Idefics2", "Kimi_K25", "LightOnOcr", "Llama4", "Ovis2"),
    )
    if f"{name}ForConditionalGeneration" in MORE
)
ALL = MODELS | OTHERS | MORE


def write_seeing(architecture: str, folder: Path) -> None:
    """Write a random float32 checkpoint that never draws the tokens of images."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = ALL[architecture].make().float()
        spread_weights(model)
        model.get_output_embeddings().weight[[BEGIN, END, IMAGE, 251]] = 0
    model.save_pretrained(folder)


def make_prompt(architecture: str, parts: Sequence[int | str], seed: int = 0) -> ProcessedPrompt:
    """Return a prompt of texts and images. parts: the length of a text, or "#3" for the image of seed 3."""
    draw = random.Random(seed)
    token_ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            token_ids += [draw.randrange(5, 240) for _ in range(part)]
            continue
        picture = ALL[architecture].picture(int(part[1:]))
        token_ids.append(BEGIN)
        key = sha256(f"{architecture} {part}".encode()).digest()
        images.append(ProcessedImage(len(token_ids), len(picture.token_ids), dict(picture.tensors), key))
        token_ids += [*picture.token_ids, END]
    return ProcessedPrompt(token_ids, images, IMAGE)


def padded(tensors: Sequence[Tensor]) -> Tensor:
    """Return the inputs of several images in one tensor, as processors make it, with zeros where they are smaller."""
    sizes = [max(size) for size in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    whole = torch.zeros(sum(map(len, tensors)), *sizes, dtype=tensors[0].dtype)
    for part, tensor in zip(whole.split([*map(len, tensors)]), tensors, strict=True):
        part[tuple(map(slice, tensor.shape))] = tensor
    return whole


def answers_of_transformers(
    architecture: str, folder: Path, prompts: Sequence[ProcessedPrompt], num_tokens: int
) -> list[Answer]:
    """Return what transformers answers greedily without any cache, one prompt after the other."""
    model = load_hf(architecture, folder)
    answers = []
    for prompt in prompts:
        answer = Answer([], [])
        for _ in range(num_tokens):
            so_far = replace(prompt, token_ids=prompt.token_ids + answer.token_ids)
            logprobs = own_logits(model, ALL[architecture], so_far)[-1].log_softmax(-1)
            answer.token_ids.append(int(logprobs.argmax()))
            answer.logprobs.append(float(logprobs.max()))
        answers.append(answer)
    return answers


def logits_of_transformers(architecture: str, folder: Path, prompt: ProcessedPrompt) -> Tensor:
    """Return transformers' logits at each place of a prompt, (num_tokens, vocab_size)."""
    return own_logits(load_hf(architecture, folder), ALL[architecture], prompt)


def load_hf(architecture: str, folder: Path) -> Any:
    model_class = getattr(transformers, architecture)
    model = model_class.from_pretrained(folder, attn_implementation="eager").float().eval()
    if architecture.startswith("Llama4"):  # which asks its language model for what that does not return
        model.language_model.register_forward_hook(lambda _, __, output: setattr(output, "image_outputs", None))
    return model


@torch.no_grad()
def own_logits(model: Any, seeing: Seeing, prompt: ProcessedPrompt) -> Tensor:
    """Return a model's logits at each place of a prompt with images, computed without a cache."""
    given = [image.tensors for image in prompt.images]
    inputs = {name: padded([one[name] for one in given if name in one]) for one in given for name in one}
    if prompt.images and seeing.types in inspect.signature(model.forward).parameters:  # of transformers 5, some
        inputs[seeing.types] = torch.tensor([[int(token_id == IMAGE) for token_id in prompt.token_ids]])
    if hasattr(getattr(model, "model", None), "rope_deltas"):
        model.model.rope_deltas = None
    ids = torch.tensor([prompt.token_ids])
    # Without a mask, transformers 4 takes positions that do not grow for the begin of another text.
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits[0]
    return logits.float()
