"""How an architecture differs from the common decoder."""

from collections.abc import Callable, Set
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from nanoinfer.layers.embed_head import VocabParallelEmbedding
from nanoinfer.layers.layernorm import SCALING_NORMS, RMSNorm
from nanoinfer.layers.moe import SparseMoE
from nanoinfer.models.layer_stack import Way
from nanoinfer.ops.activations.spec import silu_and_mul
from nanoinfer.ops.common.fp8_format import Activations, RowFormat

# Which ways serve a field with another value than its default: those of a field that says nothing are none.
# `few_rows_layer.py` serves what differs within attention, or outside of the layers; the others call a layer's own
# norms and MLP.
ALL_WAYS = {"ways": frozenset(Way)}
IN_PIECES = {"ways": frozenset({Way.GRAPHS, Way.SLICES})}


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """How an architecture differs from the common decoder.

    qkv_bias: whether queries, keys and values have biases even without attention_bias in config.json. That field adds
    biases to them and to the output product.
    qk_norm: whether each head of the queries and keys is normalised before its rotation.
    whole_qk_norm: whether all queries of a token are normalised together, and all keys.
    has_post_norms: whether what attention and MLP add to the residual stream is normalised before it is added.
    has_pre_norms: whether the inputs of attention and MLP are normalised.
    has_parallel_block: whether attention and MLP have the same normalised inputs, and both are added to the residual
    stream at once.
    interleaves_rotary: whether RoPE turns neighbouring dimensions of a head together, in place of its halves.
    o_bias: whether the output product of attention has a bias if config.json has attention_bias.
    has_sinks: whether each query head has a sink, see `AttentionSpec`.
    has_gates: whether attention's output is multiplied by the sigmoid of gates, which q_proj computes too.
    interleaves_linear: whether checkpoints interleave the weights of linear attention by key heads.
    attention: the class of a layer's attention, called as `DecoderAttention`, and with its attributes `input_format`
    and `o_proj`, `project` and `attend`; None for `DecoderAttention`.
    norm, embedding, activation, experts: the classes of all norms and of the embedding, the function between the two
    products of a dense MLP, and the class of an MLP of experts, called as `SparseMoE(hidden_size, moe, tp)`.
    """

    qkv_bias: bool = field(default=False, metadata=ALL_WAYS)
    qk_norm: bool = field(default=False, metadata=ALL_WAYS)
    whole_qk_norm: bool = field(default=False, metadata=ALL_WAYS)
    has_post_norms: bool = field(default=False, metadata=IN_PIECES)
    has_pre_norms: bool = True
    has_parallel_block: bool = False
    interleaves_rotary: bool = field(default=False, metadata=ALL_WAYS)
    o_bias: bool = field(default=True, metadata=ALL_WAYS)
    has_sinks: bool = field(default=False, metadata=ALL_WAYS)
    has_gates: bool = False
    interleaves_linear: bool = field(default=False, metadata=ALL_WAYS)
    attention: Callable[..., Any] | None = None
    norm: type[RMSNorm] = field(default=RMSNorm, metadata=IN_PIECES)
    embedding: type[VocabParallelEmbedding] = field(default=VocabParallelEmbedding, metadata=ALL_WAYS)
    activation: Callable[[Tensor, RowFormat | None], Activations] = field(default=silu_and_mul, metadata=IN_PIECES)
    experts: Callable[..., SparseMoE] = field(default=SparseMoE, metadata=ALL_WAYS)

    @property
    def ways(self) -> Set[Way]:
        """Which ways serve all that differs from the common decoder; see `Layer.ways`."""
        if self.norm not in SCALING_NORMS:
            return frozenset()
        differing = [one for one in fields(self) if getattr(self, one.name) != one.default]
        return {way for way in Way if all(way in one.metadata.get("ways", ()) for one in differing)}

    @property
    def needs_whole_sums(self) -> bool:
        """Whether the ranks all-reduce what is added to the residual stream before the next norm, and not within it."""
        # The kernel that does both knows no other norms, and leaves a rank only its own rows of the stream.
        return self.has_parallel_block or not self.has_pre_norms or self.norm not in SCALING_NORMS
