"""Defines types for what the host decides between a step's forward pass and its draw: which tokens rows may get.

These types are all that the engine, the runner and the sampler know of constraints.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

UserFunction = Callable[[list[int], Any], Any]  # of the completion's token ids and its logits (vocab_size,), float32


class RowMasks(NamedTuple):
    """Says which tokens some of a step's rows may get, by a mask each."""

    batch_indices: list[int]  # which of the tokens that the step draws, in any order
    bits: NDArray[np.int32]  # (num_masks, ceil(vocab_size / 32)): token i is bit i % 32 of word i // 32, 1 if allowed


class TokenMasks(NamedTuple):
    """Says which tokens a step may draw, where the model alone does not decide it.

    grammars: the masks of grammars. token_sets: the masks of allowed_token_ids and bad_words. functions: by batch_idx,
    a user's logits processors and the completion's token ids so far. Raw log-probabilities are taken from the logits
    before all of these, processed ones from the logits after them.
    """

    grammars: RowMasks | None = None
    token_sets: RowMasks | None = None
    functions: dict[int, tuple[tuple[UserFunction, ...], list[int]]] = {}  # noqa: RUF012 (never changed)


class Constraint(Protocol):
    """Follows one sample, and says what it may get next. It stays with its sequence when that is preempted."""

    follows_tokens: bool  # whether the next masks depend on the newest token
    error: str | None  # why no token can follow; the sample then gets none, and ends

    def append(self, token_id: int) -> bool:
        """Take the sample's newest token; return whether the text is complete with it."""

    def num_allowed(self, proposals: Sequence[int]) -> int:
        """Return how many of these tokens, from the first one on, may follow, as far as it can tell fast."""

    def forced(self) -> Sequence[int]:
        """Return the tokens that have to follow, as far as it can tell fast."""


class CompiledConstraint(Protocol):
    """Makes the constraint of each sample of one request, whose options are checked and compiled."""

    def start(self, prompt: Sequence[int]) -> Constraint:
        """Return the constraint of a new sample. prompt: its token ids."""
