"""Rotation and writes to the cache on a CPU, in few operators: what the layers of a step share is computed once."""

from functools import lru_cache

import torch
from torch import Tensor

from nanoinfer.ops.kv_cache.spec import LayerCache, quantize_vectors
from nanoinfer.ops.norms.spec import rms_norm

NUM_STEPS = 4  # that are remembered: a step has a few rotary tables and block tables


def norm_rope_store(
    qkv: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _, num_kv_heads, _, head_dim = cache.k.shape
    if qkv.dim() == 3:
        qkv = qkv.sum(0, dtype=torch.float32).to(qkv.dtype)
    heads = qkv.unflatten(1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    turned, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]  # queries and keys together
    if norm_weights is not None:
        of_queries, of_keys = norm_weights
        weights = torch.cat((of_queries.expand(num_heads, -1), of_keys.expand(num_kv_heads, -1)))
        turned = rms_norm(turned, weights, eps)
    rotated = _rotate(turned, positions, cos_sin_cache, interleaved)
    q, k = rotated[:, :num_heads], rotated[:, num_heads:]
    store_keys_values(k, v, cache, slot_mapping)
    return q, k, v


def store_keys_values(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    kept, blocks, offsets = _places(slot_mapping, cache.block_size)
    for x, side, scales in ((k, cache.k, cache.k_scales), (v, cache.v, cache.v_scales)):
        stored = x if kept is None else x[kept]
        if scales is None:
            side[blocks, :, offsets] = stored
        else:
            side[blocks, :, offsets], scales[blocks, :, offsets] = quantize_vectors(stored, side.dtype)


def _rotate(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool) -> Tensor:
    cos, sin = _factors(positions, cos_sin_cache, interleaved)
    rotary_dim = cos_sin_cache.shape[1]
    turned = x[..., :rotary_dim].float()
    partners = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else turned.roll(rotary_dim // 2, -1)
    rotated = (turned * cos).addcmul_(partners, sin).to(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else torch.cat([rotated, x[..., rotary_dim:]], dim=-1)


# Tensors are found by identity. The layers of a step pass the same ones, and each step makes its own.
@lru_cache(maxsize=NUM_STEPS)
def _factors(positions: Tensor, cos_sin_cache: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return what each dimension and its partner are multiplied by, (num_tokens, 1, rotary_dim) each."""
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
    join = torch.stack if interleaved else torch.cat
    shape = len(positions), 1, cos_sin_cache.shape[1]
    return join((cos, cos), dim=-1).view(shape), join((-sin, sin), dim=-1).view(shape)


@lru_cache(maxsize=NUM_STEPS)
def _places(slot_mapping: Tensor, block_size: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return which tokens are written (None: all), and their blocks and offsets."""
    kept = None if bool((slot_mapping >= 0).all()) else slot_mapping >= 0
    slots = slot_mapping if kept is None else slot_mapping[kept]
    return kept, slots // block_size, slots % block_size
