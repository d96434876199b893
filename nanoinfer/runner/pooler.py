"""Turns the hidden states of a step into what requests want: pooled vectors, scores, or the states themselves.

Only rank 0 keeps the results. The other ranks take part in the forward pass and in exchanges.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from nanoinfer.checkpoint.pooling_config import DenseConfig, PoolingConfig
from nanoinfer.device import numbers_to_device
from nanoinfer.engine.hidden_states_request import ChunkStates, WantedStates
from nanoinfer.engine.row_options import AdmittedRow
from nanoinfer.engine.side_outputs import HiddenStates, PooledVectors, SideOutput
from nanoinfer.errors import ModelError
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.interface import Model
from nanoinfer.sampling.row_state import RowState

Chunks = list[list[int]]  # (row, start, length) of each chunk of a step
# (index, offset, start, length, ends) of each chunk that is pooled: its place in the list, that of its first token in
# the step and in its prompt, its number of tokens, and whether its prompt ends with it. Hundreds are made in each step.
PooledChunks = list[tuple[int, int, int, int, bool]]


class DenseLayer:
    """Computes activation(x W^T + b) in float32, as sentence-transformers puts it after pooling.

    weight: (out_features, in_features); bias: (out_features,) or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self.weight, self.bias = weight.float(), None if bias is None else bias.float()
        self.activation = nn.Softmax(-1) if activation == "Softmax" else getattr(nn, activation)()

    def __call__(self, vectors: Tensor) -> Tensor:
        return self.activation(F.linear(vectors, self.weight, self.bias))


def load_dense(configs: tuple[DenseConfig, ...], is_random: bool, device: torch.device) -> list[DenseLayer]:
    """Return the layers that a folder describes. Raises ModelError where their weights are missing or do not fit."""
    return [_load_dense_layer(config, is_random, device) for config in configs]


def _load_dense_layer(config: DenseConfig, is_random: bool, device: torch.device) -> DenseLayer:
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (config.out_features, config.in_features)}
    shapes |= {"linear.bias": (config.out_features,)} if config.bias else {}
    if is_random:
        weights = {name: torch.full(shape, 0.02) for name, shape in shapes.items()}
    else:
        path = config.path / "model.safetensors"
        try:
            weights = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read ({error}); a dense layer's weights are in safetensors") from None
        if {name: tuple(tensor.shape) for name, tensor in weights.items()} != shapes:
            raise ModelError(f"{path} has weights of other names or shapes than its config.json: it must have {shapes}")
    bias = weights.get("linear.bias")
    return DenseLayer(weights["linear.weight"].to(device), None if bias is None else bias.to(device), config.activation)


class Pooler(RowState):
    """Knows what the rows of the step tables want of hidden states.

    config: how they are pooled. dense: the layers after pooling. Sums of prompts in several chunks are kept in float32.
    """

    reads: ClassVar = ("hidden_states_request",)

    def __init__(self, model: Model, config: PoolingConfig, dense: list[DenseLayer]) -> None:
        super().__init__()
        self._model, self._config, self._dense = model, config, dense
        self._sums: dict[int, Tensor] = {}  # by row: (hidden_size,) float32 of the tokens so far

    def remember(self, row: AdmittedRow) -> None:
        pools, layers_from, keeps, second_text, *layers = map(int, row.options["hidden_states_request"])
        self.by_row[row.row] = WantedStates(row.num_prompt_tokens, pools, layers_from, keeps, second_text, layers)

    def run(
        self, forward: Callable[[ForwardStep], Tensor], step: ForwardStep, chunks: Chunks
    ) -> tuple[Tensor, list[SideOutput]]:
        """Run a prefill step; return its hidden states (num_tokens, hidden_size), and what its chunks want of them.

        forward: the fastest way to run the model; it is not used where hidden states of single layers are wanted.
        """
        if not self.by_row:
            return forward(step), []
        step = self._with_token_types(step, chunks)
        layers = {layer for row, _, _ in chunks if row in self.by_row for layer in self.by_row[row].layers}
        if not layers:
            hidden = forward(step)
            return hidden, self._pool(hidden, chunks)
        hidden, states = self._model.forward_with_hidden_states(step, layers)
        return hidden, [HiddenStates(self._states(states, chunks)), *self._pool(hidden, chunks)]

    def _with_token_types(self, step: ForwardStep, chunks: Chunks) -> ForwardStep:
        """Return the step with token types, if the encoder has them and a prompt is a pair of texts."""
        if not self._model.has_token_types:
            return step
        places = [self.by_row[row].second_text if row in self.by_row else 0 for row, _, _ in chunks]
        if all(place >= start + length for place, (_, start, length) in zip(places, chunks, strict=True)):
            return step
        numbers = numbers_to_device([places, [length for _, _, length in chunks]], step.positions.device)
        num_tokens = len(step.positions)
        second_texts = numbers[0].repeat_interleave(numbers[1], output_size=num_tokens)
        return replace(step, token_types=(step.positions >= second_texts).int())

    def _states(self, states: dict[int, Tensor], chunks: Chunks) -> list[ChunkStates]:
        """Return the hidden states that are wanted as they are, most on their way to the host. states: by layer."""
        parts, offset = [], 0
        for index, (row, start, length) in enumerate(chunks):
            wanted = self.by_row.get(row)
            if wanted is not None:
                first, end = max(start, wanted.layers_from), min(start + length, wanted.num_prompt_tokens)
                for layer in wanted.layers if first < end else []:
                    part = states[layer][offset + first - start : offset + end - start]
                    if not wanted.keeps_on_device:
                        part = part.to("cpu", non_blocking=True)
                    parts.append(ChunkStates(index, layer, first, part))
            offset += length
        return parts

    # -------- Pooling: a method for each value of PoolingConfig.method ------------------------------------------------

    def _pool(self, hidden: Tensor, chunks: Chunks) -> list[SideOutput]:
        by_method = {"last": self._last_tokens, "cls": self._first_tokens, "mean": self._means, "all": self._each_token}
        return by_method[self._config.method](hidden, chunks)

    def _last_tokens(self, hidden: Tensor, chunks: Chunks) -> list[SideOutput]:
        tokens = [(index, offset + length - 1) for index, offset, _, length, ends in self._pooled(chunks) if ends]
        return self._vectors_at(tokens, hidden)

    def _first_tokens(self, hidden: Tensor, chunks: Chunks) -> list[SideOutput]:
        tokens = [(index, offset) for index, offset, start, _, _ in self._pooled(chunks) if start == 0]
        return self._vectors_at(tokens, hidden)

    def _means(self, hidden: Tensor, chunks: Chunks) -> list[SideOutput]:
        pooled = self._pooled(chunks)
        if not pooled:
            return []
        lens = numbers_to_device([length for _, _, length in chunks], hidden.device)
        sums = torch.segment_reduce(hidden.float(), "sum", lengths=lens, axis=0, unsafe=True)
        if len(pooled) == len(chunks) and all(start == 0 and ends for _, _, start, _, ends in pooled):
            return self._vectors(sums / lens.unsqueeze(1), [*range(len(chunks))])
        ended, means = [], []
        for index, _, start, length, ends in pooled:
            row = chunks[index][0]
            total = sums[index] if start == 0 else sums[index] + self._sums[row]
            if ends:
                ended.append(index)
                means.append(total / (start + length))
            else:
                self._sums[row] = total
        return self._vectors(torch.stack(means), ended) if ended else []

    def _each_token(self, hidden: Tensor, chunks: Chunks) -> list[SideOutput]:
        parts = [
            ChunkStates(index, None, start, self._to_host(hidden[offset : offset + length]))
            for index, offset, start, length, _ in self._pooled(chunks)
        ]
        return [HiddenStates(parts)] if parts else []

    def _pooled(self, chunks: Chunks) -> PooledChunks:
        pooled, offset = [], 0
        for index, (row, start, length) in enumerate(chunks):
            wanted = self.by_row.get(row)
            if wanted is not None and wanted.pools:
                pooled.append((index, offset, start, length, start + length == wanted.num_prompt_tokens))
            offset += length
        return pooled

    def _vectors_at(self, tokens: list[tuple[int, int]], hidden: Tensor) -> list[SideOutput]:
        """Return the pooled vectors of single tokens. tokens: (index of a chunk, place in the step)."""
        if not tokens:
            return []
        indices, places = map(list, zip(*tokens, strict=True))
        return self._vectors(hidden[numbers_to_device(places, hidden.device)], indices)

    def _vectors(self, vectors: Tensor, indices: list[int]) -> list[SideOutput]:
        return [PooledVectors(indices, self._to_host(vectors))]

    def _to_host(self, vectors: Tensor) -> Tensor:
        """Return embeddings or logits of pooled vectors (num_vectors, hidden_size), on their way to the host."""
        return self._after_pooling(vectors).to("cpu", non_blocking=True)

    def _after_pooling(self, vectors: Tensor) -> Tensor:
        """Return embeddings or logits (num_vectors, size) float32 of pooled vectors (num_vectors, hidden_size)."""
        if self._config.token_ids:
            return self._vocabulary_scores(vectors)
        if self._model.score is not None:
            return self._model.score(vectors)
        vectors = vectors.float()
        for layer in self._dense:
            vectors = layer(vectors)
        return vectors

    def _vocabulary_scores(self, vectors: Tensor) -> Tensor:
        """Return the logit of the token for yes, minus that of the token for no if there is one: (num_vectors, 1)."""
        token_ids = torch.tensor(self._config.token_ids, device=vectors.device)
        logits = self._model.logits_of_tokens(vectors, token_ids)
        return logits[:, -1:] - logits[:, :1] if len(token_ids) > 1 else logits
