"""A decoder layer for steps of few rows: its products, fused with the norms, SwiGLU and additions around them.

`layers/few_rows.py` says when and why. Only `DecoderLayer.forward` knows of this file.
"""

from typing import Any

from torch import Tensor

from nanoinfer.layers.attention.metadata import LayerCache, Metadata
from nanoinfer.layers.few_rows import few_rows_product, has_few_rows
from nanoinfer.layers.linear import PartialSum
from nanoinfer.layers.moe import SparseMoE
from nanoinfer.quantization.linear_method import LinearMethod


def suits_few_rows(layer: Any, residual: Tensor) -> bool:
    """Return whether `few_rows_layer` computes this step of a DecoderLayer. residual: (num_tokens, hidden_size).

    Not with weights in 8 bits or several GPUs.
    """
    if not has_few_rows(residual) or layer.self_attn.o_proj.tp.size > 1:
        return False
    products = [layer.self_attn.qkv_proj, layer.self_attn.o_proj]
    if not isinstance(layer.mlp, SparseMoE):
        products += [layer.mlp.gate_up_proj, layer.mlp.down_proj]
    return all(type(product.quant_method) is LinearMethod for product in products)


def few_rows_layer(
    layer: Any,
    positions: Tensor,
    hidden: PartialSum | None,
    residual: Tensor,
    cache: LayerCache,
    metadata: Metadata,
    row_mask: Tensor | None,
) -> tuple[PartialSum | None, Tensor]:
    """Do what DecoderLayer.forward does. Experts are computed as ever, after a norm by itself."""
    attention, mlp = layer.self_attn, layer.mlp
    input_norm, mlp_norm = ((norm.weight, norm.eps) for norm in (layer.input_layernorm, layer.post_attention_layernorm))
    if hidden is None:
        qkv = few_rows_product(residual, attention.qkv_proj.weight, attention.qkv_proj.bias, input_norm)
    else:
        normed, residual = layer.input_layernorm(hidden, residual)
        qkv = few_rows_product(normed, attention.qkv_proj.weight, attention.qkv_proj.bias)
    heads = attention(qkv, positions, cache, metadata)  # (num_tokens, num_heads * head_dim)
    residual = few_rows_product(heads, attention.o_proj.weight, attention.o_proj.bias, residual=residual)
    if isinstance(mlp, SparseMoE):
        normed, residual = layer.post_attention_layernorm(None, residual, mlp.input_format)
        return mlp(normed, row_mask), residual
    gated = few_rows_product(residual, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias, mlp_norm, gated=True)
    return None, few_rows_product(gated, mlp.down_proj.weight, mlp.down_proj.bias, residual=residual)
