"""The log-probabilities of a request's prompt: arrays, which become dicts when somebody looks at them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.flat_logprobs import NO_RANK, FlatLogprobs
from nanoinfer.outputs import Logprob, TokenLogprobs
from nanoinfer.text.completion_text import TokenTexts


class PromptLogprobs(Sequence[TokenLogprobs | None]):
    """Log-probabilities at each position: of its own token, and of the `num_best` likeliest tokens in order.

    Users see a list of dicts, with None where nothing is known, as at the first position; it is pickled as such a list.
    The dicts are made when the first one is looked at: for 100,000 positions, making them takes as long as computing
    the numbers.

    ranks: (num_tokens,), the rank of each position's token; 0 where nothing is known. token_ids, logprobs:
    (num_tokens, 1 + num_best), the position's own token first. texts: makes the tokens' texts, from the first position
    on; None if the user wants no texts. is_flat: the user wants arrays.
    """

    def __init__(self, num_tokens: int, num_best: int, texts: TokenTexts | None = None, is_flat: bool = False) -> None:
        self._texts, self._is_flat = texts, is_flat
        self.ranks = np.zeros(num_tokens, np.int32)
        self.token_ids = np.zeros((num_tokens, 1 + num_best), np.int32)
        self.logprobs = np.full((num_tokens, 1 + num_best), np.nan, np.float32)
        self._dicts: list[TokenLogprobs | None] | None = None

    def fill(self, start: int, ranks: NDArray[Any], token_ids: NDArray[Any], logprobs: NDArray[Any]) -> None:
        """Enter what is known of the positions from `start` on; there may be more of the likeliest than are wanted."""
        end, width = start + len(ranks), self.token_ids.shape[1]
        self.ranks[start:end] = ranks
        self.token_ids[start:end] = token_ids[:, :width]
        self.logprobs[start:end] = logprobs[:, :width]

    def for_user(self) -> "PromptLogprobs | list[TokenLogprobs | None] | FlatLogprobs":
        """Return what the user gets; texts, which a tokenizer makes, are made in this thread."""
        if self._is_flat:
            return self._to_flat()
        return self if self._texts is None else self._to_dicts()

    def _to_dicts(self) -> list[TokenLogprobs | None]:
        return [position and token_logprobs(*position, self._texts) for position in self._positions()]

    def _to_flat(self) -> FlatLogprobs:
        flat = FlatLogprobs()
        for position in self._positions():
            if position is None:
                flat.append((), (), (), ())
            else:
                add_position(flat, *position, self._texts)
        return flat

    def _positions(self) -> Iterator[tuple[list[int], list[int], list[float]] | None]:
        """Yield ranks, ids and log-probabilities of each position; None where nothing is known."""
        others = [*range(1, self.token_ids.shape[1])]
        for rank, ids, logprobs in zip(
            self.ranks.tolist(), self.token_ids.tolist(), self.logprobs.tolist(), strict=True
        ):
            yield ([rank, *others], ids, logprobs) if rank else None

    def _list(self) -> list[TokenLogprobs | None]:
        if self._dicts is None:
            self._dicts = self._to_dicts()
        return self._dicts

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, index: Any) -> Any:
        return self._list()[index]

    def __eq__(self, other: object) -> bool:
        return self._list() == (other._list() if isinstance(other, PromptLogprobs) else other)

    def __repr__(self) -> str:
        return repr(self._list())

    def __reduce__(self) -> tuple[type, tuple[list[TokenLogprobs | None]]]:
        return list, (self._list(),)


def token_logprobs(
    ranks: list[int], token_ids: list[int], logprobs: list[float], texts: TokenTexts | None
) -> TokenLogprobs:
    """Return what users get for one position: its token, then the others.

    ranks, token_ids, logprobs: those of the position's own token come first. A rank that is not known is NO_RANK.
    texts: makes the tokens' texts; it stands at this position, and is moved on to the next. None makes no text.
    """
    text_of = texts.peek() if texts else lambda _: None
    found: TokenLogprobs = {}
    for rank, token_id, logprob in zip(ranks, token_ids, logprobs, strict=True):
        if token_id not in found:
            found[token_id] = Logprob(logprob, None if rank == NO_RANK else rank, text_of(token_id))
    if texts:
        texts.append(token_ids[0])
    return found


def add_position(
    flat: FlatLogprobs, ranks: list[int], token_ids: list[int], logprobs: list[float], texts: TokenTexts | None
) -> None:
    """Add a position, given as for `token_logprobs`."""
    text_of = texts.peek() if texts else lambda _: None
    flat.append(token_ids, logprobs, ranks, map(text_of, token_ids))
    if texts:
        texts.append(token_ids[0])


def logprobs_of_tokens(logprobs: list[TokenLogprobs] | FlatLogprobs, token_ids: list[int]) -> list[float]:
    """Return the log-probability of each of a completion's tokens."""
    if isinstance(logprobs, FlatLogprobs):
        return logprobs.of_tokens()
    return [entry[token_id].logprob for entry, token_id in zip(logprobs, token_ids, strict=True)]
