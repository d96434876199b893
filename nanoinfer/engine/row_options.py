"""What a request asks of the sampler beyond temperature and seed, each option declared once.

A packet has a `SamplingRecord` for each admitted sequence that asks for anything, and the ragged options follow it. An
option that is a number needs a field of SamplingParams, a field of the same name here, whose default asks for nothing,
and a logits processor that names it in `reads`. An option that is a list needs a name in LISTS, a section of
`PacketSections`, which `sampling_sections` fills, and a count in the record.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from nanoinfer.engine.sequence import Sequence
from nanoinfer.sampling_params import SamplingParams

MANY = 2**24  # more tokens than any vocabulary or sequence has, and exact in float32


class SamplingRecord(NamedTuple):
    """What an admitted sequence asks for. Fields with a default are options; the default asks for nothing."""

    row: int
    num_prompt_tokens: int
    num_generated: int  # known tokens after the prompt: more than 0 when a sequence is computed again
    num_stop_ids: int  # their ids follow in the packet
    num_biases: int  # the ids and biases follow too
    num_logprob_ids: int  # the ids follow too
    prompt_logprobs_start: int  # the first prompt token whose log-probability is wanted; -1 for none
    logprobs: int = -1
    prompt_logprobs: int = -1
    min_tokens: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def asks_for(self, names: tuple[str, ...]) -> bool:
        """Return whether any of these options has another value than its default."""
        return any(getattr(self, name) != NEUTRAL[name] for name in names)


class TokenBias(NamedTuple):
    """What is added to the logit of a token."""

    token_id: int
    bias: float


# Options that are lists. Stop token ids are not among them: the device needs them only with `min_tokens`.
LISTS = ("logit_bias", "logprob_token_ids")
NEUTRAL: Mapping[str, Any] = SamplingRecord._field_defaults
# How an option follows from the parameters, if it is not their field of that name. Greedy decoding filters nothing.
DERIVED: Mapping[str, Callable[[SamplingParams], float | None]] = {
    "logprobs": lambda params: 0 if params.logprob_token_ids else params.logprobs,
    "min_tokens": lambda params: min(params.min_tokens, MANY) if params.structured_outputs is None else 0,
    "top_k": lambda params: min(max(params.top_k, 0), MANY) if params.temperature > 0 else 0,
    "top_p": lambda params: max(params.top_p, 1e-30) if params.temperature > 0 else 1.0,  # more than 0 in float32 too
    "min_p": lambda params: params.min_p if params.temperature > 0 else 0.0,
}


_read_options = attrgetter(*LISTS, *NEUTRAL)
NOTHING_ASKED = _read_options(SamplingParams())


def asked_options(params: SamplingParams) -> dict[str, Any]:
    """Return the options with a default in the record that ask for something, by name."""
    if _read_options(params) == NOTHING_ASKED:  # as of most requests
        return {}
    asked = {}
    for name, neutral in NEUTRAL.items():
        value = DERIVED[name](params) if name in DERIVED else getattr(params, name)
        if value is not None and value != neutral:
            asked[name] = value
    return asked


def sampling_sections(seqs: Iterable[Sequence]) -> dict[str, list[Any]]:
    """Return the sections of a packet that say what these sequences, each with a row, ask for; by name."""
    sections: dict[str, list[Any]] = {"sampling_records": [], "stop_ids": [], "biases": [], "logprob_ids": []}
    for seq in seqs:
        params, asked = seq.sampling_params, asked_options(seq.sampling_params)
        biases, logprob_ids = params.logit_bias or {}, params.logprob_token_ids or ()
        asks = asked or biases or logprob_ids or seq.prompt_logprobs_start is not None
        if not asks or seq.stopping.ends_with_prompt:
            continue
        # They may not come before the sample has its `min_tokens`.
        stop_ids = sorted(seq.stopping.tokens.ids) if seq.stopping.min_tokens else []
        record = SamplingRecord(
            row=seq.held_row,
            num_prompt_tokens=seq.num_prompt_tokens,
            num_generated=len(seq.token_ids) - seq.num_prompt_tokens,
            num_stop_ids=len(stop_ids),
            num_biases=len(biases),
            num_logprob_ids=len(logprob_ids),
            prompt_logprobs_start=-1 if seq.prompt_logprobs_start is None else seq.prompt_logprobs_start,
            **asked,
        )
        sections["sampling_records"].append(record)
        sections["stop_ids"] += stop_ids
        sections["biases"] += map(TokenBias, biases.keys(), biases.values())
        sections["logprob_ids"] += logprob_ids
    return sections


def slices_of(values: Any, records: Iterable[SamplingRecord], count: str) -> Iterator[tuple[SamplingRecord, Any]]:
    """Yield each record of a packet and its own part of a section. count: the field that says how long that is."""
    start = 0
    for record in records:
        end = start + getattr(record, count)
        yield record, values[start:end]
        start = end
