"""What requests want of the hidden states of their prompts: pooled to an embedding or scores, or as they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple


class HiddenStatesRecord(NamedTuple):
    """What an admitted sequence wants of its prompt's hidden states, as the packet carries it."""

    row: int
    num_prompt_tokens: int
    pools: int  # 1: they are pooled, and no token is sampled
    layers_from: int  # the first token whose hidden states are wanted as they are
    keeps_on_device: int  # 1: these stay on the device, for a function
    second_text: int  # where the second text of a pair begins; num_prompt_tokens where there is none
    num_layers: int  # hidden states of so many layers are wanted; their numbers follow in the packet


class ChunkStates(NamedTuple):
    """Hidden states of one prompt, or what pooling made of them, from one step.

    chunk: index of the prompt's chunk in the step. layer: whose hidden states these are; None for pooled values. start:
    the first prompt token that `values`, (num_tokens, size), belong to. A single pooled vector has num_tokens 1.
    """

    chunk: int
    layer: int | None
    start: int
    values: Any  # a tensor on the host


class PooledVectors(NamedTuple):
    """What pooling has made of the prompts that a step completes, a vector of each. chunks: which of the step's."""

    chunks: list[int]
    values: Any  # (num_chunks, size), a tensor on the host

    @property
    def each(self) -> list[ChunkStates]:
        """The same, one by one."""
        return [ChunkStates(chunk, None, 0, self.values[place : place + 1]) for place, chunk in enumerate(self.chunks)]


PoolerOutput = ChunkStates | PooledVectors


@dataclass(slots=True, eq=False)
class HiddenStatesRequest:
    """What a request wants of its prompt's hidden states, and what has come so far.

    pools: whether the states are pooled; the request then ends with its prompt. first: the first token whose states are
    wanted; tokens before it may come from the prefix cache. to_output: makes the user's output from the request's
    RequestOutput and this object. layers: the layers whose states are wanted without pooling; 0 is the embedding.
    layers_from: the first token whose states are wanted of these layers. second_text: where the second text of a pair
    begins; None for one text. take: called with a layer, the first token, and the states on the device, as soon as
    their step is launched; None keeps the states in `found`. found: the values that have come, by layer (None: pooled)
    and by the first token of each part; a part that is computed again replaces the old one.
    """

    pools: bool
    first: int
    to_output: Callable[..., Any]
    layers: tuple[int, ...] = ()
    layers_from: int = 0
    second_text: int | None = None
    take: Callable[[int, int, Any], object] | None = None
    found: dict[int | None, dict[int, Any]] = field(default_factory=dict)

    def record(self, row: int, num_prompt_tokens: int) -> HiddenStatesRecord:
        second_text = num_prompt_tokens if self.second_text is None else self.second_text
        pools, keeps, num_layers = int(self.pools), int(self.take is not None), len(self.layers)
        return HiddenStatesRecord(row, num_prompt_tokens, pools, self.layers_from, keeps, second_text, num_layers)

    def add(self, found: ChunkStates) -> None:
        first = 0 if found.layer is None else self.layers_from
        if found.start <= first:  # the prompt is computed again, maybe in other chunks
            self.found.pop(found.layer, None)
        self.found.setdefault(found.layer, {})[found.start] = found.values

    def parts(self, layer: int | None) -> list[Any]:
        """Return the values of a layer, or of pooling, in the order of the tokens."""
        found = self.found.get(layer, {})
        return [found[start] for start in sorted(found)]


def hand_over_states(chunks: Sequence[Any], found: Sequence[PoolerOutput]) -> None:
    """Call users' functions with the hidden states of a step that was launched."""
    for one in found:
        if isinstance(one, PooledVectors):
            continue
        states = chunks[one.chunk].seq.hidden_states_request
        if one.layer is not None and states is not None and states.take is not None:
            states.take(one.layer, one.start, one.values)


def collect_states(chunks: Sequence[Any], found: Sequence[PoolerOutput]) -> None:
    """Give the sequences of a step's chunks what the step has found of them."""
    for one in chain.from_iterable(one.each if isinstance(one, PooledVectors) else (one,) for one in found):
        states = chunks[one.chunk].seq.hidden_states_request
        if states is not None and one.layer is None:
            states.add(one)
        elif states is not None and states.take is None:
            states.add(one._replace(values=one.values.clone()))  # the memory that they came in is wanted again
    for seq, start, length, _ in chunks:
        states = seq.hidden_states_request
        if states is not None and not states.pools and start + length >= seq.num_prompt_tokens:
            seq.hidden_states_request = None  # all have come: a recomputed prompt does not need them again
