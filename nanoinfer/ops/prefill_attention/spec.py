"""Attention of prefill in plain PyTorch: all tokens of one sequence's chunk attend to its context.

The kernels take all chunks of a step at once, and read their contexts through block tables.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.kv_cache.spec import LayerCache

MAX_SCORES = 2**24  # capped ones that are computed at a time: 64 MiB in float32


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Compute causal attention for one sequence, whose last len(q) tokens attend to all len(k) tokens.

    q: (num_queries, num_heads, head_dim), like the result. k, v: (num_keys, num_kv_heads, head_dim). scale: the factor
    of the scores. window: how many tokens each one attends to at most, itself included. sinks: (num_heads,), a score
    without a value for each head: exp(sink) is added to the sum that the softmax divides by (StreamingLLM, Xiao et al.
    2023; learned as in gpt-oss). soft_cap: scaled scores become soft_cap * tanh(score / soft_cap) (Gemma 2).
    """
    query_len, context_len = len(q), len(k)
    mask = None
    if query_len != context_len or window is not None or sinks is not None or soft_cap is not None:
        mask = torch.ones(query_len, context_len, dtype=torch.bool, device=q.device).tril(context_len - query_len)
        if window is not None:
            mask = mask.triu(context_len - query_len - window + 1)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, heads, tokens, head_dim)
    if mask is not None and soft_cap is not None:
        grouped = q.unflatten(1, (k.shape[1], -1))  # (1, kv_heads, heads of each, tokens, head_dim)
        own = None if sinks is None else sinks.view(k.shape[1], -1, 1)
        k, v = k.unsqueeze(2), v.unsqueeze(2)
        at_once = max(1, MAX_SCORES // (q.shape[1] * context_len))  # queries
        parts = zip(grouped.split(at_once, dim=3), mask.split(at_once), strict=True)
        sums = [soft_capped_attention(part, k, v, seen, scale, soft_cap, own) for part, seen in parts]
        return torch.cat(sums, dim=3).flatten(1, 2).squeeze(0).transpose(0, 1)
    if mask is not None and sinks is not None:
        return attention_with_sinks(q, k, v, mask, scale, sinks[:, None]).squeeze(0).transpose(0, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """Attend from q (..., num_queries, head_dim) to k and v (..., num_keys, head_dim), with a sink for each query.

    mask: (..., num_queries, num_keys) bool, which keys each query sees. sinks: of a shape that broadcasts to that of q
    without head_dim. A sink is computed as an extra key whose value is 0. For its score there is an extra dimension: 1
    in that key, 0 in all others, and the sink over the scale in the queries.
    """
    own = (sinks / scale).to(q.dtype).expand(q.shape[:-1]).unsqueeze(-1)
    k, v = (F.pad(x, (0, 1, 1, 0)) for x in (k, v))  # a dimension after the others, a key before the others
    k[..., 0, -1] = 1
    out = F.scaled_dot_product_attention(
        torch.cat((q, own), dim=-1), k, v, attn_mask=F.pad(mask, (1, 0), value=True), scale=scale, enable_gqa=True
    )
    return out[..., :-1]


def soft_capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, soft_cap: float, sinks: Tensor | None = None
) -> Tensor:
    """Attend from q (..., num_queries, head_dim) to k and v (..., num_keys, head_dim) by capped scores, in float32.

    mask: (..., num_queries, num_keys) bool, which keys each query sees; one that sees none gets the mean of all values.
    sinks: of a shape that broadcasts to that of q without head_dim.
    """
    scores = soft_cap * torch.tanh(q.float() @ k.float().transpose(-1, -2) * scale / soft_cap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:  # each a score without a value
        scores = torch.cat((sinks.float().expand(q.shape[:-1]).unsqueeze(-1), scores), dim=-1)
    weights = scores.softmax(dim=-1)[..., -k.shape[-2] :]
    return (weights @ v.float()).to(q.dtype)


def full_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Compute the attention of all tokens of a whole text to all of them.

    q, k, v, scale: see `causal_attention`. window: how many tokens each one attends to on either side at most, itself
    included.
    """
    assert len(q) == len(k), f"{len(q)} queries and {len(k)} keys: attention to both sides is of whole texts"
    mask = None
    if window is not None:
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1 - window).tril(window - 1)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, heads, tokens, head_dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def gather_context(
    cache: LayerCache,
    block_table: Tensor,
    length: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of one sequence's first tokens: (length, num_kv_heads, head_dim) each.

    A cache in 8 bits is widened to `dtype`. block_table: (max_blocks,) int32.
    """
    block_size = cache.k.shape[2]
    positions = torch.arange(length, device=block_table.device)
    blocks, offsets = block_table[positions // block_size], positions % block_size
    k, v = cache.k[blocks, :, offsets], cache.v[blocks, :, offsets]
    if cache.k_scales is None or cache.v_scales is None:
        return k, v
    k_factors, v_factors = cache.k_scales[blocks, :, offsets], cache.v_scales[blocks, :, offsets]
    return (k.float() * k_factors.unsqueeze(-1)).to(dtype), (v.float() * v_factors.unsqueeze(-1)).to(dtype)
