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
from nanoinfer.layers.attention.metadata import DecodeMetadata, LayerCache, Metadata
from nanoinfer.layers.few_rows import few_rows_attention, few_rows_product
from nanoinfer.layers.moe import SparseMoE
from nanoinfer.quantization.linear_method import LinearMethod

MAX_FEW_ROWS = 16


def suits_few_rows(layer: Any, residual: Tensor) -> bool:
    """Return whether `few_rows_layer` computes this step of a DecoderLayer. residual: (num_tokens, hidden_size)."""
    return 0 < len(residual) <= MAX_FEW_ROWS and _can_overlap(residual) and _is_dense_in_16_bits(layer)


def _can_overlap(x: Tensor) -> bool:
    """Return whether kernels can be launched early, on Hopper and later; not in float16, where a norm may overflow."""
    return bool(overlap_options(x.device)["OVERLAP"]) and x.dtype == torch.bfloat16 and not import_error("triton")


def _is_dense_in_16_bits(layer: Any) -> bool:
    """Return whether one GPU holds all of a layer that has no experts, and no weights in 8 bits."""
    attention, mlp = layer.self_attn, layer.mlp
    if isinstance(mlp, SparseMoE) or attention.o_proj.tp.size > 1:
        return False
    products = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    return all(type(product.quant_method) is LinearMethod for product in products)


def few_rows_layer(layer: Any, positions: Tensor, residual: Tensor, cache: LayerCache, metadata: Metadata) -> Tensor:
    """Return the residual stream after a DecoderLayer. residual: the stream before it, (num_tokens, hidden_size)."""
    attention, mlp = layer.self_attn, layer.mlp
    norm = layer.input_layernorm.weight, layer.input_layernorm.eps
    qkv = few_rows_product(residual, attention.qkv_proj.weight, attention.qkv_proj.bias, norm)
    heads = _attend(attention, qkv, positions, cache, metadata).flatten(1)  # (num_tokens, num_heads * head_dim)
    residual = few_rows_product(heads, attention.o_proj.weight, attention.o_proj.bias, residual=residual)
    norm = layer.post_attention_layernorm.weight, layer.post_attention_layernorm.eps
    gated = few_rows_product(residual, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias, norm, gated=True)
    return few_rows_product(gated, mlp.down_proj.weight, mlp.down_proj.bias, residual=residual)


def _attend(attention: Any, qkv: Tensor, positions: Tensor, cache: LayerCache, metadata: Metadata) -> Tensor:
    """Return (num_tokens, num_heads, head_dim). attention: a DecoderAttention."""
    attn, spec = attention.attn, attention.attn.backend.spec
    norm_weights = None if attention.q_norm is None else (attention.q_norm.weight, attention.k_norm.weight)
    is_common = cache.is_rounded or spec.window is not None or not attn.backend.name.startswith("triton")
    if is_common or not isinstance(metadata, DecodeMetadata) or metadata.shared_prefixes is not None:
        out: Tensor = attn(qkv, norm_weights, positions, cache, metadata)
        return out
    return few_rows_attention(
        qkv,
        norm_weights,
        attn.norm_eps,
        positions,
        attn.rotary_emb.cos_sin_cache,
        cache.k,
        cache.v,
        metadata.slot_mapping,
        metadata.context_lens,
        metadata.block_tables,
        spec.scale,
    )
