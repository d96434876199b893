"""Turns prompts with images into token ids and processed images, in threads."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoinfer.config import EngineConfig, as_processor_kwargs
from nanoinfer.errors import ConfigError, RequestError, closed_error
from nanoinfer.images.picture_store import PictureStore
from nanoinfer.images.processed import ProcessedImage, ProcessedPrompt
from nanoinfer.images.processor import ImageProcessor, ProcessedPicture
from nanoinfer.images.sources import as_rules, find_picture
from nanoinfer.text.arguments import Errors, Prompt, as_list
from nanoinfer.text.image_parts import ImagePrompt, ImageTexts
from nanoinfer.text.prompts import find_bad_texts
from nanoinfer.text.tokenizer import Tokenizer

MOST_WORKERS = 16
MIN_SAVED = 4  # tensors at least so many times as large as their file may be dropped and made again
GRID = "image_grid_thw"  # an input of models that take each run of image tokens for one image
_thread_counts = threading.Lock()  # guards PyTorch's number of threads while a thread sets its own


class KeyedPicture(NamedTuple):
    """Holds a processed picture, and a key that is equal for equal pictures. make_tensors: see ProcessedImage."""

    key: bytes
    picture: ProcessedPicture
    make_tensors: Callable[[], Mapping[str, Tensor]] | None


class ImageReader:
    """Reads the images of prompts. Any thread may call any method.

    processor, tokenizer: the model's. to_dtype: the dtype that floating-point tensors get; None leaves theirs. config:
    says how many images a prompt may have, where they may come from, and how many threads process them.
    """

    def __init__(
        self, processor: ImageProcessor, tokenizer: Tokenizer, to_dtype: torch.dtype | None, config: EngineConfig
    ) -> None:
        self._processor, self._tokenizer, self._dtype = processor, tokenizer, to_dtype
        self._limit = (config.limit_mm_per_prompt or {}).get("image", 0)
        self._options = config.mm_processor_kwargs or {}
        try:
            processor.check_options(self._options)
        except RequestError as error:
            raise ConfigError(str(error)) from None
        self._rules = as_rules(config.allowed_media_domains, config.allowed_local_media_path)
        self.store = PictureStore(int(config.mm_processor_cache_gb * 2**30))
        self.num_workers = config.renderer_num_workers or default_workers()
        self._threads = ThreadPoolExecutor(self.num_workers, "nanoinfer images", initializer=use_one_core)
        self.image_texts = ImageTexts(processor.placeholder, processor.reserved)

    def read(
        self, prompts: Mapping[int, Prompt], add_special_tokens: bool, longest_text: int, errors: Errors
    ) -> tuple[dict[int, Prompt], dict[int, tuple[ProcessedImage, ...]]]:
        """Return the prompts, as token ids if they have images, and the processed images, both by index.

        A prompt with an error gets no token ids, and its error is added to `errors`. longest_text: in characters.
        """
        begun: dict[int, tuple[ImagePrompt, list[Future[KeyedPicture]]]] = {}
        found = dict(prompts)
        for index, prompt in prompts.items():
            if index in errors:
                continue
            try:
                if (given := self._as_image_prompt(prompt)) is not None:
                    begun[index] = given, self._begin(given)
            except RequestError as error:
                errors[index] = error.within(f"prompt {index}")
        images: dict[int, tuple[ProcessedImage, ...]] = {}
        for index, (given, coming) in begun.items():
            try:
                processed = self._finish(given, coming, add_special_tokens, longest_text)
                found[index], images[index] = processed.token_ids, tuple(processed.images)
            except RequestError as error:
                errors[index] = error.within(f"prompt {index}")
        return {index: [] if index in errors else prompt for index, prompt in found.items()}, images

    def has_room(self, num_images: int) -> bool:
        return self.store.has_room(num_images)

    def close(self) -> None:
        """Drop all pictures; each thread ends after its current picture. Closing twice is fine."""
        self._threads.shutdown(wait=False)
        self.store.close()

    def process(self, given: ImagePrompt, add_special_tokens: bool = True) -> ProcessedPrompt:
        """Return a prompt with its images processed. Raises RequestError if it cannot be served."""
        return self._finish(given, self._begin(given), add_special_tokens)

    def _as_image_prompt(self, prompt: Any) -> ImagePrompt | None:
        """Return a prompt that has images, or a text with tokens that are reserved for images; None for others."""
        if isinstance(prompt, ImagePrompt):
            return prompt
        if isinstance(prompt, str):
            return ImagePrompt(prompt, {}, (prompt,)) if self.image_texts.has_reserved(prompt) else None
        if isinstance(prompt, list) and self._processor.image_token_id in prompt:
            raise RequestError(
                f"there is no image for token id {self._processor.image_token_id}, which stands for images; give "
                "multi_modal_data, or leave it out",
                "invalid_image",
            )
        return None

    def _begin(self, given: ImagePrompt) -> "list[Future[KeyedPicture]]":
        """Have the threads process the images of a prompt."""
        images = given.images()
        if len(images) > self._limit:
            raise RequestError(
                f"there are {len(images)} images, more than limit_mm_per_prompt={{'image': {self._limit}}}; give "
                "fewer, or raise that option of LLM",
                "too_many_images",
            )
        options = as_processor_kwargs(given.processor_kwargs, RequestError) or {}
        self._processor.check_options(options)
        try:
            return [self._threads.submit(self._load, source, {**self._options, **options}) for source in images]
        except RuntimeError:  # another thread has closed this reader
            raise closed_error(None) from None

    def _load(self, source: Any, options: Mapping[str, Any]) -> KeyedPicture:
        """Return a picture, processed now or before. Raises RequestError if it cannot be read."""
        load, content, size = find_picture(source, self._rules)
        digest = hashlib.sha256(repr((size, sorted(options.items()))).encode())
        digest.update(content)
        key = digest.digest()
        known = self._process(key, load, options)
        make_tensors = None
        if size is None and len(content) < known.num_bytes / MIN_SAVED:
            make_tensors = partial(self._tensors, key, load, options)
        return KeyedPicture(key, known, make_tensors)

    def _process(self, key: bytes, load: Callable[[], Any], options: Mapping[str, Any]) -> ProcessedPicture:
        """Return the processed picture with this key, which is loaded only if it is not kept."""
        if (known := self.store.get(key)) is None:
            known = self.store.add(key, self._processor.process(load(), self._dtype, options))
        return known

    def _tensors(self, key: bytes, load: Callable[[], Any], options: Mapping[str, Any]) -> Mapping[str, Tensor]:
        return self._process(key, load, options).tensors

    def _finish(
        self,
        given: ImagePrompt,
        coming: "list[Future[KeyedPicture]]",
        add_special_tokens: bool,
        longest_text: int | None = None,
    ) -> ProcessedPrompt:
        """Wait for the images of a prompt, and write them into its token ids."""
        loaded = []
        for place, future in enumerate(coming):
            try:
                loaded.append(future.result())
            except RequestError as error:
                for other in coming[place:]:
                    other.cancel()
                raise error.within(f"image {place}") from error
            except Exception as error:  # there may be no memory for it
                raise RequestError(
                    f"image {place} cannot be loaded ({type(error).__name__}: {error}); give a smaller one",
                    "invalid_image",
                ) from error
        if isinstance(given.prompt, str):
            ids = self._encode(given, [one.picture for one in loaded], add_special_tokens, longest_text)
        else:
            ids = self._fill(given.prompt, [one.picture for one in loaded])
        image_token_id = self._processor.image_token_id
        places = [place for place, token_id in enumerate(ids) if token_id == image_token_id]
        if len(places) != sum(sum(one.picture.runs) for one in loaded):
            raise RequestError("the tokenizer does not keep the tokens of images; use the model's own", "invalid_image")
        images: list[ProcessedImage] = []
        num_before = 0
        for key, picture, make_tensors in loaded:
            num_tokens = sum(picture.runs)
            start, last = places[num_before], places[num_before + num_tokens - 1]
            is_apart = not images or start > places[num_before - 1] + 1
            if GRID in picture.tensors and not (is_apart and last + 1 - start == num_tokens):
                raise RequestError(
                    f"the tokens of image {len(images)} are not together, or nothing is between it and the one before, "
                    "so the model could not tell which are whose; write the model's tokens for begin and end around "
                    "each image, or a text between them",
                    "invalid_image",
                )
            start, end = start - picture.num_before, last + 1 + picture.num_after
            images.append(ProcessedImage(start, end - start, picture.tensors, key, make_tensors))
            num_before += num_tokens
        return ProcessedPrompt(ids, images, image_token_id)

    def _encode(
        self,
        given: ImagePrompt,
        pictures: Sequence[ProcessedPicture],
        add_special_tokens: bool,
        longest_text: int | None,
    ) -> list[int]:
        """Return the token ids of a text with its images."""
        if longest_text is not None and (wrong := find_bad_texts({0: given.prompt}, longest_text)):
            raise wrong[0]
        placeholder = self._processor.placeholder
        pieces = given.prompt.split(placeholder) if given.pieces is None else given.pieces
        if len(pieces) != len(pictures) + 1:
            raise RequestError(
                f"the text has {len(pieces) - 1} times {placeholder!r}, and there are {len(pictures)} images; write "
                "it once for each",
                "invalid_image",
            )
        segments = [""]
        for piece, picture in zip(pieces, [*pictures, None], strict=True):
            first, *others = self._cut(piece)
            segments[-1] += first
            segments += others
            segments[-1] += "" if picture is None else picture.text
        found = self._tokenizer.encode(segments[:1], add_special_tokens) + self._tokenizer.encode(segments[1:], False)
        return self._with_runs(chain.from_iterable(found), pictures)

    def _cut(self, text: str) -> list[str]:
        """Cut a user's text within each reserved token, so that the token's name is encoded as ordinary text."""
        cuts = [0]
        for token in self._processor.reserved:
            place = text.find(token)
            while place >= 0:
                cuts.append(place + len(token) // 2)
                place = text.find(token, place + 1)
        cuts.sort()
        return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]

    def _with_runs(self, token_ids: Iterator[int], pictures: Sequence[ProcessedPicture]) -> list[int]:
        """Return token ids in which each image token is repeated to the length of its run."""
        runs = chain.from_iterable(picture.runs for picture in pictures)
        ids: list[int] = []
        for token_id in token_ids:
            if token_id == self._processor.image_token_id:
                ids += [token_id] * next(runs, 1)
            else:
                ids.append(token_id)
        return ids

    def _fill(self, prompt: Any, pictures: Sequence[ProcessedPicture]) -> list[int]:
        """Return token ids with images in place of their placeholders, unless image tokens are repeated already."""
        ids = as_list(prompt)
        if not isinstance(ids, (list, tuple)):
            raise RequestError(f"a prompt with images is a {type(ids).__name__}; give a text", "not_a_prompt")
        ids, image_token_id = list(ids), self._processor.image_token_id
        if ids.count(image_token_id) == sum(sum(picture.runs) for picture in pictures):
            return ids
        [placeholder_ids] = self._tokenizer.encode([self._processor.placeholder], False)
        if len(placeholder_ids) != 1 or ids.count(placeholder_ids[0]) != len(pictures):
            raise RequestError(
                f"the token ids have {ids.count(placeholder_ids[0])} times {placeholder_ids[0]}, the placeholder, and "
                f"there are {len(pictures)} images; give it once for each",
                "invalid_image",
            )
        texts = iter(self._tokenizer.encode([picture.text for picture in pictures], False))
        filled = chain.from_iterable(next(texts) if item == placeholder_ids[0] else [item] for item in ids)
        return self._with_runs(filled, pictures)


def default_workers() -> int:
    """Return the number of cores that this process may use minus one, and at most MOST_WORKERS."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(num_cores - 1, 1), MOST_WORKERS)


def use_one_core() -> None:
    """Have PyTorch use one core for this thread's work, as other threads process other images meanwhile.

    PyTorch gives the number that was set last to threads that begin later. So a second thread sets the old one again.
    """
    with _thread_counts:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        other = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
        other.start()
        other.join()
