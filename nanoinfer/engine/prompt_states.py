"""What requests want of the hidden states of their prompts: pooled to an embedding or scores, or as they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class StatesRecord(NamedTuple):
    """What an admitted sequence wants of its prompt's hidden states, as the packet carries it."""

    row: int
    num_prompt_tokens: int
    pools: int  # 1: they are pooled, and no token is sampled
    first: int  # the first token whose states are wanted, by `num_layers` and by pooling
    second_text: int  # where the second text of a pair begins; num_prompt_tokens where there is none
    num_layers: int  # hidden states of so many layers are wanted; their numbers follow in the packet


class FoundStates(NamedTuple):
    """What a step has found of one prompt.

    chunk: which of the step's chunks. layer: hidden states of a layer; None for what pooling made of them. start: the
    first of the prompt's tokens that `values`, (num_tokens, size), belong to; pooling to one vector has one line.
    """

    chunk: int
    layer: int | None
    start: int
    values: Any  # a tensor on the host


@dataclass(slots=True, eq=False)
class PromptStates:
    """What a request wants of its prompt's hidden states, and what has come of it.

    pools: whether they are pooled, so that the request ends with its prompt. first: the first token whose states are
    wanted; those before it may come from the prefix cache. to_output: makes what the user gets of the request's
    RequestOutput and of this. layers: whose hidden states are wanted as they are, counted from 0, the embedding.
    second_text: where the second text of a pair begins; None for one text.
    found: by layer, the first token of each part and its values; a part that is computed again takes its old place.
    """

    pools: bool
    first: int
    to_output: Callable[..., Any]
    layers: tuple[int, ...] = ()
    second_text: int | None = None
    found: dict[int | None, dict[int, Any]] = field(default_factory=dict)

    def record(self, row: int, num_prompt_tokens: int) -> StatesRecord:
        second_text = num_prompt_tokens if self.second_text is None else self.second_text
        return StatesRecord(row, num_prompt_tokens, int(self.pools), self.first, second_text, len(self.layers))

    def add(self, found: FoundStates) -> None:
        if found.start <= self.first:  # the prompt is computed again, maybe in other chunks
            self.found.pop(found.layer, None)
        self.found.setdefault(found.layer, {})[found.start] = found.values

    def parts(self, layer: int | None) -> list[Any]:
        """Return the values of a layer, or of pooling, in the order of the tokens."""
        found = self.found.get(layer, {})
        return [found[start] for start in sorted(found)]


def collect_states(chunks: Sequence[Any], found: Sequence[FoundStates]) -> None:
    """Give the sequences of a step's chunks what the step has found of them."""
    for one in found:
        seq = chunks[one.chunk].seq
        if seq.prompt_states is not None:
            seq.prompt_states.add(one)
    for seq, start, length, _ in chunks:
        if seq.prompt_states is not None and not seq.pools and start + length >= seq.num_prompt_tokens:
            seq.prompt_states = None  # all has come; if the prompt is computed again, then without
