"""Puts the image tower of a model of transformers before layers of our own.

The whole model of transformers is made with no layers of text, and with our embedding in the place of its own, so that
its forward pass does all that is to be done with images.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from nanoinfer.checkpoint.loader import iterate_weights
from nanoinfer.checkpoint.weights import listed
from nanoinfer.device import to_device
from nanoinfer.errors import ModelError
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.rotary_embedding import RotaryEmbedding, StepRotary, position_axes
from nanoinfer.models.causal_lm import TOWERS, DecoderForCausalLM
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.transformers.attention_interface import base_model, text_part
from nanoinfer.models.transformers.image_encoder import TransformersImageEncoder
from nanoinfer.models.transformers.transformers_config import (
    attention_option,
    dtype_option,
    find_class,
    make_config,
    shortened,
)
from nanoinfer.models.transformers.transformers_model import (
    draw_weights,
    keep_buffers_as_weights,
    without_progress_bars,
)

NUM_EMBEDDINGS = 8  # of the text model that is left out
# Model types in which height and width rotate neighbouring dimensions; in later ones they take turns.
IN_CHUNKS = ("qwen2_vl", "qwen2_5_vl")


class NativeImageEncoder(TransformersImageEncoder):
    """Encodes images for layers of our own. rotary_emb: theirs. axes: see `RotaryEmbedding.of_three_positions`."""

    def __init__(self, model: PreTrainedModel, rotary_emb: RotaryEmbedding) -> None:
        super().__init__(model)
        self._rotary_emb = rotary_emb
        self._axes: Tensor | None = None
        if self.has_three_positions:
            axes = position_axes(_sections(model.config), model.config.model_type not in IN_CHUNKS)
            self._axes = torch.tensor(axes, device=model.device)

    def rotary(self, positions: Tensor) -> StepRotary | None:
        return None if self._axes is None else self._rotary_emb.of_three_positions(positions, self._axes)


class GivenEmbedding(nn.Module):
    """Looks up the embeddings of tokens, which are on the host, in another model."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self._decoder = (decoder,)  # no module of this one, as its weights are the other model's

    def forward(self, token_ids: Tensor) -> Tensor:
        (decoder,) = self._decoder
        ids = to_device(token_ids.flatten(), decoder.embed_tokens.weight.device)
        embeddings: Tensor = decoder.embed_tokens(ids) * decoder.embedding_multiplier
        return embeddings.unflatten(0, token_ids.shape)


def load_tower(
    model: DecoderForCausalLM,
    fields: Mapping[str, Any],
    folder: Path,
    backends: AttentionBackends,
    random_seed: int | None,
) -> NativeImageEncoder:
    """Return what encodes images for a model of our own, and make its weights a part of the model.

    fields: of config.json. random_seed: for random weights; None reads those of the folder. Raises ModelError where
    there are none.
    """
    model_class = find_class(fields)
    config = make_config(model_class, fields)
    _leave_text_out(config)
    if random_seed is None:
        whole = _load(model_class, config, folder, TOWERS, backends.dtype)
    else:
        whole = draw_weights(model_class, config, backends.device, backends.dtype, random_seed)
    base: Any = base_model(whole)
    base.set_input_embeddings(GivenEmbedding(model.model))
    keep_buffers_as_weights(whole)
    whole.to(backends.device).eval().requires_grad_(False)
    model.add_towers({name: part for name, part in base.named_children() if part is not text_part(whole)})
    return NativeImageEncoder(whole, first_rotary_embedding(model))


def first_rotary_embedding(model: DecoderForCausalLM) -> RotaryEmbedding:
    """Return the rotary embedding of a model that has one for all layers."""
    return next(part for part in model.modules() if isinstance(part, RotaryEmbedding))


@contextmanager
def _without_warnings() -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _leave_text_out(config: PretrainedConfig) -> None:
    """Let a model's text part have no layers, and hardly an embedding."""
    text = config.get_text_config()
    if getattr(text, "mlp_only_layers", None):
        text.mlp_only_layers = []
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, NUM_EMBEDDINGS, 0
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):  # of Gemma 4
        if hasattr(text, name):
            setattr(text, name, 0)
    if getattr(config, "audio_config", None) is not None:  # what hears
        config.audio_config = None


def _sections(config: PretrainedConfig) -> list[int]:
    """Return how many pairs of dimensions each of three positions rotates."""
    text = config.get_text_config()
    rope: Any = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    return [*rope["mrope_section"]]


def _load(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    folder: Path,
    prefixes: tuple[str, ...],
    dtype: torch.dtype,
) -> PreTrainedModel:
    """Return the model with those weights of a folder whose names begin with one of the prefixes."""
    tensors = {name: tensor for name, tensor in iterate_weights(folder) if name.startswith(prefixes)}
    if not tensors:
        raise ModelError(f"{folder} has no weights of what sees images; leave limit_mm_per_prompt out")
    options = {"output_loading_info": True, **attention_option(config), **dtype_option(dtype)}
    try:
        with without_progress_bars(), _without_warnings():  # that the text part is missing
            model, found = model_class.from_pretrained(
                None, config=config, state_dict=tensors, ignore_mismatched_sizes=True, **options
            )
    except Exception as error:  # what converts weights fails in its own ways
        raise ModelError(
            f"transformers {transformers.__version__} cannot load what sees images of {folder}: {shortened(error)}"
        ) from error
    of_text = {name for name, _ in text_part(model).named_parameters()}
    missing = [name for name in found["missing_keys"] if name.split("language_model.")[-1] not in of_text]
    missing = [name for name in missing if not name.startswith("lm_head")]
    if faults := sorted([*missing, *found["unexpected_keys"], *map(str, found["mismatched_keys"])]):
        raise ModelError(f"{folder} has other weights of what sees images than config.json implies: {listed(faults)}")
    return model
