"""How an architecture differs from the common decoder, and what a layer declares of itself."""

from collections.abc import Callable, Set
from dataclasses import dataclass, fields

from torch import Tensor

from nanoinfer.layers.embed_head import VocabParallelEmbedding
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.moe import SparseMoE
from nanoinfer.ops.activations.spec import silu_and_mul
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.quantization.linear_method import ProductKind

# Fields of DecoderSpec that a fast way through a layer serves; any other keeps an architecture off it.
# `few_rows_layer.py` serves those that differ within attention, or outside of the layers; never layers with experts.
SERVED_FOR_FEW_ROWS = frozenset(
    {"qkv_bias", "qk_norm", "whole_qk_norm", "interleaves_rotary", "o_bias", "has_sinks"}
    | {"interleaves_linear", "embedding", "experts"}
)
# `prefill_graphs.py` and `sliced_prefill.py` call the layer's own norms and MLP.
SERVED_IN_PIECES = SERVED_FOR_FEW_ROWS | {"has_post_norms", "norm", "activation"}


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
    norm, embedding, activation, experts: the classes of all norms and of the embedding, the function between the two
    products of a dense MLP, and the class of an MLP of experts, called as `SparseMoE(hidden_size, moe, tp)`.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    has_post_norms: bool = False
    has_pre_norms: bool = True
    has_parallel_block: bool = False
    interleaves_rotary: bool = False
    o_bias: bool = True
    has_sinks: bool = False
    has_gates: bool = False
    interleaves_linear: bool = False
    norm: type[RMSNorm] = RMSNorm
    embedding: type[VocabParallelEmbedding] = VocabParallelEmbedding
    activation: Callable[[Tensor, RowFormat | None], Activations] = silu_and_mul
    experts: Callable[..., SparseMoE] = SparseMoE

    def is_common_but_for(self, names: Set[str]) -> bool:
        """Return whether an architecture is the common decoder in all fields but these."""
        return all(getattr(self, field.name) == field.default for field in fields(self) if field.name not in names)

    @property
    def has_plain_norms(self) -> bool:
        """Whether the class of the norms sets `only_scales` itself, rather than inheriting it: see `RMSNorm`."""
        return bool(vars(self.norm).get("only_scales", False))

    @property
    def adds_whole_sums(self) -> bool:
        """Whether what attention and MLP add is all-reduced before the next norm, see `RowParallelLinear`."""
        return self.has_parallel_block or not self.has_pre_norms


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """What a layer declares of itself, for `execution.py` to choose how steps go through it.

    products: how it multiplies by its weights. is_common: whether it is just a norm, attention, a norm and SwiGLU.
    has_plain_attention: whether only the QKV product, attention and the output product lie between its two norms, and
    no multiplier scales what it adds to the residual stream. `prefill_graphs.py` and `sliced_prefill.py` need that.
    returns_stream: whether it returns its MLP's output and the residual stream separately; otherwise only their sum.
    """

    products: frozenset[ProductKind]
    is_common: bool
    has_plain_attention: bool
    returns_stream: bool = True

    @classmethod
    def of(
        cls, spec: DecoderSpec, products: frozenset[ProductKind], is_plain: bool, has_experts: bool
    ) -> "LayerTraits":
        """Return those of a decoder's layer. is_plain: whether it has attention, and no multipliers."""
        has_plain_attention = is_plain and spec.is_common_but_for(SERVED_IN_PIECES) and spec.has_plain_norms
        is_common = has_plain_attention and spec.is_common_but_for(SERVED_FOR_FEW_ROWS) and not has_experts
        return cls(products, is_common, has_plain_attention)
