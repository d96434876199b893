"""Attention within chunks of a text (Llama 4), by any backend: a chunk is a text of its own that begins later.

Not a window: a token attends to those before it that lie in the same chunk of so many positions. So a step's metadata
is cut where chunks begin, and its block tables begin there.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanoinfer.device import numbers_to_device
from nanoinfer.errors import ConfigError
from nanoinfer.layers.attention.backend import AttentionBackend, AttentionSpec
from nanoinfer.layers.attention.metadata import DecodeMetadata, MetadataT, PrefillMetadata, cumulative_lens
from nanoinfer.ops.kv_cache.spec import LayerCache


class ChunkedBackend(AttentionBackend):
    """Computes attention within chunks of `spec.chunk` tokens by a backend for attention to whole texts.

    Raises ConfigError where blocks of the cache do not end where chunks do.
    """

    def __init__(self, spec: AttentionSpec, chunk: int, backend: AttentionBackend, block_size: int) -> None:
        if chunk % block_size:
            raise ConfigError(
                f"kvcache_block_size={block_size} does not divide the {chunk} tokens of a chunk of attention; use a "
                f"divisor that is a multiple of 16, or max_model_len={chunk} at most"
            )
        self.spec, self._backend, self._chunk, self._blocks = spec, backend, chunk, chunk // block_size
        self.name, self.needs_host = backend.name, backend.needs_host

    def plan(self, metadata: MetadataT, cache: LayerCache) -> MetadataT:
        cut: Any = self._cut_prefill(metadata) if isinstance(metadata, PrefillMetadata) else self._cut_decode(metadata)
        return replace(metadata, plans={**metadata.plans, self.spec: self._backend.plan(cut, cache)})

    def prefill(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cache: LayerCache,
        metadata: PrefillMetadata,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._backend.prefill(q, k, v, cache, metadata.plans[self.spec], sinks)

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata, sinks: Tensor | None = None) -> Tensor:
        return self._backend.decode(q, cache, metadata.plans[self.spec], sinks)

    def _cut_prefill(self, metadata: PrefillMetadata) -> PrefillMetadata:
        """Return a step in which each part of a prompt within one chunk is computed by itself."""
        parts = []  # (row of the block tables, first position of the chunk, queries, context) of each part
        for row, (query_len, context_len) in enumerate(zip(metadata.query_lens, metadata.context_lens, strict=True)):
            start = context_len - query_len
            while start < context_len:
                first = start // self._chunk * self._chunk
                end = min(first + self._chunk, context_len)
                parts.append((row, first, end - start, end - first))
                start = end
        rows, firsts, query_lens, context_lens = zip(*parts, strict=True)
        device = metadata.block_tables.device
        on_device = numbers_to_device([*map(list, (rows, firsts, query_lens, context_lens))], device)
        return replace(
            metadata,
            query_lens=query_lens,
            context_lens=context_lens,
            cu_query_lens=cumulative_lens(on_device[2]),
            cu_context_lens=cumulative_lens(on_device[3]),
            block_tables=self._later_tables(metadata.block_tables[on_device[0]], on_device[1] // self._chunk),
            plans={},
        )

    def _cut_decode(self, metadata: DecodeMetadata) -> DecodeMetadata:
        """Return a step whose rows begin where their chunks do. Each token is a row: a chunk may end between two."""
        metadata = metadata.with_a_row_for_each_token()
        chunks = (metadata.context_lens - 1).clamp(min=0) // self._chunk
        return replace(
            metadata,
            context_lens=metadata.context_lens - chunks * self._chunk,
            block_tables=self._later_tables(metadata.block_tables, chunks),
            shared_prefixes=None,
            plans={},
        )

    def _later_tables(self, tables: Tensor, chunks: Tensor) -> Tensor:
        """Return block tables that begin with the block of a chunk: of that number, in each row."""
        width = tables.shape[1]
        places = torch.arange(min(width, self._blocks), device=tables.device) + chunks.unsqueeze(1) * self._blocks
        return tables.gather(1, places.clamp(max=width - 1).long())
