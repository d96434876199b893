"""Encodes images by a model's own forward pass, which is followed as far as the model calls its language model.

What it calls that with is what any language model is to read in the places of images: embeddings, positions of three
numbers, rows that are added after the first layers (deepstack). So no class of transformers needs code of its own.
"""

import inspect
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nanoinfer.device import is_out_of_memory, numbers_to_device
from nanoinfer.errors import ModelError
from nanoinfer.layers.rotary_embedding import StepRotary
from nanoinfer.models.images import ImageContent, ImageSight
from nanoinfer.models.transformers.attention_interface import (
    base_model,
    name_attention_of_towers,
    probing_masks,
    text_part,
)
from nanoinfer.models.transformers.fast_towers import speed_up_tower
from nanoinfer.models.transformers.host_tensors import HostTensorsFollow
from nanoinfer.models.transformers.transformers_config import shortened

# Arguments of a language model that need no support of ours. None, numbers and texts are always fine.
HARMLESS = frozenset(("attention_mask", "position_ids", "inputs_embeds", "cache_position", "logits_to_keep"))
OF_IMAGES = frozenset(("visual_pos_masks", "deepstack_visual_embeds"))
MAX_POSITIONS = 64  # prompts whose positions are kept
MAX_SIDE = 48  # patches on a side of a large image, where a model limits their number
NUM_POSITIONS = 3  # of time, height and width
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # 1 where an image stands


class LanguageModelReached(Exception):  # noqa: N818
    """Ends a model's forward pass where it calls its language model."""


class Inputs(NamedTuple):
    """Describes inputs that a model may take for images, by name: shapes of tensors, and sizes that come with them."""

    shapes: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, list[Any]]


class TransformersImageEncoder:
    """Makes what the language model of a transformers model reads in the places of images.

    image_token_id: stands in prompts for one embedding.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._base: Any = base_model(model)
        self._language_model: Any = text_part(model)
        if self._base is self._language_model:
            raise ModelError(f"{type(model).__name__} has no language model apart from what sees; leave images out")
        name_attention_of_towers(model)
        if model.device.type == "cuda":
            for part in self._base.children():
                if part is not self._language_model:
                    speed_up_tower(part)
        self._uploads = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._positions: dict[tuple[bytes, str], Tensor] = {}
        self._name = type(model).__name__
        self._model = model
        self._vision = getattr(model.config, "vision_config", None)
        self.image_token_id = image_token_id(model.config)
        counts_them = hasattr(self._base, "get_rope_index")
        self.has_three_positions = counts_them or "mrope_section" in str(model.config.get_text_config().to_dict())
        self._options = inspect.signature(self._base.forward).parameters
        self._check_language_model(model.config.get_text_config())
        self.sight = self._find_sight()

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageContent]) -> list[Tensor]:
        """Return what is read in the place of each image, (1 + num_levels, num_tokens, hidden_size).

        First its embeddings, then what is added to the hidden states after the first layers, if the model has that.
        """
        token_ids = [token_id for image in images for token_id in image.token_ids]
        # Which positions these tokens have does not matter, and models could not tell those of neighbouring images.
        positions = torch.arange(len(token_ids)).expand(3, 1, -1) if self.has_three_positions else None
        seen = self._capture(token_ids, [image.tensors for image in images], positions)
        rows = seen["inputs_embeds"]  # (1, num_tokens, hidden_size)
        if deepstack := seen.get("deepstack_visual_embeds"):
            levels = rows.new_zeros(len(deepstack), *rows.shape[1:])
            places = [place for place, token_id in enumerate(token_ids) if token_id == self.image_token_id]
            added = torch.stack([*deepstack]).to(rows.dtype)
            rows = torch.cat((rows, levels.index_copy_(1, numbers_to_device(places, rows.device), added)))
        parts = rows.split([len(image.token_ids) for image in images], dim=1)
        return [part.clone() for part in parts]

    def positions(self, token_ids: Sequence[int], images: Sequence[ImageContent]) -> Tensor:
        """Return the positions of time, height and width of a prompt with these images, (3, num_tokens) on the host.

        They are kept for prompts alike, as the same question about other pictures of one size. Callers do not write
        into them.
        """
        grids = [{name: x for name, x in one.tensors.items() if not x.is_floating_point()} for one in images]
        key = array("i", token_ids).tobytes(), str([{name: x.tolist() for name, x in one.items()} for one in grids])
        if key not in self._positions:
            if len(self._positions) >= MAX_POSITIONS:
                self._positions.clear()
            self._positions[key] = self._count_positions(token_ids, grids)
        return self._positions[key]

    @torch.inference_mode()
    def _count_positions(self, token_ids: Sequence[int], grids: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the positions of a prompt. grids: the sizes of each of its images."""
        if (count := getattr(self._base, "get_rope_index", None)) is not None:  # on the host, which waits for nothing
            ids = torch.tensor([[*token_ids]], device="cpu")
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **self._token_types(ids)}
            inputs |= joined(grids, torch.cat)
            known = inspect.signature(count).parameters
            positions = count(**{name: value for name, value in inputs.items() if name in known})[0]
        else:
            positions = self._capture(token_ids, grids).get("position_ids")
        if positions is None or positions.dim() != 3:
            raise ModelError(f"{self._name} tells its language model no positions of three numbers; leave images out")
        found: Tensor = positions[-3:, 0].cpu()
        return found

    @property
    def num_levels(self) -> int:
        """After how many of the language model's first layers something is added."""
        return len(getattr(self._vision, "deepstack_visual_indexes", None) or ())

    @torch.inference_mode()
    def encode_largest(self, num_values: int) -> Any:
        """Encode images whose inputs have about so many values together; return what the model makes of them.

        Raises ModelError for a class whose inputs are not known.
        """
        dtype, device = self._model.dtype, self._model.device
        errors = []
        for inputs in self._largest_inputs(num_values):
            tensors = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in inputs.shapes.items()}
            tensors |= {name: torch.tensor(sizes, device="cpu") for name, sizes in inputs.sizes.items()}
            try:
                with HostTensorsFollow(device):
                    return self._base.get_image_features(**tensors)
            except Exception as error:  # models fail in their own ways
                if is_out_of_memory(error):
                    raise
                errors.append(shortened(error))
        raise ModelError(f"what {self._name} reads of images is not known ({'; '.join(errors)})")

    def _largest_inputs(self, num_values: int) -> Iterator[Inputs]:
        """Yield inputs that a model may take: patches of one large image, of several with places, or squares."""
        size, patch = (_first(getattr(self._vision, name, None)) for name in ("image_size", "patch_size"))
        if "image_grid_thw" in self._options and patch is not None:
            depth = getattr(self._vision, "temporal_patch_size", None) or 1
            side = 4 * max(1, int((num_values / (3 * depth * patch**2)) ** 0.5) // 4)  # of patches
            grid = {"image_grid_thw": [[1, side, side]]}
            yield Inputs({"pixel_values": (side**2, 3 * depth * patch**2)}, grid)
            yield Inputs({"pixel_values": (side**2, 3, patch, patch)}, grid)
        if "image_position_ids" in self._options and patch is not None:
            pool = getattr(self._vision, "pooling_kernel_size", None) or 1
            for num_each in (3 * patch**2, 3 * (patch * pool) ** 2):  # values of a patch, or of all that are a token
                side = pool * max(1, min(MAX_SIDE, int((num_values / num_each) ** 0.5)) // pool)
                count = max(1, num_values // (num_each * side**2))
                places = {"image_position_ids": [[[x, y] for y in range(side) for x in range(side)]] * count}
                yield Inputs({"pixel_values": (count, side**2, num_each)}, places)
        if size is not None:
            count = max(1, num_values // (3 * size**2))
            shapes = (count, 3, size, size), (1, count, 3, size, size), (count, 1, 3, size, size)
            for sizes in ({}, {"image_sizes": [[size, size]] * count}):
                for shape in shapes:
                    yield Inputs({"pixel_values": shape}, sizes)

    def rotary(self, positions: Tensor) -> StepRotary | None:
        """Return None: layers of transformers rotate by positions."""

    def may_join(self, one: ImageContent, other: ImageContent) -> bool:
        """Return whether two images can be encoded in one call: their inputs differ in the first dimension alone."""
        first, second = ({name: x.shape[1:] for name, x in image.tensors.items()} for image in (one, other))
        return first == second

    def _capture(
        self, token_ids: Sequence[int], tensors: Sequence[Mapping[str, Tensor]], positions: Tensor | None = None
    ) -> dict[str, Any]:
        """Run the model up to its language model; return the arguments of that call. tensors: inputs of each image."""
        device = self._model.device
        ids = torch.tensor([[*token_ids]], device="cpu")
        inputs = joined(tensors, self._placed)
        inputs |= self._token_types(ids)
        if positions is not None:
            inputs["position_ids"] = positions
        seen: dict[str, Any] = {}

        def note(*_: Any, **options: Any) -> NoReturn:
            seen.update(options)
            raise LanguageModelReached

        self._language_model.forward = note
        try:
            with HostTensorsFollow(device):
                self._base(input_ids=ids, use_cache=False, **inputs)
        except LanguageModelReached:
            pass
        finally:
            del self._language_model.forward
        unknown = {name for name, value in seen.items() if not isinstance(value, (bool, int, float, str, type(None)))}
        if unknown := unknown - HARMLESS - OF_IMAGES - {*TOKEN_TYPES, "per_layer_inputs"}:
            raise ModelError(
                f"{self._name} gives its language model {', '.join(sorted(unknown))} of an image, which is not "
                "supported; leave images out"
            )
        return seen

    def _check_language_model(self, text: Any) -> None:
        """Raise ModelError if the text part reads images in another way than ours. text: its config."""
        token_types = [name for name in self._options if name.endswith("token_type_ids") and name not in TOKEN_TYPES]
        sections = (getattr(text, "rope_parameters", None) or {}).get("mrope_section")
        if token_types:
            what = f"computes tokens of images by other weights than those of texts ({token_types[0]})"
        elif getattr(text, "cross_attention_layers", None):
            what = "has layers of cross attention to images"
        elif sections is not None and len(sections) != NUM_POSITIONS:
            what = f"has positions of {len(sections)} numbers"
        else:
            return
        raise ModelError(f"{self._name} {what}, which is not supported; leave images out")

    def _placed(self, parts: list[Tensor]) -> Tensor:
        """Return an input of several images where it is read: sizes on the host, all others on the device.

        Pixels are large. They are joined on the device, so that the host needs no memory for all of them. A copy from
        memory that is not pinned waits for all that its stream was given before. So copies have a stream of their own
        and pinned memory, which PyTorch uses again once a copy has ended.
        """
        is_of_sizes = not parts[0].is_floating_point() and parts[0].dtype is not torch.bool
        if is_of_sizes or self._uploads is None:
            return torch.cat(parts)
        lens, stream = [len(part) for part in parts], torch.cuda.current_stream(self._model.device)
        with torch.cuda.stream(self._uploads):
            uploaded = parts[0].new_empty(sum(lens), *parts[0].shape[1:], device=self._model.device)
            for part, place in zip(parts, uploaded.split(lens), strict=True):
                place.copy_(part.contiguous().pin_memory(), non_blocking=True)
        stream.wait_stream(self._uploads)
        uploaded.record_stream(stream)
        return uploaded

    def _token_types(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the model's inputs that say which tokens stand for images."""
        return {name: (ids == self.image_token_id).long() for name in TOKEN_TYPES if name in self._options}

    def _find_sight(self) -> ImageSight:
        """Return which other tokens the tokens of an image see. Raises ModelError if that is not supported."""
        kinds = {kind for kind, _ in self._masks(0)}
        if len(kinds) <= 1 and None not in kinds:
            return next(iter(kinds), None) or ImageSight.CAUSAL
        window = getattr(self._model.config.get_text_config(), "sliding_window", None) or 0
        if self._masks(window) == {(ImageSight.CAUSAL, False), (ImageSight.WHOLE_IMAGE, True)}:
            return ImageSight.WHOLE_IN_WINDOWS
        raise ModelError(
            f"in {self._name}, tokens see other ones than those before them and those of their own image, which is not "
            "supported; leave images out"
        )

    def _masks(self, window: int) -> set[tuple[ImageSight | None, bool]]:
        """Return what the masks of a prompt with images show: a sight, and whether they end at a window of this size.

        A sight is None if it is of no kind that is supported.
        """
        made: list[Any] = []

        def make(function: Any, q_length: int, kv_length: int, device: torch.device) -> Tensor:
            made.append(function)
            return torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=device)

        image, text = self.image_token_id, 0 if self.image_token_id else 1
        prompt = [text, image, image, text, image, text]
        with probing_masks(self._model, make):
            self._capture(prompt + [text] * window, [])
        index = torch.arange(len(prompt), device=self._model.device)
        zero = torch.zeros((), dtype=torch.long, device=self._model.device)
        found: set[tuple[ImageSight | None, bool]] = set()
        for function in made:
            with HostTensorsFollow(index.device):
                mask = torch.as_tensor(function(zero, zero, index[:, None], index[None]))
                sees_first = torch.as_tensor(function(zero, zero, index[-1] + window, zero)).item()
            ahead = mask.expand(len(prompt), len(prompt)).triu(1).nonzero().tolist()
            kind = ImageSight.CAUSAL if not ahead else ImageSight.WHOLE_IMAGE if ahead == [[1, 2]] else None
            found.add((kind, not sees_first))
        return found


def image_token_id(config: Any) -> int:
    """Return the id that stands for an embedding of an image. Raises ModelError where the config names none."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(found := getattr(config, name, None), int):
            return found
    raise ModelError(f"{type(config).__name__} names no image token; leave images out")


def _first(size: Any) -> int | None:
    """Return the number in a field that may hold one number for each side."""
    return size[0] if isinstance(size, (list, tuple)) else size


def joined(tensors: Sequence[Mapping[str, Tensor]], join: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor]:
    """Return the inputs of several images as those of one call. Some images may have inputs that others have not.

    join: makes one tensor of those of all images.
    """
    names = dict.fromkeys(name for one in tensors for name in one)
    return {name: join([one[name] for one in tensors if name in one]) for name in names}
