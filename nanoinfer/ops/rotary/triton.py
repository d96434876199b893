"""A kernel that rotates queries or keys in one pass over memory. A program has all heads of one token."""

import torch
import triton
import triton.language as tl

from nanoinfer.ops.common.device_properties import next_power_of_2


@triton.jit
def _rotate_halves_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    token_stride,
    head_stride,
    num_heads,
    half_dim: tl.constexpr,
    HEADS: tl.constexpr,  # num_heads, rounded up to a power of two
    HALF_DIM: tl.constexpr,  # the same of half_dim
):
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, HALF_DIM)
    head = tl.arange(0, HEADS)[:, None]
    angles = token * 2 * half_dim + dim
    mask = (head < num_heads) & (dim < half_dim)[None, :]
    x = x_ptr + token * token_stride + head * head_stride + dim[None, :]
    first, second = tl.load(x, mask=mask).to(tl.float32), tl.load(x + half_dim, mask=mask).to(tl.float32)
    has_angle = dim < half_dim
    cos = tl.load(cos_ptr + angles, mask=has_angle).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angles, mask=has_angle).to(tl.float32)[None, :]
    cos_of_second = tl.load(cos_ptr + angles + half_dim, mask=has_angle).to(tl.float32)[None, :]
    sin_of_second = tl.load(sin_ptr + angles + half_dim, mask=has_angle).to(tl.float32)[None, :]
    out = out_ptr + (token * num_heads + head) * 2 * half_dim + dim[None, :]
    tl.store(out, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
    turned = second * cos_of_second + first * sin_of_second
    tl.store(out + half_dim, turned.to(out_ptr.dtype.element_ty), mask=mask)


def rotate_halves(x, cos, sin):
    num_tokens, num_heads, head_dim = x.shape
    assert x.stride(2) == 1, f"the heads of x must be contiguous, strides {x.stride()}"
    assert cos.is_contiguous(), "cosines must be contiguous"
    assert sin.is_contiguous(), "sines must be contiguous"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_tokens:
        _rotate_halves_kernel[(num_tokens,)](
            x,
            cos,
            sin,
            out,
            x.stride(0),
            x.stride(1),
            num_heads,
            half_dim=head_dim // 2,
            HEADS=next_power_of_2(num_heads),
            HALF_DIM=next_power_of_2(head_dim // 2),
        )
    return out
