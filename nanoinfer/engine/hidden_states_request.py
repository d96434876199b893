"""Says which hidden states of prompts requests want: pooled to an embedding or scores, or as they are."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nanoinfer.option_fields import RowOption


class ChunkStates(NamedTuple):
    """Holds hidden states of one prompt from one step, or the values that pooling made of them."""

    chunk: int  # index of the prompt's chunk in the step
    layer: int | None  # whose hidden states these are; None for pooled values
    start: int  # the first prompt token that `values` belong to
    values: Any  # (num_tokens, size), a tensor on the host; num_tokens is 1 for a single pooled vector


@dataclass(slots=True, eq=False)
class HiddenStatesRequest:
    """Says which hidden states of its prompt a request wants, and collects them as they come."""

    pools: bool  # whether the states are pooled; the request then ends with its prompt
    first: int  # the first token whose states are wanted; tokens before it may come from the prefix cache
    # Makes the user's output from the RequestOutput and this object; None where that is the RequestOutput itself.
    make_output: Callable[..., Any] | None = None
    layers: tuple[int, ...] = ()  # whose states are wanted without pooling; 0 is the embedding
    layers_from: int = 0  # the first token whose states are wanted of these layers
    second_text: int | None = None  # where the second text of a pair begins; None for one text
    # Called with a layer, the first token, and the states on the device, as soon as their step is launched. None keeps
    # the states in `received`.
    take: Callable[[int, int, Any], object] | None = None
    # By layer (None: pooled) and by the first token of each part; a part that is computed again replaces the old one.
    received: dict[int | None, dict[int, Any]] = field(default_factory=dict)

    def row_value(self, num_prompt_tokens: int) -> list[int]:
        """Return the fields of `WantedStates` after num_prompt_tokens as one list, the layers at its end."""
        second_text = num_prompt_tokens if self.second_text is None else self.second_text
        return [self.pools, self.layers_from, self.take is not None, second_text, *self.layers]

    def add(self, part: ChunkStates) -> None:
        first = 0 if part.layer is None else self.layers_from
        if part.start <= first:  # the prompt is computed again, maybe in other chunks
            self.received.pop(part.layer, None)
        self.received.setdefault(part.layer, {})[part.start] = part.values

    def parts(self, layer: int | None) -> list[Any]:
        """Return the values of a layer, or of pooling, in the order of the tokens."""
        by_start = self.received.get(layer, {})
        return [by_start[start] for start in sorted(by_start)]

    def to_output(self, output: Any) -> Any:
        """Return what the user gets, given the RequestOutput."""
        return output if self.make_output is None else self.make_output(output, self)


def _row_value(_params: object, seq: Any) -> list[int] | None:
    request = seq.hidden_states_request
    return None if request is None else request.row_value(seq.num_prompt_tokens)


HIDDEN_STATES = RowOption(derive=_row_value)


class WantedStates(NamedTuple):
    """Says which hidden states of its prompt a row wants."""

    num_prompt_tokens: int
    pools: int  # 1: they are pooled, and no token is sampled
    layers_from: int  # the first token whose hidden states are wanted as they are
    keeps_on_device: int  # 1: these stay on the device, for a function
    second_text: int  # where the second text of a pair begins; num_prompt_tokens where there is none
    layers: list[int]  # whose hidden states are wanted as they are
