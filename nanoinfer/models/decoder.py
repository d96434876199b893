"""The pre-norm decoder that most open models are: grouped-query attention with RoPE, SwiGLU, RMSNorm.

What differs between architectures is in a `DecoderSpec`; a file beside this one gives that of an architecture. Module
names are those of the checkpoint, except for the packed projections (see `packed_modules_mapping`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from nanoinfer.checkpoint.model_config import ModelConfig, MoEConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.kernels.fp8_format import Activations, RowFormat
from nanoinfer.layers.activation import silu_and_mul
from nanoinfer.layers.attention.backend import AttentionSpec
from nanoinfer.layers.attention.layer import Attention
from nanoinfer.layers.attention.metadata import KVCache, LayerCache, Metadata
from nanoinfer.layers.attention.selection import AttentionBackends
from nanoinfer.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import MergedColumnParallelLinear, PartialSum, QKVParallelLinear, RowParallelLinear
from nanoinfer.layers.moe import SparseMoE
from nanoinfer.layers.rotary_embedding import RotaryEmbedding
from nanoinfer.models.few_rows import few_rows_layer, suits_few_rows
from nanoinfer.models.sliced_prefill import sliced_prefill, suits_slices
from nanoinfer.quantization.fp8_linear import with_quantization


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """How an architecture differs from the common decoder.

    qk_norm: the norm of each head of the queries and keys before its rotation; None for none.
    qkv_bias: whether queries, keys and values have biases whatever config.json says. Its attention_bias adds them to
    the output product too.
    """

    qk_norm: type[RMSNorm] | None = None
    qkv_bias: bool = False


class DecoderAttention(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        spec: DecoderSpec,
        window: int | None,
        rotary_emb: RotaryEmbedding,
        backends: AttentionBackends,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        qkv_bias = spec.qkv_bias or config.attention_bias
        self.qkv_proj = QKVParallelLinear(config.hidden_size, head_dim, num_heads, num_kv_heads, bias=qkv_bias, tp=tp)
        self.o_proj = RowParallelLinear(num_heads * head_dim, config.hidden_size, bias=config.attention_bias, tp=tp)
        self.q_norm = spec.qk_norm(head_dim, config.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = spec.qk_norm(head_dim, config.rms_norm_eps) if spec.qk_norm else None
        attention = AttentionSpec(
            num_heads=tp.shard_size(num_heads, "query heads"),
            num_kv_heads=tp.split_of_kv_heads(num_kv_heads).shard_size(num_kv_heads, "KV heads"),
            head_dim=head_dim,
            scale=config.attention_scale,
            window=window,
        )
        self.attn = Attention(rotary_emb, config.rms_norm_eps, backends.for_layer(attention))

    def forward(self, positions: Tensor, hidden: Activations, cache: LayerCache, metadata: Metadata) -> PartialSum:
        return self.o_proj(self.attend(self.qkv_proj(hidden), positions, cache, metadata))

    def attend(self, qkv: Tensor, positions: Tensor, cache: LayerCache, metadata: Metadata) -> Tensor:
        norm_weights = None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
        return self.attn(qkv, norm_weights, positions, cache, metadata).flatten(1)  # (num_tokens, o_proj's input size)


class DecoderMLP(nn.Module):
    """The dense MLP. It computes padding rows too, which cost nothing beside the weights."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, size, bias=bias, tp=tp)
        self.down_proj = RowParallelLinear(size, config.hidden_size, bias=bias, tp=tp)

    @property
    def input_format(self) -> RowFormat | None:
        return self.gate_up_proj.input_format

    def forward(self, hidden: Activations, _row_mask: Tensor | None = None) -> PartialSum:
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden), self.down_proj.input_format))


class DecoderLayer(nn.Module):
    """One layer. Each norm adds to the residual stream what came before, then normalises. Only attention mixes tokens.

    window: how many tokens each token attends to, or None for all. moe: its experts; None for a dense MLP.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: DecoderSpec,
        window: int | None,
        moe: MoEConfig | None,
        rotary_emb: RotaryEmbedding,
        backends: AttentionBackends,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.self_attn = DecoderAttention(config, spec, window, rotary_emb, backends, tp)
        self.mlp = DecoderMLP(config, tp) if moe is None else SparseMoE(config.hidden_size, moe, tp)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        positions: Tensor,
        hidden: PartialSum | None,
        residual: Tensor,
        cache: LayerCache,
        metadata: Metadata,
        row_mask: Tensor | None,
    ) -> tuple[PartialSum | None, Tensor]:
        """Return what this layer's MLP adds to the residual stream, None if it is added already, and the stream.

        hidden: what the layer before adds; None for nothing. residual: (num_tokens, hidden_size). row_mask:
        (num_tokens,) bool, False where a row is padding, for which no expert is read; None if there are no experts.
        """
        if hidden is None and suits_few_rows(self, residual):
            return None, few_rows_layer(self, positions, residual, cache, metadata)
        normed, residual = self.input_layernorm(hidden, residual, self.self_attn.qkv_proj.input_format)
        hidden = self.self_attn(positions, normed, cache, metadata)
        normed, residual = self.post_attention_layernorm(hidden, residual, self.mlp.input_format)
        return self.mlp(normed, row_mask), residual

    def norms(self) -> tuple[RMSNorm | None, RMSNorm, RMSNorm | None]:
        """Return the norms of attention's sum by itself, of the MLP's inputs, and of its sum; None for none."""
        return None, self.post_attention_layernorm, None


class Decoder(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        spec: DecoderSpec,
        max_positions: int,
        backends: AttentionBackends,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        rotary_emb = RotaryEmbedding(config, max_positions)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        has_experts = config.moe.has_experts if config.moe else (False,) * config.num_hidden_layers
        self.has_experts = any(has_experts)
        layers = (
            DecoderLayer(config, spec, window, config.moe if sparse else None, rotary_emb, backends, tp)
            for window, sparse in zip(config.windows_within(max_positions), has_experts, strict=True)
        )
        self.layers = nn.ModuleList(with_quantization(layers, config.quantization))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids: Tensor, positions: Tensor, kv_cache: KVCache, metadata: Metadata) -> Tensor:
        if suits_slices(self, len(token_ids), metadata):
            return sliced_prefill(self, token_ids, positions, kv_cache, metadata)
        residual = self.embed_tokens(token_ids)  # (num_tokens, hidden_size)
        hidden: PartialSum | None = None
        row_mask = metadata.slot_mapping >= 0 if self.has_experts else None
        for index, layer in enumerate(self.layers):
            hidden, residual = layer(positions, hidden, residual, kv_cache.layer(index), metadata, row_mask)
        normed, _ = self.norm(hidden, residual)
        return normed


class DecoderForCausalLM(nn.Module):
    """A decoder and its head: the whole model, or one rank's share of it.

    An architecture is a subclass with a `spec`, and the defaults of its config.json: see `Architecture` in
    `checkpoint/model_config.py`.

    max_positions: positions that the rotary tables cover. backends: how attention is computed, layer by layer.
    """

    spec: ClassVar[DecoderSpec]
    decoder_class: ClassVar[type[Any]] = Decoder  # gemma3.py has another
    config_defaults: ClassVar[Mapping[str, Any]]
    # Name of a module in the checkpoint -> ours, where they differ.
    renamed_modules: ClassVar[Mapping[str, str]] = {}
    # Name in the checkpoint -> (our packed module, the shard of it that the weight fills).
    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, str]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }

    def __init__(
        self, config: ModelConfig, max_positions: int, backends: AttentionBackends, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.model = self.decoder_class(config, self.spec, max_positions, backends, tp)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp)
        # A tied checkpoint may repeat the embedding under the head's name: there is nothing to load there.
        self.ignored_weights = ("lm_head.weight",) if config.tie_word_embeddings else ()
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def locate(self, name: str) -> tuple[str, str | None]:
        """Return which parameter a checkpoint's tensor belongs to, and which shard of it; None where it is whole.

        All experts of a layer are packed in one parameter, so that "experts.7.gate_proj.weight" is the shard "7.gate".
        """
        if "." not in name:
            return name, None
        *path, part, kind = (self.renamed_modules.get(part, part) for part in name.split("."))
        packed, shard = self.packed_modules_mapping.get(part, (part, None))
        if path[-2:-1] == ["experts"]:
            shard = f"{path.pop()}.{shard or part.removesuffix('_proj')}"
        return ".".join((*path, packed, kind)), shard

    def forward(self, token_ids: Tensor, positions: Tensor, kv_cache: KVCache, metadata: Metadata) -> Tensor:
        """Return hidden states (num_tokens, hidden_size) of the step's tokens; token_ids, positions: (num_tokens,)."""
        return self.model(token_ids, positions, kv_cache, metadata)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """(num_rows, hidden_size) -> logits (num_rows, lm_head.vocab.size) in the model's dtype, in `out` if given."""
        return self.lm_head(hidden, out)
