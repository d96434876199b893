"""Rotation and writes to the cache on a CPU, in few operators: what the layers of a step share is computed once."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanoinfer.ops.kv_cache.spec import LayerCache, quantize_vectors
from nanoinfer.ops.norms.spec import rms_norm


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Holds what layers that write to the same slots share in a step: the slots, and the factors of rotations."""

    kept: Tensor | None  # (num_tokens,) bool: which tokens are written; None: all
    vector_ids: Tensor  # (num_kept, num_kv_heads) int64: (block, head, offset) of each vector, as one number
    # By the table of cosines and sines, which outlives the step, and `interleaved`: what dimensions and their partners
    # are multiplied by, (num_tokens, 1, rotary_dim) each.
    factors: dict[tuple[int, bool], tuple[Tensor, Tensor]] = field(default_factory=dict)


def plan_store(cache: LayerCache, slot_mapping: Tensor) -> StorePlan:
    """Plan the writes of a step, for all layers of one block table."""
    num_kv_heads, block_size = cache.k.shape[1:3]
    kept = None if bool((slot_mapping >= 0).all()) else slot_mapping >= 0
    slots = (slot_mapping if kept is None else slot_mapping[kept]).unsqueeze(1)
    heads = torch.arange(num_kv_heads, device=slots.device)
    return StorePlan(kept, (slots // block_size * num_kv_heads + heads) * block_size + slots % block_size)


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
    plan = plan_store(cache, slot_mapping)
    return planned_norm_rope_store(qkv, norm_weights, eps, positions, cos_sin_cache, cache, plan, interleaved)


def store_keys_values(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    planned_store(k, v, cache, plan_store(cache, slot_mapping))


def planned_norm_rope_store(
    qkv: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    cache: LayerCache,
    plan: StorePlan,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `norm_rope_store` does, by a plan."""
    _, num_kv_heads, _, head_dim = cache.k.shape
    if qkv.dim() == 3:
        qkv = qkv.sum(0, dtype=torch.float32).to(qkv.dtype)
    num_turned = qkv.shape[1] // head_dim - num_kv_heads  # heads of queries and keys, which are rotated together
    heads = qkv.view(qkv.shape[0], num_turned + num_kv_heads, head_dim)
    turned, v = heads.split_with_sizes((num_turned, num_kv_heads), 1)
    num_heads = num_turned - num_kv_heads
    if norm_weights is not None:
        of_queries, of_keys = norm_weights
        weights = torch.cat((of_queries.expand(num_heads, -1), of_keys.expand(num_kv_heads, -1)))
        turned = rms_norm(turned, weights, eps)
    key = id(cos_sin_cache), interleaved
    if key not in plan.factors:
        plan.factors[key] = _factors(positions, cos_sin_cache, interleaved)
    q, k = _rotate(turned, *plan.factors[key], interleaved).split_with_sizes((num_heads, num_kv_heads), 1)
    planned_store(k, v, cache, plan)
    return q, k, v


def planned_store(k: Tensor, v: Tensor, cache: LayerCache, plan: StorePlan) -> None:
    """Do what `store_keys_values` does, by a plan."""
    for x, side, scales in ((k, cache.k, cache.k_scales), (v, cache.v, cache.v_scales)):
        stored = x if plan.kept is None else x[plan.kept]
        if scales is not None:
            stored, factors = quantize_vectors(stored, side.dtype)
            scales.view(-1).index_put_((plan.vector_ids,), factors)
        side.view(-1, side.shape[3]).index_put_((plan.vector_ids,), stored)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotary_dim = cos.shape[2]
    is_whole = rotary_dim == x.shape[2]
    turned = (x if is_whole else x[..., :rotary_dim]).float()
    partners = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else turned.roll(rotary_dim // 2, -1)
    rotated = (turned * cos).addcmul_(partners, sin).to(x.dtype)
    return rotated if is_whole else torch.cat([rotated, x[..., rotary_dim:]], dim=-1)


def _factors(positions: Tensor, cos_sin_cache: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
    join = torch.stack if interleaved else torch.cat
    shape = positions.shape[0], 1, cos_sin_cache.shape[1]
    return join((cos, cos), dim=-1).view(shape), join((-sin, sin), dim=-1).view(shape)
