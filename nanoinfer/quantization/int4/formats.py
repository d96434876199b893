"""How checkpoints hold weights in 4 bits: each format's tensors, unpacked.

- AWQ packs eight outputs in an int32, in an order of its own: (num_inputs, num_outputs / 8).
- GPTQ packs eight inputs in a row: (num_inputs / 8, num_outputs). Zero points of its first version are one less than
  they should be. With desc_act, `g_idx` says which group each input belongs to.
- compressed-tensors ("pack-quantized") packs eight inputs in a row, too: (num_outputs, num_inputs / 8). Its numbers are
  signed, from -8 to 7, with 8 added.
- MXFP4 packs two values of e2m1 in a byte, the first in the low bits: (..., num_groups, 16) for groups of 32 inputs,
  with a power of two as their scale, whose exponent has 127 added (e8m0; 255 is NaN).
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from nanoinfer.errors import ModelError
from nanoinfer.ops.int4.spec import PACKED, ZERO, unpack

Format = Literal["awq", "gptq", "gptq_v2", "compressed-tensors"]
Reader = Callable[[Tensor], Tensor]

WEIGHT, SCALES, ZEROS, GROUPS = "weight", "weight_scale", "weight_zero_point", "weight_g_idx"  # our names
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which of the eight numbers of a word each output is


def readers(checkpoint_format: Format) -> Mapping[str, tuple[str, Reader] | None]:
    """Return by a tensor's name in the checkpoint our name for it, and what unpacks it; None: it is not needed.

    Numbers and zero points become (num_outputs, ...) uint8, scales (num_outputs, num_groups) float32.
    """
    if checkpoint_format == "compressed-tensors":
        return {
            "weight_packed": (WEIGHT, _unpacked),
            "weight_scale": (SCALES, _scales),
            "weight_zero_point": (ZEROS, _signed_zeros),
            "weight_g_idx": (GROUPS, _integers),
            "weight_shape": None,
        }
    if checkpoint_format == "awq":
        return {
            "qweight": (WEIGHT, lambda x: _awq_outputs(x).T),
            "qzeros": (ZEROS, lambda x: _awq_outputs(x).T),
            "scales": (SCALES, lambda x: _scales(x).T),
        }
    offset = 0 if checkpoint_format == "gptq_v2" else 0x11111111  # added to words: where a zero is 0, it carries
    return {
        "qweight": (WEIGHT, lambda x: _unpacked(x.T)),
        "qzeros": (ZEROS, lambda x: _unpacked(x + offset).T),
        "scales": (SCALES, lambda x: _scales(x).T),
        "g_idx": (GROUPS, _integers),
    }


def mxfp4_numbers(blocks: Tensor) -> Tensor:
    """Return the bits of each value of MXFP4's blocks, (..., num_groups, 16) -> (..., num_groups * 32) uint8."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3)


def _awq_outputs(words: Tensor) -> Tensor:
    """Return the numbers of AWQ's words in the order of the outputs, (size, num_outputs)."""
    numbers = _unpacked(words).unflatten(-1, (-1, PACKED))
    return numbers[..., torch.tensor(AWQ_ORDER, device=words.device)].flatten(-2)


def _unpacked(x: Tensor) -> Tensor:
    """Return the numbers of words, eight neighbours in each."""
    if x.dtype != torch.int32 or x.dim() != 2:
        raise ModelError(f"it has {x.dtype} and shape {tuple(x.shape)}; packed numbers are a matrix of torch.int32")
    return unpack(x, PACKED)


def _signed_zeros(x: Tensor) -> Tensor:
    """Return compressed-tensors' zero points, (num_outputs, num_groups): in words, before 0.9 in bytes."""
    return (x + ZERO).to(torch.uint8) if x.dtype == torch.int8 else _unpacked(x.T).T


def _scales(x: Tensor) -> Tensor:
    if not x.is_floating_point() or x.dim() != 2:
        raise ModelError(f"it has {x.dtype} and shape {tuple(x.shape)}; scales are a floating-point matrix")
    return x.float()


def _integers(x: Tensor) -> Tensor:
    if x.is_floating_point() or x.dim() != 1:
        raise ModelError(f"it has {x.dtype} and shape {tuple(x.shape)}; the groups of inputs are a list of integers")
    return x.to(torch.int32)
