"""Attention in plain PyTorch: the backend for CPUs, and the reference that the other backends are tested against."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.layers.attention.backend import AttentionBackend, AttentionSpec
from nanoinfer.layers.attention.metadata import DecodeMetadata, LayerCache, PrefillMetadata

MAX_GATHER_ELEMENTS = 2**24  # of keys that decode gathers at a time, and of capped scores: 64 MiB in float32


class TorchBackend(AttentionBackend):
    """Runs attention in plain PyTorch on any device."""

    name = "torch"
    needs_host = True

    def __init__(self, spec: AttentionSpec) -> None:
        has_neither = spec.soft_cap is None and not spec.has_sinks
        assert spec.causal or has_neither, "attention to both sides has no caps and no sinks here"
        self.spec = spec
        self._scratch: list[Tensor] = []  # for gathered keys and values: new memory costs a CPU as much as the rest

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: PrefillMetadata, sinks: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(q)
        start = 0
        for index, (query_len, context_len) in enumerate(zip(metadata.query_lens, metadata.context_lens, strict=True)):
            chunk = slice(start, start + query_len)
            context_k, context_v = k[chunk], v[chunk]
            if query_len != context_len or cache.in_8_bits:
                context_k, context_v = gather_context(cache, metadata.block_tables[index], context_len, q.dtype)
            if self.spec.causal:
                options = self.spec.window, sinks, self.spec.soft_cap
                attended = causal_attention(q[chunk], context_k, context_v, self.spec.scale, *options)
            else:
                attended = full_attention(q[chunk], context_k, context_v, self.spec.scale, self.spec.window)
            out[chunk] = attended
            start += query_len
        return out

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata, sinks: Tensor | None = None) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        _, num_kv_heads, block_size, _ = cache.k.shape
        lens = metadata.context_lens
        max_context = max(1, int(lens.max()))
        num_blocks = -(-max_context // block_size)
        positions = torch.arange(max_context, device=q.device)
        visible = positions < lens.unsqueeze(1)
        if self.spec.window is not None:
            visible &= positions >= lens.unsqueeze(1) - self.spec.window
        visible = visible[:, None, None, :]  # (num_rows, 1, 1, max_context)
        q = q.view(num_rows, num_kv_heads, -1, head_dim)  # the queries that share a KV head side by side
        out = torch.empty_like(q)
        group = max(1, MAX_GATHER_ELEMENTS // (num_blocks * block_size * num_kv_heads * head_dim))
        for start in range(0, num_rows, group):
            rows = slice(start, start + group)
            # (rows, kv_heads, max_context, head_dim)
            gathered = self._gather(cache, metadata.block_tables[rows, :num_blocks], q.dtype)
            k, v = (side[:, :, :max_context] for side in gathered)
            for side in (k, v):  # what lies past a context may be NaN, and 0 x NaN is NaN
                side.masked_fill_(~visible[rows].transpose(2, 3), 0)
            if self.spec.soft_cap is not None:
                own = None if sinks is None else sinks.view(num_kv_heads, -1)
                sums = soft_capped_attention(q[rows], k, v, visible[rows], self.spec.scale, self.spec.soft_cap, own)
            elif sinks is None:
                sums = F.scaled_dot_product_attention(q[rows], k, v, attn_mask=visible[rows], scale=self.spec.scale)
            else:
                sums = attention_with_sinks(q[rows], k, v, visible[rows], self.spec.scale, sinks.view(num_kv_heads, -1))
            out[rows] = sums
        return out.view(num_rows, num_heads, head_dim)

    def _gather(self, cache: LayerCache, tables: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Copy blocks, (num_rows, num_blocks), into the scratch memory as (num_rows, kv_heads, tokens, head_dim)."""
        _, num_kv_heads, block_size, head_dim = cache.k.shape
        heads = torch.arange(num_kv_heads, device=tables.device)
        # A block's heads lie one after the other. What pads a table is never seen, whatever it is.
        places = tables.long().clamp(min=0).unsqueeze(1) * num_kv_heads + heads[:, None]  # (num_rows, kv_heads, blocks)
        if not self._scratch or self._scratch[0].numel() < places.numel() * block_size * head_dim:
            self._scratch = [cache.k.new_empty(places.numel() * block_size * head_dim) for _ in range(2)]
        gathered = []
        sides = ((cache.k, cache.k_scales), (cache.v, cache.v_scales))
        for (side, scales), scratch in zip(sides, self._scratch, strict=True):
            out = scratch[: places.numel() * block_size * head_dim].view(-1, block_size * head_dim)
            torch.index_select(side.view(-1, block_size * head_dim), 0, places.flatten(), out=out)
            out = out.view(len(tables), num_kv_heads, -1, head_dim)
            if scales is not None:
                factors = scales.view(-1, block_size)[places].view(len(tables), num_kv_heads, -1, 1)
                out = (out.float() * factors).to(dtype)
            gathered.append(out)
        return gathered


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

    window: how many tokens each one attends to at most, itself included. sinks: (num_heads,), and soft_cap: see
    `AttentionSpec`.
    """
    query_len, context_len = len(q), len(k)
    mask = None
    if query_len != context_len or window is not None or sinks is not None or soft_cap is not None:
        mask = torch.ones(query_len, context_len, dtype=torch.bool, device=q.device).tril(context_len - query_len)
    if mask is not None and window is not None:
        mask = mask.triu(context_len - query_len - window + 1)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, heads, tokens, head_dim)
    if mask is not None and soft_cap is not None:
        grouped = q.unflatten(1, (k.shape[1], -1))  # (1, kv_heads, heads of each, tokens, head_dim)
        own = None if sinks is None else sinks.view(k.shape[1], -1, 1)
        k, v = k.unsqueeze(2), v.unsqueeze(2)
        at_once = max(1, MAX_GATHER_ELEMENTS // (q.shape[1] * context_len))  # queries
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

    window: how many tokens each one attends to on either side at most, itself included.
    """
    assert len(q) == len(k), f"{len(q)} queries and {len(k)} keys: attention to both sides is of whole texts"
    mask = None
    if window is not None:
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1 - window).tril(window - 1)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, heads, tokens, head_dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def gather_context(cache: LayerCache, block_table: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and values of one sequence's first tokens: (length, num_kv_heads, head_dim) each."""
    block_size = cache.k.shape[2]
    positions = torch.arange(length, device=block_table.device)
    blocks, offsets = block_table[positions // block_size], positions % block_size
    k, v = cache.k[blocks, :, offsets], cache.v[blocks, :, offsets]
    if cache.k_scales is None or cache.v_scales is None:
        return k, v
    k_scales, v_scales = cache.k_scales[blocks, :, offsets], cache.v_scales[blocks, :, offsets]
    return (k.float() * k_scales.unsqueeze(-1)).to(dtype), (v.float() * v_scales.unsqueeze(-1)).to(dtype)
