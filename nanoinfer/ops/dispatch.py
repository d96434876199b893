"""Connects an operation's specification in PyTorch, `ops/NAME/spec.py`, to what computes the same faster beside it.

That is its kernel for GPUs, `ops/NAME/triton.py`, and where the specification wastes a CPU's time, `ops/NAME/cpu.py`.
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import ParamSpec, TypeVar

from torch import Tensor

from nanoinfer.device import import_error

P = ParamSpec("P")
R = TypeVar("R")


def op(spec: Callable[P, R]) -> Callable[P, R]:
    """Decorate a specification: for CUDA tensors the function of its name in the `triton` module beside it runs.

    For CPU tensors the one in the `cpu` module beside it runs, if there is one. The first argument decides, so it must
    be a tensor. Without Triton the specification runs on GPUs too. It stays available as `__wrapped__`. A module is
    imported at the first call with such a tensor.
    """

    @cache
    def on_cuda() -> Callable[P, R]:
        return spec if import_error("triton") else kernel_of(spec)

    @cache
    def on_cpu() -> Callable[P, R]:
        is_there = Path(spec.__code__.co_filename).with_name("cpu.py").exists()
        return getattr(import_module(_beside(spec, "cpu")), spec.__name__, spec) if is_there else spec

    @wraps(spec)
    def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor), f"{spec.__name__} takes a tensor first, not a {type(first).__name__}"
        chosen = on_cuda() if first.is_cuda else on_cpu() if first.is_cpu else spec
        return chosen(*args, **kwargs)

    return dispatch


def kernel_of(spec: Callable[P, R]) -> Callable[P, R]:
    """Import the kernel of a specification: ops/NAME/spec.py's `f` is launched by ops/NAME/triton.py's `f`."""
    kernel: Callable[P, R] = getattr(import_module(_beside(spec, "triton")), spec.__name__)
    return kernel


def _beside(spec: Callable[..., object], name: str) -> str:
    return f"{spec.__module__.rpartition('.')[0]}.{name}"
