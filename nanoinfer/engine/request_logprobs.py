"""Makes the log-probabilities of a request's prompt and completions, as its user gets them."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.flat_logprobs import FlatLogprobs
from nanoinfer.outputs import TokenLogprobs, shown
from nanoinfer.text.completion_text import TokenTexts
from nanoinfer.text.prompts import PreparedRequest
from nanoinfer.text.tokenizer import Tokenizer, prompt_texts


class PromptLogprobs(Sequence[TokenLogprobs | None]):
    """Holds log-probabilities at each position: of its own token, and of the `num_best` likeliest tokens in order.

    Users see a list of dicts, with None where nothing is known, as at the first position; it is pickled as such a list.
    The dicts, and the texts in them, are made when the first one is looked at: for 100,000 positions, making them takes
    longer than computing the numbers.

    ranks: (num_tokens,), the rank of each position's token; 0 where nothing is known. token_ids, logprobs:
    (num_tokens, 1 + num_best), the position's own token first. new_texts: returns what makes the tokens' texts, from
    the second position on; None if the user wants no texts. is_flat: the user wants arrays.
    """

    def __init__(
        self,
        num_tokens: int,
        num_best: int,
        new_texts: Callable[[], TokenTexts] | None = None,
        is_flat: bool = False,
    ) -> None:
        self._new_texts, self._is_flat = new_texts, is_flat
        self.ranks = np.zeros(num_tokens, np.int32)
        self.token_ids = np.zeros((num_tokens, 1 + num_best), np.int32)
        self.logprobs = np.full((num_tokens, 1 + num_best), np.nan, np.float32)
        self._dicts: list[TokenLogprobs | None] | None = None

    @classmethod
    def of(cls, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> "PromptLogprobs | None":
        """Return an empty one for a request; None if it wants no log-probabilities of its prompt."""
        params, token_ids = prepared.sampling_params, prepared.token_ids
        if params.prompt_logprobs is None:
            return None
        new_texts = prompt_texts(tokenizer, params, prepared.prompt, token_ids)
        return cls(len(token_ids), params.prompt_logprobs, new_texts, params.flat_logprobs)

    def fill(self, start: int, ranks: NDArray[Any], token_ids: NDArray[Any], logprobs: NDArray[Any]) -> None:
        """Enter the log-probabilities of positions from `start` on; more of the likeliest may come than are wanted."""
        end, width = start + len(ranks), self.token_ids.shape[1]
        self.ranks[start:end] = ranks
        self.token_ids[start:end] = token_ids[:, :width]
        self.logprobs[start:end] = logprobs[:, :width]

    def for_user(self) -> "PromptLogprobs | FlatLogprobs":
        """Return what the user gets."""
        return self._to_flat() if self._is_flat else self

    def _to_flat(self) -> FlatLogprobs:
        known = self.ranks > 0
        ranks = np.tile(np.arange(self.token_ids.shape[1], dtype=np.int32), (int(known.sum()), 1))
        ranks[:, 0] = self.ranks[known]
        ends = np.cumsum(np.where(known, self.token_ids.shape[1], 0))
        texts = self._new_texts() if self._new_texts else None
        rows = map(texts.add_first, self.token_ids[known].tolist()) if texts else ()
        return FlatLogprobs(
            array("q", np.concatenate([[0], ends[:-1]]).astype(np.int64).tobytes()),
            array("q", ends.astype(np.int64).tobytes()),
            array("i", self.token_ids[known].tobytes()),
            array("f", self.logprobs[known].tobytes()),
            array("i", ranks.tobytes()),
            [*chain.from_iterable(rows)] if texts else [None] * ranks.size,
        )

    def _list(self) -> list[TokenLogprobs | None]:
        if self._dicts is None:
            self._dicts = [*self._to_flat()]
        return self._dicts

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, index: Any) -> Any:
        return self._list()[index]

    def __eq__(self, other: object) -> bool:
        return self._list() == (other._list() if isinstance(other, PromptLogprobs) else other)

    def __repr__(self) -> str:
        return shown(self._list())

    def __reduce__(self) -> tuple[type, tuple[list[TokenLogprobs | None]]]:
        return list, (self._list(),)


def logprobs_of_tokens(logprobs: list[TokenLogprobs] | FlatLogprobs, token_ids: list[int]) -> list[float]:
    """Return the log-probability of each of a completion's tokens."""
    if isinstance(logprobs, FlatLogprobs):
        return logprobs.of_tokens()
    return [entry[token_id].logprob for entry, token_id in zip(logprobs, token_ids, strict=True)]


def end_text(logprobs: list[TokenLogprobs] | FlatLogprobs, texts: TokenTexts | None) -> None:
    """Add the half character that a finished completion may end with to the text of its last token."""
    if not logprobs or texts is None:
        return
    if isinstance(logprobs, FlatLogprobs):
        place = logprobs.start_indices[-1]
        logprobs.decoded_tokens[place] = texts.end(logprobs.token_ids[place], logprobs.decoded_tokens[place] or "")
    else:
        token_id, entry = next(iter(logprobs[-1].items()))
        text = texts.end(token_id, entry.decoded_token or "")
        # A stream may have handed the old dict out.
        logprobs[-1] = {**logprobs[-1], token_id: replace(entry, decoded_token=text)}
