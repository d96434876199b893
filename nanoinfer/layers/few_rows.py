"""What a layer consists of in steps of few tokens, where kernels do more at once: see `kernels/few_rows_*.py`."""

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.dispatch import triton_on_cuda
from nanoinfer.layers.activation import silu_and_mul
from nanoinfer.layers.attention.backend import AttentionSpec
from nanoinfer.layers.attention.layer import norm_rope_store
from nanoinfer.layers.attention.metadata import DecodeMetadata, LayerCache
from nanoinfer.layers.attention.torch_reference import TorchBackend
from nanoinfer.layers.layernorm import rms_norm


@triton_on_cuda("nanoinfer.kernels.few_rows_product")
def few_rows_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Return SwiGLU(RMSNorm(x) W^T + b) + residual, (num_rows, num_outputs); all except the product may be left out.

    x: (num_rows, size). weight: (num_outputs, size), or (2 * num_outputs, size) with the gate before up if it is
    `gated`. bias: as long as the weight. norm: the norm's weight, (size,), and its epsilon. residual: (num_rows,
    num_outputs).
    """
    sums = F.linear(x if norm is None else rms_norm(x, *norm), weight, bias)
    out = silu_and_mul(sums) if gated else sums
    assert isinstance(out, Tensor), "SwiGLU rounds to 8 bits only if it is told to"
    return out if residual is None else out + residual


@triton_on_cuda("nanoinfer.kernels.few_rows_attention")
def few_rows_attention(
    qkv: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    """Write each row's new key and value to the cache, and attend from its new token: (num_rows, num_heads, head_dim).

    See `norm_rope_store` for the first arguments, of a cache that is not in 8 bits. context_lens: (num_rows,) int32,
    the new token included; the result of a row without context is undefined. block_tables: (num_rows, max_blocks)
    int32. scale: of the scores.
    """
    cache = LayerCache(k_cache, v_cache)
    q, _, _ = norm_rope_store(qkv, norm_weights, eps, positions, cos_sin_cache, k_cache, v_cache, slot_mapping)
    spec = AttentionSpec(q.shape[1], k_cache.shape[1], q.shape[2], scale)
    return TorchBackend(spec).decode(q, cache, DecodeMetadata(slot_mapping, context_lens, block_tables))
