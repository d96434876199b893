"""Writes of keys and values to a paged KV cache in 16 or 8 bits, after q/k norm and RoPE (Su et al. 2021).

A cache in 8 bits has a scale for each vector, the key or the value of one token in one KV head: the vector's largest
absolute value over the largest one of the format (448 in e4m3, 127 in int8). So nothing has to be calibrated and
nothing overflows, and since no rank has a part of a vector, the scales do not depend on the number of ranks. They are
float32: with a head_dim of 128 they take 4 bytes beside 128, and no vector is too small or too large for them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.ops.common.fp8_format import FP8, FP8_MAX, TINY
from nanoinfer.ops.dispatch import op
from nanoinfer.ops.norms.spec import rms_norm

LARGEST = {FP8: FP8_MAX, torch.int8: 127.0}  # the largest value of each format of 8 bits


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Holds one layer's keys and values, each (num_blocks, num_kv_heads, block_size, head_dim).

    A cache in 8 bits also has their scales, each (num_blocks, num_kv_heads, block_size) float32, which they are to be
    multiplied by.
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def in_8_bits(self) -> bool:
        return self.k_scales is not None


@op
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
    """Normalise and rotate queries and keys, write keys and values to the cache, and return all three.

    qkv: (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim), rows contiguous, which may be overwritten; head_dim
    even. Or (num_splits, ...), partial sums of a split-K product, which are added up first.
    norm_weights: (head_dim,) each, of queries and of keys, in the dtype of qkv, or both in float32; None for a model
    without q/k norms.
    positions: (num_tokens,) int. cos_sin_cache: (max_positions, rotary_dim) float32, contiguous; the first rotary_dim
    dimensions of each head are rotated. interleaved: see `rotate`.
    cache: contiguous; in 8 bits keys and values are rounded as by `quantize_vectors`. slot_mapping: (num_tokens,)
    int64, block_id * block_size + offset; -1 skips the write.
    Returns q (num_tokens, num_heads, head_dim), k and v (num_tokens, num_kv_heads, head_dim), not rounded to 8 bits,
    which may be views of qkv.
    """
    _, num_kv_heads, _, head_dim = cache.k.shape
    if qkv.dim() == 3:
        qkv = qkv.sum(0, dtype=torch.float32).to(qkv.dtype)
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if norm_weights is not None:
        q, k = (rms_norm(x, weight, eps) for x, weight in zip((q, k), norm_weights, strict=True))
    q, k = (rotate(x, positions, cos_sin_cache, interleaved) for x in (q, k))
    store_keys_values(k, v, cache, slot_mapping)
    return q, k, v


@op
def qkv_norm_rope_store(
    qkv: Tensor,
    num_heads: int,
    q_weight: Tensor,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Do as `norm_rope_store`, and normalise values too, by no weight (Gemma 4). Return all three.

    qkv: (num_tokens, size), or partial sums, which hold for each token `num_heads` queries, keys and values. Without
    values, these are the keys as they come. With queries alone, nothing is stored, and keys and values are None.
    q_weight, k_weight: (head_dim,) float32.
    """
    _, num_kv_heads, _, head_dim = cache.k.shape
    if qkv.dim() == 3:
        qkv = qkv.sum(0, dtype=torch.float32).to(qkv.dtype)
    heads = qkv.unflatten(1, (-1, head_dim))
    q = rotate(rms_norm(heads[:, :num_heads], q_weight, eps), positions, cos_sin_cache)
    if k_weight is None:
        return q, None, None
    k, v = heads[:, num_heads : num_heads + num_kv_heads], heads[:, -num_kv_heads:]
    k = rotate(rms_norm(k, k_weight, eps), positions, cos_sin_cache)
    v = rms_norm(v, torch.ones_like(k_weight), eps)
    store_keys_values(k, v, cache, slot_mapping)
    return q, k, v


@op
def store_keys_values(k: Tensor, v: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write each token's key and value (num_tokens, num_kv_heads, head_dim) to its slot; slot -1 writes nothing.

    k, v: contiguous in head_dim alone: models of transformers hand out views of transposed tensors. The others: see
    `norm_rope_store`.
    """
    kept = slot_mapping >= 0
    slots, block_size = slot_mapping[kept], cache.k.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    for x, side, scales in ((k, cache.k, cache.k_scales), (v, cache.v, cache.v_scales)):
        if scales is None:
            side[blocks, :, offsets] = x[kept]
        else:
            side[blocks, :, offsets], scales[blocks, :, offsets] = quantize_vectors(x[kept], side.dtype)


@op
def widen_blocks(values: Tensor, scales: Tensor, block_ids: Tensor, out: Tensor) -> None:
    """Write the blocks of these ids, times their scales, to the first places of `out`.

    values: (num_blocks, num_kv_heads, block_size, head_dim) in 8 bits; scales: the same without head_dim, float32; both
    contiguous. block_ids: (num_ids,) int32. out: (at least num_ids, ...) as values, in 16 bits.
    """
    ids = block_ids.long()
    out[: len(ids)] = values[ids].float() * scales[ids].unsqueeze(-1)


def rotate(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the two halves of each head, or of its first dimensions, by its token's position, in float32.

    x: (num_tokens, num_heads, head_dim). positions: (num_tokens,). cos_sin_cache: (max_positions, rotary_dim).
    interleaved: whether neighbouring dimensions are turned together, 0 and 1, 2 and 3, in place of the halves.
    """
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)  # (num_tokens, 1, rotary_dim / 2) each
    rotary_dim = cos_sin_cache.shape[1]
    turned = x[..., :rotary_dim].float()
    first, second = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, dim=-1)
    halves = [half.to(x.dtype) for half in (first * cos - second * sin, second * cos + first * sin)]
    rotated = torch.stack(halves, dim=-1).flatten(-2) if interleaved else torch.cat(halves, dim=-1)
    return torch.cat([rotated, x[..., rotary_dim:]], dim=-1)


def quantize_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round vectors, (..., head_dim), to `dtype`; return them and their scales, (...) float32.

    Zeros stay zeros. A vector with NaN or infinity becomes NaN as a whole, by its scale: int8 has no value for that.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1)
    scales = torch.where(largest < torch.inf, largest * (1 / LARGEST[dtype]), torch.nan)
    has_reciprocal = (scales >= TINY).unsqueeze(-1)
    x = torch.where(has_reciprocal, x * (1.0 / scales).unsqueeze(-1), 0.0).clamp(-LARGEST[dtype], LARGEST[dtype])
    return (x if dtype.is_floating_point else (x + 0.5).floor()).to(dtype), scales
