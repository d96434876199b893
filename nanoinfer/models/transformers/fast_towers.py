"""Faster parts of towers on a GPU, each in the place of one of transformers that it equals.

transformers' rotation of queries and keys goes over memory some twenty times, in float32. A convolution over patches
that are given one by one is a plain product, and cuDNN takes longer for it.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.ops.rotary.spec import rotate_halves

ROTATION = "apply_rotary_pos_emb_vision"  # transformers has it once for each family, with the same arguments
Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
TRIED_SHAPE = 3, 2, 16  # tokens, heads, head_dim


def speed_up_tower(tower: nn.Module) -> int:
    """Replace the parts of a tower for which we have faster ones; return how many were replaced."""
    num_replaced = 0
    for module in tower.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)) and _is_of_patches(module):
            convolution: Any = module
            convolution.forward = partial(_embed_patches, module, module.forward)
            num_replaced += 1
        elif isinstance(module, nn.ModuleList):
            num_replaced += sum(_speed_up_layer(layer) for layer in module)
    return num_replaced


def _speed_up_layer(layer: nn.Module) -> bool:
    """Have a layer rotate by our kernel, if its function equals that; return whether it does."""
    for attention in layer.children():
        forward = type(attention).forward
        if isinstance(forward, FunctionType) and ROTATION in forward.__code__.co_names:
            original = forward.__globals__[ROTATION]
            if _equals(original):
                names = {**forward.__globals__, ROTATION: partial(_rotate, original)}
                ours = FunctionType(forward.__code__, names, None, forward.__defaults__, forward.__closure__)
                ours.__kwdefaults__ = forward.__kwdefaults__
                attention.forward = MethodType(ours, attention)
                layer.forward = partial(_run_on_device, layer.forward)
                return True
    return False


def _run_on_device(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a layer without `HostTensorsFollow`, which slows each operation: all its tensors are on the device."""
    with torch._C.DisableTorchFunction():
        return forward(*args, **options)


def _is_of_patches(module: nn.Conv2d | nn.Conv3d) -> bool:
    has_padding = module.padding != "valid" and any(module.padding)
    return module.kernel_size == module.stride and module.groups == 1 and not has_padding


def _embed_patches(module: nn.Conv2d | nn.Conv3d, original: Callable[[Tensor], Tensor], patches: Tensor) -> Tensor:
    if patches.shape[2:] != module.kernel_size:  # whole pictures
        return original(patches)
    found = F.linear(patches.flatten(1), module.weight.flatten(1), module.bias)
    return found.view(*found.shape, *(1 for _ in module.kernel_size))


def _rotate(original: Rotation, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if q.dim() != 3 or cos.dim() != 2:
        return original(q, k, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    return rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)


def _equals(original: Rotation) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, *TRIED_SHAPE, generator=generator)
    angles = torch.randn(2, TRIED_SHAPE[0], TRIED_SHAPE[2], generator=generator)
    try:
        expected = original(q, k, *angles)
    except (RuntimeError, TypeError, ValueError):  # it takes something else
        return False
    return all(torch.allclose(rotate_halves(x, *angles), one) for x, one in zip((q, k), expected, strict=True))
