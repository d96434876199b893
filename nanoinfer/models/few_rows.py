"""A decoder layer for steps of few rows: its products, fused with the norms, SwiGLU and additions around them.

A step of few rows is bound by reading weights, and each kernel needs some time until it reads at full speed. So such
steps take a path of fewer kernels, each of which fetches its first weights before the kernel before it is done. More
rows are faster by the common path. MAX_FEW_ROWS = 0 turns this off; only `DecoderLayer.forward` knows of it.
"""

from typing import Any

import torch
from torch import Tensor

from nanoinfer.device import import_error
from nanoinfer.kernels.programmatic_launch import overlap_options
from nanoinfer.layers.attention.metadata import LayerCache, Metadata
from nanoinfer.layers.few_rows import few_rows_product
from nanoinfer.layers.moe import SparseMoE
from nanoinfer.quantization.linear_method import LinearMethod

MAX_FEW_ROWS = 16


def suits_few_rows(layer: Any, residual: Tensor) -> bool:
    """Return whether `few_rows_layer` computes a step of this DecoderLayer. residual: (num_tokens, hidden_size).

    Experts, weights in 8 bits, several GPUs, float16, and GPUs older than Hopper take the common path.
    """
    if not 0 < len(residual) <= MAX_FEW_ROWS or isinstance(layer.mlp, SparseMoE):
        return False
    if residual.dtype != torch.bfloat16 or not overlap_options(residual.device)["OVERLAP"] or import_error("triton"):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    products = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    return attention.o_proj.tp.size == 1 and all(type(product.quant_method) is LinearMethod for product in products)


def few_rows_layer(layer: Any, positions: Tensor, residual: Tensor, cache: LayerCache, metadata: Metadata) -> Tensor:
    """Return the residual stream after a DecoderLayer. residual: the stream before it, (num_tokens, hidden_size)."""
    attention, mlp = layer.self_attn, layer.mlp
    norm = layer.input_layernorm.weight, layer.input_layernorm.eps
    qkv = few_rows_product(residual, attention.qkv_proj.weight, attention.qkv_proj.bias, norm)
    heads = attention.attend(qkv, positions, cache, metadata).flatten(1)  # (num_tokens, num_heads * head_dim)
    residual = few_rows_product(heads, attention.o_proj.weight, attention.o_proj.bias, residual=residual)
    norm = layer.post_attention_layernorm.weight, layer.post_attention_layernorm.eps
    gated = few_rows_product(residual, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias, norm, gated=True)
    return few_rows_product(gated, mlp.down_proj.weight, mlp.down_proj.bias, residual=residual)
