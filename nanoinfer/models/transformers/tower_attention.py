"""Attention of what sees: one call for all images of a batch, where transformers has one for each image.

transformers tells attention functions with "flash" in their names where each image begins and ends, if the model
packs images one after the other. Towers of other kinds pass images as a batch, and are not called by this name.
"""

import inspect
from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nanoinfer.device import compute_capability, to_device
from nanoinfer.ops.common.device_properties import has_hopper_kernels
from nanoinfer.ops.segment_attention.spec import segment_attention

TOWER_ATTENTION = "nanoinfer_flash"
FLASH_DTYPES = (torch.bfloat16, torch.float16)
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
LEN_FOR_TILES = 256  # patches of a segment on average: in small windows, most of a tile would be empty
CUDNN_LEN = 512  # patches of a segment
# Patches of one shape before a layer has cuDNN prepare for it: so many lose as much time without it as that takes.
PATCHES_BEFORE_CUDNN = 2**19
MAX_SHAPES = 256  # that a layer counts patches of, before it begins anew


class Segments(NamedTuple):
    """Says where the patches of each image, or of each window of one, lie.

    lens: of all of them. starts: (1 + their number,) int32, on the device: where each begins, and where the last ends.
    tiles: of the kernel for Hopper GPUs, on the device; None on others, and for small windows.
    """

    lens: tuple[int, ...]
    starts: Tensor
    tiles: Tensor | None = None

    @classmethod
    def of(cls, starts: Tensor, device: torch.device) -> "Segments":
        """Return the segments with these bounds on a device. starts: on the host, or the call waits for the device."""
        lens = tuple(end - start for start, end in pairwise(starts.tolist()))
        tiles = None
        if sum(lens) >= LEN_FOR_TILES * len(lens) and has_hopper_kernels(device):
            from nanoinfer.ops.segment_attention.hopper import tiles_of

            tiles = to_device(torch.tensor(tiles_of(lens), dtype=torch.int32, device="cpu"), device)
        return cls(lens, to_device(starts, device) if starts.device != device else starts, tiles)


def packs_images(tower: PreTrainedModel) -> bool:
    """Return whether a tower computes the patches of several images as one sequence, and says where they begin."""
    return any("cu_seqlens" in inspect.signature(part.forward).parameters for part in tower.modules())


def attend_in_segments(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None, is_frequent: bool = False
) -> Tensor:
    """Return the outputs of attention within each segment, like q: (num_patches, num_heads, head_dim).

    k, v: the same, or of fewer heads, each of which serves as many neighbouring ones of q. is_frequent: whether this
    shape comes often enough to prepare cuDNN for it.
    """
    if k.shape[1] < q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if segments.tiles is not None:
        from nanoinfer.ops.segment_attention import hopper

        if hopper.serves(q, k, v):
            return hopper.segment_attention(q, k, v, segments.tiles, q.shape[2] ** -0.5 if scale is None else scale)
    fits_flash = q.dtype in FLASH_DTYPES and q.shape[2] % 8 == 0 and q.shape[2] <= 256
    if fits_flash and compute_capability(q.device) >= (8, 0):
        from torch.nn.attention.varlen import varlen_attn

        if is_frequent and _suits_cudnn(q, segments):
            return _attend_in_batch(q, k, v, len(segments.lens), scale)
        longest = max(segments.lens)
        heads = varlen_attn(q, k, v, segments.starts, segments.starts, longest, longest, scale=scale)
        assert isinstance(heads, Tensor), "only heads were asked for"
        return heads
    return segment_attention(q, k, v, segments.lens, scale)


def _suits_cudnn(q: Tensor, segments: Segments) -> bool:
    """Return whether cuDNN is faster: on Hopper and later, for long segments of one length."""
    is_long = len({*segments.lens}) == 1 and segments.lens[0] >= CUDNN_LEN
    return is_long and compute_capability(q.device) >= (9, 0)


def count_patches(layer: nn.Module, q: Tensor, segments: Segments) -> bool:
    """Count the patches of a layer's call; return whether its shape has come often. A new one costs cuDNN long."""
    num_patches: Counter[tuple[int, ...]] = layer.__dict__.setdefault("num_patches_by_shape", Counter())
    if len(num_patches) >= MAX_SHAPES:
        num_patches.clear()
    shape = len(segments.lens), *q.shape
    num_patches[shape] += len(q)
    return num_patches[shape] > PATCHES_BEFORE_CUDNN


def _attend_in_batch(q: Tensor, k: Tensor, v: Tensor, num_segments: int, scale: float | None) -> Tensor:
    """Compute attention within segments of one length, by cuDNN if it can."""
    q, k, v = (x.unflatten(0, (num_segments, -1)).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(BACKENDS, set_priority=True):
        heads = nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
    return heads.transpose(1, 2).flatten(0, 1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if cu_seq_lens_q is None or attention_mask is not None or query.shape[0] != 1:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return out, None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    segments = _segments(cu_seq_lens_q, q.device)
    is_frequent = count_patches(module, q, segments)
    return attend_in_segments(q, k, v, segments, scaling, is_frequent)[None], None


# By identity: each layer is given the same tensor.
_segments = lru_cache(maxsize=8)(Segments.of)

AttentionInterface.register(TOWER_ATTENTION, _attention)
