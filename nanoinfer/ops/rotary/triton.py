"""A kernel that rotates queries and keys in one pass over memory. A program has all heads of one token."""

import triton
import triton.language as tl

from nanoinfer.ops.common.device_properties import next_power_of_2


@triton.jit
def _rotate_halves_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
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
    places = token * token_stride + head * head_stride + dim[None, :]
    has_angle = dim < half_dim
    cos = tl.load(cos_ptr + angles, mask=has_angle).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angles, mask=has_angle).to(tl.float32)[None, :]
    cos_of_second = tl.load(cos_ptr + angles + half_dim, mask=has_angle).to(tl.float32)[None, :]
    sin_of_second = tl.load(sin_ptr + angles + half_dim, mask=has_angle).to(tl.float32)[None, :]
    for of_keys in tl.static_range(2):
        x = (k_ptr if of_keys else q_ptr) + places
        first, second = tl.load(x, mask=mask).to(tl.float32), tl.load(x + half_dim, mask=mask).to(tl.float32)
        tl.store(x, (first * cos - second * sin).to(q_ptr.dtype.element_ty), mask=mask)
        turned = second * cos_of_second + first * sin_of_second
        tl.store(x + half_dim, turned.to(q_ptr.dtype.element_ty), mask=mask)


def rotate_halves(q, k, cos, sin):
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride() == k.stride(), f"queries and keys lie apart in equal ways, strides {q.stride()} and {k.stride()}"
    assert q.stride(2) == 1, f"heads must be contiguous, strides {q.stride()}"
    assert cos.is_contiguous(), "cosines must be contiguous"
    assert sin.is_contiguous(), "sines must be contiguous"
    if num_tokens:
        _rotate_halves_kernel[(num_tokens,)](
            q,
            k,
            cos,
            sin,
            q.stride(0),
            q.stride(1),
            num_heads,
            half_dim=head_dim // 2,
            HEADS=next_power_of_2(num_heads),
            HALF_DIM=next_power_of_2(head_dim // 2),
        )
