"""A decoder layer for steps of few rows: its products, fused with the norms, SwiGLU and additions around them.

`layers/few_rows.py` says why, and `execution.py` when.
"""

from torch import Tensor

from nanoinfer.layers.few_rows import few_rows_product
from nanoinfer.models.decoder import DecoderLayer, DecoderMLP
from nanoinfer.models.forward_step import ForwardStep


def few_rows_layer(layer: DecoderLayer, residual: Tensor, step: ForwardStep) -> Tensor:
    """Return the residual stream after a layer. residual: the stream before it, (num_tokens, hidden_size)."""
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(mlp, DecoderMLP), "a layer with experts goes the common way"
    norm = layer.input_layernorm.weight, layer.input_layernorm.eps
    qkv = few_rows_product(residual, attention.qkv_proj.weight, attention.qkv_proj.bias, norm)
    heads = attention.attend(qkv, step)  # (num_tokens, num_heads * head_dim)
    residual = few_rows_product(heads, attention.o_proj.weight, attention.o_proj.bias, residual=residual)
    norm = layer.norms.before_mlp.weight, layer.norms.before_mlp.eps
    gated = few_rows_product(residual, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias, norm, gated=True)
    return few_rows_product(gated, mlp.down_proj.weight, mlp.down_proj.bias, residual=residual)
