"""How a function in plain PyTorch gets a Triton kernel for CUDA, and stays its specification."""

import importlib
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def import_error(package: str) -> ImportError | None:
    """Why `package` cannot be imported: it is not installed, say, or was built for another PyTorch."""
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        return error
    # Python takes any folder of that name for a package, one that an incomplete removal left behind too.
    return None if module.__spec__ and module.__spec__.origin else ImportError(f"{package} is an empty folder")


def triton_on_cuda(module: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For CUDA tensors, call the function of the same name in `module` instead, where Triton is installed.

    The first argument decides: it must be a tensor. `__wrapped__` is the plain version.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @cache
        def on_cuda() -> Callable[..., Any]:  # later than the import of the layers, which work without Triton
            if import_error("triton"):
                return function
            return getattr(importlib.import_module(module), function.__name__)

        @wraps(function)
        def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
            first = args[0]
            assert isinstance(first, Tensor), f"{function.__name__} takes a tensor first, not a {type(first).__name__}"
            return (on_cuda() if first.is_cuda else function)(*args, **kwargs)

        return dispatch

    return decorate
