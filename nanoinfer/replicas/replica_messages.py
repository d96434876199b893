"""Defines the messages between the parent and a replica: named tuples with arrays, for many requests at a time.

Beside these, a replica sends its EngineMetrics, and StepEvents while they are wanted.

Pickling an array copies its bytes. Lists of token ids would cost the parent more than anything else that it does.
Outputs are packed and unpacked in `packed_outputs.py`.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoinfer.engine.cache_groups.partial_hits import num_common
from nanoinfer.engine.engine import Action
from nanoinfer.engine.hidden_states_request import HiddenStatesRequest
from nanoinfer.errors import RequestError
from nanoinfer.metrics import RequestChange
from nanoinfer.replicas.dispatcher import PREFIX_TOKENS, QueuedRequest
from nanoinfer.runner.setup import RunnerInfo
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.prompts import PreparedRequest

_unhashed_options = attrgetter(*(item.name for item in fields(SamplingParams) if item.hash is False))
REASONS = ("stop", "length", "abort", "error", None)  # finish_reason by number; None of a chunk that is not the last


# -------- To a replica ------------------------------------------------------------------------------------------------


class RequestNumbers(NamedTuple):
    """Holds the numbers of a request in a message."""

    request_id: int
    priority: int
    num_tokens: int  # of its prompt after the prefix
    prompt_logprobs_start: int
    num_samples: int
    is_text: bool
    is_streamed: bool
    prefix: int  # which of `Requests.prefixes` its prompt begins with


class Requests(NamedTuple):
    """Holds requests to be queued."""

    columns: NDArray[np.int64]  # (num_requests, 8): RequestNumbers
    prefixes: list[bytes]  # token ids as int32 that several prompts begin with, sent once
    token_ids: NDArray[np.int32]  # of all prompts after their prefix, one after the other
    params: list[bytes]  # each pickled by itself: a replica may not be able to read functions, and classes of users
    which_params: NDArray[np.int32]  # (num_requests,) index in `params`
    # Of requests that want hidden states or are pooled, by their line.
    hidden_states_requests: dict[int, HiddenStatesRequest]
    images: dict[int, tuple[Any, ...]]  # ProcessedImages of the requests that have any, by their line
    adapters: dict[int, int]  # the numbers of those that requests name, by their line
    are_aborted: bool  # before they have computed anything


class Act(NamedTuple):
    """Asks the next step to abort, pause or resume some requests."""

    action: Action
    request_ids: list[int]


class Drop(NamedTuple):
    """Names requests to be forgotten at once."""

    request_ids: list[int]


class Listen(NamedTuple):
    """Says whether a StepEvent of each step is wanted from now on."""

    is_wanted: bool


class Call(NamedTuple):
    """Asks a replica to do something between two steps, and to answer with a Reply. See `Replica`."""

    name: str
    arguments: tuple[Any, ...] = ()


# -------- From a replica ----------------------------------------------------------------------------------------------


class Ready(NamedTuple):
    """Says that a replica has loaded the model."""

    max_model_len: int
    info: RunnerInfo
    seconds: dict[str, float]  # of each part of loading
    warnings: list[str]


class Reply(NamedTuple):
    """Answers a Call. error: what it raised, or None. unready_reason: why no step can run now, if none can."""

    error: Exception | None
    unready_reason: str | None


class Logged(NamedTuple):
    """Carries a line for the log."""

    level: int
    text: str


class Changes(NamedTuple):
    """Tells what happened to requests after the last StepEvent. Sent while functions of `on_step` want StepEvents."""

    changes: list[RequestChange]


class Samples(NamedTuple):
    """Holds the new tokens and texts of samples, of finished or streamed requests."""

    columns: NDArray[np.int32]  # (num_samples, 2): number of tokens, index in REASONS
    token_ids: NDArray[np.int32]  # of all samples, one after the other
    texts: list[str]
    logprobs: dict[int, Any]  # of samples that have them, by line: PackedDicts or FlatLogprobs


class Outputs(NamedTuple):
    """Holds requests that have finished."""

    requests: NDArray[np.int64]  # (num_requests, 3): request id, num_cached_tokens, number of samples
    times: NDArray[np.float64]  # (num_requests, 3): fields of RequestMetrics; NaN is None
    samples: Samples  # of all requests
    others: dict[int, dict[str, Any]]  # by line of a sample: its fields of OTHERS that are not None
    prompt_logprobs: dict[int, Any]  # of requests that asked, by their line: arrays, whose texts the parent makes
    hidden_states: dict[int, Any]  # of requests that want hidden states or are pooled, by their line: PackedStates


class Chunks(NamedTuple):
    """Holds what is new of streamed requests."""

    columns: NDArray[np.int64]  # (num_chunks, 2): request id, sample
    samples: Samples


# -------- Packing and unpacking --------------------------------------------------------------------------------------


def pack_requests(queued: Sequence[QueuedRequest], are_aborted: bool = False) -> Requests:
    distinct, which_params = distinct_params([request.prepared.sampling_params for request in queued])
    prompts = [request.prompt for request in queued]
    prefixes, which_prefix = common_prefixes(prompts)
    lines = [  # of RequestNumbers
        (
            request.request_id,
            request.priority,
            len(prompt) // 4 - len(prefixes[prefix]) // 4,
            request.prepared.prompt_logprobs_start,
            request.prepared.sampling_params.n,
            request.prepared.prompt is not None,
            request.recipient.chunks is not None,
            prefix,
        )
        for request, prompt, prefix in zip(queued, prompts, which_prefix, strict=True)
    ]
    own = (prompt[len(prefixes[prefix]) :] for prompt, prefix in zip(prompts, which_prefix, strict=True))
    return Requests(
        np.array(lines, np.int64),
        prefixes,
        np.frombuffer(b"".join(own), np.int32),
        [pickle.dumps(params, pickle.HIGHEST_PROTOCOL) for params in distinct],
        np.array(which_params, np.int32),
        {
            line: replace(request.prepared.hidden_states_request, make_output=None)  # which stays here
            for line, request in enumerate(queued)
            if request.prepared.hidden_states_request is not None
        },
        {
            # `make_tensors` stays here: it needs the image reader of this process.
            line: tuple(replace(image, make_tensors=None) for image in request.prepared.images)
            for line, request in enumerate(queued)
            if request.prepared.images
        },
        {line: request.prepared.adapter.number for line, request in enumerate(queued) if request.prepared.adapter},
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
            is_hashed = not any(_unhashed_options(params))
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
    for beginning, sharers in alike.items():
        if len(sharers) > 1 and len(beginning) == 4 * PREFIX_TOKENS:
            first, last = min(sharers), max(sharers)
            places[beginning] = len(prefixes)
            prefixes.append(first[: 4 * num_common(first, last)])
    return prefixes, [places[prompt[: 4 * PREFIX_TOKENS]] for prompt in prompts]


class ReceivedRequest(NamedTuple):
    """Holds a request as a replica queues it."""

    request_id: int
    prepared: PreparedRequest
    is_streamed: bool
    is_aborted: bool


def unpack_requests(message: Requests, make_output: Callable[..., Any]) -> list[ReceivedRequest]:
    """Return the requests; one whose sampling parameters cannot be read here has an error. Adapters are numbers yet.

    make_output: what each HiddenStatesRequest gets as its `make_output`.
    """
    for wanted in message.hidden_states_requests.values():
        wanted.make_output = make_output
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
    indices = message.which_params.tolist()
    for line, numbers in enumerate(map(RequestNumbers._make, message.columns.tolist())):
        index, start, end = indices[line], end, end + numbers.num_tokens
        prefix, packed_prefix = prefixes[numbers.prefix]
        prepared = PreparedRequest(
            prompt="" if numbers.is_text else None,  # the text itself is not needed here
            token_ids=prefix + token_ids[start:end],
            sampling_params=SamplingParams(n=numbers.num_samples) if index in errors else params[index],
            packed_ids=packed_prefix + packed[4 * start : 4 * end],
            priority=numbers.priority,
            prompt_logprobs_start=numbers.prompt_logprobs_start,
            hidden_states_request=message.hidden_states_requests.get(line),
            adapter=message.adapters.get(line),
            error=errors.get(index),
            images=message.images.get(line, ()),
        )
        is_streamed = bool(numbers.is_streamed)
        received.append(ReceivedRequest(numbers.request_id, prepared, is_streamed, message.are_aborted))
    return received
