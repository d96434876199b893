"""Decode attention on a CPU: what the rows of a step read of the cache is found out once, for all layers.

A context within one block is read where it lies. Longer ones are gathered first, and so are many short ones, which a
single call then reads.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.decode_attention import spec
from nanoinfer.ops.kv_cache.spec import LayerCache
from nanoinfer.ops.prefill_attention.spec import attention_with_sinks, soft_capped_attention

# A call for a few rows takes about as long as it takes a thread to gather this many keys and values.
VECTORS_PER_CALL = 320


class ViewedRows(NamedTuple):
    """Says where the keys and values of some rows lie: in blocks at equal distances, equally many in each."""

    rows: slice
    size: tuple[int, ...]  # (rows, kv_heads, context, head_dim)
    stride: tuple[int, ...]
    offset: int  # of the first number


class GatheredRows(NamedTuple):
    """Says which keys and values some rows read. Shorter contexts are filled up by their own last token.

    That is a token of the row's, so what others left in the cache, which may be NaN, is not read.
    """

    rows: slice
    vector_ids: Tensor  # (rows * kv_heads * max_context,) int64: (block, head, offset) of each, as one number
    visible: Tensor | None  # (rows, 1, 1, max_context) bool; None if all is


class DecodePlan(NamedTuple):
    """Says what the rows of a step read. Rows of equal lengths are put together, in the order of their blocks."""

    order: Tensor | None  # (num_rows,) int64, the rows in the order of `parts`; None if they are in it
    places: Tensor | None  # (num_rows,) int64, where each row is in that order
    parts: list[ViewedRows | GatheredRows]


NOTHING_READ = DecodePlan(None, None, [])


def plan_decode(cache: LayerCache, block_tables: Tensor, context_lens: Tensor, window: int | None) -> DecodePlan:
    """List what the rows of a step read, for all layers of one block table.

    block_tables, context_lens, window: see `decode_attention`.
    """
    block_size = cache.block_size
    ends = context_lens.long().clamp(min=1)
    firsts = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    blocks = block_tables.gather(1, (firsts // block_size).unsqueeze(1)).squeeze(1).clamp(min=0)
    rows = []  # (whether it has to be gathered, tokens, block, first token, row)
    for row, (block, first, end) in enumerate(zip(blocks.tolist(), firsts.tolist(), ends.tolist(), strict=True)):
        # A cache in 8 bits has to be widened in any case.
        is_gathered = cache.in_8_bits or first // block_size != (end - 1) // block_size
        rows.append((is_gathered, end - first, 0 if is_gathered else block, first % block_size, row))
    rows.sort()
    order = places = None
    if (in_order := [row[-1] for row in rows]) != [*range(len(rows))]:
        order = torch.tensor(in_order, device=ends.device)
        places = order.argsort()
        block_tables, firsts, ends = block_tables[order], firsts[order], ends[order]
    parts: list[ViewedRows | GatheredRows] = []
    num_viewed = sum(not is_gathered for is_gathered, *_ in rows)
    if num_viewed:
        some, views = slice(num_viewed), _view(cache, [row[1:4] for row in rows[:num_viewed]])
        parts += views or _gather(cache, block_tables[some], firsts[some], ends[some], 0)
    if num_viewed < len(rows):
        rest = slice(num_viewed, None)
        parts += _gather(cache, block_tables[rest], firsts[rest], ends[rest], num_viewed)
    return DecodePlan(order, places, parts)


def planned_decode_attention(
    q: Tensor,
    cache: LayerCache,
    plan: DecodePlan,
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Do what `decode_attention` does, by a plan."""
    shape, (num_rows, num_heads, head_dim), num_kv_heads = q.shape, q.shape, cache.k.shape[1]
    if plan.order is not None:
        q = q.index_select(0, plan.order)
    # The queries that share a KV head side by side.
    q = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    sinks = None if sinks is None else sinks.view(num_kv_heads, -1)
    if len(plan.parts) == 1:
        out = _attend(q, cache, plan.parts[0], scale, sinks, soft_cap)
    elif plan.parts:
        out = torch.cat([_attend(q[part.rows], cache, part, scale, sinks, soft_cap) for part in plan.parts])
    else:
        return torch.empty_like(q).view(shape)
    return (out if plan.places is None else out.index_select(0, plan.places)).reshape(shape)


def _view(cache: LayerCache, rows: list[tuple[int, int, int]]) -> list[ViewedRows] | None:
    """Return views of all that rows read; None if it takes less time to gather that.

    rows: how many tokens each of the first rows reads, in which block, and from which token of it on.
    """
    _, num_kv_heads, block_size, head_dim = cache.k.shape
    groups: list[tuple[list[int], int, int]] = []  # the blocks of some rows, and which tokens of them are read
    for length, block, first in rows:
        if groups and groups[-1][1:] == (first, length) and _continues(groups[-1][0], block):
            groups[-1][0].append(block)
        else:
            groups.append(([block], first, length))
    num_vectors = len(rows) * num_kv_heads * max(length for length, _, _ in rows)
    if len(groups) > max(1, num_vectors // (VECTORS_PER_CALL * torch.get_num_threads())):
        return None
    views, start, block_numbers = [], 0, num_kv_heads * block_size * head_dim
    for blocks, first, length in groups:
        distance = blocks[1] - blocks[0] if len(blocks) > 1 else 1
        size = len(blocks), num_kv_heads, length, head_dim
        stride = distance * block_numbers, block_size * head_dim, head_dim, 1
        offset = blocks[0] * block_numbers + first * head_dim
        views.append(ViewedRows(slice(start, start + len(blocks)), size, stride, offset))
        start += len(blocks)
    return views


def _continues(blocks: list[int], block: int) -> bool:
    distance = block - blocks[-1]
    return distance > 0 if len(blocks) == 1 else distance == blocks[1] - blocks[0]


def _gather(
    cache: LayerCache, block_tables: Tensor, firsts: Tensor, ends: Tensor, first_row: int
) -> list[GatheredRows]:
    """List what rows read, as many at a time as fit; the first one is row `first_row` of the step."""
    _, num_kv_heads, block_size, head_dim = cache.k.shape
    max_context, least_context = int((ends - firsts).max()), int((ends - firsts).min())
    heads = torch.arange(num_kv_heads, device=ends.device).unsqueeze(1)
    offsets = torch.arange(max_context, device=ends.device)
    parts = []
    rows_at_once = max(1, spec.MAX_GATHERED // (max_context * num_kv_heads * head_dim))
    for start in range(0, len(ends), rows_at_once):
        rows = slice(start, min(start + rows_at_once, len(ends)))
        positions = firsts[rows, None] + offsets
        visible = None if least_context == max_context else (positions < ends[rows, None])[:, None, None, :]
        positions = torch.minimum(positions, ends[rows, None] - 1)
        blocks = block_tables[rows].gather(1, positions // block_size).long().clamp(min=0)
        ids = (blocks.unsqueeze(1) * num_kv_heads + heads) * block_size + (positions % block_size).unsqueeze(1)
        parts.append(GatheredRows(slice(first_row + rows.start, first_row + rows.stop), ids.flatten(), visible))
    return parts


def _attend(
    q: Tensor,
    cache: LayerCache,
    part: ViewedRows | GatheredRows,
    scale: float,
    sinks: Tensor | None,
    soft_cap: float | None,
) -> Tensor:
    """Attend from the queries of some rows, (rows, kv_heads, queries, head_dim)."""
    visible = None
    if isinstance(part, ViewedRows):
        k, v = (
            side.as_strided(part.size, part.stride, side.storage_offset() + part.offset) for side in (cache.k, cache.v)
        )
    else:
        visible, shape = part.visible, (q.shape[0], q.shape[1], -1, q.shape[3])
        k = _gathered(cache.k, cache.k_scales, part.vector_ids, q.dtype).view(shape)
        v = _gathered(cache.v, cache.v_scales, part.vector_ids, q.dtype).view(shape)
    if soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    if visible is None:
        visible = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool, device=k.device)
    if soft_cap is not None:
        return soft_capped_attention(q, k, v, visible, scale, soft_cap, sinks)
    assert sinks is not None, "one of the two is given"
    return attention_with_sinks(q, k, v, visible, scale, sinks)


def _gathered(side: Tensor, scales: Tensor | None, vector_ids: Tensor, dtype: torch.dtype) -> Tensor:
    vectors = side.view(-1, side.shape[-1]).index_select(0, vector_ids)
    if scales is None:
        return vectors
    return (vectors.float() * scales.view(-1)[vector_ids].unsqueeze(1)).to(dtype)
