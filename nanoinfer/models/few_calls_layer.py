"""Computes a decoder layer on a CPU in the fewest calls: there a call takes as long as a small operator.

It computes what `DecoderLayer` does, to the last bit, without what only GPUs and ranks need of the parts between: sums
that are left to the next norm, and rows in 8 bits. It serves the layers that have `Way.FEW_CALLS` among their `ways`.
"""

from typing import cast

from torch import Tensor

from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import ShardedLinear
from nanoinfer.models.decoder import DecoderLayer, DecoderMLP
from nanoinfer.models.forward_step import ForwardStep
from nanoinfer.ops.norms.spec import rms_norm


def few_calls_layer(layer: DecoderLayer, residual: Tensor, step: ForwardStep) -> Tensor:
    """Return the residual stream after a layer. residual: the stream before it, (num_tokens, hidden_size)."""
    attention, mlp = layer.self_attn, cast(DecoderMLP, layer.mlp)
    heads = attention.attend(_product(attention.qkv_proj, _normed(layer.input_layernorm, residual)), step)
    residual = _product(attention.o_proj, heads).add_(residual)
    gate_up = _product(mlp.gate_up_proj, _normed(layer.post_attention_layernorm, residual))
    return _product(mlp.down_proj, cast(Tensor, mlp.activation(gate_up, None))).add_(residual)


def _normed(norm: RMSNorm, residual: Tensor) -> Tensor:
    return rms_norm(residual, norm.weight, norm.eps)


def _product(proj: ShardedLinear, x: Tensor) -> Tensor:
    return proj.quant_method.apply(proj, x, proj.bias)
