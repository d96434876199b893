"""A decoder layer for steps of few rows: its products, fused with the norms, SwiGLU and additions around them.

`layers/few_rows.py` says why, and `execution.py` when.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from nanoinfer.layers.few_rows import few_rows_product
from nanoinfer.models.decoder import DecoderLayer, DecoderMLP
from nanoinfer.models.forward_step import ForwardStep


def few_rows_layer(layer: DecoderLayer, residual: Tensor, step: ForwardStep) -> Tensor:
    """Return the residual stream after a layer. residual: the stream before it, (num_tokens, hidden_size)."""
    heads = layer.self_attn.attend(_qkv(layer, residual), step)  # (num_tokens, num_heads * head_dim)
    residual = _o(layer, heads, residual)
    return _down(layer, _gate_up(layer, residual), residual)


def few_rows_products(layer: DecoderLayer, num_rows: int) -> list[Callable[[], Tensor]]:
    """Return the layer's products as functions that each compute one of so many rows of zeros."""
    new_zeros, mlp = layer.self_attn.o_proj.weight.new_zeros, _mlp(layer)
    residual = new_zeros(num_rows, layer.self_attn.qkv_proj.weight.shape[1])
    heads = new_zeros(num_rows, layer.self_attn.o_proj.weight.shape[1])
    gated = new_zeros(num_rows, mlp.down_proj.weight.shape[1])
    return [
        partial(_qkv, layer, residual),
        partial(_o, layer, heads, residual),
        partial(_gate_up, layer, residual),
        partial(_down, layer, gated, residual),
    ]


def _qkv(layer: DecoderLayer, residual: Tensor) -> Tensor:
    proj, norm = layer.self_attn.qkv_proj, layer.input_layernorm
    return few_rows_product(residual, proj.weight, proj.bias, (norm.weight, norm.eps))


def _o(layer: DecoderLayer, heads: Tensor, residual: Tensor) -> Tensor:
    proj = layer.self_attn.o_proj
    return few_rows_product(heads, proj.weight, proj.bias, residual=residual)


def _gate_up(layer: DecoderLayer, residual: Tensor) -> Tensor:
    proj, norm = _mlp(layer).gate_up_proj, layer.norms.before_mlp
    return few_rows_product(residual, proj.weight, proj.bias, (norm.weight, norm.eps), gated=True)


def _down(layer: DecoderLayer, gated: Tensor, residual: Tensor) -> Tensor:
    proj = _mlp(layer).down_proj
    return few_rows_product(gated, proj.weight, proj.bias, residual=residual)


def _mlp(layer: DecoderLayer) -> DecoderMLP:
    assert isinstance(layer.mlp, DecoderMLP), "a layer with experts goes the common way"
    return layer.mlp
