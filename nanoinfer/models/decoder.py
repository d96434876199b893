"""The pre-norm decoder that most open models are: grouped-query attention with RoPE, a gated MLP, RMSNorm.

What differs between architectures is in a `DecoderSpec`, and a file beside this one has that of each family. Module
names are those of the checkpoint, except for the packed projections (see `packed_modules_mapping` in `causal_lm.py`).
`layer_stack.py` says how a step goes through the layers; `execution.py` chooses another way where one is faster.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from nanoinfer.caches.block_layout import num_local_kv_heads
from nanoinfer.caches.kv_cache_layout import LayerPlace
from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.attention.attention_layer import Attention
from nanoinfer.layers.attention.backend import AttentionSpec
from nanoinfer.layers.attention.backend_selection import AttentionBackends
from nanoinfer.layers.gated_delta_net import GatedDeltaNet
from nanoinfer.layers.layernorm import ResidualStream, ResidualSum, RMSNorm, WholeNorm, normalise_wholly
from nanoinfer.layers.linear import (
    MergedColumnParallelLinear,
    PartialSum,
    QKVParallelLinear,
    RowParallelLinear,
    ShardedVector,
)
from nanoinfer.layers.rotary_embedding import RotaryEmbedding, rotary_embeddings
from nanoinfer.models.decoder_spec import IN_PIECES, WAYS_OF_PRODUCTS, DecoderSetup, DecoderSpec, Mixer
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.models.layer_stack import Layer, LayerStack, Way
from nanoinfer.ops.activations.spec import sigmoid_and_mul
from nanoinfer.ops.common.fp8_format import Activations, RowFormat
from nanoinfer.quantization.method_selection import quantize_layer


class DecoderAttention(nn.Module):
    """Computes attention and the products before and after it.

    place: this layer's part of the KV cache. window: how many tokens each token attends to, or None for all.
    """

    def __init__(self, setup: DecoderSetup, place: LayerPlace, window: int | None, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        config, spec, tp = setup.config, setup.spec, setup.tp
        num_heads, num_kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        qkv_bias, o_bias = spec.qkv_bias or config.attention_bias, spec.o_bias and config.attention_bias
        self.place = place
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, head_dim, num_heads, num_kv_heads, qkv_bias, tp, has_gates=spec.has_gates
        )
        self.o_proj = RowParallelLinear(num_heads * head_dim, config.hidden_size, o_bias, tp)
        self.has_whole_norms = spec.whole_qk_norm
        if spec.whole_qk_norm:
            of_keys = tp.split_of_kv_heads(num_kv_heads)
            self.q_norm: Any = WholeNorm(num_heads, head_dim, config.rms_norm_eps, tp, tp)
            self.k_norm: Any = WholeNorm(num_kv_heads, head_dim, config.rms_norm_eps, tp, of_keys)
        else:
            has_norms = spec.qk_norm if config.qk_norm is None else config.qk_norm
            self.q_norm = spec.norm(head_dim, config.rms_norm_eps) if has_norms else None
            self.k_norm = spec.norm(head_dim, config.rms_norm_eps) if has_norms else None
        attention = AttentionSpec(
            num_heads=tp.shard_size(num_heads, "query heads"),
            num_kv_heads=num_local_kv_heads(config, tp),
            head_dim=head_dim,
            scale=config.attention_scale,
            window=window,
            has_sinks=spec.has_sinks,
            soft_cap=config.attention_soft_cap,
        )
        self.sinks = ShardedVector(num_heads, tp) if spec.has_sinks else None
        self.heads_size = attention.num_heads * head_dim
        self.attn = Attention(rotary_emb, config.rms_norm_eps, setup.backends.for_layer(attention, place))

    @property
    def input_format(self) -> RowFormat | None:
        return self.qkv_proj.input_format

    def project(self, hidden: Activations) -> Tensor:
        return self.qkv_proj(hidden)

    def attend(self, qkv: Tensor, step: ForwardStep) -> Tensor:
        """Return the heads' outputs, (num_tokens, o_proj's input size). qkv: what `project` returns."""
        gates = None
        if self.qkv_proj.has_gates:
            gates, qkv = qkv[..., : self.heads_size], qkv[..., self.heads_size :]
        scales = self.attn.rotary_emb.query_scales
        if scales is not None:
            qkv[..., : self.heads_size].mul_(scales[step.positions].to(qkv.dtype))
        if self.has_whole_norms:
            qkv, norm_weights = normalise_wholly(qkv, self.q_norm, self.k_norm), None
        else:
            norm_weights = None if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight)
        cache, metadata = step.kv_cache.layer(self.place), step.metadata[self.place.table]
        sinks = None if self.sinks is None else self.sinks.weight
        attend = self.attn if step.images is None else partial(step.images.attend, self.attn)
        positions = step.positions if step.rotary_positions is None else step.rotary_positions
        heads = attend(qkv, norm_weights, positions, cache, metadata, sinks).flatten(1)
        return heads if gates is None else sigmoid_and_mul(heads, gates)


class DecoderLinearAttention(GatedDeltaNet):
    """Computes linear attention in the place of attention. index: this layer's index among the recurrent states."""

    def __init__(self, config: ModelConfig, index: int, is_interleaved: bool, tp: TensorParallel) -> None:
        assert config.linear_attention is not None, "the config says which layers have linear attention"
        super().__init__(config.hidden_size, config.rms_norm_eps, config.linear_attention, is_interleaved, tp)
        self.index, self.heads_size = index, config.linear_attention.value_size // tp.size

    @property
    def o_proj(self) -> RowParallelLinear:
        """The output product, by the name that it has in attention."""
        return self.out_proj

    def attend(self, projected: tuple[Tensor, Tensor], step: ForwardStep) -> Tensor:
        """Return the heads' outputs, (num_tokens, o_proj's input size). projected: what `project` returns."""
        assert step.recurrent_states is not None, "a model with linear attention gets states with each step"
        states = step.recurrent_states.layer(self.index)
        return self.mix(projected, step.rows, step.positions, step.attention, states)


class DecoderMLP(nn.Module):
    """Computes the dense MLP, for padding rows too: they take hardly any time beside reading the weights."""

    def __init__(self, config: ModelConfig, spec: DecoderSpec, tp: TensorParallel) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.mlp_bias
        self.activation = spec.activation
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, size, bias=bias, tp=tp)
        self.down_proj = RowParallelLinear(size, config.hidden_size, bias, tp)

    @property
    def input_format(self) -> RowFormat | None:
        return self.gate_up_proj.input_format

    def forward(self, hidden: Activations, _row_mask: Tensor | None = None, _routed: Any = None) -> PartialSum:
        return self.down_proj(self.activation(self.gate_up_proj(hidden), self.down_proj.input_format))


class LayerNorms(NamedTuple):
    """Holds the norms of a layer after its attention: of attention's output, the MLP's input, the MLP's output.

    Without `before_mlp`, attention and MLP read the same rows, and both are added to the residual stream at once.
    """

    of_attention: RMSNorm | None = None
    before_mlp: RMSNorm | None = None
    of_mlp: RMSNorm | None = None


class DecoderLayer(Layer):
    """Computes a layer: a mixer, which is attention or linear attention, and an MLP. window: as in DecoderAttention."""

    def __init__(self, setup: DecoderSetup, index: int, window: int | None, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        config, spec, tp = setup.config, setup.spec, setup.tp
        self.spec = spec
        self.residual_multiplier = config.residual_multiplier
        self.has_multipliers = config.has_multipliers
        moe = config.moe if config.moe is not None and config.moe.has_experts[index] else None
        self.has_experts = moe is not None
        self.is_linear = config.is_linear(index)
        index_of_kind = config.index_among_its_kind(index)
        if self.is_linear:
            self.linear_attn = DecoderLinearAttention(config, index_of_kind, spec.interleaves_linear, tp)
        else:
            attention = spec.attention or DecoderAttention
            self.self_attn: Any = attention(setup, setup.backends.places[index_of_kind], window, rotary_emb)
        of_mlp = replace(tp, share_multiple=config.mlp_multiple)
        self.mlp = DecoderMLP(config, spec, of_mlp) if moe is None else spec.experts(config.hidden_size, moe, of_mlp)
        norm = partial(spec.norm, config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = norm() if spec.has_pre_norms else ResidualSum(config.hidden_size, config.rms_norm_eps)
        self.norms = self._make_norms(spec, norm)

    @property
    def mixer(self) -> Mixer:
        return self.linear_attn if self.is_linear else self.self_attn

    def _make_norms(self, spec: DecoderSpec, norm: Callable[[], RMSNorm]) -> LayerNorms:
        """Make the norms after attention, by the names that they have in checkpoints; return them by their roles."""
        if spec.has_parallel_block:
            return LayerNorms()
        self.post_attention_layernorm = norm()
        if not spec.has_post_norms:
            return LayerNorms(before_mlp=self.post_attention_layernorm)
        self.pre_feedforward_layernorm = norm() if spec.has_pre_norms else self.input_layernorm
        self.post_feedforward_layernorm = norm()
        return LayerNorms(
            of_attention=self.post_attention_layernorm,
            before_mlp=self.pre_feedforward_layernorm,
            of_mlp=self.post_feedforward_layernorm,
        )

    @property
    def attention_sizes(self) -> tuple[int, ...]:
        """How many numbers of a token the mixer reads, by tensor, and how many it returns; see `Buffers`."""
        mixer: Any = self.mixer
        products = (mixer.in_proj_qkvz, mixer.in_proj_ba) if self.is_linear else (mixer.qkv_proj,)
        return *(sum(product.local_sizes.values()) for product in products), mixer.heads_size

    @cached_property
    def ways(self) -> Set[Way]:
        methods = (getattr(part, "quant_method", None) for part in self.modules())
        ways = frozenset() if self.has_multipliers else self.spec.ways
        if self.is_linear:
            ways &= {Way.GRAPHS}
        for kind in {method.kind for method in methods if method is not None}:
            ways &= WAYS_OF_PRODUCTS[kind]
        return ways & IN_PIECES if self.has_experts else ways

    def normalise_input(self, stream: ResidualStream) -> None:
        # In a parallel block the MLP reads these rows, too, so mixer and MLP each round them if they need it.
        stream.normalise(self.input_layernorm, None if self.spec.has_parallel_block else self.mixer.input_format)

    def project(self, stream: ResidualStream) -> Any:
        return self.mixer.project(stream.normed_rows())

    def attend(self, projected: Any, step: ForwardStep) -> Tensor:
        return self.mixer.attend(projected, step)

    def add_attention(self, stream: ResidualStream, heads: Tensor) -> None:
        stream.add(self.mixer.o_proj(heads).times(self.residual_multiplier), self.norms.of_attention)

    def normalise_sum(self, stream: ResidualStream) -> None:
        if self.norms.before_mlp is not None:
            stream.normalise(self.norms.before_mlp, self.mlp.input_format)

    def add_mlp(
        self, stream: ResidualStream, row_mask: Tensor | None = None, routed: list[Tensor] | None = None
    ) -> None:
        stream.add(self.mlp(stream.normed_rows(), row_mask, routed).times(self.residual_multiplier), self.norms.of_mlp)


class Decoder(LayerStack):
    """Holds embeddings, layers and the last norm. max_positions: how many positions the rotary tables have."""

    layers: Sequence[DecoderLayer]

    def __init__(
        self,
        config: ModelConfig,
        spec: DecoderSpec,
        max_positions: int,
        backends: AttentionBackends,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.tp = tp
        if spec.needs_whole_sums:
            tp = replace(tp, symmetric_memory=None)
        self.embedding_multiplier = config.embedding_multiplier
        self.embed_tokens = spec.embedding(config.vocab_size, config.hidden_size, tp)
        setup = DecoderSetup(config, spec, backends, tp)
        windows = config.windows_within(max_positions)
        embeddings = rotary_embeddings(config, max_positions, spec.interleaves_rotary)
        layers: list[Layer] = []
        for index, (window, embedding) in enumerate(zip(windows, embeddings, strict=True)):
            layers.append((spec.layer or DecoderLayer)(setup, index, window, embedding))
            # Layer by layer, since there may be no memory for all layers in 16 bits.
            quantize_layer(layers[-1], f"model.layers.{index}", config.quantization)
        self.layers = cast(Sequence[DecoderLayer], nn.ModuleList(layers))
        self.has_experts = any(layer.has_experts for layer in self.layers)
        self.norm = spec.norm(config.hidden_size, config.rms_norm_eps)

    def embed(self, step: ForwardStep) -> Tensor:
        embeddings = self.embed_tokens(step.token_ids)
        embeddings = embeddings if self.embedding_multiplier == 1 else embeddings * self.embedding_multiplier
        return embeddings if step.images is None else step.images.merge(embeddings)

    def finish(self, stream: ResidualStream) -> Tensor:
        stream.normalise(self.norm)
        return stream.normed
