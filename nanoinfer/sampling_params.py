"""How one request is to be sampled: chosen by the user, validated once, never changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from nanoinfer.errors import RequestError

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of generation_config.json
MAX_TEMPERATURE = 1e6  # far past where every token is as likely as any other


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request.

    temperature: scale of the randomness; 1 samples from the model's own distribution, 0 is greedy.
    max_tokens: the most tokens to generate, the stop token included; at least 1.
    ignore_eos: go on past the model's stop tokens, up to max_tokens (for benchmarks).
    stop: a string or several that end the text, wherever their tokens begin and end; kept as a tuple.
    stop_token_ids: token ids that end the completion besides the model's own; kept as a tuple.
    include_stop_str_in_output: leave in the text what ended it, a stop string or a stop token.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: make text at all; without it the text is "", and there can be no stop strings.

    Raises RequestError (a ValueError) for a value out of range.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    stop: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

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
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} is not a bool; use True or False")
        self._check_stops()

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingParams":
        """What a generation_config.json, read as a dict, recommends; its options that are none of ours are left out.

        "do_sample": false is a temperature of 0, and max_new_tokens is max_tokens. `dataclasses.replace` changes what
        is to differ.
        """
        known = {field.name for field in fields(cls)}
        names = {"max_new_tokens": "max_tokens"} | {name: name for name in RECOMMENDED if name in known}
        options = {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}
        if config.get("do_sample") is False:
            options["temperature"] = 0.0
        return cls(**options)

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(item, str) and item for item in stop):
            raise RequestError(f"stop={self.stop!r} must be a string or a list of them, none empty; use ['\\n'], say")
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(ids, (list, tuple)) or not all(_is_token_id(item) for item in ids):
            raise RequestError(f"stop_token_ids={self.stop_token_ids!r} must be a list of token ids; use [0], say")
        if stop and not self.detokenize:
            raise RequestError(f"stop={self.stop!r} is found in text, and detokenize=False makes none; leave one out")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(item) for item in ids))


def _is_token_id(item: object) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool) and int(item) >= 0
