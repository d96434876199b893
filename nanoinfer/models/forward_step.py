"""A forward pass as data: one record that the runner makes, and that goes through the model and all of its layers."""

from dataclasses import dataclass

from torch import Tensor

from nanoinfer.layers.attention.kv_cache import KVCache
from nanoinfer.layers.attention.metadata import Metadata
from nanoinfer.layers.recurrent_states import RecurrentStates


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """Says what a forward pass computes, and where layers find what they remember of earlier tokens.

    Where a CUDA graph is captured, the step is made inside the capture, from tables that stay where they are. What else
    layers come to need of a step gets a field here. Of what is remembered, each layer takes its own part.
    """

    token_ids: Tensor  # (num_tokens,) int32
    positions: Tensor  # (num_tokens,) int64, each within its sequence
    kv_cache: KVCache
    attention: Metadata  # of a prefill step or of a decode step: lengths, slots, block tables
    outputs: Tensor | None = None  # (num_outputs,) int64: the tokens whose hidden states become logits; None for all
    recurrent_states: RecurrentStates | None = None  # of layers with linear attention; None where there are none
    rows: Tensor | None = None  # (num_chunks,) or (num_rows,) int32: whose states they are; None where there are none
    windowed_attention: tuple[Metadata, ...] = ()  # of the groups of layers beside the first: other slots and tables
    token_types: Tensor | None = None  # (num_tokens,) int32: 1 in the second text of a pair; None where all are 0
    row_mask: Tensor | None = None  # (num_tokens,) bool, False where a row is padding; None where no layer asks
    routed: list[Tensor] | None = None  # layers add the experts of each token, (num_tokens, k); None: nobody asks

    def attention_of(self, group: int) -> Metadata:
        """Return the metadata of a group of layers: see `kv_cache_groups.py`."""
        return self.windowed_attention[group - 1] if group else self.attention
