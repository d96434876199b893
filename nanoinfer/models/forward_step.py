"""Describes a forward pass as one record, which the runner makes and which goes through the model's layers."""

from dataclasses import dataclass

from torch import Tensor

from nanoinfer.caches.kv_cache import KVCache
from nanoinfer.caches.recurrent_states import RecurrentStates
from nanoinfer.layers.attention.metadata import Metadata
from nanoinfer.models.images import StepImages
from nanoinfer.ops.lora.spec import LoRARows


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """Says what a forward pass computes, and where layers find what they remember of earlier tokens.

    For a CUDA graph, the step is made inside the capture, from tables that keep their addresses. Whatever else layers
    need to know of a step becomes a field here. Each layer takes its own part of the cache and of the states.
    """

    token_ids: Tensor  # (num_tokens,) int32
    positions: Tensor  # (num_tokens,) int64, each within its sequence
    kv_cache: KVCache
    metadata: tuple[Metadata, ...]  # of a prefill or of a decode step, by block table: lengths, slots, blocks
    rows: Tensor  # (num_chunks,) or (num_rows,) int32: of the step tables, and of the recurrent states
    recurrent_states: RecurrentStates | None  # of layers with linear attention; None where there are none
    outputs: Tensor | None = None  # (num_outputs,) int64: the tokens whose hidden states become logits; None for all
    token_types: Tensor | None = None  # (num_tokens,) int32: 1 in the second text of a pair; None where all are 0
    row_mask: Tensor | None = None  # (num_tokens,) bool, False where a row is padding; None where no layer asks
    adapters: LoRARows | None = None  # which adapter each token has; None where no row has any
    images: StepImages | None = None  # what tokens of images read; None where the step has none
    rotary_positions: Tensor | None = None  # (num_tokens,) int64, by which tokens after images rotate; None: positions
    reads_all: bool = True  # False: only the hidden states of the last token of each prefill chunk are read
    routed: list[Tensor] | None = None  # each layer appends its experts' ids, (num_tokens, k); None if nobody asks

    @property
    def attention(self) -> Metadata:
        """The metadata of the first block table, for readers of lengths and of the kind of step."""
        return self.metadata[0]
