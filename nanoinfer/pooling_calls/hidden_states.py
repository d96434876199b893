"""Hidden states of prompts as users ask for them: which layers, of which tokens, kept or handed to a function."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.config import EngineConfig
from nanoinfer.engine.hidden_states_request import HiddenStatesRequest
from nanoinfer.engine.preparer import Portions
from nanoinfer.errors import RequestError
from nanoinfer.option_fields import is_whole_number
from nanoinfer.text.prompts import PreparedRequest

# Is called with the index of the prompt, the layer, the place of the first token, and the states on the device.
OnHiddenStates = Callable[[int, int, int, torch.Tensor], object]
POSITIONS = ("prompt", "last")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class HiddenStatesOptions:
    """Says which hidden states a call asks for.

    layers: maps each layer as the user gave it to its number from 0. only_last: only the last token's states. errors:
    what the callback raised, maybe in a step that another call ran; `raising_errors` raises it in the call that asked.
    """

    layers: dict[int, int]
    only_last: bool
    callback: OnHiddenStates | None
    row_bytes: int  # of a token's states of one layer
    errors: list[Exception] = field(default_factory=list)

    def add_to(self, portions: Portions) -> Portions:
        """Have all requests of a call ask for it, beside what they ask for, and return them at once.

        Raises RequestError where memory cannot hold it all.
        """
        requests = portions.take_all()
        lens = [len(request.token_ids) for request in requests if request.error is None]
        num_bytes = self.row_bytes * len(self.layers) * (len(lens) if self.only_last else sum(lens))
        free = free_host_bytes()
        if self.callback is None and free is not None and num_bytes > free:
            raise RequestError(
                f"hidden_states of these prompts take {num_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of host "
                "memory are free; ask for fewer prompts or layers at a time, for hidden_state_positions='last', or "
                "take them by on_hidden_states"
            )
        for index, request in enumerate(requests):
            if request.error is None:
                self._add(request, index)
        return Portions.of(requests)

    def _add(self, request: PreparedRequest, index: int) -> None:
        start = len(request.token_ids) - 1 if self.only_last else 0
        layers = tuple(dict.fromkeys(self.layers.values()))
        states: HiddenStatesRequest | None = request.hidden_states_request
        if states is None:
            states = HiddenStatesRequest(pools=False, first=start)
        states.layers, states.layers_from, states.first = layers, start, min(start, states.first)
        states.take = None if self.callback is None else partial(self._call_back, index)
        if self.callback is None:
            states.make_output = partial(self._with_states, states.make_output)
        request.hidden_states_request = states

    def _call_back(self, index: int, layer: int, start: int, states: torch.Tensor) -> None:
        assert self.callback is not None
        try:
            for given, counted in self.layers.items():
                if counted == layer and not self.errors:
                    self.callback(index, given, start, states)
        except Exception as error:
            self.errors.append(error)

    def raise_errors(self) -> None:
        if self.errors:
            raise self.errors[0]

    def _with_states(self, make_output: Callable[..., Any] | None, output: Any, states: HiddenStatesRequest) -> Any:
        """Return the output of a request, with the states of each layer in one tensor, on the host."""
        parts = {given: states.parts(counted) for given, counted in self.layers.items()}
        whole = {given: torch.cat(states) for given, states in parts.items() if states}  # none of what was aborted
        made = replace(make_output(output, states) if make_output else output, hidden_states=whole)
        states.received.clear()  # which the request would keep until its call returns
        return made


class HiddenStatesReader:
    """Reads the arguments of calls that ask for hidden states, and checks them against the model."""

    def __init__(self, model_config: BaseModelConfig, config: EngineConfig, dtype: torch.dtype) -> None:
        self._num_layers = model_config.num_hidden_layers
        self._row_bytes = model_config.hidden_size * dtype.itemsize
        self._num_replicas = config.data_parallel_size

    def read(
        self, layers: Sequence[int] | None, positions: str, callback: OnHiddenStates | None
    ) -> HiddenStatesOptions | None:
        """Return what is asked for; None for nothing.

        Raises RequestError for layers, positions or a callback that cannot be served.
        """
        if positions not in POSITIONS:
            raise RequestError(f"hidden_state_positions={positions!r} is not known; use {' or '.join(POSITIONS)}")
        if layers is None:
            if callback is not None:
                raise RequestError("on_hidden_states is given without hidden_states; say which layers, such as [-1]")
            return None
        if callback is not None and not callable(callback):
            raise RequestError(f"on_hidden_states={callback!r} cannot be called; give a function")
        if callback is not None and self._num_replicas > 1:
            raise RequestError(
                f"on_hidden_states with data_parallel_size={self._num_replicas}: the states are on the devices of "
                "other processes; leave it out and take output.hidden_states, or use data_parallel_size=1"
            )
        count = self._num_layers + 1
        if not isinstance(layers, (list, tuple)) or not layers or not all(map(is_whole_number, layers)):
            raise RequestError(f"hidden_states={layers!r} must be a list of layers, such as [0, 12, -1]")
        if wrong := [layer for layer in layers if not -count <= layer < count]:
            raise RequestError(
                f"hidden_states has layer {wrong[0]}, and this model has 0 (the embedding) to {self._num_layers} "
                f"(after the last norm), or {-count} to -1"
            )
        numbers = {int(layer): int(layer) % count for layer in layers}
        return HiddenStatesOptions(numbers, positions == "last", callback, self._row_bytes)


@contextmanager
def raising_errors(
    wanted: HiddenStatesOptions | None, show: Callable[[int], object]
) -> Iterator[Callable[[int], object]]:
    """Give what a call does after each step: show its progress, or raise the error of its own callback."""
    if wanted is None:
        yield show
        return

    def check(num_done: int) -> None:
        wanted.raise_errors()
        show(num_done)

    yield check
    wanted.raise_errors()  # of the last step, which another call may have run


def free_host_bytes() -> int | None:
    """Return how much memory of the host can be had, that of file caches included; None where the system does not say.

    On Linux, what sysconf calls available leaves file caches out, and these fill most of the memory of many hosts.
    """
    with suppress(OSError):
        if match := re.search(r"^MemAvailable: *(\d+) kB$", MEMINFO.read_text(), re.MULTILINE):
            return 1024 * int(match[1])
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
