"""What the parent and a replica send each other through a pipe: named tuples with arrays, for many requests at a time.

Pickling an array copies its bytes. Lists of token ids would cost the parent more than anything else that it does.
"""

import math
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engine.blocks.partial_hits import num_common
from nanoinfer.engine.extras.hidden_states_request import HiddenStatesRequest
from nanoinfer.engine.extras.prompt_logprobs import PromptLogprobs
from nanoinfer.engine.reserved_ids import Action
from nanoinfer.errors import RequestError
from nanoinfer.flat_logprobs import NO_RANK, FlatLogprobs
from nanoinfer.outputs import (
    CompletionOutput,
    EngineMetrics,
    Logprob,
    RequestChange,
    RequestMetrics,
    RequestOutput,
    StepEvent,
    StreamChunk,
    TokenLogprobs,
)
from nanoinfer.replicas.dispatcher import PREFIX_TOKENS, QueuedRequest
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.prompts import PreparedRequest
from nanoinfer.text.tokenizer import Tokenizer, prompt_texts

REASONS = ("stop", "length", "abort", "error")  # finish_reason by number
NO_REASON = len(REASONS)  # of a chunk that is not the last
NO_OTHERS = (None,) * 6


# -------- To a replica ------------------------------------------------------------------------------------------------


class Requests(NamedTuple):
    """Requests to be queued."""

    columns: NDArray[np.int64]  # (num_requests, 8): see `pack_requests`
    prefixes: list[bytes]  # token ids as int32 that several prompts begin with, sent once
    token_ids: NDArray[np.int32]  # of all prompts after their prefix, one after the other
    params: list[bytes]  # each pickled by itself: a replica may not be able to read functions, and classes of users
    which_params: NDArray[np.int32]  # (num_requests,) index in `params`
    states: dict[int, HiddenStatesRequest]  # of requests that want hidden states or are pooled, by their line
    are_aborted: bool  # before they have computed anything


class Act(NamedTuple):
    """What the next step is to do to some requests."""

    action: Action
    request_ids: list[int]


class Drop(NamedTuple):
    """Requests to be forgotten at once."""

    request_ids: list[int]


class Listen(NamedTuple):
    """Whether an Event of each step is wanted from now on."""

    is_wanted: bool


class Call(NamedTuple):
    """Something else that a replica does between two steps, and answers with a Reply. See `Replica`."""

    name: str
    arguments: tuple[Any, ...] = ()


# -------- From a replica ----------------------------------------------------------------------------------------------


class Ready(NamedTuple):
    """A replica has loaded the model."""

    max_model_len: int
    device: str
    dtype: str  # as in EngineConfig
    description: str
    seconds: dict[str, float]
    warnings: list[str]


class Reply(NamedTuple):
    """Answers a Call. error: what it raised, or None. unready_reason: why no step can run now, if none can."""

    error: Exception | None
    unready_reason: str | None


class Logged(NamedTuple):
    """A line for the log."""

    level: int
    text: str


class Metrics(NamedTuple):
    """What a replica has done so far, and what it holds."""

    metrics: EngineMetrics


class Event(NamedTuple):
    """What a step did, where somebody listens."""

    event: StepEvent


class Changes(NamedTuple):
    """What happened to requests after the last event, where somebody listens."""

    changes: list[RequestChange]


class PackedLogprobs(NamedTuple):
    """Log-probabilities at several places; at each, those of some tokens."""

    counts: NDArray[np.int32]  # (num_places,) how many tokens each place has; 0 where nothing is known
    token_ids: NDArray[np.int32]  # of all places, one after the other; the next three fields likewise
    ranks: NDArray[np.int32]
    logprobs: NDArray[np.float64]
    texts: list[str | None]


class Outputs(NamedTuple):
    """Requests that have finished."""

    requests: NDArray[np.int64]  # (num_requests, 3): request id, num_cached_tokens, number of samples
    times: NDArray[np.float64]  # (num_requests, 3): fields of RequestMetrics; NaN is None
    samples: NDArray[np.int32]  # (num_samples, 2), of all requests: number of tokens, index in REASONS
    token_ids: NDArray[np.int32]  # of all samples, one after the other
    texts: list[str]  # of each sample
    others: dict[int, tuple[Any, ...]]  # by sample, if it has any: its last fields, from stop_reason on
    prompt_logprobs: dict[int, Any]  # of requests that asked, by their line: arrays, whose texts the parent makes
    states: dict[int, Any]  # of requests that want hidden states or are pooled, by their line: PackedStates


class Chunks(NamedTuple):
    """What is new of requests that are streamed."""

    columns: NDArray[np.int64]  # (num_chunks, 4): request id, sample, number of tokens, index in REASONS
    token_ids: NDArray[np.int32]
    texts: list[str]
    logprobs: dict[int, "PackedLogprobs | FlatLogprobs"]  # of chunks that have them


# -------- Packing and unpacking ---------------------------------------------------------------------------------------


def pack_requests(queued: Sequence[QueuedRequest], are_streamed: Sequence[bool], are_aborted: bool = False) -> Requests:
    distinct, which_params = distinct_params([request.prepared.sampling_params for request in queued])
    prompts = [request.prompt for request in queued]
    prefixes, which_prefix = common_prefixes(prompts)
    rows = [
        (
            request.request_id,
            request.priority,
            len(prompt) // 4 - len(prefixes[prefix]) // 4,
            request.prepared.prompt_logprobs_start,
            request.prepared.sampling_params.n,
            request.prepared.prompt is not None,
            is_streamed,
            prefix,
        )
        for request, prompt, prefix, is_streamed in zip(queued, prompts, which_prefix, are_streamed, strict=True)
    ]
    own = (prompt[len(prefixes[prefix]) :] for prompt, prefix in zip(prompts, which_prefix, strict=True))
    return Requests(
        np.array(rows, np.int64),
        prefixes,
        np.frombuffer(b"".join(own), np.int32),
        [pickle.dumps(params, pickle.HIGHEST_PROTOCOL) for params in distinct],
        np.array(which_params, np.int32),
        {
            line: replace(request.prepared.hidden_states_request, to_output=None)  # which stays here
            for line, request in enumerate(queued)
            if request.prepared.hidden_states_request is not None
        },
        are_aborted,
    )


def distinct_params(all_params: Sequence[SamplingParams]) -> tuple[list[SamplingParams], list[int]]:
    """Return the distinct parameters, and for each of `all_params` its index among them.

    Parameters with fields that cannot be hashed are compared by identity only.
    """
    distinct: list[SamplingParams] = []
    places: dict[Any, int] = {}  # by object, and by value
    which = []
    for params in all_params:
        place = places.get(id(params))
        if place is None:
            is_hashed = not (params.logit_bias or params.structured_outputs or params.logits_processors)
            place = places.get(params) if is_hashed else None
            if place is None:
                place = len(distinct)
                distinct.append(params)
                if is_hashed:
                    places[params] = place
            places[id(params)] = place
        which.append(place)
    return distinct, which


def common_prefixes(prompts: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
    """Return b"" and the prefixes that several prompts share, and for each prompt the index of its prefix in this list.

    Prompts whose first PREFIX_TOKENS tokens are equal share a prefix. It is what the first and the last of them in
    sorted order have in common, since all of them begin with that.
    """
    alike: dict[bytes, list[bytes]] = {}
    for prompt in prompts:
        alike.setdefault(prompt[: 4 * PREFIX_TOKENS], []).append(prompt)
    prefixes, places = [b""], dict.fromkeys(alike, 0)
    for beginning, those in alike.items():
        if len(those) > 1 and len(beginning) == 4 * PREFIX_TOKENS:
            first, last = min(those), max(those)
            places[beginning] = len(prefixes)
            prefixes.append(first[: 4 * num_common(first, last)])
    return prefixes, [places[prompt[: 4 * PREFIX_TOKENS]] for prompt in prompts]


class ReceivedRequest(NamedTuple):
    """A request as a replica queues it."""

    request_id: int
    prepared: PreparedRequest
    is_streamed: bool
    is_aborted: bool


def unpack_requests(message: Requests, to_output: Callable[..., Any]) -> list[ReceivedRequest]:
    """Return the requests; those whose sampling parameters cannot be read here have an error.

    to_output: what each HiddenStatesRequest gets as its `to_output`.
    """
    for states in message.states.values():
        states.to_output = to_output
    params: list[SamplingParams] = []
    errors: dict[int, RequestError] = {}
    for pickled in message.params:
        try:
            params.append(pickle.loads(pickled))
        except Exception as error:  # what unpickling does is up to functions and classes of users
            errors[len(params)] = RequestError(
                f"sampling_params cannot be read by a replica ({type(error).__name__}: {error}); define functions and "
                "classes of your own in a module that can be imported",
                "invalid_sampling_params",
            )
            params.append(SamplingParams())
    received, end = [], 0
    token_ids = message.token_ids.tolist()
    packed = message.token_ids.tobytes()
    prefixes = [(np.frombuffer(prefix, np.int32).tolist(), prefix) for prefix in message.prefixes]
    for line, (row, index) in enumerate(zip(message.columns.tolist(), message.which_params.tolist(), strict=True)):
        request_id, priority, length, logprobs_start, n, is_text, is_streamed, which_prefix = row
        start, end = end, end + length
        prefix, packed_prefix = prefixes[which_prefix]
        prepared = PreparedRequest(
            prompt="" if is_text else None,  # the text itself is not needed here
            token_ids=prefix + token_ids[start:end],
            sampling_params=SamplingParams(n=n) if index in errors else params[index],
            packed_ids=packed_prefix + packed[4 * start : 4 * end],
            priority=priority,
            prompt_logprobs_start=logprobs_start,
            hidden_states_request=message.states.get(line),
            error=errors.get(index),
        )
        received.append(ReceivedRequest(request_id, prepared, bool(is_streamed), message.are_aborted))
    return received


def pack_outputs(outputs: Sequence[RequestOutput]) -> Outputs:
    samples = [sample for output in outputs for sample in output.outputs]
    others = {}
    for line, sample in enumerate(samples):
        logprobs = pack_logprobs(sample.logprobs)
        ends = sample.stop_reason, logprobs, sample.cumulative_logprob, sample.error, sample.error_kind
        found = *ends, sample.routed_experts
        if any(item is not None for item in found):
            others[line] = found
    metrics = [output.metrics for output in outputs]
    times = [(one.queue_time, one.time_to_first_token, one.time_per_token) for one in metrics]
    return Outputs(
        np.array([(one.request_id, one.num_cached_tokens, len(one.outputs)) for one in outputs], np.int64),
        np.array(times, np.float64),
        np.array([(len(one.token_ids), REASONS.index(one.finish_reason)) for one in samples], np.int32),
        np.array(array("i", chain.from_iterable(one.token_ids for one in samples)), np.int32),
        [one.text for one in samples],
        others,
        {
            line: pack_prompt_logprobs(output.prompt_logprobs)
            for line, output in enumerate(outputs)
            if output.prompt_logprobs is not None
        },
        {line: output.hidden_states for line, output in enumerate(outputs) if output.hidden_states is not None},
    )


def unpack_outputs(
    message: Outputs,
    requests: Sequence[QueuedRequest | None],
    waited: list[float],
    tokenizer: Tokenizer | None = None,
) -> list[RequestOutput | None]:
    """Return the outputs in a message; None for each request that is None.

    requests: those of the message, in its order. waited: seconds that each waited in the parent before it was sent.
    tokenizer: makes the texts of prompts' tokens.
    """
    ids, lines = message.token_ids.tolist(), zip(message.samples.tolist(), message.texts, strict=True)
    found: list[RequestOutput | None] = []
    rows = zip(message.requests.tolist(), message.times.tolist(), requests, waited, strict=True)
    line = end = 0
    for row, ((_, num_cached_tokens, num_samples), times, request, seconds) in enumerate(rows):
        samples = []
        for index in range(num_samples):
            (count, reason), text = next(lines)
            start, end = end, end + count
            stop_reason, logprobs, *others = message.others.get(line, NO_OTHERS)
            line += 1
            ends = REASONS[reason], stop_reason, unpack_logprobs(logprobs), *others
            samples.append(CompletionOutput(index, text, ids[start:end], *ends))
        if request is None:
            found.append(None)
            continue
        of_prompt = message.prompt_logprobs.get(row)
        queue_time, first, per_token = (None if math.isnan(time) else time for time in times)
        output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prepared.prompt,
            prompt_token_ids=request.prepared.token_ids,
            num_cached_tokens=num_cached_tokens,
            outputs=samples,
            metrics=RequestMetrics(
                None if queue_time is None else queue_time + seconds,
                None if first is None else first + seconds,
                per_token,
            ),
            prompt_logprobs=unpack_prompt_logprobs(of_prompt, request.prepared, tokenizer),
        )
        if row in message.states:
            output = with_states(output, request.prepared.hidden_states_request, message.states[row])
        found.append(output)
    return found


def with_states(output: RequestOutput, states: HiddenStatesRequest, packed: Any) -> Any:
    """Return what the user gets: an output together with the hidden states that came with it."""
    from nanoinfer.replicas.packed_states import unpack_states  # PyTorch, without which `nanoinfer bench host` does

    return states.to_output(output, replace(states, found=unpack_states(packed)))


def pack_chunks(chunks: Sequence[StreamChunk]) -> Chunks:
    def reason(chunk: StreamChunk) -> int:
        return NO_REASON if chunk.finish_reason is None else REASONS.index(chunk.finish_reason)

    return Chunks(
        np.array([(one.request_id, one.sample, len(one.token_ids), reason(one)) for one in chunks], np.int64),
        np.array(array("i", chain.from_iterable(one.token_ids for one in chunks)), np.int32),
        [one.text for one in chunks],
        {line: pack_logprobs(one.logprobs) for line, one in enumerate(chunks) if one.logprobs is not None},
    )


def unpack_chunks(message: Chunks, index_of: dict[int, int]) -> list[StreamChunk]:
    """Return the chunks of the requests in `index_of`, which maps each one's id to its prompt's index in the stream."""
    chunks, end = [], 0
    token_ids = message.token_ids.tolist()
    for line, ((request_id, sample, count, reason), text) in enumerate(
        zip(message.columns.tolist(), message.texts, strict=True)
    ):
        start, end = end, end + count
        if request_id in index_of:
            chunks.append(
                StreamChunk(
                    index_of[request_id],
                    text,
                    token_ids[start:end],
                    None if reason == NO_REASON else REASONS[reason],
                    sample,
                    unpack_logprobs(message.logprobs.get(line)),
                    request_id=request_id,
                )
            )
    return chunks


def pack_logprobs(places: Sequence[TokenLogprobs | None] | None) -> Any:
    """Return log-probabilities for a message; they come out of `unpack_logprobs` as they were."""
    if places is None or isinstance(places, FlatLogprobs):
        return places
    entries = [item for place in places if place for item in place.items()]
    return PackedLogprobs(
        np.array([len(place) if place else 0 for place in places], np.int32),
        np.array([token_id for token_id, _ in entries], np.int32),
        np.array([NO_RANK if entry.rank is None else entry.rank for _, entry in entries], np.int32),
        np.array([entry.logprob for _, entry in entries], np.float64),
        [entry.decoded_token for _, entry in entries],
    )


def unpack_logprobs(packed: Any) -> Any:
    if isinstance(packed, PackedLogprobs):
        ranks = [None if rank == NO_RANK else rank for rank in packed.ranks.tolist()]
        found = map(Logprob, packed.logprobs.tolist(), ranks, packed.texts)
        entries = [*zip(packed.token_ids.tolist(), found, strict=True)]
        counts = packed.counts.tolist()
        return [dict(entries[end - count : end]) or None for count, end in zip(counts, accumulate(counts), strict=True)]
    return packed


def pack_prompt_logprobs(found: Any) -> Any:
    """Return a prompt's log-probabilities for a message: arrays, or FlatLogprobs with their texts."""
    return (found.ranks, found.token_ids, found.logprobs) if isinstance(found, PromptLogprobs) else found


def unpack_prompt_logprobs(packed: Any, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> Any:
    """Return what the user of a request gets of these. tokenizer: makes the texts, when somebody looks."""
    if not isinstance(packed, tuple):
        return packed
    ranks, token_ids, logprobs = packed
    new_texts = prompt_texts(tokenizer, prepared.sampling_params, prepared.prompt, prepared.token_ids)
    found = PromptLogprobs(len(ranks), token_ids.shape[1] - 1, new_texts)
    found.fill(0, ranks, token_ids, logprobs)
    return found
