"""Defines what models and the runner exchange about images: inputs, embeddings, and the images of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

from torch import Tensor

from nanoinfer.layers.attention.attention_layer import Attention
from nanoinfer.layers.attention.image_attention import SeenImage, attend_to_whole_images
from nanoinfer.layers.attention.metadata import Metadata, PrefillMetadata
from nanoinfer.layers.rotary_embedding import StepRotary
from nanoinfer.ops.kv_cache.spec import LayerCache

MakeTensors = Callable[[], Mapping[str, Tensor]]


class ImageSight(Enum):
    """Says which other tokens those of an image attend to."""

    CAUSAL = auto()  # those before them, as tokens of a text do
    WHOLE_IMAGE = auto()  # all of their own image, too (Gemma 3); windows still end where they end
    WHOLE_IN_WINDOWS = auto()  # so in layers with a window, and in others as tokens of a text do (Gemma 4)


@dataclass(frozen=True, slots=True, eq=False)
class ImageContent:
    """Holds an image as encoders read it.

    token_ids: of its span in prompts, in which the image token stands for one embedding. tensors: the inputs of the
    model's forward for this image, on the host; those of floating point may be missing. make_tensors: makes all of
    them once more; None where nothing can.
    """

    token_ids: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    make_tensors: MakeTensors | None = None

    def without_pixels(self) -> "ImageContent":
        """Return the image with sizes alone, by which positions are counted, if the other tensors can be made again."""
        if self.make_tensors is None:
            return self
        return replace(self, tensors={name: x for name, x in self.tensors.items() if not x.is_floating_point()})

    def with_pixels(self) -> "ImageContent":
        """Return the image with all tensors."""
        if self.make_tensors is None or any(tensor.is_floating_point() for tensor in self.tensors.values()):
            return self
        return replace(self, tensors=self.make_tensors())


class ImageEncoder(Protocol):
    """Makes the embeddings that a language model reads in the places of images."""

    @property
    def sight(self) -> ImageSight: ...
    @property
    def has_three_positions(self) -> bool:
        """Whether tokens have positions of time, height and width (M-RoPE, Qwen2-VL)."""

    def encode(self, images: Sequence[ImageContent]) -> list[Tensor]:
        """Return the embeddings of each image, (1 + num_levels, num_tokens, hidden_size)."""

    @property
    def num_levels(self) -> int:
        """After how many of the language model's first layers something is added."""

    def encode_largest(self, num_values: int) -> object:
        """Encode images whose inputs have about so many values together, to find out how much memory that takes."""

    def may_join(self, one: ImageContent, other: ImageContent) -> bool:
        """Return whether two images can be encoded in one call."""

    def rotary(self, positions: Tensor) -> StepRotary | None:
        """Return the cosines and sines of our own layers at these positions, (3, num_tokens); None for other layers."""

    def positions(self, token_ids: Sequence[int], images: Sequence[ImageContent]) -> Tensor:
        """Return the positions of a prompt with these images, (3, num_tokens) int64 on the host."""


@dataclass(frozen=True, slots=True)
class StepImages:
    """Holds what a prefill step has of images.

    places: (num_image_tokens,) int64, which tokens of the step are of images; there may be none.
    rows: (1 + num_levels, num_image_tokens, hidden_size): their embeddings, and what is added after the first layers.
    positions: (3, num_tokens) int64, of time, height and width; None: the step's own.
    rotary: what these rotate by, for layers of our own.
    whole: images whose tokens see all of their image; in_windows_alone: in layers with a window alone.
    """

    places: Tensor
    rows: Tensor
    positions: Tensor | None = None
    rotary: StepRotary | None = None
    whole: tuple[SeenImage, ...] = ()
    in_windows_alone: bool = False

    @property
    def num_levels(self) -> int:
        """After how many of the first layers something is added."""
        return len(self.rows) - 1

    def attend(
        self,
        attention: Attention,
        qkv: Tensor,
        norm_weights: tuple[Tensor, Tensor] | None,
        positions: Tensor,
        cache: LayerCache,
        metadata: Metadata,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute a layer's attention in this step, as `attention` does in others."""
        assert isinstance(metadata, PrefillMetadata), "tokens of images are computed in prefill"
        places = positions if self.rotary is None else self.rotary.places
        backend, rotary = attention.backend, self.rotary or attention.rotary_emb
        q, k, v = backend.rotate_and_store(qkv, norm_weights, attention.norm_eps, places, rotary, cache, metadata)
        heads = backend.prefill(q, k, v, cache, metadata, sinks)
        assert not self.in_windows_alone, "this kind of layer does not know whether it has a window"
        if self.whole:
            attend_to_whole_images(heads, q, cache, metadata, backend.spec, self.whole)
        return heads

    def whole_in(self, has_window: bool) -> tuple[SeenImage, ...]:
        """Return the images whose tokens see all of their image in a layer.

        has_window: whether the layer has one, though it may be longer than any sequence.
        """
        return self.whole if has_window or not self.in_windows_alone else ()

    def merge(self, embeddings: Tensor) -> Tensor:
        """Return embeddings of the step's tokens, (num_tokens, hidden_size), with those of images in their places."""
        if not len(self.places):
            return embeddings
        return embeddings.index_copy(0, self.places, self.rows[0].to(embeddings.dtype))

    def add_level(self, level: int, hidden: Tensor) -> Tensor:
        """Return hidden states (num_tokens, hidden_size) after layer `level`, with the images' rows added."""
        return hidden.index_add(0, self.places, self.rows[1 + level].to(hidden.dtype))
