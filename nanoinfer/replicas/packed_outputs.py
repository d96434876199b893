"""Outputs on their way from a replica to the parent: packed into messages there, unpacked here."""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoinfer.engine.hidden_states_request import HiddenStatesRequest
from nanoinfer.engine.request_logprobs import PromptLogprobs
from nanoinfer.flat_logprobs import NO_RANK, FlatLogprobs
from nanoinfer.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    StreamChunk,
    TokenLogprobs,
)
from nanoinfer.replicas.dispatcher import QueuedRequest
from nanoinfer.replicas.replica_messages import REASONS, Chunks, Outputs, Samples
from nanoinfer.text.prompts import PreparedRequest
from nanoinfer.text.tokenizer import Tokenizer, prompt_texts

# Fields of a CompletionOutput that few have.
OTHERS = ("stop_reason", "cumulative_logprob", "error", "error_kind", "routed_experts")
# Hidden states and pooled vectors: by layer, or None for what pooling made, the dtype and the bytes of each part of the
# prompt. They are bytes because NumPy has no bfloat16.
PackedStates = dict[int | None, list[tuple[torch.dtype, Any]]]


class PackedDicts(NamedTuple):
    """Holds in arrays the log-probabilities that the user gets as a list of dicts."""

    positions: FlatLogprobs


def pack_samples(samples: Sequence[CompletionOutput | StreamChunk]) -> Samples:
    return Samples(
        np.array([(len(one.token_ids), REASONS.index(one.finish_reason)) for one in samples], np.int32),
        np.array(array("i", chain.from_iterable(one.token_ids for one in samples)), np.int32),
        [one.text for one in samples],
        {line: pack_logprobs(one.logprobs) for line, one in enumerate(samples) if one.logprobs is not None},
    )


def unpack_samples(message: Samples) -> Iterator[tuple[str, list[int], Any, Any]]:
    """Yield text, token ids, finish_reason and log-probabilities of each sample."""
    token_ids, end = message.token_ids.tolist(), 0
    for line, ((count, reason), text) in enumerate(zip(message.columns.tolist(), message.texts, strict=True)):
        start, end = end, end + count
        yield text, token_ids[start:end], REASONS[reason], unpack_logprobs(message.logprobs.get(line))


def pack_outputs(outputs: Sequence[RequestOutput]) -> Outputs:
    samples = [sample for output in outputs for sample in output.outputs]
    others = {}
    for line, sample in enumerate(samples):
        if given := {name: value for name in OTHERS if (value := getattr(sample, name)) is not None}:
            others[line] = given
    metrics = [output.metrics for output in outputs]
    times = [(one.queue_time, one.time_to_first_token, one.time_per_token) for one in metrics]
    return Outputs(
        np.array([(one.request_id, one.num_cached_tokens, len(one.outputs)) for one in outputs], np.int64),
        np.array(times, np.float64),
        pack_samples(samples),
        others,
        {
            line: pack_prompt_logprobs(output.prompt_logprobs)
            for line, output in enumerate(outputs)
            if output.prompt_logprobs is not None
        },
        {line: output.hidden_states for line, output in enumerate(outputs) if output.hidden_states is not None},
    )


def unpack_outputs(
    message: Outputs, requests: Mapping[int, QueuedRequest], tokenizer: Tokenizer | None = None
) -> Iterator[tuple[QueuedRequest, RequestOutput]]:
    """Yield those of `requests` that are in a message, with their outputs.

    requests: by id. tokenizer: makes the texts of prompts' tokens.
    """
    samples = enumerate(unpack_samples(message.samples))
    lines = zip(message.requests.tolist(), message.times.tolist(), strict=True)
    for line, ((request_id, num_cached_tokens, num_samples), times) in enumerate(lines):
        outputs = [
            CompletionOutput(index, text, token_ids, reason, logprobs=logprobs, **message.others.get(sample_line, {}))
            for index, (sample_line, (text, token_ids, reason, logprobs)) in enumerate(islice(samples, num_samples))
        ]
        request = requests.get(request_id)
        if request is None:
            continue
        prepared, waited = request.prepared, request.sent - request.recipient.arrival_time  # here, before it was sent
        queue_time, first, per_token = (None if math.isnan(time) else time for time in times)
        output = RequestOutput(
            request_id=request_id,
            prompt=prepared.prompt,
            prompt_token_ids=prepared.token_ids,
            num_cached_tokens=num_cached_tokens,
            outputs=outputs,
            metrics=RequestMetrics(
                None if queue_time is None else queue_time + waited,
                None if first is None else first + waited,
                per_token,
            ),
            prompt_logprobs=unpack_prompt_logprobs(message.prompt_logprobs.get(line), prepared, tokenizer),
        )
        if line in message.hidden_states:
            states = replace(prepared.hidden_states_request, received=unpack_states(message.hidden_states[line]))
            output = states.to_output(output)
        yield request, output


def pack_chunks(chunks: Sequence[StreamChunk]) -> Chunks:
    """Return a message; `index` is left out, which the parent knows."""
    return Chunks(np.array([(one.request_id, one.sample) for one in chunks], np.int64), pack_samples(chunks))


def unpack_chunks(
    message: Chunks, requests: Mapping[int, QueuedRequest]
) -> Iterator[tuple[QueuedRequest, StreamChunk]]:
    """Yield those of `requests`, by id, that have chunks in a message, with each of them."""
    samples = unpack_samples(message.samples)
    for (request_id, sample), (text, token_ids, reason, logprobs) in zip(
        message.columns.tolist(), samples, strict=True
    ):
        if request := requests.get(request_id):
            index = request_id - request.recipient.first_id
            yield request, StreamChunk(index, text, token_ids, reason, sample, logprobs, request_id=request_id)


def pack_logprobs(places: Sequence[TokenLogprobs | None] | None) -> PackedDicts | FlatLogprobs | None:
    """Return log-probabilities for a message; they come out of `unpack_logprobs` as they were."""
    if places is None or isinstance(places, FlatLogprobs):
        return places
    entries = [item for place in places if place for item in place.items()]
    ends = array("q", accumulate(len(place) if place else 0 for place in places))
    flat = FlatLogprobs(
        array("q", [0, *ends][:-1]),
        ends,
        array("i", [token_id for token_id, _ in entries]),
        array("f", [entry.logprob for _, entry in entries]),
        array("i", [NO_RANK if entry.rank is None else entry.rank for _, entry in entries]),
        [entry.decoded_token for _, entry in entries],
    )
    return PackedDicts(flat)


def unpack_logprobs(packed: PackedDicts | FlatLogprobs | None) -> Any:
    if not isinstance(packed, PackedDicts):
        return packed
    flat = packed.positions
    ranks = [None if rank == NO_RANK else rank for rank in flat.ranks]
    logprobs = map(Logprob, flat.logprobs, ranks, flat.decoded_tokens)
    entries = [*zip(flat.token_ids, logprobs, strict=True)]
    return [dict(entries[start:end]) or None for start, end in zip(flat.start_indices, flat.end_indices, strict=True)]


def pack_prompt_logprobs(logprobs: Any) -> Any:
    """Return a prompt's log-probabilities for a message: arrays, or FlatLogprobs with their texts."""
    return (logprobs.ranks, logprobs.token_ids, logprobs.logprobs) if isinstance(logprobs, PromptLogprobs) else logprobs


def unpack_prompt_logprobs(packed: Any, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> Any:
    """Return what the user of a request gets of these. tokenizer: makes the texts, when somebody looks."""
    if not isinstance(packed, tuple):
        return packed
    ranks, token_ids, logprobs = packed
    new_texts = prompt_texts(tokenizer, prepared.sampling_params, prepared.prompt, prepared.token_ids)
    made = PromptLogprobs(len(ranks), token_ids.shape[1] - 1, new_texts)
    made.fill(0, ranks, token_ids, logprobs)
    return made


def keep_states(output: RequestOutput, states: HiddenStatesRequest) -> RequestOutput:
    """Return the output of a request with all that it wants of hidden states, for a message.

    It is the `make_output` of requests in a replica. The parts are not joined, which would copy them.
    """
    packed: Any = {layer: [*map(_pack_values, states.parts(layer))] for layer in states.received}
    return replace(output, hidden_states=packed)


def unpack_states(packed: PackedStates) -> dict[int | None, dict[int, Tensor]]:
    """Return the states of a message as `HiddenStatesRequest.received`; the parts are numbered."""
    return {
        layer: {index: torch.from_numpy(values).view(dtype) for index, (dtype, values) in enumerate(parts)}
        for layer, parts in packed.items()
    }


def _pack_values(values: Tensor) -> tuple[torch.dtype, Any]:
    return values.dtype, values.view(torch.uint8).numpy()
