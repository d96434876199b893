"""Log-probabilities in a few arrays: dicts of objects cost more to make, and to keep, than the numbers themselves."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.outputs import Logprob, TokenLogprobs

NO_RANK = 0  # in `ranks`


@dataclass(slots=True)
class FlatLogprobs(Sequence[TokenLogprobs | None]):
    """Holds the log-probabilities of consecutive positions, as `SamplingParams(flat_logprobs=True)` asks for.

    Indexing gives what a list of dicts would have there, and a slice is a FlatLogprobs. A position of which nothing is
    known, as the first of a prompt, has no entries, and None as its dict.

    start_indices, end_indices: position i has the entries from start_indices[i] to end_indices[i], exclusive: its token
    first, then the likeliest, its token once more if it is among them. token_ids, logprobs (float32), ranks (0 where it
    is not known) and decoded_tokens: of each entry. All but the last are arrays, which NumPy reads without a copy.
    """

    start_indices: "array[int]" = field(default_factory=lambda: array("q"))
    end_indices: "array[int]" = field(default_factory=lambda: array("q"))
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    ranks: "array[int]" = field(default_factory=lambda: array("i"))
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(
        self,
        token_ids: Sequence[int],
        logprobs: Iterable[float],
        ranks: Iterable[int],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add a position with these entries; without any, it is one of which nothing is known."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))

    def of_tokens(self) -> list[float]:
        """Return the log-probability of each position's own token; every position must have one."""
        return [self.logprobs[start] for start in self.start_indices]

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            picked = FlatLogprobs()
            for start, end in zip(self.start_indices[index], self.end_indices[index], strict=True):
                picked.append(*self._entries(start, end))
            return picked
        return token_logprobs(*self._entries(self.start_indices[index], self.end_indices[index])) or None

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"FlatLogprobs({len(self)} positions, {len(self.token_ids)} entries)"

    def _entries(self, start: int, end: int) -> Any:
        """Return a range of the entries, as `append` and `token_logprobs` take them."""
        return [part[start:end] for part in (self.token_ids, self.logprobs, self.ranks, self.decoded_tokens)]


def token_logprobs(
    token_ids: Iterable[int], logprobs: Iterable[float], ranks: Iterable[int], decoded_tokens: Iterable[str | None]
) -> TokenLogprobs:
    """Return the entries of one position as a dict; of a token that is there twice, the first counts."""
    entries: TokenLogprobs = {}
    for token_id, logprob, rank, text in zip(token_ids, logprobs, ranks, decoded_tokens, strict=True):
        if token_id not in entries:
            entries[token_id] = Logprob(logprob, None if rank == NO_RANK else rank, text)
    return entries
