"""How likely a completion is, from the log-probabilities of a prompt that ends with it."""

import math

from nanoinfer.outputs import Logprob, RequestOutput, Score
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.prompts import PreparedRequest

SCORING = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
Pair = tuple[list[int], list[int]]  # token ids of a prompt, and those of its completion


def scoring_request(pair: Pair) -> PreparedRequest:
    """Return the request whose output `score` reads."""
    before, after = pair
    return PreparedRequest(
        prompt=None, token_ids=before + after, sampling_params=SCORING, prompt_logprobs_start=len(before)
    )


def score(output: RequestOutput, pair: Pair) -> Score:
    """Score the completion of a pair, given the output of its `scoring_request`."""
    token_ids = pair[1]
    found = (output.prompt_logprobs or [])[len(pair[0]) :]
    unknown = Logprob(math.nan, rank=0)  # of what was aborted
    entries = [(entry or {}).get(token_id, unknown) for token_id, entry in zip(token_ids, found, strict=True)]
    logprobs = [entry.logprob for entry in entries]
    total = sum(logprobs)
    return Score(token_ids, logprobs, total, all(entry.rank == 1 for entry in entries) and not math.isnan(total))
