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


def stop_ids_of(seq: Sequence) -> list[int]:
    """Return the tokens that may not come before the sample has its `min_tokens`."""
    return sorted(seq.stopping.tokens.ids) if seq.stopping.min_tokens else []


def biases_of(seq: Sequence) -> list[TokenBias]:
    return [TokenBias(*item) for item in (seq.sampling_params.logit_bias or {}).items()]


def logprob_ids_of(seq: Sequence) -> list[int]:
    return [*(seq.sampling_params.logprob_token_ids or ())]


def sampling_sections(seqs: Iterable[Sequence]) -> dict[str, list[Any]]:
    """Return the sections of a packet that say what these sequences, each with a row, ask for; by name."""
    records = [(seq, record) for seq in seqs if (record := sampling_record(seq)) is not None]
    return {
        "sampling_records": [record for _, record in records],
        "stop_ids": [token_id for seq, _ in records for token_id in stop_ids_of(seq)],
        "biases": [bias for seq, _ in records for bias in biases_of(seq)],
        "logprob_ids": [token_id for seq, _ in records for token_id in logprob_ids_of(seq)],
    }


def slices_of(values: Any, records: Iterable[SamplingRecord], count: str) -> Iterator[tuple[SamplingRecord, Any]]:
    """Yield each record of a packet and its own part of a section. count: the field that says how long that is."""
    start = 0
    for record in records:
        end = start + getattr(record, count)
        yield record, values[start:end]
        start = end


def sampling_record(seq: Sequence) -> SamplingRecord | None:
    """Return what a sequence with a row asks for; None if that is nothing."""
    if seq.stopping.ends_with_prompt:
        return None
    asked, params = asked_options(seq.sampling_params), seq.sampling_params
    if not asked and seq.prompt_logprobs_start is None and not any(getattr(params, name) for name in LISTS):
        return None
    return SamplingRecord(
        row=seq.held_row,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_generated=len(seq.token_ids) - seq.num_prompt_tokens,
        num_stop_ids=len(stop_ids_of(seq)),
        num_biases=len(params.logit_bias or {}),
        num_logprob_ids=len(logprob_ids_of(seq)),
        prompt_logprobs_start=-1 if seq.prompt_logprobs_start is None else seq.prompt_logprobs_start,
        **asked,
    )
