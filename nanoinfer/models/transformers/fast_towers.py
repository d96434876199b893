"""Faster parts of towers on a GPU, each in the place of one of transformers that it equals.

transformers' rotation of queries and keys goes over memory some twenty times, in float32. A convolution over patches
that are given one by one is a plain product, and cuDNN takes longer for it. Additions and norms, products and
activations are separate passes over memory there.

Whether a part equals ours is tried on a copy of it with small modules in the place of its own.
"""

import copy
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.ops.activations.spec import linear_gelu_tanh
from nanoinfer.ops.norms.spec import add_layer_norm, add_rms_norm, rms_norm
from nanoinfer.ops.rotary.spec import rotate_halves

ROTATION = "apply_rotary_pos_emb_vision"  # transformers has it once for each family, with the same arguments
Rotation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
TRIED_SHAPE = 3, 2, 16  # tokens, heads, head_dim
TRIED_SIZES = 8, 12  # of hidden states, and of what an MLP has between its products
BLOCK = {"norm1", "norm2", "attn", "mlp"}  # the names of Qwen's and GLM's towers


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
        elif (parts := _gelu_mlp(module)) is not None:
            mlp: Any = module
            mlp.forward = partial(_run_mlp, *parts)
            num_replaced += 1
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
                forward = partial(_run_block, layer) if _is_known_block(layer) else layer.forward
                layer.forward = partial(_run_on_device, forward)
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
    """Rotate queries and keys in place: a layer has just computed them, and nothing else reads them."""
    if q.dim() != 3 or cos.dim() != 2 or q.shape != k.shape or q.stride() != k.stride():
        return original(q, k, cos, sin)
    rotate_halves(q, k, cos.contiguous(), sin.contiguous())
    return q, k


def _equals(original: Rotation) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, *TRIED_SHAPE, generator=generator)
    angles = torch.randn(2, TRIED_SHAPE[0], TRIED_SHAPE[2], generator=generator)
    try:
        expected = original(q.clone(), k.clone(), *angles)  # it might rotate in place, too
    except Exception:  # it takes something else
        return False
    rotate_halves(q, k, *angles)
    return all(torch.allclose(one, other) for one, other in zip((q, k), expected, strict=True))


def _run_block(block: Any, hidden: Tensor, *args: Any, **options: Any) -> Tensor:
    """Compute a block with norms before attention and MLP. hidden: (num_patches, hidden_size), or what it takes."""
    if hidden.dim() != 2 or not hidden.is_contiguous():
        return type(block).forward(block, hidden, *args, **options)
    norm = block.norm2
    if isinstance(norm, nn.LayerNorm):
        total = block.attn(block.norm1(hidden), *args, **options)
        normed = add_layer_norm(total, hidden, norm.weight, norm.bias, norm.eps, total=total)
    else:
        heads = block.attn(rms_norm(hidden, block.norm1.weight, block.norm1.variance_epsilon), *args, **options)
        normed, total = add_rms_norm(heads, hidden, norm.weight, norm.variance_epsilon)
    found: Tensor = block.mlp(normed).add_(total)
    return found


def _is_known_block(block: nn.Module) -> bool:
    """Return whether `_run_block` does what a block does."""
    parts = dict(block.named_children())
    if parts.keys() != BLOCK or type(parts["norm1"]) is not type(parts["norm2"]):
        return False
    size, generator = TRIED_SIZES[0], torch.Generator().manual_seed(0)
    x, *weights = torch.rand(3, TRIED_SHAPE[0], size, generator=generator, dtype=torch.float32, device="cpu")
    tried = copy.copy(block)
    tried._modules = {"attn": _Stub(torch.sin), "mlp": _Stub(torch.cos)}
    for index, name in enumerate(("norm1", "norm2")):
        norm: Any = copy.copy(parts[name])
        if isinstance(norm, nn.LayerNorm):
            norm.normalized_shape = (size,)
        given = zip(norm._parameters.items(), weights[index], strict=False)
        norm._parameters = {name: own if own is None else nn.Parameter(new, False) for (name, own), new in given}
        tried._modules[name] = norm
    try:
        expected = type(block).forward(tried, hidden_states=x, cu_seqlens=None, position_embeddings=None)
        found = _run_block(tried, x, cu_seqlens=None, position_embeddings=None)
    except Exception:  # it is something else, which fails in its own way
        return False
    return torch.allclose(found, expected)


class _Stub(nn.Module):
    """Stands in for a module in a trial."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return self._function(x)


def _run_mlp(first: nn.Linear, last: nn.Linear, hidden: Tensor) -> Tensor:
    between = linear_gelu_tanh(hidden.flatten(0, -2), first.weight, first.bias)
    found: Tensor = last(between).view(*hidden.shape[:-1], -1)
    return found


def _gelu_mlp(mlp: nn.Module) -> tuple[nn.Linear, nn.Linear] | None:
    """Return both products of an MLP that `_run_mlp` computes; None for another module."""
    parts = dict(mlp.named_children())
    linears = {name: part for name, part in parts.items() if type(part) is nn.Linear and part.bias is not None}
    if len(parts) != 3 or len(linears) != 2:
        return None
    (first_name, first), (last_name, last) = linears.items()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        sizes = {first_name: TRIED_SIZES, last_name: TRIED_SIZES[::-1]}
        small = {name: nn.Linear(*its, dtype=torch.float32) for name, its in sizes.items()}
        x = 4 * torch.randn(32, TRIED_SIZES[0], dtype=torch.float32)
    tried = copy.copy(mlp)
    tried._modules = {**parts, **small}
    try:
        expected = type(mlp).forward(tried, x)
        found = _run_mlp(small[first_name], small[last_name], x)
    except Exception:  # it is something else, which fails in its own way
        return None
    return (first, last) if torch.allclose(found, expected, rtol=1e-5, atol=1e-5) else None
