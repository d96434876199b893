"""Qwen3, dense: a pre-norm decoder with grouped-query attention, normalised queries and keys, RoPE and SwiGLU.

Module names are those of the checkpoint, but for the packed projections (see `packed_modules_mapping`).
"""

from typing import ClassVar

from torch import Tensor, nn

from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.distributed.symmetric_memory import SymmetricBuffers
from nanoinfer.distributed.tensor_parallel import TensorParallel, in_slices
from nanoinfer.layers.activation import silu_and_mul
from nanoinfer.layers.attention.backend import AttentionBackend
from nanoinfer.layers.attention.layer import Attention
from nanoinfer.layers.attention.metadata import KVCache, LayerCache, Metadata
from nanoinfer.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear, Sum
from nanoinfer.layers.rotary_embedding import RotaryEmbedding

Residual = Tensor | list[Tensor]  # (num_tokens, hidden_size), or slices of it


class Qwen3Attention(nn.Module):
    def __init__(
        self, config: ModelConfig, rotary_emb: RotaryEmbedding, backend: AttentionBackend, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=config.attention_bias,
            tp=tp,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=config.attention_bias, tp=tp
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.attn = Attention(rotary_emb, config.rms_norm_eps, backend)

    def forward(self, positions: Tensor, qkv: Tensor, cache: LayerCache, metadata: Metadata) -> Sum:
        """qkv: (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim), the product of `qkv_proj`."""
        out = self.attn(qkv, (self.q_norm.weight, self.k_norm.weight), positions, cache, metadata)
        return self.o_proj(out.flatten(1))


class Qwen3MLP(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, config.intermediate_size, tp)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, bias=False, tp=tp)

    def forward(self, hidden: Tensor) -> Sum:
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))


class Qwen3DecoderLayer(nn.Module):
    """`residual` is the stream that skips the layer; each norm adds to it before it normalises.

    Several GPUs exchange the sums of a large step in slices of its tokens. Norms and MLP go by these slices too.
    """

    def __init__(
        self, config: ModelConfig, rotary_emb: RotaryEmbedding, backend: AttentionBackend, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config, rotary_emb, backend, tp)
        self.mlp = Qwen3MLP(config, tp)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, positions: Tensor, hidden: Sum, residual: Residual | None, cache: LayerCache, metadata: Metadata
    ) -> tuple[Sum, Residual]:
        qkv, residual = in_slices(self._to_qkv, hidden, residual)
        hidden = self.self_attn(positions, qkv, cache, metadata)
        return in_slices(self._through_mlp, hidden, residual)

    def _to_qkv(self, hidden: Tensor | SymmetricBuffers, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            assert isinstance(hidden, Tensor), "the first layer gets the embeddings"
            return self.self_attn.qkv_proj(self.input_layernorm(hidden)), hidden
        hidden, residual = self.input_layernorm.add(hidden, residual)
        return self.self_attn.qkv_proj(hidden), residual

    def _through_mlp(self, hidden: Tensor | SymmetricBuffers, residual: Tensor) -> tuple[Sum, Tensor]:
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class Qwen3Model(nn.Module):
    def __init__(self, config: ModelConfig, max_positions: int, backend: AttentionBackend, tp: TensorParallel) -> None:
        super().__init__()
        rotary_emb = RotaryEmbedding(config, max_positions)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, rotary_emb, backend, tp) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids: Tensor, positions: Tensor, kv_cache: KVCache, metadata: Metadata) -> Tensor:
        hidden: Sum = self.embed_tokens(token_ids)  # (num_tokens, hidden_size)
        residual: Residual | None = None
        for index, layer in enumerate(self.layers):
            hidden, residual = layer(positions, hidden, residual, kv_cache.layer(index), metadata)
        out, _ = in_slices(self.norm.add, hidden, residual)
        return out


class Qwen3ForCausalLM(nn.Module):
    """The whole model, or one rank's share of it.

    max_positions: positions that the rotary tables cover. backend: how attention is computed.
    """

    # Name in the checkpoint -> (our packed module, the shard of it that the weight fills).
    packed_modules_mapping: ClassVar = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }

    def __init__(self, config: ModelConfig, max_positions: int, backend: AttentionBackend, tp: TensorParallel) -> None:
        super().__init__()
        self.model = Qwen3Model(config, max_positions, backend, tp)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp)
        # A tied checkpoint may repeat the embedding under the head's name: there is nothing to load there.
        self.ignored_weights = ("lm_head.weight",) if config.tie_word_embeddings else ()
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, token_ids: Tensor, positions: Tensor, kv_cache: KVCache, metadata: Metadata) -> Tensor:
        """Hidden states (num_tokens, hidden_size) of the step's tokens; token_ids, positions: (num_tokens,) int."""
        return self.model(token_ids, positions, kv_cache, metadata)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """(num_rows, hidden_size) -> logits (num_rows, vocab_size), in the model's dtype, in `out` if it is given."""
        return self.lm_head(hidden, out)
