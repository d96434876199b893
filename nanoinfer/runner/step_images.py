"""Knows which rows have which images, and what the tokens of a step read in their places.

Packets name images by virtual ids among the known tokens of a row (`virtual_ids.py`). They end here: the tables of the
device get the token that stands for an image, so that penalties, log-probabilities and proposals know no other.

Images are encoded when a step first computes one of their tokens. What was made of them is kept until their requests
have ended, or until others need the room; then it is made again.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.device import numbers_to_device, to_device
from nanoinfer.engine.interfaces import FailedImages
from nanoinfer.engine.packet import AllSections
from nanoinfer.errors import ModelError
from nanoinfer.layers.attention.image_attention import SeenImage
from nanoinfer.layers.attention.metadata import DecodeBatch
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.images import ImageContent, ImageEncoder, ImageSight, StepImages

MAX_VALUES_AT_ONCE = 9 * 2**22  # inputs of one call to encode: of eight pictures of 1,024 x 768 with Qwen3-VL

logger = logging.getLogger("nanoinfer")


class HeldImages(dict[int, ImageContent]):
    """Holds the images of unfinished requests, by their first virtual id. They stay while the device sleeps.

    Once encoded, those that can be made again are held without their pixels.
    """


class Span(NamedTuple):
    """Says where a row has an image."""

    start: int
    end: int
    image_id: int


@dataclass(slots=True)
class RowImages:
    """Holds the images of a row.

    positions: (3, num_prompt_tokens) of time, height and width; None where tokens have one. delta: what is added to the
    places of the tokens after the prompt.
    """

    spans: list[Span]
    positions: Tensor | None = None
    delta: int = 0


def described(error: Exception) -> str:
    """Return the kind of an error, and its message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"


class ImageRows:
    """Knows the images of the rows of the step tables, and has them encoded.

    held: all images that packets may name. vocab_size: where virtual ids begin. num_rows: of the tables. max_tokens: of
    the images whose rows are kept. hidden_size, dtype: of the model.
    """

    def __init__(
        self,
        encoder: ImageEncoder,
        held: HeldImages,
        vocab_size: int,
        num_rows: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._hidden_size, self._dtype = hidden_size, dtype
        self._encoder, self._held, self._vocab_size, self._device = encoder, held, vocab_size, device
        self._max_tokens = max_tokens
        self._rows: dict[int, RowImages] = {}
        # Until `take_failed`: why images could not be encoded, by first id, and why positions not be counted, by row.
        self._failed: dict[int, str] = {}
        self._failed_rows: dict[int, str] = {}
        self._encoded: OrderedDict[int, Tensor] = OrderedDict()  # by first id, the least recently used first
        # (num_rows,) int64: added to the places of tokens after images, by which they rotate.
        self._deltas = torch.zeros(num_rows, dtype=torch.int64, device=device) if encoder.has_three_positions else None

    def enter(self, on_host: AllSections) -> None:
        """Note the images of newly admitted rows, and put the image token in the place of each virtual id."""
        records, known, end = on_host.row_records[:, :3].tolist(), on_host.known_tokens[:, 0], 0
        has_images = bool((known >= self._vocab_size).any())
        deltas = []
        for row, num_tokens, num_prompt_tokens in records:
            start, end = end, end + num_tokens
            self._rows.pop(row, None)
            self._failed_rows.pop(row, None)  # of a request that had the row before
            spans = [*self._take_spans(known[start:end])] if has_images else []
            deltas.append(0)
            if spans:
                self._rows[row] = images = RowImages(spans)
                if self._deltas is not None:
                    prompt = known[start : start + num_prompt_tokens].tolist()
                    images.positions = self._positions_of(row, prompt, spans)
                    images.delta = deltas[-1] = int(images.positions.max()) + 1 - num_prompt_tokens
        if self._deltas is not None:
            rows, values = numbers_to_device([[row for row, _, _ in records], deltas], self._device)
            self._deltas[rows] = values

    def _positions_of(self, row: int, prompt: list[int], spans: list[Span]) -> Tensor:
        """Return the positions of a row's prompt with images; any, where the model fails to count them."""
        try:
            return self._encoder.positions(prompt, [self._held[span.image_id] for span in spans])
        except ModelError:
            raise
        except Exception as error:  # models fail in their own ways
            self._failed_rows[row] = described(error)
            return torch.arange(len(prompt)).expand(3, -1)

    def _take_spans(self, token_ids: NDArray[Any]) -> Iterator[Span]:
        """Yield where images stand among the tokens of a row, whose virtual ids are replaced."""
        end = 0
        for place in np.flatnonzero(token_ids >= self._vocab_size).tolist():
            if place >= end:
                image_id = int(token_ids[place])
                shown = self._held[image_id].token_ids
                end = place + len(shown)
                token_ids[place:end] = shown
                yield Span(place, end, image_id)

    def reserve_largest(self) -> Tensor:
        """Encode the largest batch; return a tensor as large as the kept embeddings and those of one step together."""
        encoder = self._encoder
        try:
            encoder.encode_largest(MAX_VALUES_AT_ONCE)
        except ModelError as error:
            logger.warning("the memory for images is not measured, so lower gpu_memory_utilization: %s", error)
        shape = 2, 1 + encoder.num_levels, self._max_tokens, self._hidden_size
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def forget(self, image_ids: Iterable[int]) -> None:
        """Let go of images whose requests have ended."""
        for image_id in image_ids:
            self._encoded.pop(image_id, None)
            self._failed.pop(image_id, None)

    def take_failed(self) -> FailedImages:
        """Return where the model failed, with images by their first virtual ids; each failure once."""
        failed = FailedImages(self._failed, self._failed_rows)
        self._failed, self._failed_rows = {}, {}
        return failed

    def with_rotary_positions(self, step: ForwardStep, batch: DecodeBatch) -> ForwardStep:
        """Return a decode step with the positions for rotation, if they differ from places because of images."""
        if self._deltas is None:
            return step
        deltas = self._deltas[batch.rows.long()].repeat_interleave(batch.num_tokens)
        return replace(step, rotary_positions=step.positions + deltas)

    def add_to(self, step: ForwardStep, chunks: list[list[int]]) -> ForwardStep:
        """Return a prefill step with the embeddings and positions of its images. chunks: (row, start, length) each."""
        wanted: list[tuple[int, int, Span]] = []  # (chunk, place in the step of the sequence's first token, span)
        has_positions, offset = False, 0
        for index, (row, start, length) in enumerate(chunks):
            if (images := self._rows.get(row)) is not None:
                has_positions |= images.positions is not None
                inside = (span for span in images.spans if span.start < start + length and span.end > start)
                wanted += [(index, offset - start, span) for span in inside]
            offset += length
        if not (wanted or has_positions):
            return step
        rows = self._encode({span.image_id for _, _, span in wanted})
        positions = self._positions(chunks) if has_positions else None
        places: list[int] = []
        parts, whole = [], []
        for chunk, place, span in wanted:
            _, start, length = chunks[chunk]
            first, end = max(span.start, start), min(span.end, start + length)
            places += range(place + first, place + end)
            parts.append(rows[span.image_id][:, first - span.start : end - span.start])
            if self._encoder.sight is not ImageSight.CAUSAL:
                assert end - first == span.end - span.start, "an image is cut whose tokens see all of it"
                whole.append(SeenImage(chunk, place + first, first, end - first))
        return replace(
            step,
            images=StepImages(
                places=numbers_to_device(places, self._device),
                rows=torch.cat(parts, dim=1) if parts else torch.empty(1, 0, 1, device=self._device),
                positions=positions,
                rotary=None if positions is None else self._encoder.rotary(positions),
                whole=tuple(whole),
                in_windows_alone=self._encoder.sight is ImageSight.WHOLE_IN_WINDOWS,
            ),
        )

    def _positions(self, chunks: list[list[int]]) -> Tensor:
        """Return the positions of a step's tokens, (3, num_tokens)."""
        parts = []
        for row, start, length in chunks:
            images, end = self._rows.get(row), start + length
            of_prompt, delta = torch.empty(3, 0, dtype=torch.int64), 0
            if images is not None and images.positions is not None:
                of_prompt, delta = images.positions[:, start:end], images.delta
            after = torch.arange(start + of_prompt.shape[1], end).expand(3, -1)
            parts += [of_prompt, after + delta]
        return to_device(torch.cat(parts, dim=1), self._device)

    def _encode(self, image_ids: Iterable[int]) -> dict[int, Tensor]:
        """Return the embeddings of these images, by id; images without any are encoded now."""
        found: dict[int, Tensor] = {}
        missing: list[int] = []
        for image_id in sorted(image_ids):
            if image_id in self._encoded:
                self._encoded.move_to_end(image_id)
                found[image_id] = self._encoded[image_id]
            else:
                missing.append(image_id)
        for image_id in missing:
            try:
                self._held[image_id] = self._held[image_id].with_pixels()
            except Exception as error:  # there may be no memory for them
                found[image_id] = self._note_failed(image_id, described(error))
        for batch in self._batches([image_id for image_id in missing if image_id not in found]):
            found |= zip(batch, self._encode_batch(batch), strict=True)
            for image_id in batch:
                self._held[image_id] = self._held[image_id].without_pixels()
        self._encoded |= found
        num_tokens = sum(rows.shape[1] for rows in self._encoded.values())
        while num_tokens > self._max_tokens and len(self._encoded) > len(found):
            num_tokens -= self._encoded.popitem(last=False)[1].shape[1]
        return found

    def _encode_batch(self, image_ids: list[int]) -> list[Tensor]:
        """Encode images in one call, or where that fails, each by itself. One that cannot be encoded is NaN."""
        contents = [self._held[image_id] for image_id in image_ids]
        try:
            return self._encoder.encode(contents)
        except ModelError:  # of the model, whatever the image
            raise
        except Exception as error:  # models fail in their own ways
            reason = described(error)  # all else of the error holds the device's memory
        if len(image_ids) > 1:
            return [self._encode_batch([image_id])[0] for image_id in image_ids]
        return [self._note_failed(image_ids[0], reason)]

    def _note_failed(self, image_id: int, reason: str) -> Tensor:
        """Note why an image cannot be encoded; return NaN in place of its embeddings."""
        self._failed[image_id] = reason
        shape = 1 + self._encoder.num_levels, len(self._held[image_id].token_ids), self._hidden_size
        return torch.full(shape, torch.nan, dtype=self._dtype, device=self._device)

    def _batches(self, image_ids: list[int]) -> Iterator[list[int]]:
        """Yield batches of images to encode in one call: neighbours of one kind that are not too large together."""
        batch: list[int] = []
        num_values = 0
        for image_id in image_ids:
            content = self._held[image_id]
            size = sum(tensor.numel() for tensor in content.tensors.values())
            fits = num_values + size <= MAX_VALUES_AT_ONCE
            if batch and not (fits and self._encoder.may_join(self._held[batch[-1]], content)):
                yield batch
                batch, num_values = [], 0
            batch.append(image_id)
            num_values += size
        if batch:
            yield batch
