"""Holds what `embed`, `classify` and `reward` return, by vLLM's names. Numbers come as NumPy arrays of float32."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nanoinfer.outputs import OutputList, RequestMetrics, prompt_cell, short_repr, with_error

if TYPE_CHECKING:  # importing the package is to cost little
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Values = NDArray[np.float32]


def _shown(values: "Values") -> str:
    first = ", ".join(f"{value:.4g}" for value in values.flat[:3])
    return f"[{first}{', ...' if values.size > 3 else ''}] of shape {values.shape}"


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    """Holds the embedding of a text, (size,)."""

    embedding: "Values"

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(embedding={_shown(self.embedding)})"


@dataclass(frozen=True, slots=True, eq=False)
class ClassificationOutput:
    """Holds the probabilities of classes, (num_classes,), or of each token's, (num_tokens, num_classes).

    labels: the names of the classes, in order.
    """

    probs: "Values"
    labels: tuple[str, ...] = field(default=(), repr=False)

    @property
    def num_classes(self) -> int:
        return self.probs.shape[-1]

    @property
    def label(self) -> str | list[str]:
        """The name of the likeliest class; for each token, where there are probabilities of each."""
        best = self.probs.argmax(-1)
        return self.labels[int(best)] if self.probs.ndim == 1 else [self.labels[int(index)] for index in best]

    def __repr__(self) -> str:
        return f"ClassificationOutput(probs={_shown(self.probs)})"


@dataclass(frozen=True, slots=True, eq=False)
class RewardOutput:
    """Holds the reward of a text, a float; from a model that rewards each token, an array (num_tokens,)."""

    reward: "float | Values"

    def __repr__(self) -> str:
        return f"RewardOutput(reward={self.reward if isinstance(self.reward, float) else _shown(self.reward)})"


Contents = TypeVar("Contents", EmbeddingOutput, ClassificationOutput, RewardOutput)


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRequestOutput(Generic[Contents]):
    """Holds a finished request of `embed`, `classify` or `reward`.

    request_id, prompt, prompt_token_ids, num_cached_tokens, metrics: as in RequestOutput. outputs: an EmbeddingOutput,
    a ClassificationOutput or a RewardOutput; its values are NaN where the model's are, if the request was aborted, and
    where there is an error. hidden_states: those that were asked for, by layer; None if none were. error, error_kind:
    why the text could not be served, as in RequestOutput; None where it was.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: Contents
    metrics: RequestMetrics = field(default=RequestMetrics(), repr=False)
    hidden_states: "Mapping[int, Tensor] | None" = field(default=None, repr=False)
    error: str | None = None
    error_kind: str | None = None

    __repr__ = short_repr

    @property
    def finished(self) -> bool:
        """Return True: programs written for vLLM ask."""
        return True

    @property
    def embedding(self: "PoolingRequestOutput[EmbeddingOutput]") -> "Values":
        """The embedding, of an output of `embed`."""
        return self.outputs.embedding

    @property
    def reward(self: "PoolingRequestOutput[RewardOutput]") -> "float | Values":
        """The reward, of an output of `reward`."""
        return self.outputs.reward

    def to_dict(self) -> dict[str, Any]:
        """Return a flat row of a table; arrays are as they are."""
        pooled: Any = self.outputs
        if isinstance(pooled, EmbeddingOutput):
            values: dict[str, Any] = {"embedding": pooled.embedding}
        elif isinstance(pooled, ClassificationOutput):
            values = {"label": pooled.label if self.error is None else None, "probs": pooled.probs}
        else:
            values = {"reward": pooled.reward}
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            **values,
            "error": self.error,
            "error_kind": self.error_kind,
            "num_prompt_tokens": len(self.prompt_token_ids),
            "num_cached_tokens": self.num_cached_tokens,
            "prompt_token_ids": self.prompt_token_ids,
        }

    def html_row(self) -> list[str]:
        numbers = str(len(self.prompt_token_ids))
        return [str(self.request_id), prompt_cell(self), with_error(repr(self.outputs), self.error), numbers]


class PoolingOutputs(OutputList[PoolingRequestOutput[Contents]]):
    """Lists what `embed`, `classify` and `reward` return."""

    head = "request", "prompt", "output", "tokens in"
