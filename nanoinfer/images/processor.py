"""Loads the model's own processor from transformers, without its parts for video and sound.

Processors differ in how many tokens an image gets, in what stands between these tokens, and in the names of tensors. So
the processor gets each picture by itself, with a text that is one placeholder. The text that it then hands to its
tokenizer is the text that stands for the picture in any prompt.
"""

import copy
import importlib
import inspect
import re
import threading
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, dtype

from nanoinfer.checkpoint.hub import read_json
from nanoinfer.errors import ModelError, RequestError

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
OF_THE_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids"}
MAX_TEXTS = 64  # the token ids of so many texts of pictures are kept
PROBE_SIZE = (64, 48)  # pixels of the picture that shows how the processor writes images
# Arguments of image processors that are no options.
NO_OPTIONS = {"self", "images", "videos", "kwargs", "args", "return_tensors", "data_format", "input_data_format"}
NO_OPTIONS |= {"device", "disable_grouping", "segmentation_maps"}


class ProcessedPicture(NamedTuple):
    """Holds what stands for a picture in any prompt.

    text: takes the placeholder's place; in it, one image token stands for each run of image tokens. runs: the length of
    each run. tensors: as ProcessedImage has them. num_before, num_after: how many tokens before the first image token,
    and after the last one, also get embeddings of the picture.
    """

    text: str
    runs: tuple[int, ...]
    tensors: dict[str, Tensor]
    num_before: int = 0
    num_after: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class ImageProcessor:
    """Makes tensors and texts of pictures, with the class of transformers that the model's files name.

    folder: the model's. tokenizer: of transformers; `lock` is held while it is used. Any thread may process pictures.
    Raises ModelError if there is no processor for images, or if a package that it needs is missing.
    """

    def __init__(self, folder: Path, tokenizer: Any, lock: threading.Lock) -> None:
        self._processor = load_processor(folder, tokenizer)
        self._texts = _PictureTexts(self._processor.tokenizer, lock)
        self._known = known_options(self._processor.image_processor)
        config = read_json(folder / "config.json")
        given = [config.get(name) for name in ("image_token_id", "image_token_index")]
        own = [getattr(self._processor, name, None) for name in ("image_token_ids", "image_token_id")]
        ids = [item[0] if isinstance(item, list) and item else item for item in (*given, *own)]
        found = next((item for item in ids if isinstance(item, int)), None)
        if found is None:
            found = tokenizer.convert_tokens_to_ids(self._named_tokens("image_token")[0])
        self.image_token_id: int = found
        self.image_token: str = tokenizer.convert_ids_to_tokens(self.image_token_id)
        # Beside an image, the model puts embeddings of its own in the places of these tokens (Ovis 2).
        self._indicators = tokenizer.convert_ids_to_tokens([*(config.get("visual_indicator_token_ids") or ())])
        self.placeholder = self._find_placeholder()
        others = self._named_tokens("image_token", "video_token", "audio_token", "boi_token")
        # Only the processor may write these: for each, the model would look for an image, a video or a sound.
        self.reserved = tuple(dict.fromkeys([self.placeholder, self.image_token, *others]))

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise RequestError for a name that the image processor does not know; transformers would ignore it."""
        if unknown := [name for name in options if name not in self._known]:
            raise RequestError(
                f"mm_processor_kwargs has {unknown[0]!r}, which {type(self._processor.image_processor).__name__} does "
                f"not know; known are {', '.join(sorted(self._known))}",
                "invalid_image",
            )

    def process(self, picture: Any, to_dtype: dtype | None, options: Mapping[str, Any]) -> ProcessedPicture:
        """Return what stands for a picture, PIL's image in RGB. Raises RequestError where the processor refuses it.

        to_dtype: the dtype that floating-point tensors get; None leaves theirs. options: of the image processor, over
        those of the model's files.
        """
        try:
            return self._run(self.placeholder, picture, to_dtype, options)
        except RequestError:
            raise
        except Exception as error:
            remedy = (
                f"crop it, change its size, or mend mm_processor_kwargs={dict(options)!r:.200}"
                if options
                else "crop it, or change its size"
            )
            raise RequestError(
                f"the image of {picture.width} x {picture.height} pixels cannot be processed ({error}); {remedy}",
                "invalid_image",
            ) from error

    def _named_tokens(self, *names: str) -> list[str]:
        """Return the tokens in these attributes of the processor; some are objects of the tokenizer's, not strings."""
        found = (getattr(self._processor, name, None) for name in names)
        return [*dict.fromkeys(str(token) for token in found if token is not None)]

    def _find_placeholder(self) -> str:
        """Return the token that the processor replaces. In some models it is not the image token."""
        from PIL import Image

        picture, errors = Image.new("RGB", PROBE_SIZE), []
        for token in self._named_tokens("image_token", "boi_token", "image_placeholder_token"):
            try:
                if self._run(token, picture, None, {}).runs:
                    return token
            except Exception as error:  # it wants another token
                errors.append(f"{type(error).__name__}: {error}")
        raise ModelError(
            f"{type(self._processor).__name__} does not process a picture ({'; '.join(errors) or 'no image token'}); "
            "use a model with a processor that transformers has, or leave out limit_mm_per_prompt"
        )

    def _run(
        self, placeholder: str, picture: Any, to_dtype: dtype | None, options: Mapping[str, Any]
    ) -> ProcessedPicture:
        processor = copy.copy(self._processor)  # for this thread alone, since its tokenizer is replaced
        processor.tokenizer = tokenizer = _Listener(self._texts)
        found = processor(images=[picture], text=[placeholder], return_tensors="pt", **options)
        tensors = {name: value for name, value in found.items() if name not in OF_THE_TEXT}
        if wrong := [name for name, value in tensors.items() if not isinstance(value, Tensor)]:
            raise ModelError(f"{type(self._processor).__name__} returns {wrong[0]!r}, which is no tensor")
        if to_dtype is not None:
            tensors = {
                name: value.to(to_dtype) if value.is_floating_point() else value for name, value in tensors.items()
            }
        text, runs = join_runs(tokenizer.text, self.image_token)
        around = text.partition(self.image_token)[0], text.rpartition(self.image_token)[2]
        return ProcessedPicture(text, runs, tensors, *(sum(map(part.count, self._indicators)) for part in around))


class _PictureTexts:
    """Tokenizes what processors write for pictures, one thread at a time. Pictures of one size have equal texts."""

    def __init__(self, tokenizer: Any, lock: threading.Lock) -> None:
        self.tokenizer, self._lock = tokenizer, lock
        self._known: dict[str, Any] = {}

    def encode(self, text: Any, *args: Any, **options: Any) -> Any:
        """Return the tokenizer's result for a text, copied, so that the caller may change the mapping."""
        key = repr((text, args, options))
        with self._lock:
            if key not in self._known:
                if len(self._known) >= MAX_TEXTS:
                    self._known.clear()
                self._known[key] = self.tokenizer(text, *args, **options)
            return copy.copy(self._known[key])


class _Listener:
    """Takes the place of a processor's tokenizer, and keeps the text that the processor writes."""

    def __init__(self, texts: _PictureTexts) -> None:
        self._texts, self.text = texts, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._texts.tokenizer, name)

    def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self._texts.encode(text, *args, **options)


def join_runs(text: str, token: str) -> tuple[str, tuple[int, ...]]:
    """Return the text with each run of `token` shortened to one, and the lengths of the runs."""
    parts = [(piece, len(piece) // len(token)) for piece in re.split(f"((?:{re.escape(token)})+)", text)]
    joined = [token if is_run else piece for (piece, _), is_run in zip(parts, cycle((False, True)))]
    return "".join(joined), tuple(length for _, length in parts[1::2])


def load_processor(folder: Path, tokenizer: Any) -> Any:
    """Return the processor of the class that a model's files name, with its image processor and this tokenizer alone.

    Without its parts for video, it often needs Pillow alone, and not torchvision. Raises ModelError.
    """
    # Slow to import. Some versions have it in `transformers` itself only where torchvision is installed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    files = [read_json(folder / name) for name in PROCESSOR_FILES]
    model_type = read_json(folder / "config.json").get("model_type")
    named = [file.get("processor_class") for file in files] + [PROCESSOR_MAPPING_NAMES.get(model_type)]
    names = [*dict.fromkeys(filter(None, named))]
    try:
        found = next(filter(None, map(processor_class_from_name, names)), None)
        if found is None:
            raise ValueError(f"transformers has no processor class {' or '.join(names) or 'for ' + str(model_type)}")
        if needed := getattr(found, "_backends", None):  # a class that stands in for one that lacks a package
            raise ImportError(f"{found.__name__} of transformers needs {' and '.join(needed)}")
        module = importlib.import_module(found.__module__)
        if getattr(module, "num2words", ...) is None:  # SmolVLM's processor requires it, for videos
            module.num2words = _refuse_video  # type: ignore[attr-defined]
        image_processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        parts = {"tokenizer": tokenizer, "image_processor": image_processor}
        attributes = found.get_attributes() if hasattr(found, "get_attributes") else found.attributes
        composed = type(found.__name__, (found,), {"get_possibly_dynamic_module": staticmethod(lambda _: object)})
        accepted = {*inspect.signature(found.__init__).parameters} - {*attributes}
        options = {key: value for key, value in files[0].items() if key in accepted}
        return composed(**{name: parts.get(name) for name in attributes}, **options)
    except Exception as error:
        remedy = "install torchvision" if "torchvision" in str(error) else "check its files"
        raise ModelError(f"the image processor in {folder} cannot be loaded ({error}); {remedy}") from error


def known_options(image_processor: Any) -> set[str]:
    """Return the names of the options that an image processor takes with a picture."""
    typed = getattr(getattr(image_processor, "valid_kwargs", None), "__annotations__", {})
    return {*typed, *inspect.signature(image_processor.preprocess).parameters} - NO_OPTIONS


def _refuse_video(*_: Any) -> str:
    raise RequestError("videos are not read")
