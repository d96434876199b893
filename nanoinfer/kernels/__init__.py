"""Triton kernels, one file each. Their twins in PyTorch are in layers, sampling, quantization and runner.

The twins work without Triton, so nothing is imported with the package: the module of a kernel is imported when it is
first asked for. Type checkers and the rules of imports read here which ones there are.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoinfer.kernels import gated_delta_prefill as gated_delta_prefill
    from nanoinfer.kernels import gated_delta_step as gated_delta_step
    from nanoinfer.kernels import norm_rope_store as norm_rope_store
    from nanoinfer.kernels import store_keys_values as store_keys_values
    from nanoinfer.kernels import widened_blocks as widened_blocks
else:

    def __getattr__(name: str) -> ModuleType:
        if find_spec(f"nanoinfer.kernels.{name}") is None:
            raise AttributeError(f"module 'nanoinfer.kernels' has no attribute {name!r}")
        return import_module(f"nanoinfer.kernels.{name}")
