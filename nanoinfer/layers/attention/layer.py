"""Attention over a paged KV cache: the layer, the interface of its backends, and the backend in plain PyTorch.

The plain backend is the specification of the others, the one for CPUs, and the one for what they do not support.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.errors import ConfigError
from nanoinfer.layers.rotary_embedding import RotaryEmbedding, norm_rope_store
from nanoinfer.layers.attention.metadata import DecodeMetadata, KVCache, LayerCache, Metadata, PrefillMetadata, ragged_indices
from nanoinfer.kernels.dispatch import import_error

MAX_GATHER_ELEMENTS = 2**24  # of keys that the plain decode gathers at a time: 64 MiB in float32


class PrefillAttention(Protocol):
    """Attends from the chunks of a prefill step, causally, scaled by head_dim ** -0.5.

    q: (num_tokens, num_heads, head_dim). k, v: (num_tokens, num_kv_heads, head_dim). Results have the shape of q.
    """

    name: str

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: PrefillMetadata) -> Tensor:
        """Attend from the step's chunks, whose keys and values (k, v) are in the cache already."""

    def scratch_bytes(self, bytes_per_token: int, max_model_len: int) -> int:
        """Memory that a step with cached prefixes takes beyond what one without them does.

        bytes_per_token: of one layer's key and value. max_model_len: the most tokens that a sequence may have.
        """
        return 0


class AttentionBackend(PrefillAttention, Protocol):
    """Attends in decode steps too."""

    needs_host: bool  # whether decode reads lengths on the host, so that it cannot be captured in a CUDA graph

    def plan(self, metadata: DecodeMetadata, cache: KVCache) -> DecodeMetadata:
        """Add what `decode` works out once a step for all layers: nothing, unless a backend says otherwise."""
        return metadata

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata) -> Tensor:
        """Attend from one token for each row; a row with a context of 0 tokens gives anything but an error."""


class Attention(nn.Module):
    """What lies between the qkv product and the output product: norms, rotation, the write to the cache, attention."""

    def __init__(self, rotary_emb: RotaryEmbedding, norm_eps: float, backend: AttentionBackend) -> None:
        super().__init__()
        self.rotary_emb = rotary_emb
        self.norm_eps = norm_eps
        self.backend = backend

    def forward(
        self,
        qkv: Tensor,
        norm_weights: tuple[Tensor, Tensor] | None,
        positions: Tensor,
        cache: LayerCache,
        metadata: Metadata,
    ) -> Tensor:
        """Attend from all tokens of the step: (num_tokens, num_heads, head_dim). See `norm_rope_store` for shapes."""
        q, k, v = norm_rope_store(
            qkv, norm_weights, self.norm_eps, positions, self.rotary_emb.cos_sin_cache, *cache, metadata.slot_mapping
        )
        if isinstance(metadata, PrefillMetadata):
            return self.backend.prefill(q, k, v, cache, metadata)
        return self.backend.decode(q, cache, metadata)


class TorchBackend(AttentionBackend):
    """Plain PyTorch: for a CPU, and the twin that the other backends are tested against."""

    name = "torch"
    needs_host = True

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: PrefillMetadata) -> Tensor:
        out = torch.empty_like(q)
        start = 0
        for index, (query_len, context_len) in enumerate(zip(metadata.query_lens, metadata.context_lens, strict=True)):
            chunk = slice(start, start + query_len)
            context_k, context_v = k[chunk], v[chunk]
            if query_len != context_len:
                context_k, context_v = gather_context(cache, metadata, slice(index, index + 1))
            out[chunk] = causal_attention(q[chunk], context_k, context_v)
            start += query_len
        return out

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        _, num_kv_heads, block_size, _ = cache.k.shape
        lens = metadata.context_lens
        num_blocks = max(1, -(-int(lens.max()) // block_size))
        visible = torch.arange(num_blocks * block_size, device=q.device) < lens.unsqueeze(1)
        visible = visible[:, None, None, :]  # (num_rows, 1, 1, max_context)
        q = q.view(num_rows, num_kv_heads, -1, head_dim)  # the queries that share a KV head side by side
        out = torch.empty_like(q)
        group = max(1, MAX_GATHER_ELEMENTS // (num_blocks * block_size * num_kv_heads * head_dim))
        for start in range(0, num_rows, group):
            rows = slice(start, start + group)
            tables = metadata.block_tables[rows, :num_blocks]
            k, v = (side[tables].transpose(1, 2).flatten(2, 3) for side in cache)  # (rows, kv_heads, max_context, dim)
            for side in (k, v):  # what lies past a context may be NaN, and 0 x NaN is NaN
                side.masked_fill_(~visible[rows].transpose(2, 3), 0)
            out[rows] = F.scaled_dot_product_attention(q[rows], k, v, attn_mask=visible[rows])
        return out.view(num_rows, num_heads, head_dim)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence: the last len(q) of len(k) tokens attend to themselves and all before them."""
    query_len, context_len = len(q), len(k)
    mask = None
    if query_len != context_len:
        mask = torch.ones(query_len, context_len, dtype=torch.bool, device=q.device).tril(context_len - query_len)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, heads, tokens, head_dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def gather_context(cache: LayerCache, metadata: PrefillMetadata, chunks: slice) -> tuple[Tensor, Tensor]:
    """Copy the whole contexts of some chunks out of the cache: (sum of context_lens, num_kv_heads, head_dim) each."""
    block_size = cache.k.shape[2]
    cu_lens = metadata.cu_context_lens[chunks.start : chunks.stop + 1]
    segments, positions = ragged_indices(cu_lens - cu_lens[0], sum(metadata.context_lens[chunks]))
    blocks = metadata.block_tables[chunks][segments, positions // block_size]
    return cache.k[blocks, :, positions % block_size], cache.v[blocks, :, positions % block_size]


def select_backend(
    requested: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> AttentionBackend:
    """The backend that `requested` names; for "auto", the fastest that serves this device, dtype and these sizes.

    Raises ConfigError where the requested one cannot, with the reason.
    """
    names = ("triton", "flash_attn", "torch")
    obstacles = {name: _obstacle(name, device, dtype, head_dim, block_size) for name in names}
    if requested == "auto":
        requested = next(name for name in names if obstacles[name] is None)
    if obstacles[requested] is not None:
        raise ConfigError(f"attention_backend={requested!r} {obstacles[requested]}, or use attention_backend='auto'")
    if requested == "torch":
        return TorchBackend()
    # What these import is slow to import, or not there.
    from nanoinfer.layers.attention.triton import TritonBackend

    if obstacles["flash_attn"] is None:
        from nanoinfer.layers.attention.flash_attn import FlashAttentionBackend

        flash_attn = FlashAttentionBackend()
        return flash_attn if requested == "flash_attn" else TritonBackend(flash_attn)
    from nanoinfer.layers.attention.torch_varlen import VarlenAttention

    return TritonBackend(VarlenAttention())


def _obstacle(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why a backend cannot serve; None where it can."""
    if backend == "torch":
        return None
    if device.type != "cuda":
        return f"runs on CUDA, and device is {device.type!r}; use a GPU"
    for package in ("triton", backend):
        if error := import_error(package):
            return f"needs the package {package.replace('_', '-')}, which cannot be imported ({error}); install it"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return f"needs a GPU of compute capability 8.0 or more, and {torch.cuda.get_device_name(device)} has less"
    if dtype == torch.float32:
        return "computes in 16 bits, and dtype is 'float32'; use dtype='bfloat16'"
    if backend == "triton" and head_dim not in (64, 128):
        return f"takes a head_dim of 64 or 128, and the model has {head_dim}; use another model"
    if backend == "flash_attn" and (head_dim % 8 != 0 or head_dim > 256):
        return f"takes a head_dim that is a multiple of 8 up to 256, and the model has {head_dim}; use another model"
    if backend == "flash_attn" and block_size % 256 != 0:
        return f"needs kvcache_block_size to be a multiple of 256, not {block_size}; use 256"
    return None
