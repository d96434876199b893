"""Folders with a small tokenizer, chat template and real image processor of a model, and pictures to give to them.

write_processor(tmp_path, "qwen3_vl")  # what a checkpoint has beside its config.json and its weights
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import transformers

NORMALIZE = {"do_rescale": True, "do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.3, 0.25, 0.2]}
NORMALIZE |= {"do_convert_rgb": True, "do_resize": True, "rescale_factor": 1 / 255, "resample": 3}
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
BYTES = 256  # ids of the tokens that stand for a byte; special tokens come after them


@dataclass(frozen=True)
class Kind:
    """Describes the files of one family of models.

    image_token: stands for one embedding. placeholder: what the chat template writes for an image, in `around`.
    tokens: further special tokens. named: attributes of the tokenizer. beside: tokens in what stands for an image that
    are read otherwise than in texts.
    """

    processor_class: str
    image_processor_type: str
    image_processor: dict[str, Any]
    image_token: str
    around: str = "{}"
    placeholder: str = ""
    tokens: tuple[str, ...] = ()
    named: dict[str, str] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    bos: str | None = None
    beside: tuple[str, ...] = ()

    @property
    def all_tokens(self) -> list[str]:
        own = [token for token in (self.bos, "<|im_start|>", "<|im_end|>", self.image_token) if token]
        return [*dict.fromkeys([*own, *([self.placeholder] if self.placeholder else []), *self.tokens, *self.beside])]


def qwen(processor_class: str, patch_size: int) -> Kind:
    return Kind(
        processor_class,
        "Qwen2VLImageProcessor",
        {"patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 4 * 16 * 16}
        | {"max_pixels": 64 * 64, "size": {"shortest_edge": 4 * 16 * 16, "longest_edge": 64 * 64}},
        "<|image_pad|>",
        around="<|vision_start|>{}<|vision_end|>",
        tokens=("<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
    )


KINDS: dict[str, Kind] = {
    "qwen2_vl": qwen("Qwen2VLProcessor", 8),
    "qwen2_5_vl": qwen("Qwen2_5_VLProcessor", 8),
    "qwen3_vl": qwen("Qwen3VLProcessor", 8),
    "qwen3_5": qwen("Qwen3VLProcessor", 8),
    "gemma3": Kind(
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        {"size": {"height": 32, "width": 32}},
        "<image_soft_token>",
        placeholder="<start_of_image>",
        tokens=("<end_of_image>",),
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        processor={"image_seq_length": 16},
        bos="<bos>",
    ),
    "mistral3": Kind(
        "PixtralProcessor",
        "PixtralImageProcessor",
        {"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
        "[IMG]",
        tokens=("[IMG_BREAK]", "[IMG_END]"),
        processor={"patch_size": 8, "spatial_merge_size": 2},
        bos="<s>",
    ),
    "llava": Kind(
        "LlavaProcessor",
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 32}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}},
        "<image>",
        around="{}\n",
        processor={
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        bos="<s>",
    ),
    "llava_next": Kind(
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        {"size": {"shortest_edge": 32}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}}
        | {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
        "<image>",
        around="{}\n",
        processor={
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        bos="<s>",
    ),
    "internvl": Kind(
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        "<IMG_CONTEXT>",
        around="{}\n",
        tokens=("<img>", "</img>", "<video>"),
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        processor={"image_seq_length": 4},
    ),
    "smolvlm": Kind(
        "SmolVLMProcessor",
        "SmolVLMImageProcessor",
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": True}
        | {
            "do_pad": True,
            "resample": 1,
            "video_sampling": {"fps": 1, "max_frames": 4, "video_size": {"longest_edge": 64}},
        },
        "<image>",
        tokens=("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>"),
        processor={"image_seq_len": 4},
    ),
    "idefics3": Kind(
        "Idefics3Processor",
        "Idefics3ImageProcessor",
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": True}
        | {"do_pad": True, "resample": 1},
        "<image>",
        tokens=("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        processor={"image_seq_len": 4},
    ),
    "paddleocr_vl": Kind(
        "PaddleOCRVLProcessor",
        "PaddleOCRVLImageProcessor",
        {"patch_size": 8, "temporal_patch_size": 1, "merge_size": 2, "min_pixels": 16 * 16, "max_pixels": 64 * 64}
        | {"size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}},
        "<|IMAGE_PLACEHOLDER|>",
        around="<|IMAGE_START|>{}<|IMAGE_END|>",
        tokens=("<|IMAGE_START|>", "<|IMAGE_END|>"),
        named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    "glm_ocr": Kind(
        "Glm46VProcessor",
        "Glm46VImageProcessor",
        {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
        | {"size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 2 * 64 * 64}},
        "<|image|>",
        around="<|begin_of_image|>{}<|end_of_image|>",
        tokens=("<|begin_of_image|>", "<|end_of_image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
        named={"image_token": "<|image|>", "video_token": "<|video|>"},
    ),
    "deepseek_ocr2": Kind(
        "DeepseekOcr2Processor",
        "DeepseekOcr2ImageProcessor",
        {"size": {"height": 64, "width": 64}, "tile_size": 48, "min_patches": 2, "max_patches": 4},
        "<image>",
        around="{}\n",
        processor={"patch_size": 4, "downsample_ratio": 4},
        bos="<s>",
    ),
    "gemma4": Kind(
        "Gemma4Processor",
        "Gemma4ImageProcessor",
        {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70},
        "<|image|>",
        around="\n\n{}\n\n",
        tokens=("<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
        named={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        processor={"image_seq_length": 70},
        bos="<bos>",
    ),
    "granite_docling": Kind(
        "GraniteDoclingProcessor",
        "GraniteDoclingImageProcessor",
        {"size": {"height": 32, "width": 32}, "max_patches": 4},
        "<image>",
        tokens=("<fake_token_around_image>", "<global-img>"),
        processor={"image_seq_len": 4},
    ),
    "kimi_k25": Kind(
        "Kimi_K25Processor",
        "Kimi_K25ImageProcessor",
        {"patch_size": 8, "merge_size": 2, "max_patches": 64},
        "<|media_pad|>",
        around="<|media_begin|>image<|media_content|>{}<|media_end|>",
        tokens=("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|kimi_k25_video_placeholder|>"),
    ),
    "llama4": Kind(
        "Llama4Processor",
        "Llama4ImageProcessor",
        {"size": {"height": 32, "width": 32}, "max_patches": 4},
        "<|patch|>",
        placeholder="<|image|>",
        tokens=("<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
        processor={"patch_size": 8, "pixel_shuffle_ratio": 0.5},
    ),
    "ovis2": Kind(
        "Ovis2Processor",
        "Ovis2ImageProcessor",
        {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "max_patches": 4},
        "<IMG_ATOM>",
        placeholder="<image>",
        processor={"image_seq_length": 4},
        beside=("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
    ),
    "lighton_ocr": Kind(
        "LightOnOcrProcessor",
        "PixtralImageProcessor",
        {"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
        "<|image_pad|>",
        around="{}\n",
        tokens=("<|vision_pad|>", "<|vision_end|>"),
        named={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        processor={"patch_size": 8, "spatial_merge_size": 2},
    ),
    "qianfan_ocr": Kind(
        "QianfanOCRProcessor",
        "GotOcr2ImageProcessor",
        {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        "<IMG_CONTEXT>",
        placeholder="<image>" if VERSION >= (5, 24) else "",
        around="{}\n",
        tokens=("<img>", "</img>"),
        named={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
        processor={"image_seq_length": 4},
    ),
    "step3p7": Kind(
        "Step3p7Processor",
        "Step3p7ImageProcessor",
        {"size": {"height": 56, "width": 56}, "patch_size": 28, "vision_patch_size": 7, "downsampler_stride": 2},
        "<im_patch>",
        tokens=("<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
    ),
    "video_llama_3": Kind(
        "VideoLlama3Processor",
        "VideoLlama3ImageProcessor",
        {"patch_size": 8, "temporal_patch_size": 1, "merge_size": 1}
        | {"size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}},
        "<|image_pad|>",
        around="{}\n",
        tokens=("<|video_pad|>",),
    ),
}


def token_ids_of(kind: str) -> dict[str, int]:
    """Return the ids of the special tokens, which follow those of the bytes; the vocabulary ends with the last."""
    return {token: BYTES + place for place, token in enumerate(KINDS[kind].all_tokens)}


def chat_template(kind: str) -> str:
    """Return a template that writes an image as the family's own does, and takes contents as texts or in parts."""
    one = KINDS[kind]
    image = one.around.format(one.placeholder or one.image_token).replace("\n", "\\n")
    return (
        (f"{one.bos}" if one.bos else "") + "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '" + image + "' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def write_processor(folder: Path, kind: str, **image_processor: Any) -> Path:
    """Write all that a checkpoint has beside config.json and weights. image_processor: replaces its options."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    one = KINDS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: place for place, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in one.all_tokens])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=one.bos,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        extra_special_tokens=one.named,
    )
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(chat_template(kind), encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {"chat_template": chat_template(kind), "tokenizer_class": "PreTrainedTokenizerFast", **one.named}
    _write(folder / "tokenizer_config.json", settings)
    options = {**NORMALIZE, **one.image_processor, **image_processor}
    options |= {"image_processor_type": one.image_processor_type, "processor_class": one.processor_class}
    _write(folder / "preprocessor_config.json", options)
    _write(folder / "processor_config.json", {"processor_class": one.processor_class, **one.processor})
    if one.placeholder or one.beside:  # else the processor itself says what stands for an embedding
        ids = token_ids_of(kind)
        beside = {"visual_indicator_token_ids": [ids[token] for token in one.beside]} if one.beside else {}
        _write(folder / "config.json", {"image_token_id": ids[one.image_token], **beside})
    return folder


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def picture(width: int, height: int, seed: int = 0) -> Any:
    """Return a picture of PIL with random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
