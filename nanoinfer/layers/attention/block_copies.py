"""Copies tokens within the KV cache, where a prompt parts from a cached one inside a block."""

from torch import Tensor

from nanoinfer import kernels
from nanoinfer.kernels.triton_twins import triton_on_cuda
from nanoinfer.layers.attention.metadata import KVCache


def copy_cached_tokens(cache: KVCache, copies: Tensor) -> None:
    """Copy the keys and values of a block's first tokens to other blocks. copies: (num_copies, 3), as `BlockCopy`."""
    for tensor in (cache.k, cache.v, cache.k_scales, cache.v_scales):
        if tensor is not None:
            copy_tokens(tensor, copies)


@triton_on_cuda(lambda: kernels.copy_tokens.copy_tokens)
def copy_tokens(cache: Tensor, copies: Tensor) -> None:
    """Copy the first tokens of blocks to other blocks, which are no sources.

    cache: (num_layers, num_blocks, num_heads, block_size) or with values of a token behind that, contiguous. copies:
    (num_copies, 3) int32: from which block, to which one, and how many tokens.
    """
    for source, target, num_tokens in copies.tolist():
        cache[:, target, :, :num_tokens] = cache[:, source, :, :num_tokens]
