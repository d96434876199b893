"""Makes the outputs of pooled texts: embeddings, classes and rewards, from the vectors and logits of steps."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nanoinfer.checkpoint.pooling_config import PoolingConfig
from nanoinfer.engine.hidden_states_request import HiddenStatesRequest
from nanoinfer.errors import RequestError
from nanoinfer.outputs import RequestOutput
from nanoinfer.pooling_calls.pooling_steps import check_finite
from nanoinfer.pooling_outputs import ClassificationOutput, EmbeddingOutput, PoolingRequestOutput, RewardOutput
from nanoinfer.pooling_params import PoolingParams

Values = NDArray[np.float32]
MIN_NORM = 1e-12  # a vector of zeros stays one


@dataclass(frozen=True, slots=True)
class PooledOutput(ABC):
    """Makes the user's outputs of texts with the same parameters: `HiddenStatesRequest.make_output`.

    size: values of an embedding, or logits.
    """

    takes_pairs: ClassVar[bool] = True  # of texts

    config: PoolingConfig
    size: int
    params: PoolingParams

    @classmethod
    @abstractmethod
    def check(cls, config: PoolingConfig, size: int, model: str, all_params: list[PoolingParams]) -> None:
        """Raise RequestError where a model does not make these outputs, or not with the parameters of a call."""

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
    """Cuts and normalises vectors, for `LLM.embed`."""

    takes_pairs = False

    @classmethod
    def check(cls, config: PoolingConfig, size: int, model: str, all_params: list[PoolingParams]) -> None:
        if config.is_classifier:
            raise RequestError(f"embed needs an embedding model, and {model} is a classifier; use classify")
        known = config.dimensions
        for dimensions in {one.dimensions for one in all_params if one.dimensions is not None}:
            if dimensions > size or (known and dimensions not in known):
                allowed = f"one of {', '.join(map(str, known))}" if known else f"at most {size}"
                raise RequestError(f"dimensions={dimensions} is not what this model was made for; use {allowed}")

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
    """Makes probabilities of logits, for `LLM.classify`."""

    call: ClassVar[str] = "classify"

    @classmethod
    def check(cls, config: PoolingConfig, size: int, model: str, all_params: list[PoolingParams]) -> None:
        if not config.is_classifier:
            raise RequestError(
                f"{cls.call} needs a classification head, and {model} has none; use embed, or a model such as one of "
                "...ForSequenceClassification"
            )
        if any(one.dimensions is not None for one in all_params):
            raise RequestError(f"dimensions is about embeddings, and {cls.call} returns none; leave it out")

    def make(self, values: Values) -> list[Any]:
        activation = "Identity" if self.params.use_activation is False else self.config.activation
        return [ClassificationOutput(probs.copy(), self.config.labels) for probs in activate(values, activation)]


class PooledReward(PooledClasses):
    """Takes the only logit for the reward, for `LLM.reward`."""

    call = "reward"

    @classmethod
    def check(cls, config: PoolingConfig, size: int, model: str, all_params: list[PoolingParams]) -> None:
        super().check(config, size, model, all_params)
        if len(config.labels) != 1:
            raise RequestError(f"reward needs a head of one value, and this one has {len(config.labels)} classes")

    def make(self, values: Values) -> list[Any]:
        scores = activate(values, self.config.activation if self.params.use_activation else "Identity")[..., 0]
        return [RewardOutput(float(score) if score.ndim == 0 else score.copy()) for score in scores]


def activate(logits: Values, activation: str) -> Values:
    """Apply a class of torch.nn to logits, such as a softmax over their last dimension."""
    layer = nn.Softmax(-1) if activation == "Softmax" else getattr(nn, activation)()
    values: Values = layer(torch.tensor(logits)).numpy()
    return values
