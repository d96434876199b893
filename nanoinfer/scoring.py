"""Computes how likely a completion is, by the log-probabilities of a prompt that ends with it: `LLM.score`."""

import math
from collections.abc import Sequence

from nanoinfer.config import EngineConfig
from nanoinfer.engine.engine import Engine
from nanoinfer.engine.preparer import Portions, Preparer, add_adapters
from nanoinfer.engine.request_logprobs import PromptLogprobs
from nanoinfer.engine.request_queue import RequestQueue
from nanoinfer.errors import RequestError
from nanoinfer.garbage import rare_collections
from nanoinfer.lora.lora_request import LoRARequests
from nanoinfer.outputs import RequestOutput, Score, Scores
from nanoinfer.progress import Progress
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.text.arguments import Errors, OnError, Prompt, Prompts, as_list_of_prompts, check_on_error
from nanoinfer.text.prompts import EncodedPair, PreparedRequest

SCORING = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)


class ScoringMethods:
    """Gives `LLM`, which sets these fields, the method that scores completions."""

    engine: Engine
    config: EngineConfig
    queue: RequestQueue
    preparer: Preparer

    @rare_collections()
    def score(
        self,
        prompts: Prompts,
        completions: Prompts,
        use_tqdm: bool = True,
        *,
        on_error: OnError = "raise",
        lora_request: LoRARequests = None,
    ) -> Scores:
        """Return how likely the model finds each completion after its prompt, and whether greedy decoding would say it.

        prompts, completions: as in `generate`, as many of both, or one prompt for all completions.
        on_error: with "return", pairs that cannot be served come back in their places, with the reason in `error`.
        lora_request: as in `generate`.

        Two texts are joined before they are tokenized, as the model would read them. The completion begins where the
        tokens of the whole differ from those of the prompt alone, so a token across the border belongs to the
        completion. If that leaves no token for the prompt, if either is given as token ids, or if the prompt has
        images, each is tokenized by itself. Prompts that begin alike share the computation of what is alike. Raises
        RequestError for a pair that cannot be served, and where `logprobs_mode` is one of logits.
        """
        self.engine.check_open()
        check_scores(self.config.logprobs_mode)
        pairs = Pairs(self.preparer, as_list_of_prompts(prompts), as_list_of_prompts(completions), lora_request)
        portions = pairs.prepare_portions(on_error)
        with Progress(self.engine.metrics, portions.num_requests, use_tqdm, reads="Scoring") as progress:
            return pairs.scores(self.queue.complete(portions, progress.show))


def check_scores(logprobs_mode: str) -> None:
    """Raise RequestError if the prompts' log-probabilities are logits, which give no likelihood."""
    if logprobs_mode.endswith("logits"):
        raise RequestError(
            f"score needs log-probabilities, and this LLM has logprobs_mode={logprobs_mode!r}; use 'raw_logprobs'"
        )


class Pairs:
    """Prepares the requests of the pairs of one call to `LLM.score`, and reads the scores from the outputs."""

    def __init__(
        self, preparer: Preparer, firsts: Sequence[Prompt], seconds: Sequence[Prompt], lora_request: LoRARequests
    ) -> None:
        if len(firsts) == 1 and seconds:
            firsts = [*firsts] * len(seconds)
        if len(firsts) != len(seconds):
            raise RequestError(
                f"{len(seconds)} completions for {len(firsts)} prompts; give one for each, or one prompt for all"
            )
        self._preparer, self._firsts, self._seconds = preparer, firsts, seconds
        self._adapters = preparer.find_adapters(lora_request, len(firsts))
        self._encoded: dict[int, EncodedPair] = {}

    def prepare_portions(self, on_error: OnError) -> Portions:
        """Return the requests of all pairs. Raises RequestError for those that cannot be served, unless told not to."""
        check_on_error(on_error)
        return self._preparer.portions(self._prepare, range(len(self._firsts)), self._firsts, on_error)

    def scores(self, outputs: Sequence[RequestOutput]) -> Scores:
        """Return the score of each pair, given the outputs of their requests in order."""
        return Scores(score(output, self._encoded[index]) for index, output in enumerate(outputs))

    def _prepare(self, indices: Sequence[int], errors: Errors) -> list[PreparedRequest]:
        firsts = {index: self._firsts[index] for index in indices}
        encoded = self._preparer.prompt_processor.encode_pairs(firsts, self._seconds, errors)
        self._encoded |= encoded
        requests = {index: scoring_request(pair) for index, pair in encoded.items()}
        add_adapters(requests, self._adapters)
        return [*requests.values()]


def scoring_request(pair: EncodedPair) -> PreparedRequest:
    """Return the request whose output `score` reads."""
    return PreparedRequest(
        prompt=None,
        token_ids=pair.whole,
        packed_ids=pair.packed_ids,
        sampling_params=SCORING,
        prompt_logprobs_start=len(pair.prompt),
        images=pair.images,
    )


def score(output: RequestOutput, pair: EncodedPair) -> Score:
    """Score the completion of a pair, given the output of its `scoring_request`."""
    token_ids, of_prompt = pair.completion, output.prompt_logprobs
    if of_prompt is None:  # it was refused
        return Score([], [], math.nan, False, output.error, output.error_kind)
    assert isinstance(of_prompt, PromptLogprobs), (
        "the prompt's log-probabilities come in arrays, as they are without texts"
    )
    ranks, logprobs = of_prompt.ranks[len(pair.prompt) :].tolist(), of_prompt.logprobs[len(pair.prompt) :, 0].tolist()
    total = sum(logprobs)  # NaN for what was aborted
    is_greedy = all(rank == 1 for rank in ranks) and not math.isnan(total)
    return Score(token_ids, logprobs, total, is_greedy, output.error, output.error_kind)
