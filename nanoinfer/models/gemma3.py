"""Gemma 3, text alone: norms around attention and MLP, GeGLU, scaled embeddings, two types of layers.

A layer with a window has another RoPE than one that attends to all tokens. The layers differ so much from those of the
common decoder that they have a decoder of their own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.checkpoint.weights import check_shape
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.kernels.fp8_format import Activations
from nanoinfer.layers.activation import gelu_tanh_and_mul
from nanoinfer.layers.attention.metadata import KVCache, LayerCache, Metadata
from nanoinfer.layers.attention.selection import AttentionBackends
from nanoinfer.layers.embed_head import VocabParallelEmbedding
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import PartialSum
from nanoinfer.layers.rotary_embedding import RotaryEmbedding
from nanoinfer.models.decoder import DecoderAttention, DecoderForCausalLM, DecoderMLP, DecoderSpec
from nanoinfer.models.sliced_prefill import sliced_prefill, suits_slices
from nanoinfer.quantization.fp8_linear import with_quantization


class Gemma3Norm(RMSNorm):
    """RMSNorm whose checkpoint holds the weight less 1. The product is in float32, and so is the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)

    def weight_loader(self, param: Tensor, full: Tensor) -> None:
        check_shape(full, tuple(param.shape))
        param.copy_(1 + full.float())

    def of_sum(self, hidden: PartialSum) -> PartialSum:
        """Return the sum, to be normalised by this norm before the next one adds it to the residual stream."""
        return replace(hidden, sum_weight=self.weight)


class Gemma3Embedding(VocabParallelEmbedding):
    """Scales the embeddings by sqrt(hidden_size), rounded to their dtype. The head that is tied to them does not."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__(vocab_size, hidden_size, tp)
        self.scale = torch.tensor(hidden_size**0.5, dtype=self.weight.dtype).item()

    def forward(self, token_ids: Tensor) -> Tensor:
        return super().forward(token_ids) * self.scale


class Gemma3MLP(DecoderMLP):
    def forward(self, hidden: Activations, _row_mask: Tensor | None = None) -> PartialSum:
        return self.down_proj(gelu_tanh_and_mul(self.gate_up_proj(hidden), self.down_proj.input_format))


class Gemma3Layer(nn.Module):
    """One layer. What attention and MLP add to the residual stream is normalised before it is added, too."""

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
        self.self_attn = DecoderAttention(config, spec, window, rotary_emb, backends, tp)
        self.mlp = Gemma3MLP(config, tp)
        self.input_layernorm = Gemma3Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Gemma3Norm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = Gemma3Norm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = Gemma3Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, positions: Tensor, hidden: PartialSum | None, residual: Tensor, cache: LayerCache, metadata: Metadata
    ) -> tuple[PartialSum, Tensor]:
        """Return what this layer's MLP adds to the residual stream, and the stream, as `DecoderLayer` does."""
        normed, residual = self.input_layernorm(hidden, residual, self.self_attn.qkv_proj.input_format)
        hidden = self.self_attn(positions, normed, cache, metadata)
        hidden = self.post_attention_layernorm.of_sum(hidden)
        normed, residual = self.pre_feedforward_layernorm(hidden, residual, self.mlp.input_format)
        return self.post_feedforward_layernorm.of_sum(self.mlp(normed)), residual

    def norms(self) -> tuple[RMSNorm | None, RMSNorm, RMSNorm | None]:
        """Return what `DecoderLayer.norms` does."""
        return self.post_attention_layernorm, self.pre_feedforward_layernorm, self.post_feedforward_layernorm


class Gemma3Decoder(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        spec: DecoderSpec,
        max_positions: int,
        backends: AttentionBackends,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        assert config.local_rope is not None, "Gemma 3 has a default for the RoPE of layers with a window"
        rotary_emb = RotaryEmbedding(config, max_positions)
        local_rotary_emb = RotaryEmbedding(replace(config, rope=config.local_rope), max_positions)
        self.embed_tokens = Gemma3Embedding(config.vocab_size, config.hidden_size, tp)
        # Which RoPE a layer has does not depend on whether a sequence can outgrow its window.
        layers = (
            Gemma3Layer(config, spec, window, local_rotary_emb if is_local else rotary_emb, backends, tp)
            for is_local, window in zip(config.windows, config.windows_within(max_positions), strict=True)
        )
        self.layers = nn.ModuleList(with_quantization(layers, config.quantization))
        self.norm = Gemma3Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids: Tensor, positions: Tensor, kv_cache: KVCache, metadata: Metadata) -> Tensor:
        if suits_slices(self, len(token_ids), metadata):
            return sliced_prefill(self, token_ids, positions, kv_cache, metadata)
        residual = self.embed_tokens(token_ids)  # (num_tokens, hidden_size)
        hidden: PartialSum | None = None
        for index, layer in enumerate(self.layers):
            hidden, residual = layer(positions, hidden, residual, kv_cache.layer(index), metadata)
        normed, _ = self.norm(hidden, residual)
        return normed


class Gemma3ForCausalLM(DecoderForCausalLM):
    spec: ClassVar = DecoderSpec(qk_norm=Gemma3Norm)
    decoder_class: ClassVar = Gemma3Decoder
    config_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,  # every sixth layer attends to all tokens
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    }
