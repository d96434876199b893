"""The interface that attention backends implement; `selection.py` chooses one."""

from typing import Protocol

from torch import Tensor

from nanoinfer.layers.attention.metadata import DecodeMetadata, KVCache, LayerCache, PrefillMetadata


class PrefillAttention(Protocol):
    """Computes causal attention for prefill steps, with scores scaled by head_dim ** -0.5.

    q: (num_tokens, num_heads, head_dim). k, v: (num_tokens, num_kv_heads, head_dim). Results have the shape of q.
    """

    name: str

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, metadata: PrefillMetadata) -> Tensor:
        """Attend from the step's chunks to their contexts. The chunks' own keys and values are in the cache already."""

    def scratch_bytes(self, bytes_per_token: int, max_model_len: int) -> int:
        """Return how much more memory a prefill step needs if it reads cached prefixes.

        bytes_per_token: size of one token's key and value in one layer. max_model_len: the longest sequence, in tokens.
        """
        return 0


class AttentionBackend(PrefillAttention, Protocol):
    """Computes attention for prefill and decode steps."""

    needs_host: bool  # whether decode reads lengths on the host, so that a CUDA graph cannot capture it

    def plan(self, metadata: DecodeMetadata, cache: KVCache) -> DecodeMetadata:
        """Return `metadata` with a plan that `decode` uses in all layers of the step. By default there is none."""
        return metadata

    def decode(self, q: Tensor, cache: LayerCache, metadata: DecodeMetadata) -> Tensor:
        """Attend from one token of each row. The result of a row without context is undefined, but never an error."""
