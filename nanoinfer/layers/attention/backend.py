"""The interface of attention backends."""

from typing import Protocol

from torch import Tensor

from nanoinfer.layers.attention.metadata import DecodeMetadata, KVCache, LayerCache, PrefillMetadata


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
