"""Attention of decode in plain PyTorch: one query token of each row attends to the row's cached tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.ops.kv_cache.spec import LayerCache
from nanoinfer.ops.prefill_attention.spec import attention_with_sinks, soft_capped_attention

MAX_GATHERED = 2**24  # elements of keys that are gathered at a time: 64 MiB in float32


def decode_attention(
    q: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    scratch: list[Tensor] | None = None,
) -> Tensor:
    """Attend from one token of each row to the row's cached tokens; the result has the shape of q.

    q: (num_rows, num_heads, head_dim); num_heads a multiple of the KV heads. block_tables: (num_rows, max_blocks)
    int32. context_lens: (num_rows,) int32, the tokens that each row attends to, its own included; the result of a row
    without any is undefined. scale, window, sinks, soft_cap: see `causal_attention`.
    scratch: memory for gathered keys and values, which this function makes as large as it needs. Pass it again to the
    next call: new memory costs a CPU as much as the rest.
    A step of several tokens a row is one of more rows: see `DecodeMetadata.with_a_row_for_each_token`.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = cache.k.shape
    max_context = max(1, int(context_lens.max()))
    num_blocks = -(-max_context // block_size)
    positions = torch.arange(max_context, device=q.device)
    visible = positions < context_lens.unsqueeze(1)
    if window is not None:
        visible &= positions >= context_lens.unsqueeze(1) - window
    visible = visible[:, None, None, :]  # (num_rows, 1, 1, max_context)
    q = q.view(num_rows, num_kv_heads, -1, head_dim)  # the queries that share a KV head side by side
    sinks = None if sinks is None else sinks.view(num_kv_heads, -1)
    out = torch.empty_like(q)
    scratch = [] if scratch is None else scratch
    rows_at_once = max(1, MAX_GATHERED // (num_blocks * block_size * num_kv_heads * head_dim))
    for start in range(0, num_rows, rows_at_once):
        rows = slice(start, start + rows_at_once)
        # (rows, kv_heads, max_context, head_dim)
        gathered = _gather(cache, block_tables[rows, :num_blocks], q.dtype, scratch)
        k, v = (side[:, :, :max_context] for side in gathered)
        for side in (k, v):  # what lies past a context may be NaN, and 0 x NaN is NaN
            side.masked_fill_(~visible[rows].transpose(2, 3), 0)
        if soft_cap is not None:
            out[rows] = soft_capped_attention(q[rows], k, v, visible[rows], scale, soft_cap, sinks)
        elif sinks is not None:
            out[rows] = attention_with_sinks(q[rows], k, v, visible[rows], scale, sinks)
        else:
            out[rows] = F.scaled_dot_product_attention(q[rows], k, v, attn_mask=visible[rows], scale=scale)
    return out.view(num_rows, num_heads, head_dim)


def _gather(cache: LayerCache, tables: Tensor, dtype: torch.dtype, scratch: list[Tensor]) -> list[Tensor]:
    """Copy blocks, (num_rows, num_blocks), into the scratch memory as (num_rows, kv_heads, tokens, head_dim)."""
    _, num_kv_heads, block_size, head_dim = cache.k.shape
    heads = torch.arange(num_kv_heads, device=tables.device)
    # A block's heads lie one after the other. What pads a table is never seen, whatever it is.
    places = tables.long().clamp(min=0).unsqueeze(1) * num_kv_heads + heads[:, None]  # (num_rows, kv_heads, blocks)
    size = places.numel() * block_size * head_dim
    if not scratch or scratch[0].numel() < size:
        scratch[:] = [cache.k.new_empty(size) for _ in range(2)]
    gathered = []
    sides = (cache.k, cache.k_scales), (cache.v, cache.v_scales)
    for (side, scales), memory in zip(sides, scratch, strict=True):
        out = memory[:size].view(-1, block_size * head_dim)
        torch.index_select(side.view(-1, block_size * head_dim), 0, places.flatten(), out=out)
        out = out.view(len(tables), num_kv_heads, -1, head_dim)
        if scales is not None:
            factors = scales.view(-1, block_size)[places].view(len(tables), num_kv_heads, -1, 1)
            out = (out.float() * factors).to(dtype)
        gathered.append(out)
    return gathered
