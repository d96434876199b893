"""What users get of pooled texts: embeddings, classes and rewards, made of the vectors and logits that steps bring."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nanoinfer.checkpoint.pooling_config import PoolingConfig
from nanoinfer.engine.hidden_states_request import HiddenStatesRequest
from nanoinfer.outputs import RequestOutput
from nanoinfer.pooling_calls.pooling_steps import check_finite
from nanoinfer.pooling_outputs import ClassificationOutput, EmbeddingOutput, PoolingRequestOutput, RewardOutput
from nanoinfer.pooling_params import PoolingParams

Values = NDArray[np.float32]
MIN_NORM = 1e-12  # a vector of zeros stays one


@dataclass(frozen=True, slots=True)
class PooledOutput(ABC):
    """Makes the user's outputs of texts with the same parameters: `HiddenStatesRequest.to_output`.

    size: values of an embedding, or logits.
    """

    config: PoolingConfig
    size: int
    params: PoolingParams

    @abstractmethod
    def make(self, values: Values) -> list[Any]:
        """Make the contents of several outputs at once, from the pooled values of their texts: (num_texts, ...)."""

    def make_all(self, values: Any) -> list[Any]:
        """Do as `make`; where there are values of each token, they are a list with an array for each text."""
        if self.config.is_of_each_token:
            return [self.make(one[np.newaxis])[0] for one in values]
        return self.make(values)

    def __call__(self, output: RequestOutput, states: HiddenStatesRequest) -> PoolingRequestOutput[Any]:
        """Make the output of a request that has ended."""
        parts = [part.numpy() for part in states.parts(None)]
        if parts and output.finish_reason not in ("abort", "error"):
            values = parts[0] if len(parts) == 1 else np.concatenate(parts)
            check_finite([output.request_id], [values])
        else:
            values = np.full((1, self.size), np.nan, np.float32)
        return PoolingRequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            output.num_cached_tokens,
            self.make_all([values] if self.config.is_of_each_token else values)[0],
            output.metrics,
            error=output.error,
            error_kind=output.error_kind,
        )


class PooledEmbedding(PooledOutput):
    """Cuts and normalises vectors."""

    def make(self, values: Values) -> list[EmbeddingOutput]:
        params, config = self.params, self.config
        size = config.truncate_dim if params.dimensions is None else params.dimensions
        normalizes = config.activation == "normalize" if params.use_activation is None else params.use_activation
        measured, vectors = values, values[..., :size]
        if normalizes:
            # A folder that cuts embeddings by itself cuts them once they are normalised, as sentence-transformers.
            measured = measured if params == PoolingParams() else vectors
            norms = np.sqrt(np.einsum("...i,...i", measured, measured))
            vectors = vectors / np.maximum(norms, MIN_NORM)[..., np.newaxis]
        return [EmbeddingOutput(vector.copy()) for vector in vectors]  # so that one does not keep the others


class PooledClasses(PooledOutput):
    """Makes probabilities of logits."""

    def make(self, values: Values) -> list[ClassificationOutput]:
        activation = "Identity" if self.params.use_activation is False else self.config.activation
        return [ClassificationOutput(probs.copy(), self.config.labels) for probs in activate(values, activation)]


class PooledReward(PooledOutput):
    """Takes the only logit for the reward."""

    def make(self, values: Values) -> list[RewardOutput]:
        scores = activate(values, self.config.activation if self.params.use_activation else "Identity")[..., 0]
        return [RewardOutput(float(score) if score.ndim == 0 else score.copy()) for score in scores]


def activate(logits: Values, activation: str) -> Values:
    """Return what a class of torch.nn makes of logits, such as probabilities over their last dimension."""
    layer = nn.Softmax(-1) if activation == "Softmax" else getattr(nn, activation)()
    values: Values = layer(torch.tensor(logits)).numpy()
    return values
