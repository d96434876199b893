"""Brings requests what a step computes beside tokens: log-probabilities, hidden states, pooled vectors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

from nanoinfer.engine.hidden_states_request import ChunkStates
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.flat_logprobs import NO_RANK, FlatLogprobs, token_logprobs


class SideOutput(ABC):
    """Brings the requests what they get of a step beside its tokens; vLLM: the other fields of ModelRunnerOutput.

    `runner/` and `sampling/` make it.
    """

    def launched(self, batch: ScheduledBatch) -> None:  # noqa: B027 (most kinds have nothing to do here)
        """Hand over what users take on the device, as soon as the step is launched."""

    @abstractmethod
    def collected(self, batch: ScheduledBatch, requests: Mapping[int, Any], wanted: list[bool]) -> None:
        """Give it to the requests, once it has come to the host.

        requests: a Request by id; dropped ones are missing. wanted: for each of the step's tokens, whether its sequence
        was still running. Called once for each turn of `drawn_in_turns`, with the tokens in it that count.
        """


@dataclass(slots=True)
class SampleLogprobs(SideOutput):
    """Brings log-probabilities of drawn tokens."""

    batch_indices: list[int]  # which of the step's tokens
    logprobs: Any  # `LogprobsTensors`
    num_tokens: int = 1  # that the step draws of each sequence; those of the first sequence come first
    positions: list[Any] | None = None  # the log-probabilities by token, once they have come

    def collected(self, batch: ScheduledBatch, requests: Mapping[int, Any], wanted: list[bool]) -> None:
        if self.positions is None:
            self.positions = self.logprobs.to_positions()
        for batch_idx, (rank, token_ids, logprobs) in zip(self.batch_indices, self.positions, strict=True):
            seq = batch.sampled[batch_idx // self.num_tokens]
            params = seq.sampling_params
            num_others = params.num_logprobs
            if not wanted[batch_idx] or num_others is None or seq.finish_reason == "error":
                continue
            completion = requests[seq.request_id].completions[seq.sample]
            token_ids, logprobs = token_ids[: 1 + num_others], logprobs[: 1 + num_others]
            ranks = [NO_RANK] * num_others if params.logprob_token_ids else range(1, 1 + num_others)
            texts = completion.text().of_tokens
            decoded = texts.add_first(token_ids) if texts else repeat(None, len(token_ids))
            entries = token_ids, logprobs, [rank, *ranks], decoded
            if isinstance(completion.logprobs, FlatLogprobs):
                completion.logprobs.append(*entries)
            else:
                completion.logprobs.append(token_logprobs(*entries))


class PromptSpan(NamedTuple):
    """Names neighbouring positions of a prompt, whose log-probabilities a step computes."""

    chunk: int  # which of the step's chunks
    start: int  # the first position
    length: int


@dataclass(slots=True)
class SpanLogprobs(SideOutput):
    """Brings log-probabilities of prompts' tokens."""

    spans: list[PromptSpan]
    logprobs: Any  # `LogprobsTensors` of all spans, end to end

    def collected(self, batch: ScheduledBatch, requests: Mapping[int, Any], wanted: list[bool]) -> None:
        arrays, offset = [part.numpy() for part in self.logprobs], 0
        for chunk, start, length in self.spans:
            ranks, token_ids, logprobs = (part[offset : offset + length] for part in arrays)
            offset += length
            request = requests.get(batch.prefill[chunk].seq.request_id)
            if request is None or request.prompt_logprobs is None:  # None: it was dropped
                continue
            request.prompt_logprobs.fill(start, ranks, token_ids, logprobs)
            seq = request.completions[0].seq
            if start + length == seq.num_prompt_tokens:
                seq.prompt_logprobs_start = None  # all have come: a recomputed prompt does not need them again


@dataclass(slots=True)
class HiddenStates(SideOutput):
    """Brings the hidden states of a step's prompts, or the values that pooling made of each of their tokens."""

    parts: list[ChunkStates]

    def launched(self, batch: ScheduledBatch) -> None:
        for part in self.parts:
            request = batch.prefill[part.chunk].seq.hidden_states_request
            if part.layer is not None and request is not None and request.take is not None:
                request.take(part.layer, part.start, part.values)

    def collected(self, batch: ScheduledBatch, *unused: object) -> None:
        for part in self.parts:
            request = batch.prefill[part.chunk].seq.hidden_states_request
            if request is not None and part.layer is None:
                request.add(part)
            elif request is not None and request.take is None:
                request.add(part._replace(values=part.values.clone()))  # the memory that they came in is wanted again
        for seq, start, length, _ in batch.prefill:
            request = seq.hidden_states_request
            if request is not None and not request.pools and start + length >= seq.num_prompt_tokens:
                seq.hidden_states_request = None  # all have come: a recomputed prompt does not need them again


@dataclass(slots=True)
class PooledVectors(SideOutput):
    """Brings one pooled vector of each prompt that a step completes."""

    chunks: list[int]  # which of the step's
    values: Any  # (num_chunks, size), a tensor on the host

    def collected(self, batch: ScheduledBatch, *unused: object) -> None:
        for place, chunk in enumerate(self.chunks):
            request = batch.prefill[chunk].seq.hidden_states_request
            if request is not None:
                request.add(ChunkStates(chunk, None, 0, self.values[place : place + 1]))
