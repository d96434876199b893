"""Computes a decoder layer in steps of few rows: products fused with the norms, SwiGLU and additions around them.

Such a step is bound by reading weights. A kernel takes a few microseconds to reach full bandwidth, so these steps use
seven kernels a layer instead of ten, and products fetch their first weights before the kernel before them is done.
With more rows the common kernels are faster, since they multiply by tensor cores.

Since these kernels fuse across the borders of a layer's parts, this is a second implementation of `DecoderLayer`, on
purpose. It serves the layers that have `Way.FEW_ROWS` among their `ways`.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import ShardedLinear
from nanoinfer.models.decoder import DecoderLayer, DecoderMLP
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.ops.few_rows.spec import few_rows_product


def few_rows_layer(layer: DecoderLayer, residual: Tensor, step: ForwardStep) -> Tensor:
    """Return the residual stream after a layer. residual: the stream before it, (num_tokens, hidden_size)."""
    attention, mlp = layer.self_attn, _mlp(layer)
    qkv = _product_of_norm(attention.qkv_proj, layer.input_layernorm, residual)
    heads = attention.attend(qkv, step)  # (num_tokens, num_heads * head_dim)
    residual = _add_product(attention.o_proj, heads, residual)
    gated = _product_of_norm(mlp.gate_up_proj, layer.post_attention_layernorm, residual, gated=True)
    return _add_product(mlp.down_proj, gated, residual)


def few_rows_products(layer: DecoderLayer, num_rows: int) -> list[Callable[[], Tensor]]:
    """Return the layer's products as functions that each compute one of so many rows of zeros."""
    qkv_proj, o_proj, mlp = layer.self_attn.qkv_proj, layer.self_attn.o_proj, _mlp(layer)
    residual, heads, gated = (
        proj.weight.new_zeros(num_rows, proj.weight.shape[1]) for proj in (qkv_proj, o_proj, mlp.down_proj)
    )
    return [
        partial(_product_of_norm, qkv_proj, layer.input_layernorm, residual),
        partial(_add_product, o_proj, heads, residual),
        partial(_product_of_norm, mlp.gate_up_proj, layer.post_attention_layernorm, residual, gated=True),
        partial(_add_product, mlp.down_proj, gated, residual),
    ]


def _product_of_norm(proj: ShardedLinear, norm: RMSNorm, residual: Tensor, gated: bool = False) -> Tensor:
    return few_rows_product(residual, proj.weight, proj.bias, (norm.weight, norm.eps), gated=gated)


def _add_product(proj: ShardedLinear, inputs: Tensor, residual: Tensor) -> Tensor:
    return few_rows_product(inputs, proj.weight, proj.bias, residual=residual)


def _mlp(layer: DecoderLayer) -> DecoderMLP:
    assert isinstance(layer.mlp, DecoderMLP), "a layer with experts goes the common way"
    return layer.mlp
