"""Describes a prompt whose images have been processed, for the engine and the model.

This file imports no PyTorch, because `engine/` may not import it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the engine imports no PyTorch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """Holds one image of a prompt, as the model reads it.

    start, num_tokens: the span of the prompt's token ids from the first to the last that stands for the image. Within
        the span, each token id that equals ProcessedPrompt.image_token_id is the place of one embedding, in order. A
        span may have other tokens between them, as some models write rows and tiles apart. The model decides what it
        reads there.
    tensors: the keywords of the model's forward for this image alone, on the CPU, by name: pixel_values,
        image_grid_thw, image_sizes, pixel_attention_mask and others, as the model's own processor makes them.
        Floating-point ones have the model's dtype. Nobody writes into them: equal images share them.
    make_tensors: makes the tensors once more, so that they need not be held. None for a picture that came without a
        file, or if its file is hardly smaller than the tensors.
    key: a digest of the picture's file and of the processor's options. For a picture in memory, its pixels and its size
        take the place of the file. Images with equal keys have equal tensors and as many image tokens, in any prompt.
    """

    start: int
    num_tokens: int
    tensors: "dict[str, Tensor]"
    key: bytes
    make_tensors: "Callable[[], Mapping[str, Tensor]] | None" = None


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """Holds a prompt whose images are processed.

    token_ids: of the whole prompt, with the model's own image token at each place of an image.
    images: in the order of the prompt; their spans do not overlap.
    image_token_id: stands nowhere outside the images' spans, also where a user wrote the token's text himself.
    """

    token_ids: list[int]
    images: list[ProcessedImage]
    image_token_id: int
