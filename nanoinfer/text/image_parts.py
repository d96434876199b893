"""Images in what a user gives: parts of messages, and `multi_modal_data` beside a prompt.

Nothing is loaded here, so that a wrong prompt costs nothing: see `images/sources.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.errors import RequestError

# How OpenAI, transformers and vLLM name the kinds of parts, and the fields that have the image.
IMAGE_TYPES = ("image", "image_url", "input_image", "image_pil")
IMAGE_FIELDS = ("image", "image_url", "image_pil", "url", "path", "base64")
OTHER_KINDS = {
    "video": ("video", "video_url", "input_video"),
    "sound": ("audio", "audio_url", "input_audio"),
}
MARK = "nanoinferWritten"  # stands for a token that a user wrote himself, while a template is rendered
NUM_DIMS_OF_SEVERAL = 4  # of an array: images, height, width, channels
IMAGE_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs")


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Holds a prompt with images that are not loaded, and not checked yet.

    prompt: the text, or the token ids, with a placeholder for each image. data: vLLM's multi_modal_data.
    pieces: the text before, between and after the images, where a chat template has written the placeholders; all
        else that looks like a placeholder is text then. None: all of them in `prompt` stand for images.
    processor_kwargs: options of the image processor for this prompt.
    """

    prompt: Any
    data: Any
    pieces: tuple[str, ...] | None = None
    processor_kwargs: Any = None

    def images(self) -> list[Any]:
        """Return the images as the user gave them, in the order of the prompt. Raises RequestError for other media."""
        if not isinstance(self.data, Mapping):
            raise _invalid(f"multi_modal_data is a {type(self.data).__name__}; give {{'image': ...}}")
        found = {str(name).removesuffix("s"): value for name, value in self.data.items() if value is not None}
        for kind, names in OTHER_KINDS.items():
            if any(name in names for name in found):
                raise _invalid(f"multi_modal_data has {kind}, which is not read; leave it out")
        if {*found} - {"image"}:
            raise _invalid(f"multi_modal_data has {[*self.data]!r:.200}; give {{'image': ...}}")
        images = found.get("image", [])
        are_several = isinstance(images, (list, tuple)) or getattr(images, "ndim", None) == NUM_DIMS_OF_SEVERAL
        return list(images) if are_several else [images]


def as_image_prompt(given: Mapping[str, Any]) -> ImagePrompt | None:
    """Return the prompt in vLLM's {"prompt": ..., "multi_modal_data": {"image": ...}}; None for another mapping."""
    prompts = [given[name] for name in IMAGE_PROMPT_FIELDS[:2] if name in given]
    if "multi_modal_data" not in given or len(prompts) != 1 or not {*given} <= {*IMAGE_PROMPT_FIELDS}:
        return None
    return ImagePrompt(prompts[0], given["multi_modal_data"], processor_kwargs=given.get("mm_processor_kwargs"))


def _invalid(message: str) -> RequestError:
    return RequestError(message, "invalid_image")


def is_image_part(part: Any) -> bool:
    """Return whether a part of a content has an image, of whatever kind of source."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in IMAGE_TYPES or (kind is None and any(name in part for name in IMAGE_FIELDS[:3]))


def has_images(given: Any) -> bool:
    """Return whether a prompt, or a message of a conversation, has an image."""
    if not isinstance(given, (list, tuple)):
        return isinstance(given, ImagePrompt)
    conversation = given if given and isinstance(given[0], Mapping) else ()
    contents = [message.get("content") for message in conversation if isinstance(message, Mapping)]
    return any(is_image_part(part) for content in contents if isinstance(content, (list, tuple)) for part in content)


def other_kind(part: Any) -> str | None:
    """Return "video" or "sound" for a part of that kind."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return next((name for name, types in OTHER_KINDS.items() if kind in types), None)


def source_of(part: Mapping[str, Any], which: str) -> Any:
    """Return what an image part has in one of the fields of OpenAI, transformers or vLLM. Raises RequestError."""
    given = {name: part[name] for name in IMAGE_FIELDS if part.get(name) is not None}
    if len(given) != 1:
        named = " and ".join(given) or "no image"
        raise _invalid(
            f"{which} has an image part with {named}; give {{'type': 'image', 'image': ...}}, or "
            "{'type': 'image_url', 'image_url': {'url': ...}}"
        )
    [(name, source)] = given.items()
    if isinstance(source, Mapping) and not (name == "image" and "bytes" in source):
        source = source.get("url")
    if name == "base64":
        return f"data:;base64,{source}"
    if source is None or (name.endswith("url") and not isinstance(source, str)):
        raise _invalid(f"{which} has {name}={part[name]!r:.200}; give {{'url': 'data:image/png;base64,...'}}, say")
    return source


class ImagePart(dict[str, str]):
    """Stands in a message in place of an image part while the chat template is rendered."""


class ImageTexts:
    """Keeps apart the placeholders that a chat template writes, and those that users write into their messages.

    placeholder: what stands for an image in a text, before it is processed. reserved: texts of tokens that are for
    images alone, the placeholder among them.
    """

    def __init__(self, placeholder: str, reserved: Sequence[str]) -> None:
        self.placeholder, self._reserved = placeholder, tuple(reserved)

    def take_images(self, conversation: Sequence[Any], index: int) -> tuple[list[Any], list[Any]]:
        """Return a conversation for the template to render, and its images.

        Each image part becomes an ImagePart, whose text is the placeholder, for templates that read texts alone.
        """
        images: list[Any] = []
        messages = []
        for number, message in enumerate(conversation):
            message = self._hidden(message)
            content = message["content"] if isinstance(message, dict) and "content" in message else None
            if isinstance(content, list):
                parts = []
                for part, given in zip(content, conversation[number]["content"], strict=True):
                    if is_image_part(part):
                        images.append(source_of(given, f"message {number} of conversation {index}"))
                        part = ImagePart(type="image", text=self.placeholder)
                    parts.append(part)
                message = {**message, "content": parts}
            messages.append(message)
        return messages, images

    def prompt_of(
        self, text: str, images: list[Any], index: int, processor_kwargs: Mapping[str, Any] | None = None
    ) -> str | ImagePrompt:
        """Return the prompt of a rendered conversation; a text where it has neither images nor reserved texts.

        Raises RequestError where the template has not written one placeholder for each image.
        """
        pieces = text.split(self.placeholder)
        if len(pieces) != len(images) + 1:
            raise RequestError(
                f"the chat template writes {len(pieces) - 1} images of the {len(images)} in conversation {index}; put "
                "them into messages of the user, or give a chat_template that writes them",
            )
        if MARK not in text and not images:
            return text
        shown = tuple(map(self._shown, pieces))
        return ImagePrompt(self.placeholder.join(shown), {"image": images}, shown, processor_kwargs)

    def has_reserved(self, text: str) -> bool:
        return any(token in text for token in self._reserved)

    def _hidden(self, value: Any) -> Any:
        """Return what a user wrote with marks in place of reserved texts; images are left as they are."""
        if isinstance(value, str):
            for place, token in enumerate(self._reserved):
                value = value.replace(token, f"{MARK}{place}x")
            return value
        if is_image_part(value):
            return value
        if isinstance(value, Mapping):
            return {name: self._hidden(item) for name, item in value.items()}
        return [*map(self._hidden, value)] if isinstance(value, (list, tuple)) else value

    def _shown(self, text: str) -> str:
        for place, token in enumerate(self._reserved):
            text = text.replace(f"{MARK}{place}x", token)
        return text
