"""A decoder layer for steps of few rows: its products, fused with the norms, SwiGLU and additions around them.

`layers/few_rows.py` says when and why. Only `DecoderLayer.forward` knows of this file.
"""

from typing import Any

from torch import Tensor

from nanoinfer.layers.attention.metadata import LayerCache, Metadata
from nanoinfer.layers.few_rows import few_rows_product, has_few_rows
from nanoinfer.layers.moe import SparseMoE
from nanoinfer.quantization.linear_method import LinearMethod


def suits_few_rows(layer: Any, residual: Tensor) -> bool:
    """Return whether `few_rows_layer` computes this step of a DecoderLayer. residual: (num_tokens, hidden_size).

    Not with experts, weights in 8 bits or several GPUs.
    """
    if not has_few_rows(residual) or isinstance(layer.mlp, SparseMoE):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    products = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    return mlp.down_proj.tp.size == 1 and all(type(product.quant_method) is LinearMethod for product in products)


def few_rows_layer(layer: Any, positions: Tensor, residual: Tensor, cache: LayerCache, metadata: Metadata) -> Tensor:
    """Return the residual stream after a DecoderLayer. residual: the stream before it, (num_tokens, hidden_size)."""
    attention, mlp = layer.self_attn, layer.mlp
    norm = layer.input_layernorm.weight, layer.input_layernorm.eps
    qkv = few_rows_product(residual, attention.qkv_proj.weight, attention.qkv_proj.bias, norm)
    heads = attention.attend(qkv, positions, cache, metadata)  # (num_tokens, num_heads * head_dim)
    residual = few_rows_product(heads, attention.o_proj.weight, attention.o_proj.bias, residual=residual)
    norm = layer.post_attention_layernorm.weight, layer.post_attention_layernorm.eps
    gated = few_rows_product(residual, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias, norm, gated=True)
    return few_rows_product(gated, mlp.down_proj.weight, mlp.down_proj.bias, residual=residual)
