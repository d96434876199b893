"""Attention of decode in plain PyTorch: one query token of each row attends to the row's cached tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.integers import ceil_div
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
) -> Tensor:
    """Attend from one token of each row to the row's cached tokens; the result has the shape of q.

    q: (num_rows, num_heads, head_dim); num_heads a multiple of the KV heads. block_tables: (num_rows, max_blocks)
    int32. context_lens: (num_rows,) int32, the tokens that each row attends to, its own included; the result of a row
    without any is undefined. scale, window, sinks, soft_cap: see `causal_attention`.
    A step of several tokens a row is one of more rows: see `DecodeMetadata.with_a_row_for_each_token`.
    """
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = cache.k.shape
    max_context = max(1, int(context_lens.max()))
    num_blocks = ceil_div(max_context, block_size)
    positions = torch.arange(max_context, device=q.device)
    visible = positions < context_lens.unsqueeze(1)
    if window is not None:
        visible &= positions >= context_lens.unsqueeze(1) - window
    visible = visible[:, None, None, :]  # (num_rows, 1, 1, max_context)
    q = q.view(num_rows, num_kv_heads, -1, head_dim)  # the queries that share a KV head side by side
    sinks = None if sinks is None else sinks.view(num_kv_heads, -1)
    out = torch.empty_like(q)
    rows_at_once = max(1, MAX_GATHERED // (num_blocks * block_size * num_kv_heads * head_dim))
    for start in range(0, num_rows, rows_at_once):
        rows = slice(start, start + rows_at_once)
        # (rows, kv_heads, max_context, head_dim)
        gathered = _gather(cache, block_tables[rows, :num_blocks], q.dtype)
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


def _gather(cache: LayerCache, tables: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the keys and the values of blocks, (num_rows, num_blocks), as (num_rows, kv_heads, tokens, head_dim)."""
    blocks = tables.long().clamp(min=0)  # what pads a table is never seen, whatever it is
    gathered = []
    for side, scales in ((cache.k, cache.k_scales), (cache.v, cache.v_scales)):
        vectors = side[blocks].transpose(1, 2)  # (num_rows, kv_heads, num_blocks, block_size, head_dim)
        if scales is not None:
            vectors = (vectors.float() * scales[blocks].transpose(1, 2).unsqueeze(-1)).to(dtype)
        gathered.append(vectors.flatten(2, 3))
    return gathered
