"""How one request is to be sampled: chosen by the user, validated once, never changed."""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from nanoinfer.errors import RequestError, check_names

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of generation_config.json
MAX_TEMPERATURE = 1e6  # far past where every token is as likely as any other

# Parameters of vLLM and transformers: those that nanoinfer does not have, and all with our name for the same thing, or
# else None.
UNSUPPORTED = """
    best_of use_beam_search length_penalty early_stopping bad_words logit_bias allowed_token_ids logits_processors
    guided_decoding structured_outputs truncate_prompt_tokens output_kind spaces_between_special_tokens flat_logprobs
    extra_args do_sample num_beams no_repeat_ngram_size typical_p
"""
FOREIGN_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    **dict.fromkeys(UNSUPPORTED.split()),
}

# Each number has a test of its range, the rule in words, and what to use instead.
FLOATS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "temperature": (
        lambda value: 0 <= value <= MAX_TEMPERATURE,
        f"finite and at least 0, and at most {MAX_TEMPERATURE:g}",
        "use 0 for greedy or a positive number",
    ),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1", "use 1 for all tokens"),
    "min_p": (lambda value: 0 <= value <= 1, "at least 0 and at most 1", "use 0 for all tokens"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "between -2 and 2", "use 0 for none"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "between -2 and 2", "use 0 for none"),
    "repetition_penalty": (lambda value: 1e-3 <= value <= 1e3, "between 0.001 and 1000", "use 1 for none"),
}
# Each whole number has a least and a greatest value, and words on what to use instead.
INTS: dict[str, tuple[int, float, str]] = {
    "max_tokens": (1, math.inf, "a request generates one token or more; use None for up to the model's limit"),
    "n": (1, 10_000, "a request has one sample or more; for more than these, ask again"),
    "top_k": (-1, math.inf, "use 0 for all tokens"),
    "min_tokens": (0, math.inf, "use 0 for no such limit"),
    "logprobs": (0, 1000, "use None for none, or 0 for those of the tokens themselves"),
    "prompt_logprobs": (0, 1000, "use None for none, or 0 for those of the tokens themselves"),
    "seed": (-(2**63), 2**63 - 1, "it must fit in 64 bits; use None for any"),
}
MAY_BE_NONE = ("max_tokens", "logprobs", "prompt_logprobs", "seed")


def with_checked_names(cls: type) -> type:
    """Make a misspelt argument of a dataclass an error that names the argument that was probably meant."""
    init, known = cls.__init__, [item.name for item in fields(cls)]  # type: ignore[misc]

    @functools.wraps(init)  # keeps the signature that help() and editors show
    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        check_names(cls.__name__, options, known, FOREIGN_NAMES)
        init(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


@with_checked_names
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Holds the sampling options of one request.

    Penalties come first, then temperature, top_k, top_p and min_p, each on what the one before has left; tokens as
    likely as the last that stays, stay too.

    temperature: scale of the randomness; 1 samples from the model's own distribution, 0 is greedy.
    max_tokens: the most tokens to generate, the stop token included; at least 1. None is up to the model's limit.
    ignore_eos: go on past the model's stop tokens, up to max_tokens (for benchmarks).
    stop: a string or several that end the text, wherever their tokens begin and end; kept as a tuple.
    stop_token_ids: token ids that end the completion besides the model's own; kept as a tuple.
    include_stop_str_in_output: leave in the text what ended it, a stop string or a stop token.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: make text at all; without it the text is "", and there can be no stop strings.
    n: how many samples of the prompt; they share the blocks of its KV cache.
    top_k: draw from this many of the likeliest tokens; 0 or -1 is all of them.
    top_p: draw from the fewest tokens, likeliest first, that have this share of the probability; 1 is all of them.
    min_p: draw from the tokens with this share of the likeliest one's probability, or more; 0 is all of them.
    seed: of the request's random numbers; the same request with the same seed draws the same tokens, alone or in any
        batch, where the logits are the same to the bit. None, or -1, is a seed of its own for each request.
    min_tokens: tokens to generate before a stop token can be drawn or a stop string ends the text.
    presence_penalty: taken off the logit of each token generated before; frequency_penalty: once for each time.
    repetition_penalty: logits of tokens in the prompt or generated before are divided by it where they are positive,
        and multiplied where they are negative; 1 is none.
    logprobs: for each generated token, its log-probability and those of this many of the likeliest tokens, by the
        model's own distribution (temperature 1, no penalties). prompt_logprobs: the same for the prompt's tokens.

    Raises RequestError (a ValueError) for a value out of range.
    """

    temperature: float = 1.0
    max_tokens: int | None = 64
    ignore_eos: bool = False
    stop: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    n: int = 1
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (is_in_range, rule, remedy) in FLOATS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise RequestError(f"{name}={value!r} is not a number; {remedy}")
            if not is_in_range(value):
                raise RequestError(f"{name}={value} must be {rule}; {remedy}")
        for name, (least, most, remedy) in INTS.items():
            value = getattr(self, name)
            if value is None and name in MAY_BE_NONE:
                continue
            if not is_whole_number(value):
                raise RequestError(f"{name}={value!r} is not an int; use a whole number of at least {max(least, 0)}")
            if value < least:
                raise RequestError(f"{name}={value} must be at least {least}; {remedy}")
            if value > most:
                raise RequestError(f"{name}={value} must be at most {most}; {remedy}")
            object.__setattr__(self, name, int(value))  # NumPy's integers, say
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}; raise that")
        if self.n > 1 and self.temperature == 0:
            raise RequestError(f"n={self.n} samples at temperature=0 are all the same; use n=1, or a temperature")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} is not a bool; use True or False")
        self._check_stops()

    @property
    def is_filtered(self) -> bool:
        """Return whether top_k, top_p or min_p excludes tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def is_penalised(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingParams":
        """Read what a generation_config.json, given as a dict, recommends; options that are none of ours are left out.

        "do_sample": false is a temperature of 0, and max_new_tokens is max_tokens. `dataclasses.replace` changes what
        is to differ.
        """
        names = {"max_new_tokens": "max_tokens"} | {name: name for name in RECOMMENDED}
        options = {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}
        if config.get("do_sample") is False:
            options["temperature"] = 0.0
        return cls(**options)

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(item, str) and item for item in stop):
            raise RequestError(f"stop={self.stop!r} must be a string or a list of them, none empty; use ['\\n'], say")
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(ids, (list, tuple)) or not all(is_whole_number(item) and 0 <= item < 2**31 for item in ids):
            raise RequestError(f"stop_token_ids={self.stop_token_ids!r} must be a list of token ids; use [0], say")
        if stop and not self.detokenize:
            raise RequestError(f"stop={self.stop!r} is found in text, and detokenize=False makes none; leave one out")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(item) for item in ids))


def check_against_model(params: SamplingParams, vocab_size: int, stop_token_ids: Collection[int]) -> None:
    """Raise RequestError for what no model with this vocabulary and these stop tokens can serve."""
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name) or 0
        if value > vocab_size:
            raise RequestError(f"{name}={value} is more than the vocabulary of {vocab_size} tokens; use 20, say")
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else stop_token_ids)}
    if params.min_tokens > 0 and len(stops) >= vocab_size and stops.issuperset(range(vocab_size)):
        raise RequestError(
            f"min_tokens={params.min_tokens} forbids all stop tokens at first, and stop_token_ids has all {vocab_size} "
            "tokens of the vocabulary; leave one of the two out"
        )


def is_whole_number(item: object) -> bool:
    """Return whether it is an integer, NumPy's included; True and False are none."""
    return isinstance(item, Integral) and not isinstance(item, bool)
