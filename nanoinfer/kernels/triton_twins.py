"""Connects a Triton kernel to its twin, a function in plain PyTorch that specifies the kernel and runs on a CPU."""

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

from torch import Tensor

from nanoinfer.device import import_error

P = ParamSpec("P")
R = TypeVar("R")


def triton_on_cuda(kernel: Callable[[], Callable[P, R]]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a twin so that for CUDA tensors the function that `kernel` returns runs, if Triton is installed.

    The first argument decides, so it must be a tensor. The twin itself stays available as `__wrapped__`.
    kernel: called at the first use, since it imports the kernel: layers work without Triton.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @cache
        def on_cuda() -> Callable[P, R]:
            return function if import_error("triton") else kernel()

        @wraps(function)
        def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
            first = args[0]
            assert isinstance(first, Tensor), f"{function.__name__} takes a tensor first, not a {type(first).__name__}"
            return (on_cuda() if first.is_cuda else function)(*args, **kwargs)

        return dispatch

    return decorate
