"""A forward pass as data: one record that the runner makes, and that goes through the model and all of its layers."""

from dataclasses import dataclass

from torch import Tensor

from nanoinfer.caches.kv_cache import KVCache
from nanoinfer.caches.recurrent_states import RecurrentStates
from nanoinfer.layers.attention.metadata import Metadata


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """Says what a forward pass computes, and where layers find what they remember of earlier tokens.

    Where a CUDA graph is captured, the step is made inside the capture, from tables that stay where they are. What else
    layers come to need of a step gets a field here. Of what is remembered, each layer takes its own part.
    """

    token_ids: Tensor  # (num_tokens,) int32
    positions: Tensor  # (num_tokens,) int64, each within its sequence
    kv_cache: KVCache
    attention: Metadata  # of a prefill step or of a decode step: lengths, slots, the first block table of the rows
    outputs: Tensor | None = None  # (num_outputs,) int64: the tokens whose hidden states become logits; None for all
    recurrent_states: RecurrentStates | None = None  # of layers with linear attention; None where there are none
    rows: Tensor | None = None  # (num_chunks,) or (num_rows,) int32: whose states they are; None where there are none
    more_attention: tuple[Metadata, ...] = ()  # by the block tables after the first: other slots, and maybe windows
    token_types: Tensor | None = None  # (num_tokens,) int32: 1 in the second text of a pair; None where all are 0
    row_mask: Tensor | None = None  # (num_tokens,) bool, False where a row is padding; None where no layer asks
    routed: list[Tensor] | None = None  # layers add the experts of each token, (num_tokens, k); None: nobody asks

    def attention_of(self, table: int) -> Metadata:
        """Return the metadata by a block table: see `caches/cache_groups.py`."""
        return self.more_attention[table - 1] if table else self.attention
