"""Decode attention on a CPU: which lines of the cache the rows of a step read is found out once, for all layers."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.decode_attention import spec
from nanoinfer.ops.kv_cache.spec import LayerCache
from nanoinfer.ops.prefill_attention.spec import attention_with_sinks, soft_capped_attention


class GatheredRows(NamedTuple):
    """Says which keys and values some rows read. Shorter contexts are filled up by their own last token.

    That is a token of the row's, so what others left in the cache, which may be NaN, is not read.
    """

    rows: slice
    lines: Tensor  # (rows * kv_heads * max_context,) int64: (block, head, offset) of each vector, as one number
    visible: Tensor | None  # (rows, 1, 1, max_context) bool; None if all is


def plan_decode(
    cache: LayerCache, block_tables: Tensor, context_lens: Tensor, window: int | None
) -> list[GatheredRows]:
    """List what the rows of a step read, for all layers of one block table.

    block_tables, context_lens, window: see `decode_attention`.
    """
    _, num_kv_heads, block_size, head_dim = cache.k.shape
    ends = context_lens.long().clamp(min=1)
    firsts = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    max_context, least_context = int((ends - firsts).max()), int((ends - firsts).min())
    heads = torch.arange(num_kv_heads, device=ends.device).unsqueeze(1)
    offsets = torch.arange(max_context, device=ends.device)
    parts = []
    rows_at_once = max(1, spec.MAX_GATHERED // (max_context * num_kv_heads * head_dim))
    for start in range(0, len(ends), rows_at_once):
        rows = slice(start, start + rows_at_once)
        positions = firsts[rows, None] + offsets
        visible = None if least_context == max_context else (positions < ends[rows, None])[:, None, None, :]
        positions = torch.minimum(positions, ends[rows, None] - 1)
        blocks = block_tables[rows].gather(1, positions // block_size).long().clamp(min=0)
        lines = (blocks.unsqueeze(1) * num_kv_heads + heads) * block_size + (positions % block_size).unsqueeze(1)
        parts.append(GatheredRows(rows, lines.flatten(), visible))
    return parts


def planned_decode_attention(
    q: Tensor,
    cache: LayerCache,
    plan: list[GatheredRows],
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Do what `decode_attention` does, by a plan."""
    num_kv_heads, head_dim = cache.k.shape[1], cache.k.shape[3]
    grouped = q.view(len(q), num_kv_heads, -1, head_dim)  # the queries that share a KV head side by side
    sinks = None if sinks is None else sinks.view(num_kv_heads, -1)
    outs = [_attend(grouped[part.rows], cache, part, scale, sinks, soft_cap) for part in plan]
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).reshape(q.shape)


def _attend(
    q: Tensor, cache: LayerCache, part: GatheredRows, scale: float, sinks: Tensor | None, soft_cap: float | None
) -> Tensor:
    num_rows, num_kv_heads, _, head_dim = q.shape
    shape = num_rows, num_kv_heads, -1, head_dim
    k = _gather(cache.k, cache.k_scales, part.lines, q.dtype).view(shape)
    v = _gather(cache.v, cache.v_scales, part.lines, q.dtype).view(shape)
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=part.visible, scale=scale)
    visible = part.visible
    if visible is None:
        visible = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool, device=k.device)
    if soft_cap is not None:
        return soft_capped_attention(q, k, v, visible, scale, soft_cap, sinks)
    assert sinks is not None, "one of the two is given"
    return attention_with_sinks(q, k, v, visible, scale, sinks)


def _gather(side: Tensor, scales: Tensor | None, lines: Tensor, dtype: torch.dtype) -> Tensor:
    vectors = side.view(-1, side.shape[-1]).index_select(0, lines)
    if scales is None:
        return vectors
    return (vectors.float() * scales.view(-1)[lines].unsqueeze(1)).to(dtype)
