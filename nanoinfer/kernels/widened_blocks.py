"""Widens blocks of a KV cache in 8 bits to 16. Twin: `layers/attention/widened_blocks.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.ops.common.device_properties import next_power_of_2

CHUNK = 4096  # values that a program widens


@triton.jit
def _widen_blocks_kernel(
    values_ptr,
    scales_ptr,
    block_ids_ptr,
    out_ptr,
    num_vectors,  # of a block
    head_dim: tl.constexpr,
    VECTORS: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # head_dim, padded
):
    place = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids_ptr + place).to(tl.int64)
    vector = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    dim = tl.arange(0, HEAD_DIM)
    offsets = vector[:, None] * head_dim + dim[None, :]
    mask = (vector < num_vectors)[:, None] & (dim < head_dim)[None, :]
    values = tl.load(values_ptr + block * num_vectors * head_dim + offsets, mask=mask, other=0.0).to(tl.float32)
    scales = tl.load(scales_ptr + block * num_vectors + vector, mask=vector < num_vectors, other=0.0)
    wide = (values * scales[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place * num_vectors * head_dim + offsets, wide, mask=mask)


def widen_blocks(values: Tensor, scales: Tensor, block_ids: Tensor, out: Tensor) -> None:
    """Write the blocks of these ids, times their scales, to the first places of `out`.

    values: (num_blocks, num_kv_heads, block_size, head_dim) in 8 bits; scales: the same without head_dim, float32; both
    contiguous. block_ids: (num_ids,) int32. out: (at least num_ids, ...) as values, in 16 bits.
    """
    head_dim, num_vectors = values.shape[3], scales[0].numel()
    padded = next_power_of_2(head_dim)
    vectors = CHUNK // padded
    assert out.dtype in (torch.bfloat16, torch.float16), f"blocks are widened to 16 bits, not to {out.dtype}"
    _widen_blocks_kernel[(len(block_ids), triton.cdiv(num_vectors, vectors))](
        values, scales, block_ids, out, num_vectors, head_dim=head_dim, VECTORS=vectors, HEAD_DIM=padded
    )
