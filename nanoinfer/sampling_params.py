"""How one request is to be sampled: chosen by the user, validated once, never changed."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from nanoinfer.errors import RequestError, with_checked_names
from nanoinfer.structured_outputs import StructuredOutputsParams
from nanoinfer.vllm_names import SAMPLING_NAMES as FOREIGN_NAMES

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of generation_config.json
MAX_TEMPERATURE = 1e6  # far past where every token is as likely as any other
TOKEN_ID = re.compile("[0-9]{1,10}")
MAX_BIAS = 1e30  # a logit stays finite with it, in float32
MAX_LOGPROB_TOKEN_IDS = 128

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
LOGPROBS = ("logprobs", "prompt_logprobs")
LOGPROBS_REMEDY = "use None for none, 0 for those of the tokens themselves, or -1 for all of the vocabulary"
# Each whole number has a least and a greatest value, and words on what to use instead.
INTS: dict[str, tuple[int, float, str]] = {
    "max_tokens": (1, math.inf, "a request generates one token or more; use None for up to the model's limit"),
    "n": (1, 10_000, "a request has one sample or more; for more than these, ask again"),
    "top_k": (-1, math.inf, "use 0 for all tokens"),
    "min_tokens": (0, math.inf, "use 0 for no such limit"),
    "routed_experts_prompt_start": (0, math.inf, "use 0 for all of the prompt"),
    **dict.fromkeys(LOGPROBS, (-1, math.inf, LOGPROBS_REMEDY)),
    "seed": (-(2**63), 2**63 - 1, "it must fit in 64 bits; use None for any"),
}
MAY_BE_NONE = ("max_tokens", "logprobs", "prompt_logprobs", "seed")


@with_checked_names(FOREIGN_NAMES)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Holds the sampling options of one request.

    logit_bias and penalties come first, then what allowed_token_ids and bad_words forbid, then temperature, min_p,
    top_k and top_p, each on what the one before has left; tokens as likely as the last that stays, stay too.

    temperature: scale of the randomness; 1 samples from the model's own distribution, 0 is greedy.
    max_tokens: the most tokens to generate, the stop token included; at least 1. None is up to the model's limit.
    ignore_eos: go on past the model's stop tokens, up to max_tokens (for benchmarks).
    stop: a string or several that end the text, wherever their tokens begin and end; of several that are complete with
        the same token, the first in the list; kept as a tuple.
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
    min_tokens: tokens to generate before a stop token can be drawn, even one that ignore_eos ignores, or a stop string
        ends the text.
    presence_penalty: taken off the logit of each token generated before; frequency_penalty: taken off once for each
        time that the token was generated.
    repetition_penalty: logits of tokens in the prompt or generated before are divided by it where they are positive,
        and multiplied where they are negative; 1 is none.
    logprobs: for each generated token, its log-probability and those of this many of the likeliest tokens, of the
        distribution that `logprobs_mode` of the LLM names. -1 is all of the vocabulary, True is 1.
        prompt_logprobs: the same for the prompt's tokens, always of the model's own distribution.
    logprob_token_ids: for each generated token, its log-probability and those of these tokens, at most 128, in place of
        the likeliest; if `logprobs` is given too, it must be their number. Kept as a tuple.
    routed_experts_prompt_start: the first prompt token of `routed_experts`, if the LLM returns them.
    flat_logprobs: return log-probabilities as FlatLogprobs, in arrays and not in dicts.
    spaces_between_special_tokens: keep the spaces that the tokenizer writes between special tokens side by side, where
        the text has these. Tokenizers of most models write none.
    logit_bias: a number for each of some token ids, added to their logits; kept as a dict of int to float, and no part
        of the hash. Ids may be written as strings, as in JSON.
    allowed_token_ids: draw from these tokens only, and from stop tokens only if they are among them; kept as a tuple.
    bad_words: strings that are not generated, each forbidden where its last token would complete it; kept as a tuple.
    structured_outputs: what form the text has (a JSON schema, a regular expression, ...): a StructuredOutputsParams.
    logits_processors: functions of the completion's token ids, a list of int, and its logits, a float32 tensor
        (vocab_size,), that return the logits to go on with; they see logits after logit_bias, and cannot call their own
        engine. Kept as a tuple.

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
    spaces_between_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = field(default=None, hash=False)
    logits_processors: Sequence[Callable[[list[int], Any], Any]] | None = field(default=None, hash=False)
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    routed_experts_prompt_start: int = 0

    def __post_init__(self) -> None:
        for name, (is_in_range, rule, remedy) in FLOATS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise RequestError(f"{name}={value!r} is not a number; {remedy}")
            if not is_in_range(value):
                raise RequestError(f"{name}={value} must be {rule}; {remedy}")
        for name, (least, most, remedy) in INTS.items():
            value = getattr(self, name)
            if value is True and name in LOGPROBS:
                value = 1
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
        for item in fields(self):
            if isinstance(item.default, bool) and not isinstance(getattr(self, item.name), bool):
                raise RequestError(f"{item.name}={getattr(self, item.name)!r} is not a bool; use True or False")
        self._check_stops()
        self._check_rules()

    @property
    def num_logprobs(self) -> int | None:
        """Return how many log-probabilities each generated token comes with beside its own; None where without any."""
        return len(self.logprob_token_ids) if self.logprob_token_ids and self.logprobs is None else self.logprobs

    def __repr__(self) -> str:
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        differ = [f"{name}={value!r}" for name, (value, default) in values.items() if value not in (default, ())]
        return f"SamplingParams({', '.join(differ)})"

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
        stop_token_ids = self._token_ids("stop_token_ids")
        if stop and not self.detokenize:
            raise RequestError(f"stop={self.stop!r} is found in text, and detokenize=False makes none; leave one out")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", stop_token_ids)

    def _check_rules(self) -> None:
        """Check what limits the tokens beside their probability; what is empty becomes None."""
        object.__setattr__(self, "logit_bias", self._bias())
        wanted = self._token_ids("logprob_token_ids")
        if len(wanted) > MAX_LOGPROB_TOKEN_IDS:
            raise RequestError(
                f"logprob_token_ids has {len(wanted)} token ids, and at most {MAX_LOGPROB_TOKEN_IDS} can be asked for; "
                "use logprobs=-1 for all of the vocabulary"
            )
        if self.logprob_token_ids is not None and self.logprobs not in (None, len(wanted)):
            raise RequestError(
                f"logprobs={self.logprobs} with {len(wanted)} logprob_token_ids: these take the place of the likeliest "
                "tokens; leave logprobs out"
            )
        object.__setattr__(self, "logprob_token_ids", wanted or None)
        if self.allowed_token_ids is not None:
            allowed = self._token_ids("allowed_token_ids")
            if not allowed:
                raise RequestError("allowed_token_ids is empty, and no token could be drawn; use None for all tokens")
            object.__setattr__(self, "allowed_token_ids", allowed)
        words = () if self.bad_words is None else self.bad_words
        if not isinstance(words, (list, tuple)) or not all(isinstance(item, str) and item.strip() for item in words):
            raise RequestError(f"bad_words={words!r} must be a list of strings, none empty or blank; use ['no'], say")
        functions = () if self.logits_processors is None else self.logits_processors
        if not isinstance(functions, (list, tuple)) or not all(map(callable, functions)):
            raise RequestError(
                f"logits_processors={functions!r} must be a list of functions of (output_token_ids, logits); use "
                "[lambda token_ids, logits: logits], say"
            )
        object.__setattr__(self, "bad_words", tuple(words) or None)
        object.__setattr__(self, "logits_processors", tuple(functions) or None)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise RequestError(
                f"structured_outputs={self.structured_outputs!r} is a {type(self.structured_outputs).__name__}; "
                "use StructuredOutputsParams(json=...), say"
            )

    def _bias(self) -> dict[int, float] | None:
        given = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(given, Mapping):
            raise RequestError(f"logit_bias={given!r} must be a dict from token ids to numbers; use {{0: -100}}, say")
        bias: dict[int, float] = {}
        for token_id, value in given.items():
            key = int(token_id) if isinstance(token_id, str) and TOKEN_ID.fullmatch(token_id) else token_id
            if not is_token_id(key):
                raise RequestError(f"logit_bias has {token_id!r} in place of a token id; use whole numbers from 0 on")
            if isinstance(value, bool) or not isinstance(value, Real) or not abs(value) <= MAX_BIAS:
                raise RequestError(
                    f"logit_bias has {value!r} for token {token_id}; use a finite number between -{MAX_BIAS:g} and "
                    f"{MAX_BIAS:g}, -100 to all but forbid the token"
                )
            bias[int(key)] = float(value)
        return bias or None

    def _token_ids(self, name: str) -> tuple[int, ...]:
        given = getattr(self, name)
        ids: list[Any] | None = [] if given is None else None
        if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping)):
            ids = list(given)
        if ids is None or not all(map(is_token_id, ids)):
            raise RequestError(f"{name}={given!r} must be a list of token ids; use [0], say")
        return tuple(map(int, ids))


def check_against_model(
    params: SamplingParams, vocab_size: int, stop_token_ids: Collection[int], max_logprobs: int = -1
) -> None:
    """Raise RequestError for what no model with this vocabulary and these stop tokens can serve.

    max_logprobs: the engine's option; -1 is no limit.
    """
    for name in LOGPROBS:
        value = getattr(params, name) or 0
        if value > vocab_size:
            raise RequestError(f"{name}={value} is more than the vocabulary of {vocab_size} tokens; use 20, say")
        if 0 <= max_logprobs < (vocab_size if value == -1 else value):
            raise RequestError(
                f"{name}={value} is more than max_logprobs={max_logprobs} of this LLM; ask for fewer, or raise that"
            )
    for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids"):
        if outside := [token_id for token_id in getattr(params, name) or () if token_id >= vocab_size]:
            raise RequestError(
                f"{name} has token id {outside[0]}, outside the vocabulary; ids are 0 to {vocab_size - 1}"
            )
    stops = {*(params.stop_token_ids or ()), *stop_token_ids}
    drawable = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if params.min_tokens > 0 and len(stops) >= len(drawable) and stops.issuperset(drawable):
        raise RequestError(
            f"min_tokens={params.min_tokens} forbids all stop tokens at first, and these are all "
            f"{len(drawable)} tokens that may be drawn; leave out min_tokens, stop_token_ids or allowed_token_ids"
        )


def is_token_id(item: object) -> bool:
    """Return whether it may be a token id of some model."""
    return is_whole_number(item) and 0 <= item < 2**31  # type: ignore[operator]


def is_whole_number(item: object) -> bool:
    """Return whether it is an integer, NumPy's included; True and False are none."""
    return isinstance(item, Integral) and not isinstance(item, bool)
