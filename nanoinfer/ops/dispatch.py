"""Connects an operation's specification in PyTorch, `ops/NAME/spec.py`, to its kernel, `ops/NAME/triton.py`."""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import ParamSpec, TypeVar

from torch import Tensor

from nanoinfer.device import import_error

P = ParamSpec("P")
R = TypeVar("R")


def op(spec: Callable[P, R]) -> Callable[P, R]:
    """Decorate a specification: for CUDA tensors the function of its name in the `triton` module beside it runs.

    The first argument decides, so it must be a tensor. Without Triton the specification runs on GPUs too. It stays
    available as `__wrapped__`. The module of kernels is imported at the first call with a CUDA tensor.
    """

    @cache
    def on_cuda() -> Callable[P, R]:
        return spec if import_error("triton") else kernel_of(spec)

    @wraps(spec)
    def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor), f"{spec.__name__} takes a tensor first, not a {type(first).__name__}"
        return (on_cuda() if first.is_cuda else spec)(*args, **kwargs)

    return dispatch


def kernel_of(spec: Callable[P, R]) -> Callable[P, R]:
    """Import the kernel of a specification: ops/NAME/spec.py's `f` is launched by ops/NAME/triton.py's `f`."""
    kernels = import_module(f"{spec.__module__.rpartition('.')[0]}.triton")
    kernel: Callable[P, R] = getattr(kernels, spec.__name__)
    return kernel
