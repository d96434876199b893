"""Compiles the layers of a model of transformers by torch.compile, which computes many small operations in one kernel.

Layers of one kind share a compiled function, so a model compiles as fast as one of its layers. Attention is an operator
that the compiler does not look into: see `attention_interface.py`. Weights are arguments of the compiled function, so
it sees updates in place, and weights whose memory has moved.
"""

import logging
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.errors import ConfigError
from nanoinfer.models.transformers.attention_interface import handling_attention
from nanoinfer.models.transformers.guards import TOLERANCE, attend_alone
from nanoinfer.models.transformers.probe import AttentionCall
from nanoinfer.models.transformers.split_model import SplitModel
from nanoinfer.models.transformers.transformers_config import shortened

logger = logging.getLogger("nanoinfer")

# How many tokens the compared steps have: one is compiled apart from all other numbers, and a prime equals no size of
# the model, which the compiler might take for the number of tokens.
NUM_TOKENS = (67, 1)
LAYER = re.compile(r".+?\.\d+(?=\.|$)")  # how the name of a module within a list of layers begins
Layers = Sequence[tuple[nn.Module, tuple[AttentionCall, ...]]]
Outputs = list[tuple[Hashable, Any]]  # the kind of each layer that ran, and what it returned
OPTIONS: dict[str, Any] = {"triton.cudagraphs": False}  # the engine captures graphs itself


class CompiledLayers:
    """Switches layers between transformers' forward pass and a compiled one.

    layers: with their attention calls, as `layers_of` returns them. whole: whether a layer must be one graph. Otherwise
    Python runs what cannot be compiled.
    """

    def __init__(self, layers: Layers, whole: bool) -> None:
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        compiled: dict[Any, Callable[..., Any]] = {}  # by kind
        for layer, calls in layers:
            kind = kind_of(layer, calls)
            if kind not in compiled:
                compiled[kind] = torch.compile(_own_forward(), fullgraph=whole, dynamic=True, options=OPTIONS)
            self._forwards.append((layer, MethodType(compiled[kind], layer)))

    def switch_on(self) -> None:
        """Let the layers run compiled."""
        for layer, forward in self._forwards:
            layer.forward = forward

    def switch_off(self) -> None:
        """Let the layers run as transformers wrote them."""
        for layer, _ in self._forwards:
            vars(layer).pop("forward", None)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Let the layers run as transformers wrote them in a scope: hooks on their parts are not compiled."""
        self.switch_off()
        try:
            yield
        finally:
            self.switch_on()


@torch.inference_mode()
def compile_layers(model: SplitModel, calls: Sequence[AttentionCall]) -> CompiledLayers:
    """Compile the layers of a loaded model for steps of any length, and switch them on.

    Raises ConfigError where they cannot be compiled, or compute something else then.
    """
    name, layers = type(model.model).__name__, layers_of(model.model, calls)
    for layer, _ in layers:
        for module in layer.modules():  # norms that `fast_norms.py` has replaced: the compiler fuses the class's own
            vars(module).pop("forward", None)
    expected = [_run_in_order(model, layers, num_tokens) for num_tokens in NUM_TOKENS]
    reason = "" if layers else "it has no list of layers"
    for whole in (True, False) if layers else ():
        compiled = CompiledLayers(layers, whole)
        compiled.switch_on()
        failure = _why_not_equal(model, layers, expected)
        if failure is None:
            if not whole:
                logger.info("the layers of %s are compiled in parts: %s", name, reason)
            return compiled
        compiled.switch_off()
        reason = failure
    raise ConfigError(f"compile=True cannot compile the layers of {name}: {reason}; leave it out")


def _why_not_equal(model: SplitModel, layers: Layers, expected: list[Outputs]) -> str | None:
    """Compile and run the steps whose outputs are given; return why theirs are not the same, None if they are."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the compiler says of speed
            found = [
                _run_in_order(model, layers, num, outputs) for num, outputs in zip(NUM_TOKENS, expected, strict=True)
            ]
    except Exception as error:  # it fails in many ways
        return f"{type(error).__name__}: {shortened(error)}"
    return "compiled, they give other hidden states" if any(map(_differ, found, expected)) else None


def kind_of(layer: nn.Module, calls: tuple[AttentionCall, ...]) -> Hashable:
    """Return the key of layers that share a compiled function."""
    return type(layer), calls, tuple((name, tuple(param.shape)) for name, param in layer.named_parameters())


def layers_of(model: nn.Module, calls: Sequence[AttentionCall]) -> list[tuple[nn.Module, tuple[AttentionCall, ...]]]:
    """Return the outermost modules in lists of modules that call attention, and their calls, without names."""
    found: dict[str, list[AttentionCall]] = {}
    for call in calls:
        if layer := LAYER.match(call.name):
            found.setdefault(layer[0], []).append(replace(call, name=""))
    return [(model.get_submodule(name), tuple(its)) for name, its in found.items()]


def _own_forward() -> FunctionType:
    """Return a function of its own to compile: PyTorch counts by a function's code how often it was compiled."""
    return FunctionType(_forward.__code__.replace(), _forward.__globals__)


def _forward(layer: nn.Module, *args: Any, **options: Any) -> Any:
    return type(layer).forward(layer, *args, **options)


def _run_in_order(model: SplitModel, layers: Layers, num_tokens: int, handed_on: Outputs | None = None) -> Outputs:
    """Return the outputs of the layers in a step where each token sees itself alone, scaled by the place of the call.

    handed_on: the outputs of such a step before. Each layer gets those of the layers before it in place of this step's,
    so that what is compared is one layer: a token may choose other experts after an error of rounding.
    """
    device, num_calls, outputs = model.model.device, 0, Outputs()

    def attend(module: nn.Module | None, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return attend_alone(module, query, key, value, *others) * (1 + num_calls % 8 / 16)

    def record(kind: Hashable, _layer: nn.Module, _args: Any, output: Any) -> Any:
        outputs.append((kind, output))
        return output if handed_on is None else handed_on[len(outputs) - 1][1]

    places = torch.arange(num_tokens, device=device)
    hooks = [layer.register_forward_hook(partial(record, kind_of(layer, calls))) for layer, calls in layers]
    try:
        with handling_attention(attend):
            model.run((5 + 7 * places) % model.model.get_input_embeddings().weight.shape[0], places)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _differ(found: Outputs, expected: Outputs) -> bool:
    """Return whether most tokens' states differ by more than rounding, measured by the mean one, for any kind of layer.

    A few tokens may: rounding changes which experts they choose.
    """
    errors: dict[Hashable, list[Tensor]] = {}
    for (kind, output), (_, other) in zip(found, expected, strict=True):
        states, exact = (x if isinstance(x, Tensor) else x[0] for x in (output, other))
        error = (states.float() - exact.float()).abs().mean(-1).flatten()  # (num_tokens,)
        errors.setdefault(kind, []).append(error / (TOLERANCE[exact.dtype] * exact.float().abs().mean()))
    return any(not torch.cat(of_kind).median() <= 1 for of_kind in errors.values())
