"""Log-probabilities that requests ask for: from what a step brings of them to what their users get."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from nanoinfer.engine.extras.prompt_logprobs import PromptLogprobs, add_position, token_logprobs
from nanoinfer.engine.interfaces import SampledStep
from nanoinfer.engine.request import Completion, Request
from nanoinfer.engine.scheduled_batch import ScheduledBatch
from nanoinfer.flat_logprobs import NO_RANK, FlatLogprobs
from nanoinfer.text.prompts import PreparedRequest
from nanoinfer.text.tokenizer import Tokenizer, prompt_texts


def make_room(request: Request, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
    """Make room for what a request wants: its tokens' log-probabilities as arrays, those of its prompt."""
    token_ids, params = prepared.token_ids, prepared.sampling_params
    if params.flat_logprobs:
        for completion in request.completions:
            completion.logprobs = FlatLogprobs()
    if params.prompt_logprobs is not None:
        new_texts = prompt_texts(tokenizer, params, prepared.prompt, token_ids)
        found = PromptLogprobs(len(token_ids), params.prompt_logprobs, new_texts, params.flat_logprobs)
        request.prompt_logprobs = found
        if prepared.prompt_logprobs_start < len(token_ids):
            request.completions[0].seq.prompt_logprobs_start = prepared.prompt_logprobs_start


def collect_logprobs(
    requests: Mapping[int, Request], batch: ScheduledBatch, handle: SampledStep, wanted: list[bool]
) -> None:
    """Keep the log-probabilities of the tokens that a step has yielded, and of the prompts' tokens in it.

    wanted: for each of the step's tokens, whether its sequence was still running.
    """
    sampled, prefill = batch.sampled, batch.prefill
    for of_samples in handle.logprobs:
        for batch_idx, entry in zip(of_samples.batch_indices, of_samples.logprobs.to_positions(), strict=True):
            if wanted[batch_idx]:
                seq = sampled[batch_idx]
                _add(requests[seq.request_id], seq.sample, *entry)
    for of_prompts in handle.prompt_logprobs:
        arrays, offset = [part.numpy() for part in of_prompts.logprobs], 0
        for chunk, start, length in of_prompts.spans:
            request = requests.get(prefill[chunk].seq.request_id)
            if request is not None:  # None: it was dropped
                _add_of_prompt(request, start, [part[offset : offset + length] for part in arrays])
            offset += length


def _add(request: Request, sample: int, rank: int, token_ids: list[int], logprobs: list[float]) -> None:
    """Keep the log-probabilities of a sample's newest token, which comes first, and of others; rank: its own."""
    completion = request.completions[sample]
    params = completion.seq.sampling_params
    num_others = params.num_logprobs
    if num_others is not None and completion.seq.finish_reason != "error":
        token_ids, logprobs = token_ids[: 1 + num_others], logprobs[: 1 + num_others]
        ranks = [NO_RANK] * num_others if params.logprob_token_ids else range(1, 1 + num_others)
        position = [rank, *ranks], token_ids, logprobs, completion.text().of_tokens
        if isinstance(completion.logprobs, FlatLogprobs):
            add_position(completion.logprobs, *position)
        else:
            completion.logprobs.append(token_logprobs(*position))


def _add_of_prompt(request: Request, start: int, arrays: list[NDArray[Any]]) -> None:
    """Keep the log-probabilities of neighbouring prompt tokens: their ranks, ids and log-probabilities."""
    seq, found = request.completions[0].seq, request.prompt_logprobs
    if found is not None:
        ranks, token_ids, logprobs = arrays
        found.fill(start, ranks, token_ids, logprobs)
        if start + len(ranks) == seq.num_prompt_tokens:
            seq.prompt_logprobs_start = None  # all have come; they are not wanted again if the prompt is computed again


def end_texts(completion: Completion) -> None:
    """Give the last token of a completion the half of a character that its text ends with, if there is one."""
    logprobs = completion.logprobs
    texts = completion.text().of_tokens if logprobs else None
    if not texts:
        return
    if isinstance(logprobs, FlatLogprobs):
        place = logprobs.start_indices[-1]
        logprobs.decoded_tokens[place] = texts.end(logprobs.token_ids[place], logprobs.decoded_tokens[place] or "")
    else:
        token_id, entry = next(iter(logprobs[-1].items()))
        text = texts.end(token_id, entry.decoded_token or "")
        # A stream may have handed the old dict out.
        logprobs[-1] = {**logprobs[-1], token_id: replace(entry, decoded_token=text)}
