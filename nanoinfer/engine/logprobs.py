"""Log-probabilities that requests ask for: from what a step brings of them to what their users get."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanoinfer.engine.batch import PositionLogprobs, ScheduledBatch
from nanoinfer.engine.request import Completion, Request
from nanoinfer.outputs import Logprob, TokenLogprobs
from nanoinfer.text.detokenizer import TokenTexts


def collect_logprobs(requests: Mapping[int, Request], batch: ScheduledBatch, handle: Any, wanted: list[bool]) -> None:
    """Keep the log-probabilities of the tokens that a step has yielded, and of the prompts' tokens in it.

    handle: the runner's. wanted: for each of the step's tokens, whether its sequence was still running.
    """
    sampled, prefill = batch.sampled, batch.prefill
    for of_samples in handle.logprobs:
        for line, entry in zip(of_samples.lines, of_samples.logprobs.to_positions(), strict=True):
            if wanted[line]:
                _add(requests[sampled[line].request_id], sampled[line].sample, entry)
    for of_prompt in handle.prompt_logprobs:
        request = requests.get(prefill[of_prompt.chunk].seq.request_id)
        if request is not None:  # None: it was dropped
            for position, entry in enumerate(of_prompt.logprobs.to_positions(), of_prompt.start):
                _add_of_prompt(request, position, entry)


def _add(request: Request, sample: int, entry: PositionLogprobs) -> None:
    """Keep the log-probabilities of a sample's newest token."""
    completion = request.completions[sample]
    num_best = completion.seq.sampling_params.logprobs
    if num_best is not None and completion.seq.finish_reason != "error":
        completion.logprobs.append(_token_logprobs(num_best, entry, completion.text.of_tokens))


def _add_of_prompt(request: Request, position: int, entry: PositionLogprobs) -> None:
    """Keep the log-probabilities of one prompt token."""
    seq, found = request.completions[0].seq, request.prompt_logprobs
    num_best = seq.sampling_params.prompt_logprobs
    if found is not None and num_best is not None:
        if found[position] is None:  # else it came before the request was preempted
            found[position] = _token_logprobs(num_best, entry, request.prompt_texts)
        if position == seq.num_prompt_tokens - 1:
            seq.prompt_logprobs_start = None  # all have come; if the prompt is computed again, then without


def _token_logprobs(num_best: int, entry: PositionLogprobs, texts: TokenTexts | None) -> TokenLogprobs:
    """Return what users get for one position: its token, then the `num_best` likeliest.

    texts: stands where this token comes, and afterwards behind it; None makes no text.
    """
    text_of = texts.peek() if texts else lambda _: None
    (token_id, logprob), *likeliest = zip(entry.token_ids, entry.logprobs, strict=True)
    likeliest = sorted(likeliest, key=lambda pair: (-pair[1], pair[0]))[:num_best]
    found = {token_id: Logprob(logprob, entry.rank, text_of(token_id))}
    for its_rank, (its_id, its_logprob) in enumerate(likeliest, 1):
        if its_id not in found:
            found[its_id] = Logprob(its_logprob, its_rank, text_of(its_id))
    if texts:
        texts.append(token_id)
    return found


def end_texts(completion: Completion) -> None:
    """Give the last token of a completion the half of a character that its text ends with, if there is one."""
    texts = completion.text.of_tokens
    if texts and completion.logprobs:
        token_id, entry = next(iter(completion.logprobs[-1].items()))
        text = texts.end(token_id, entry.decoded_token or "")
        # A stream may have handed the old dict out.
        completion.logprobs[-1] = {**completion.logprobs[-1], token_id: replace(entry, decoded_token=text)}
