"""Says how one request is sampled: chosen by the user, validated once, never changed."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from nanoinfer.errors import NOT_SUPPORTED, Foreigners, RequestError, with_checked_names
from nanoinfer.option_fields import RowOption, a_bool, many, option, real, token_biases, token_ids, whole
from nanoinfer.structured_outputs import StructuredOutputsParams
from nanoinfer.vllm_names import guided, only

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of generation_config.json
LOGPROBS = ("logprobs", "prompt_logprobs")
MAX_TEMPERATURE = 1e6  # far past where every token is as likely as any other
MANY = 2**24  # more tokens than any vocabulary or sequence has, and exact in float32
MAX_LOGPROB_TOKEN_IDS = 128

# What users of vLLM and transformers write, as in `vllm_names.py`. An option that is declared below has no place here.
FOREIGN_NAMES: Foreigners = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "guided_decoding": "structured_outputs",
    "response_format": "structured_outputs",
    "top_logprobs": "logprobs",
    **guided("structured_outputs=StructuredOutputsParams({})"),
    "truncate_prompt_tokens": "tokenization_kwargs of generate and chat",
    "best_of": only(1, why="n samples are drawn, and all of them returned"),
    "do_sample": only(True, why="temperature=0 is greedy decoding"),
    "length_penalty": only(1),
    "no_repeat_ngram_size": only(0),
    "num_beams": only(1),
    "typical_p": only(1),
    "output_kind": only(why=f"{NOT_SUPPORTED}: generate returns whole outputs, and stream yields what is new"),
    "skip_reading_prefix_cache": only(False, why=f"{NOT_SUPPORTED}, but LLM(enable_prefix_caching=False)"),
    "output_text_buffer_length": only(0),
    **dict.fromkeys(("early_stopping", "skip_clone", "use_beam_search"), only(False)),
    **dict.fromkeys(("extra_args", "repetition_detection")),
}


# -------- How some options are checked, and what their rows are told -------------------------------------------------


def _penalty() -> Any:
    return real(0.0, lambda value: -2 <= value <= 2, "between -2 and 2", "use 0 for none", RowOption(neutral=0.0))


def _filter(neutral: float, derive: Callable[[Any], float]) -> RowOption:
    """Tell a row of a filter; greedy decoding filters nothing."""
    return RowOption(neutral, lambda params, _: derive(params) if params.temperature > 0 else neutral)


def _min_tokens(params: Any, seq: Any) -> list[int] | None:
    """Return the number, and the tokens that it forbids. Where there is a grammar, its masks leave them out."""
    if params.min_tokens == 0 or params.structured_outputs is not None:
        return None
    return [min(params.min_tokens, MANY), *sorted(seq.stopping.tokens.ids)]


def _num_logprobs(row: RowOption) -> Any:
    remedy = "use None for none, 0 for those of the tokens themselves, or -1 for all of the vocabulary"
    check = whole(None, -1, remedy, may_be_none=True).metadata["check"]
    return option(None, lambda name, value: check(name, 1 if value is True else value), row)


def _prompt_logprobs(params: Any, seq: Any) -> list[int] | None:
    """Return the number, and the first token of the prompt whose log-probability is still wanted."""
    return None if seq.prompt_logprobs_start is None else [params.prompt_logprobs, seq.prompt_logprobs_start]


def _stop(name: str, value: Any) -> Any:
    stop = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(stop, (list, tuple)) or not all(isinstance(item, str) and item for item in stop):
        raise RequestError(f"{name}={value!r} must be a string or a list of them, none empty; use ['\\n'], say")
    return tuple(stop)


def _allowed(name: str, value: Any) -> Any:
    ids = token_ids(name, value)
    if value is not None and not ids:
        raise RequestError(f"{name} is empty, and no token could be drawn; use None for all tokens")
    return ids or None


def _budget() -> Any:
    remedy = "use 0 to close a thought at once, or None for no limit"
    check = whole(None, -1, remedy, may_be_none=True).metadata["check"]
    return option(None, lambda name, value: None if (checked := check(name, value)) == -1 else checked)


def _structured_outputs(name: str, value: Any) -> Any:
    if not isinstance(value, StructuredOutputsParams | None):
        raise RequestError(f"{name}={value!r} is a {type(value).__name__}; use StructuredOutputsParams(json=...), say")
    return value


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
    thinking_token_budget: the most tokens of a thought; then the text that ends it is forced. Each thought has as many;
        one that the prompt leaves open has used its tokens there. 0 closes it at once; None, or -1, is no limit.
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

    temperature: float = real(
        1.0,
        lambda value: 0 <= value <= MAX_TEMPERATURE,
        f"finite and at least 0, and at most {MAX_TEMPERATURE:g}",
        "use 0 for greedy or a positive number",
    )
    max_tokens: int | None = whole(
        64, 1, "a request generates one token or more; use None for up to the model's limit", may_be_none=True
    )
    ignore_eos: bool = False
    stop: Sequence[str] | None = option(None, _stop)
    stop_token_ids: Sequence[int] | None = option(None, token_ids)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    n: int = whole(1, 1, "a request has one sample or more; for more than these, ask again", most=10_000)
    top_k: int = whole(0, -1, "use 0 for all tokens", row=_filter(0, lambda params: min(max(params.top_k, 0), MANY)))
    top_p: float = real(
        1.0,
        lambda value: 0 < value <= 1,
        "above 0 and at most 1",
        "use 1 for all tokens",
        _filter(1.0, lambda params: max(params.top_p, 1e-30)),  # more than 0 in float32 too
    )
    min_p: float = real(
        0.0,
        lambda value: 0 <= value <= 1,
        "at least 0 and at most 1",
        "use 0 for all tokens",
        _filter(0.0, lambda params: params.min_p),
    )
    seed: int | None = whole(
        None, -(2**63), "it must fit in 64 bits; use None for any", most=2**63 - 1, may_be_none=True
    )
    min_tokens: int = whole(0, 0, "use 0 for no such limit", row=RowOption(derive=_min_tokens))
    presence_penalty: float = _penalty()
    frequency_penalty: float = _penalty()
    repetition_penalty: float = real(
        1.0,
        lambda value: 1e-3 <= value <= 1e3,
        "between 0.001 and 1000",
        "use 1 for none",
        RowOption(neutral=1.0),
    )
    logprobs: int | None = _num_logprobs(
        RowOption(derive=lambda params, _: 0 if params.logprob_token_ids else params.logprobs)
    )
    prompt_logprobs: int | None = _num_logprobs(RowOption(derive=_prompt_logprobs))
    spaces_between_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = option(
        None,
        token_biases,
        RowOption(derive=lambda params, _: params.logit_bias and [*params.logit_bias, *params.logit_bias.values()]),
        hashed=False,
    )
    allowed_token_ids: Sequence[int] | None = option(None, _allowed)
    bad_words: Sequence[str] | None = many(
        lambda item: isinstance(item, str) and item.strip(), "a list of strings, none empty or blank; use ['no']"
    )
    structured_outputs: StructuredOutputsParams | None = option(None, _structured_outputs, hashed=False)
    logits_processors: Sequence[Callable[[list[int], Any], Any]] | None = many(
        callable,
        "a list of functions of (output_token_ids, logits); use [lambda token_ids, logits: logits]",
        hashed=False,
    )
    logprob_token_ids: Sequence[int] | None = option(None, token_ids, RowOption())
    flat_logprobs: bool = False
    routed_experts_prompt_start: int = whole(0, 0, "use 0 for all of the prompt")
    thinking_token_budget: int | None = _budget()

    def __post_init__(self) -> None:
        given_stop, names_tokens = self.stop, self.logprob_token_ids is not None
        for name, default, check in CHECKS:
            value = getattr(self, name)
            if value is not default or default is None:
                object.__setattr__(self, name, check(name, value))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}; "
                "lower min_tokens, or raise max_tokens"
            )
        if self.n > 1 and self.temperature == 0:
            raise RequestError(f"n={self.n} samples at temperature=0 are all the same; use n=1, or a temperature")
        if self.stop and not self.detokenize:
            raise RequestError(f"stop={given_stop!r} is found in text, and detokenize=False makes none; leave one out")
        named = self.logprob_token_ids or ()
        if len(named) > MAX_LOGPROB_TOKEN_IDS:
            raise RequestError(
                f"logprob_token_ids has {len(named)} token ids, and at most {MAX_LOGPROB_TOKEN_IDS} can be asked for; "
                "use logprobs=-1 for all of the vocabulary"
            )
        if names_tokens and self.logprobs not in (None, len(named)):
            raise RequestError(
                f"logprobs={self.logprobs} with {len(named)} logprob_token_ids: these take the place of the likeliest "
                "tokens; leave logprobs out"
            )
        object.__setattr__(self, "logprob_token_ids", named or None)

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


CHECKS = [(item.name, item.default, item.metadata.get("check", a_bool)) for item in fields(SamplingParams)]


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
                f"{name}={value} is more than max_logprobs={max_logprobs} of this LLM; ask for fewer, or raise "
                "max_logprobs of the LLM"
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
