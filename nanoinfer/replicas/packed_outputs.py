"""Outputs on their way from a replica to the parent: packed into messages there, unpacked here."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoinfer.engine.hidden_states_request import HiddenStatesRequest
from nanoinfer.engine.prompt_logprobs import PromptLogprobs
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
from nanoinfer.replicas.replica_messages import REASONS, Chunks, Outputs
from nanoinfer.text.prompts import PreparedRequest
from nanoinfer.text.tokenizer import Tokenizer, prompt_texts

NO_REASON = len(REASONS)  # of a chunk that is not the last
NO_OTHERS = (None,) * 6
# Hidden states and pooled vectors: by layer, or None for what pooling made, the dtype and the bytes of each part of the
# prompt. They are bytes because NumPy has no bfloat16.
PackedStates = dict[int | None, list[tuple[torch.dtype, Any]]]


class PackedDicts(NamedTuple):
    """Log-probabilities whose user gets a list of dicts, in arrays."""

    positions: FlatLogprobs


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
    ids, samples_left = message.token_ids.tolist(), zip(message.samples.tolist(), message.texts, strict=True)
    found: list[RequestOutput | None] = []
    lines = zip(message.requests.tolist(), message.times.tolist(), requests, waited, strict=True)
    sample_line = end = 0
    for line, ((_, num_cached_tokens, num_samples), times, request, seconds) in enumerate(lines):
        samples = []
        for index in range(num_samples):
            (count, reason), text = next(samples_left)
            start, end = end, end + count
            stop_reason, logprobs, *others = message.others.get(sample_line, NO_OTHERS)
            sample_line += 1
            ends = REASONS[reason], stop_reason, unpack_logprobs(logprobs), *others
            samples.append(CompletionOutput(index, text, ids[start:end], *ends))
        if request is None:
            found.append(None)
            continue
        of_prompt = message.prompt_logprobs.get(line)
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
        if line in message.hidden_states:
            output = with_states(output, request.prepared.hidden_states_request, message.hidden_states[line])
        found.append(output)
    return found


def with_states(output: RequestOutput, states: HiddenStatesRequest, packed: PackedStates) -> Any:
    """Return what the user gets: an output together with the hidden states that came with it."""
    return replace(states, found=unpack_states(packed)).to_output(output)


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
    found = map(Logprob, flat.logprobs, ranks, flat.decoded_tokens)
    entries = [*zip(flat.token_ids, found, strict=True)]
    return [dict(entries[start:end]) or None for start, end in zip(flat.start_indices, flat.end_indices, strict=True)]


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


def keep_states(output: RequestOutput, states: HiddenStatesRequest) -> RequestOutput:
    """Return the output of a request with all that it wants of hidden states, for a message.

    It is the `make_output` of requests in a replica. The parts are not joined, which would copy them.
    """
    found: Any = {layer: [*map(_pack_values, states.parts(layer))] for layer in states.found}
    return replace(output, hidden_states=found)


def unpack_states(packed: PackedStates) -> dict[int | None, dict[int, Tensor]]:
    """Return the states of a message as `HiddenStatesRequest.found`; the parts are numbered."""
    return {
        layer: {index: torch.from_numpy(values).view(dtype) for index, (dtype, values) in enumerate(parts)}
        for layer, parts in packed.items()
    }


def _pack_values(values: Tensor) -> tuple[torch.dtype, Any]:
    return values.dtype, values.view(torch.uint8).numpy()
