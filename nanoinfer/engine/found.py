"""What a step finds beside tokens, on its way to the requests that want it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

from nanoinfer.flat_logprobs import NO_RANK, FlatLogprobs, token_logprobs


class Found(ABC):
    """Holds what a step has found: log-probabilities here, hidden states in `hidden_states_request.py`."""

    def launched(self, batch: Any) -> None:  # noqa: B027 (most kinds have nothing to do here)
        """Hand over what users take on the device, as soon as the step is launched. batch: its ScheduledBatch."""

    @abstractmethod
    def collected(self, batch: Any, requests: Mapping[int, Any], wanted: list[bool]) -> None:
        """Give it to the requests, once it has come to the host.

        requests: a Request by id; dropped ones are missing. wanted: for each of the step's tokens, whether its sequence
        was still running. Called once for each token of a row, with those that count.
        """


@dataclass(slots=True)
class SampleLogprobs(Found):
    """Log-probabilities of drawn tokens.

    batch_indices: which of the step's tokens. logprobs: `LogprobsTensors`. num_tokens: how many tokens of each sequence
    the step draws, those of the first sequence first. positions: the log-probabilities by token, once they have come.
    """

    batch_indices: list[int]
    logprobs: Any
    num_tokens: int = 1
    positions: list[Any] | None = None

    def collected(self, batch: Any, requests: Mapping[int, Any], wanted: list[bool]) -> None:
        if self.positions is None:
            self.positions = self.logprobs.to_positions()
        for batch_idx, entry in zip(self.batch_indices, self.positions, strict=True):
            seq = batch.sampled[batch_idx // self.num_tokens]
            params = seq.sampling_params
            num_others = params.num_logprobs
            if not wanted[batch_idx] or num_others is None or seq.finish_reason == "error":
                continue
            completion = requests[seq.request_id].completions[seq.sample]
            rank, token_ids, logprobs = entry[0], entry[1][: 1 + num_others], entry[2][: 1 + num_others]
            ranks = [NO_RANK] * num_others if params.logprob_token_ids else range(1, 1 + num_others)
            texts = completion.text().of_tokens
            decoded = texts.add_first(token_ids) if texts else repeat(None, len(token_ids))
            entries = token_ids, logprobs, [rank, *ranks], decoded
            if isinstance(completion.logprobs, FlatLogprobs):
                completion.logprobs.append(*entries)
            else:
                completion.logprobs.append(token_logprobs(*entries))


class PromptSpan(NamedTuple):
    """Neighbouring positions of a prompt whose log-probabilities a step computes."""

    chunk: int  # which of the step's chunks
    start: int  # the first position
    length: int


@dataclass(slots=True)
class SpanLogprobs(Found):
    """Log-probabilities of prompts' tokens, all spans end to end. logprobs: `LogprobsTensors`."""

    spans: list[PromptSpan]
    logprobs: Any

    def collected(self, batch: Any, requests: Mapping[int, Any], wanted: list[bool]) -> None:
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
