"""Lets our kernel compute the norms of a model of transformers, which takes six of PyTorch's for each.

Which norms these are is found by trying: those that our kernel equals on random numbers. So a norm of another kind
stays as it is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.ops.norms.spec import rms_norm

NUM_TRIED_ROWS = 4
EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
# What a norm may multiply by: its weight, or one more in float32 (Gemma).
SCALES: tuple[Callable[[Tensor], Tensor], ...] = (lambda weight: weight, lambda weight: 1 + weight.float())


@torch.inference_mode()
def use_norm_kernel(model: nn.Module) -> int:
    """Replace the forward of each norm that our kernel equals; return how many there are."""
    found = 0
    for module in model.modules():
        eps = next(
            (getattr(module, name) for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None
        )
        weight = getattr(module, "weight", None)
        is_norm = isinstance(weight, nn.Parameter) and weight.dim() == 1 and len([*module.parameters()]) == 1
        if not is_norm or eps is None or type(module).__module__.startswith("torch."):
            continue
        scale = next((scale for scale in SCALES if _equals(module, scale, eps)), None)
        if scale is not None:
            module.forward = partial(_norm, module, module.forward, scale, eps)
            found += 1
    return found


def _norm(
    module: Any, original: Callable[..., Tensor], scale: Callable[[Tensor], Tensor], eps: float, x: Tensor
) -> Tensor:
    # A stream in float32 beside weights in 16 bits, say, or what Gemma 3's projector has transposed.
    if x.dtype != module.weight.dtype or x.stride(-1) != 1:
        return original(x)
    return rms_norm(x, scale(module.weight), eps)


def _equals(module: Any, scale: Callable[[Tensor], Tensor], eps: float) -> bool:
    weight = module.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(NUM_TRIED_ROWS, len(weight), generator=generator, device=weight.device, dtype=weight.dtype)
    try:
        expected = module(x)
    except (RuntimeError, TypeError, ValueError):  # it takes something else
        return False
    if not isinstance(expected, Tensor) or expected.shape != x.shape or expected.dtype != x.dtype:
        return False
    tolerance = 2 * torch.finfo(x.dtype).eps
    return bool(torch.allclose(rms_norm(x, scale(weight), eps), expected, rtol=tolerance, atol=tolerance * 1e-2))
