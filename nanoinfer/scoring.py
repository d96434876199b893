"""How likely a completion is, from the log-probabilities of a prompt that ends with it."""

import math

from nanoinfer.engine.prompt_logprobs import PromptLogprobs
from nanoinfer.outputs import RequestOutput, Score
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
    token_ids, found = pair[1], output.prompt_logprobs
    assert isinstance(found, PromptLogprobs), "the prompt's log-probabilities come in arrays, as they are without texts"
    ranks, logprobs = found.ranks[len(pair[0]) :].tolist(), found.logprobs[len(pair[0]) :, 0].tolist()
    total = sum(logprobs)  # NaN for what was aborted
    return Score(token_ids, logprobs, total, all(rank == 1 for rank in ranks) and not math.isnan(total))
