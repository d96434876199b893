"""Decides which tokens end a sample, and which may not end it yet.

The scheduler asks after each token, and a constraint asks when its text may end. The sampler forbids the stop tokens
that come too early, unless a grammar's masks leave them out. Stop strings are found elsewhere (`Completion.advance`);
they do not end a sample before `min_tokens` either.
"""

from collections.abc import Iterable
from typing import NamedTuple

from nanoinfer.engine.token_masks import Constraint
from nanoinfer.sampling_params import SamplingParams


class StopTokens(NamedTuple):
    """Holds the ids of the tokens that end a sample."""

    ids: frozenset[int]  # the model's stop tokens, and those that the request names
    ignored: frozenset[int]  # the model's stop tokens if ignore_eos is set, except any that the request names

    @classmethod
    def of(cls, own_ids: Iterable[int], ignore_eos: bool, model_ids: frozenset[int]) -> "StopTokens":
        own = frozenset(own_ids)
        return cls(model_ids | own if own else model_ids, model_ids - own if ignore_eos else frozenset())


class Stopping(NamedTuple):
    """Decides when one sample ends."""

    tokens: StopTokens
    max_num_tokens: int  # of prompt and completion together
    min_tokens: int  # of the completion, before a stop token or a stop string may end it
    ends_with_prompt: bool = False  # whether the sequence ends with its prompt, and samples nothing

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        num_prompt_tokens: int,
        model_ids: frozenset[int],
        max_model_len: int,
        ends_with_prompt: bool = False,
    ) -> "Stopping":
        max_tokens = 0 if ends_with_prompt else params.max_tokens
        longest = max_model_len if max_tokens is None else num_prompt_tokens + max_tokens
        tokens = StopTokens.of(params.stop_token_ids or (), params.ignore_eos, model_ids)
        return cls(tokens, min(longest, max_model_len), params.min_tokens, ends_with_prompt)

    def advance(self, token_id: int, constraint: Constraint | None) -> bool:
        """Hand a sample's newest token to its constraint. Return whether the sample is complete with it."""
        if token_id in self.tokens.ids and token_id not in self.tokens.ignored:
            return True
        return constraint is not None and constraint.append(token_id)

    def num_early(self, num_generated: int) -> int:
        """Return how many tokens must still come before a stop token or a stop string counts."""
        return max(0, self.min_tokens - num_generated)
