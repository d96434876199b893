"""Says how an architecture differs from the common decoder, and what its layers are made of."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor

from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.embed_head import VocabParallelEmbedding
from nanoinfer.layers.layernorm import SCALING_NORMS, RMSNorm
from nanoinfer.layers.linear import RowParallelLinear
from nanoinfer.layers.moe import SparseMoE
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.layer_stack import Layer, Way
from nanoinfer.ops.activations.spec import silu_and_mul
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.quantization.linear_method import ProductKind

# The fields of `DecoderSpec` that may differ from their defaults in layers that go by all ways: they say what differs
# within attention, or outside of the layers.
SERVED_BY_ALL_WAYS = frozenset(
    (
        *("qkv_bias", "qk_norm", "whole_qk_norm", "interleaves_rotary", "o_bias", "has_sinks", "interleaves_linear"),
        *("embedding", "experts"),
    )
)
# Those that may differ too where a way calls a layer's own norms and MLP: not `few_rows_layer.py`, and
# `few_calls_layer.py` knows no norms after attention and MLP.
SERVED_IN_PIECES = frozenset(("has_post_norms", "norm", "activation"))
SERVED_IN_GRAPHS = SERVED_IN_PIECES | {"has_gates"}
IN_PIECES = frozenset((Way.GRAPHS, Way.SLICES))
# Which ways serve layers by how these multiply. A weight that is widened for each product would be widened for few
# tokens, or once more for each slice; on a CPU that makes no difference.
WAYS_OF_PRODUCTS: Mapping[ProductKind, Set[Way]] = {
    ProductKind.PLAIN: frozenset(Way),
    ProductKind.WIDENED: frozenset((Way.FEW_CALLS,)),
    ProductKind.NARROW: frozenset((Way.GRAPHS,)),
    ProductKind.ROUNDED: IN_PIECES,
}


class Mixer(Protocol):
    """Types what a layer calls on its attention of any kind, such as `DecoderAttention` or linear attention."""

    @property
    def input_format(self) -> RowFormat | None:
        """How `project` wants its inputs: None for the dtype of the model."""

    @property
    def o_proj(self) -> RowParallelLinear:
        """The output product."""

    def project(self, hidden: Activations) -> Any:
        """Compute what `attend` takes from the layer's normalised inputs."""

    def attend(self, projected: Any, step: ForwardStep) -> Tensor:
        """Return the heads' outputs, (num_tokens, o_proj's input size). Only this mixes tokens."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Says how an architecture differs from the common decoder."""

    # Queries, keys and values have biases even without attention_bias in config.json, which adds biases to them and to
    # the output product.
    qkv_bias: bool = False
    qk_norm: bool = False  # each head of the queries and keys is normalised before its rotation
    whole_qk_norm: bool = False  # all queries of a token are normalised together, and all keys
    has_post_norms: bool = False  # the outputs of attention and MLP are normalised before they are added
    has_pre_norms: bool = True  # the inputs of attention and MLP are normalised
    has_parallel_block: bool = False  # attention and MLP read the same normalised rows, and are added at once
    interleaves_rotary: bool = False  # RoPE turns neighbouring dimensions of a head together, in place of its halves
    o_bias: bool = True  # the output product of attention has a bias if config.json has attention_bias
    has_sinks: bool = False  # each query head has a sink, see `AttentionSpec`
    has_gates: bool = False  # attention's output is multiplied by the sigmoid of gates, which q_proj computes too
    interleaves_linear: bool = False  # checkpoints interleave the weights of linear attention by key heads
    attention: Callable[..., Mixer] | None = None  # a Mixer, called as `DecoderAttention`; None for DecoderAttention
    layer: Callable[..., Layer] | None = None  # called as DecoderLayer; None for DecoderLayer
    norm: type[RMSNorm] = RMSNorm  # of all norms
    embedding: type[VocabParallelEmbedding] = VocabParallelEmbedding
    activation: Callable[[Tensor, RowFormat | None], Activations] = silu_and_mul  # between a dense MLP's two products
    experts: Callable[..., SparseMoE] = SparseMoE  # an MLP of experts, called as SparseMoE(hidden_size, moe, tp)

    @property
    def ways(self) -> Set[Way]:
        """Which ways serve all that differs from the common decoder; see `Layer.ways`."""
        if self.norm not in SCALING_NORMS:
            return frozenset()
        differing = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        differing -= SERVED_BY_ALL_WAYS
        if not differing:
            return frozenset(Way)
        if differing <= SERVED_IN_PIECES:
            return IN_PIECES if "has_post_norms" in differing else IN_PIECES | {Way.FEW_CALLS}
        return frozenset((Way.GRAPHS,)) if differing <= SERVED_IN_GRAPHS else frozenset()

    @property
    def needs_whole_sums(self) -> bool:
        """Whether the ranks all-reduce what is added to the residual stream before the next norm, and not within it."""
        # The kernel that does both knows no other norms, and leaves a rank only its own rows of the stream.
        if self.layer is not None:  # which may read the stream itself
            return True
        return self.has_parallel_block or not self.has_pre_norms or self.norm not in SCALING_NORMS


@dataclass(frozen=True, slots=True)
class DecoderSetup:
    """Holds the arguments that all layers of a decoder are made with."""

    config: ModelConfig
    spec: DecoderSpec
    backends: AttentionBackends
    tp: TensorParallel
