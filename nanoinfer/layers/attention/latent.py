"""Backends of latent attention: their interface, the one in plain PyTorch, and which one serves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanoinfer.checkpoint.base_config import LatentAttentionConfig
from nanoinfer.errors import ConfigError
from nanoinfer.layers.attention.backend import Backend
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.attention.metadata import DecodeMetadata, Metadata, PrefillMetadata
from nanoinfer.ops.kv_cache.spec import LayerCache
from nanoinfer.ops.latent_attention.spec import gather_latents, latent_decode_attention
from nanoinfer.ops.prefill_attention.spec import causal_attention

MAX_SIZES = {"latent_size": 512, "rotary_size": 64, "plain_size": 256, "value_size": 256}  # of our kernels
MAX_ABSORBED = 2**26  # numbers of absorbed queries, and of their sums
# Expands latents, (num_tokens, latent_size), to keys and values: (num_tokens, num_heads, plain_size + value_size).
Expand = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Says what a layer's latent attention computes. Layers with equal specs share a backend."""

    num_heads: int  # of this rank
    sizes: LatentAttentionConfig
    scale: float  # the factor of the scores

    def heads_at_once(self, num_tokens: int) -> int:
        """Return how many heads attend to latents at a time, a divisor of all, so that a large step takes less memory.

        Absorbed queries and sums of latents are larger than what is expanded.
        """
        most = max(1, MAX_ABSORBED // max(1, 2 * num_tokens * self.sizes.latent_size))
        return next(count for count in range(self.num_heads, 0, -1) if self.num_heads % count == 0 and count <= most)


class LatentBackend(Backend, Protocol):
    """Computes latent attention for the layers of one spec. The vectors of the step are in the cache already."""

    spec: LatentAttentionSpec

    def reads_latents(self, metadata: Metadata) -> bool:
        """Return whether a step calls `attend_to_latents`; it calls `attend_to_heads` otherwise."""

    def attend_to_heads(
        self, q: Tensor, vectors: Tensor, expand: Expand, cache: LayerCache, metadata: PrefillMetadata
    ) -> Tensor:
        """Attend from the step's chunks to their contexts, expanded: (num_tokens, num_heads, value_size).

        q: (num_tokens, num_heads, plain_size + rotary_size). vectors: (num_tokens, vector_size), the chunks' own.
        """

    def attend_to_latents(self, absorbed: Tensor, rotated: Tensor, cache: LayerCache, metadata: Metadata) -> Tensor:
        """Attend from all tokens of the step to cached vectors; return sums of latents, like `absorbed`.

        absorbed: (num_tokens, num_heads, latent_size), contiguous; rotated: (num_tokens, num_heads, rotary_size). Heads
        come in parts, see `heads_at_once`.
        """


class TorchLatentBackend(LatentBackend):
    """Expands in prefill, and reads latents in decode."""

    name = "torch"
    needs_host = True

    def __init__(self, spec: LatentAttentionSpec) -> None:
        self.spec = spec

    def reads_latents(self, metadata: Metadata) -> bool:
        return not metadata.is_prefill

    def attend_to_heads(
        self, q: Tensor, vectors: Tensor, expand: Expand, cache: LayerCache, metadata: PrefillMetadata
    ) -> Tensor:
        sizes, start = self.spec.sizes, 0
        out = q.new_empty(*q.shape[:2], sizes.value_size)
        for row, (query_len, context_len) in enumerate(zip(metadata.query_lens, metadata.context_lens, strict=True)):
            chunk = slice(start, start + query_len)
            context = vectors[chunk]
            if query_len != context_len:
                context = gather_latents(cache, metadata.block_tables[row], context_len)
            latents, rotated = context.split([sizes.latent_size, sizes.rotary_size], dim=1)
            keys, values = expand(latents).split([sizes.plain_size, sizes.value_size], dim=2)
            keys = torch.cat((keys, rotated.unsqueeze(1).expand(-1, self.spec.num_heads, -1)), dim=2)
            out[chunk] = causal_attention(q[chunk], keys, values, self.spec.scale)
            start += query_len
        return out

    def attend_to_latents(self, absorbed: Tensor, rotated: Tensor, cache: LayerCache, metadata: Metadata) -> Tensor:
        assert isinstance(metadata, DecodeMetadata), "prefill attends to heads"
        metadata = metadata.with_a_row_for_each_token()
        tables, lens = metadata.block_tables, metadata.context_lens
        return latent_decode_attention(absorbed, rotated, cache, tables, lens, self.spec.scale)


def select_latent_backend(backends: AttentionBackends, spec: LatentAttentionSpec) -> LatentBackend:
    """Make the backend that was requested; for "auto", the fastest that serves on this device.

    Raises ConfigError where the requested one cannot, or the cache has 8 bits.
    """
    if backends.in_8_bits:
        raise ConfigError(
            "kv_cache_dtype asks for a KV cache in 8 bits, and latent attention keeps one vector of "
            f"{spec.sizes.vector_size} numbers for all heads of a token in 16 bits alone; leave kv_cache_dtype "
            "out, or use model_impl='transformers', which keeps keys and values"
        )
    name = backends.requested
    if name == "flash_attn":
        raise ConfigError(
            "attention_backend='flash_attn' has no latent attention; leave attention_backend out, or use "
            "model_impl='transformers'"
        )
    obstacle = backends.obstacle_of_device("triton") or _obstacle_of_sizes(spec.sizes)
    if name == "torch" or (name == "auto" and obstacle is not None):
        return TorchLatentBackend(spec)
    if obstacle is not None:
        raise ConfigError(f"attention_backend={name!r} {obstacle}, or use attention_backend='auto'")
    from nanoinfer.layers.attention.latent_triton import TritonLatentBackend  # imported late, as it needs Triton

    return TritonLatentBackend(spec, backends.device)


def _obstacle_of_sizes(sizes: LatentAttentionConfig) -> str | None:
    """Return why our kernels do not serve vectors of these sizes; None where they do."""
    for name, most in MAX_SIZES.items():
        size = getattr(sizes, name)
        if size > most:
            return f"takes a {name} up to {most}, and the model has {size}; use another model"
    return None
