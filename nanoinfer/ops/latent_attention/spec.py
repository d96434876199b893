"""Latent attention (MLA, DeepSeek-V2, 2024): the write of a token's vector, and attention to such vectors.

A token's vector is its latent, from which keys and values of all heads can be made, and a rotated part that the keys of
all heads have. Attention need not make them: queries are multiplied by what makes keys (absorbed), so that the vectors
are keys, and the latents are values; what makes values is multiplied into the sums.
"""

import torch
from torch import Tensor

from nanoinfer.ops.dispatch import op
from nanoinfer.ops.kv_cache.spec import LayerCache, rotate
from nanoinfer.ops.norms.spec import rms_norm

MAX_GATHERED = 2**24  # numbers that are gathered at a time


@op
def norm_rope_store_latents(
    latents: Tensor,
    norm_weight: Tensor,
    eps: float,
    queries: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor,
    interleaved: bool = False,
) -> Tensor:
    """Make the vectors of tokens, write them to the cache, and return them; rotate the queries in their place.

    latents: (num_tokens, latent_size + rotary_dim), like the result; rows contiguous. The latents are normalised, what
    follows them is rotated. norm_weight: (latent_size,).
    queries: (num_tokens, num_heads, size), the heads of a token contiguous. The last rotary_dim numbers of each head
    are rotated.
    positions: (num_tokens,) int. cos_sin_cache: (max_positions, rotary_dim) float32, contiguous. interleaved: see
    `rotate`. cache: of one KV head, see `LatentLayout`. slot_mapping: (num_tokens,) int64; -1 skips the write.
    """
    rotary_dim = cos_sin_cache.shape[1]
    queries[..., -rotary_dim:] = rotate(queries[..., -rotary_dim:], positions, cos_sin_cache, interleaved)
    latent, key = latents.split([len(norm_weight), rotary_dim], dim=1)
    key = rotate(key.unsqueeze(1), positions, cos_sin_cache, interleaved).squeeze(1)
    vectors = torch.cat((rms_norm(latent.contiguous(), norm_weight, eps), key), dim=1)
    kept = slot_mapping >= 0
    slots, block_size = slot_mapping[kept], cache.block_size
    cache.k[slots // block_size, 0, slots % block_size] = vectors[kept]
    return vectors


@op
def store_and_absorb(
    latents: Tensor,
    norm_weight: Tensor,
    eps: float,
    queries: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor,
    interleaved: bool,
    of_keys: Tensor,
) -> Tensor:
    """Do as `norm_rope_store_latents`, and return absorbed queries in the place of vectors: for few tokens.

    of_keys: (num_heads, plain_size, latent_size), by which the first numbers of the queries are multiplied; the weights
    of a head are contiguous. Returns (num_tokens, num_heads, latent_size), contiguous.
    """
    norm_rope_store_latents(
        latents, norm_weight, eps, queries, positions, cos_sin_cache, cache, slot_mapping, interleaved
    )
    return torch.einsum("thp,hpl->thl", queries[..., : of_keys.shape[1]], of_keys).contiguous()


@op
def values_of_sums(sums: Tensor, of_values: Tensor) -> Tensor:
    """Make each head's result of its sum of latents, (num_tokens, num_heads, value_size): for few tokens.

    sums: (num_tokens, num_heads, latent_size), contiguous. of_values: (num_heads, value_size, latent_size), the weights
    of a head contiguous.
    """
    return torch.einsum("thl,hvl->thv", sums, of_values).contiguous()


def gather_latents(cache: LayerCache, block_tables: Tensor, length: int) -> Tensor:
    """Return the vectors of the first tokens of sequences: (..., length, size). block_tables: (..., max_blocks)."""
    positions = torch.arange(length, device=block_tables.device)
    blocks = block_tables[..., positions // cache.block_size].long().clamp(min=0)  # what pads a table is never seen
    return cache.k[blocks, 0, positions % cache.block_size]


def latent_decode_attention(
    absorbed: Tensor, rotated: Tensor, cache: LayerCache, block_tables: Tensor, context_lens: Tensor, scale: float
) -> Tensor:
    """Attend from one token of each row to the vectors of the row's tokens; return sums of latents.

    absorbed: (num_rows, num_heads, latent_size), like the result; rotated: (num_rows, num_heads, rotary_dim). Together
    they are queries of vectors. The others: see `decode_attention`.
    """
    q = torch.cat((absorbed, rotated), dim=2)
    longest, latent_size = max(1, int(context_lens.max())), cache.v.shape[-1]
    visible = (torch.arange(longest, device=q.device) < context_lens.unsqueeze(1)).unsqueeze(1)
    rows_at_once = max(1, MAX_GATHERED // (longest * q.shape[2]))
    out = torch.empty_like(absorbed)
    for start in range(0, len(q), rows_at_once):
        rows = slice(start, start + rows_at_once)
        vectors = gather_latents(cache, block_tables[rows], longest)
        # What lies past a context may be NaN, and 0 x NaN is NaN.
        vectors = vectors.masked_fill(~visible[rows].transpose(1, 2), 0).float()
        scores = (q[rows].float() @ vectors.transpose(1, 2) * scale).masked_fill(~visible[rows], -1e30)
        out[rows] = scores.softmax(dim=-1) @ vectors[..., :latent_size]
    return out
