"""How one request is to be sampled: chosen by the user, validated once, never changed."""

from dataclasses import dataclass
from numbers import Integral, Real

from nanoinfer.errors import RequestError

MAX_TEMPERATURE = 1e6  # far past where every token is as likely as any other


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request.

    temperature: scale of the randomness; 1 samples from the model's own distribution, 0 is greedy.
    max_tokens: the most tokens to generate, the stop token included; at least 1.
    ignore_eos: go on past the model's stop tokens, up to max_tokens (for benchmarks).

    Raises RequestError (a ValueError) for a value out of range.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, Real):
            raise RequestError(
                f"temperature={self.temperature!r} is not a number; use 0 for greedy or a positive number"
            )
        if not 0 <= self.temperature <= MAX_TEMPERATURE:  # NaN fails it too
            raise RequestError(
                f"temperature={self.temperature} must be finite and at least 0, and at most {MAX_TEMPERATURE:g}; use 0 "
                "for greedy or a positive number"
            )
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, Integral):
            raise RequestError(f"max_tokens={self.max_tokens!r} is not an int; use a whole number of at least 1")
        if self.max_tokens < 1:
            raise RequestError(
                f"max_tokens={self.max_tokens} must be at least 1; a request generates one token or more"
            )
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={self.ignore_eos!r} is not a bool; use True or False")
