"""Splits a model of transformers in two: its layers, and its own head, which reads hidden states."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nanoinfer.models.images import StepImages
from nanoinfer.models.transformers.attention_interface import base_model, text_part


class SplitModel:
    """Runs the layers of a model, and its head, apart from each other.

    layers: the model without its head. first_position: what it calls the place of a text's first token; RoBERTa and
    its like begin after the row of their table that padding has.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        inner = getattr(model, "language_model", None)  # of Llama 4, with a head of its own
        if isinstance(inner, PreTrainedModel) and inner.get_output_embeddings() is not None:
            model = inner
        self.model, self.layers = model, base_model(model)
        self.first_position = _first_position(self.layers)
        text = model.config.get_text_config()
        if getattr(text, "pad_token_id", None) is None:
            text.pad_token_id = 0  # classifiers of several texts want one
        self._padding = int(text.pad_token_id)
        for part in model.modules():  # to look for padding among the inputs, GPT-2 would wait for the device
            if isinstance(part, PreTrainedModel):
                part.__dict__["warn_if_padding_and_no_attention_mask"] = lambda *_: None

    def run(self, token_ids: Tensor, positions: Tensor | None, **options: Any) -> Any:
        """Return what the layers return of a step: first of all its hidden states, (1, num_tokens, hidden_size).

        token_ids, positions: (num_tokens,) each. positions: from 0 on; None lets the model count them itself.
        """
        if positions is not None:
            positions = (positions + self.first_position if self.first_position else positions)[None]
        return self.layers(input_ids=token_ids[None].long(), position_ids=positions, **{"use_cache": False, **options})

    def run_with_images(self, token_ids: Tensor, positions: Tensor, images: StepImages, **options: Any) -> Any:
        """Return the output of the language model within the layers for a step with images."""
        language_model: Any = text_part(self.model)
        ids = token_ids.long().index_fill(0, images.places, 0)  # the image token may have no embedding
        embeddings = images.merge(language_model.get_input_embeddings()(ids))
        positions = (positions + self.first_position)[None] if images.positions is None else images.positions[:, None]
        if len(images.rows) > 1:
            is_image = torch.zeros(1, len(ids), dtype=torch.bool, device=ids.device).index_fill(1, images.places, True)
            options |= {"visual_pos_masks": is_image, "deepstack_visual_embeds": [*images.rows[1:]]}
        if getattr(language_model.config, "hidden_size_per_layer_input", 0):  # images have the padding's (Gemma 3n, 4)
            ids = ids.index_fill(0, images.places, language_model.config.pad_token_id)
            of_tokens = language_model.get_per_layer_inputs
            others = dict.fromkeys({*inspect.signature(of_tokens).parameters} - {"input_ids"})  # of embeddings, if any
            options["per_layer_inputs"] = of_tokens(input_ids=ids[None], **others)
        return language_model(inputs_embeds=embeddings[None], position_ids=positions, **{"use_cache": False, **options})

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits (num_rows, vocab_size) of (num_rows, hidden_size), by the model's own forward."""
        return self.run_head(hidden[None])[0]

    def score(self, vectors: Tensor) -> Tensor:
        """Return logits (num_vectors, num_labels) of (num_vectors, hidden_size): each vector is a text of one token."""
        logits = self.run_head(vectors[:, None].to(self.model.dtype))
        return logits.reshape(len(vectors), -1).float()

    def run_head(self, hidden: Tensor) -> Tensor:
        """Return the model's own logits of hidden states (batch, num_tokens, hidden_size).

        So scales, soft caps and biases come along. Its layers are left out: their forward returns `hidden`.
        """
        given = GivenStates(hidden, self._pooled(hidden))
        found = (self.layers, self.model.get_decoder())
        parts = {id(part): part for part in found if isinstance(part, PreTrainedModel) and part is not self.model}
        for part in parts.values():
            part.forward = lambda *_, **__: given
        try:
            ids = torch.full(hidden.shape[:2], 1 + self._padding, device=hidden.device)  # not padding
            output = self.model(input_ids=ids, position_ids=ids, use_cache=False)
        finally:
            for part in parts.values():
                del part.forward
        logits: Tensor = output[0] if isinstance(output, tuple) else output.logits
        return logits

    def _pooled(self, hidden: Tensor) -> Tensor | None:
        """Return what the pooler within the layers of BERT's relatives makes of each text, (batch, hidden_size)."""
        pooler = getattr(self.layers, "pooler", None)
        if not isinstance(pooler, nn.Module) or self.model is self.layers:
            return None
        activation: Any = getattr(self.layers, "pooler_activation", None)  # of ALBERT
        pooled: Tensor = pooler(hidden) if activation is None else activation(pooler(hidden[:, 0]))
        return pooled


class GivenStates:
    """Stands for the output of a model without its head: hidden states that are there already."""

    def __init__(self, hidden: Tensor, pooled: Tensor | None) -> None:
        self.last_hidden_state = hidden  # (batch, num_tokens, hidden_size)
        self.pooler_output = pooled

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return ()
        return (self.last_hidden_state, self.pooler_output)[index] if index in (0, 1) else None


def _first_position(layers: nn.Module) -> int:
    for name, module in layers.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0
