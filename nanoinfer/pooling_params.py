"""Holds what `embed`, `classify` and `reward` take beside prompts, by vLLM's names."""

from dataclasses import dataclass

from nanoinfer.errors import RequestError
from nanoinfer.option_fields import is_whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Says what becomes of a text's pooled vector or scores. Raises RequestError for a value out of range.

    dimensions: to how many values an embedding is cut, before it is normalised; None for all.
    use_activation: whether embeddings are normalised, and logits become probabilities; None does what the model's
        folder says, but leaves rewards as they are.
    """

    dimensions: int | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        size = self.dimensions
        if size is not None:
            if not is_whole_number(size) or size < 1:
                raise RequestError(f"dimensions={size!r} must be a whole number of at least 1; leave it out for all")
            object.__setattr__(self, "dimensions", int(size))  # NumPy's integers, say
        if self.use_activation not in (None, True, False):
            raise RequestError(f"use_activation={self.use_activation!r} is no bool; use True, False or None")
