"""Arithmetic that decode and prefill of the gated delta rule share. Rounds where the twins round."""

import triton
import triton.language as tl

L2_EPS: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def silu(x, dtype: tl.constexpr):
    """Return silu of float32 values in `dtype`, to which they are rounded before."""
    x = x.to(dtype).to(tl.float32)
    return (x * tl.sigmoid(x)).to(dtype)


@triton.jit
def gates(ba_ptr, a_log_ptr, dt_bias_ptr, head, num_heads, mask):
    """Return g, the logarithm of the decay, and beta in float32, each shaped as `ba_ptr`; zero where masked.

    ba_ptr: to the line of each token.
    """
    b = tl.load(ba_ptr + head, mask=mask, other=0.0)
    beta = tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)
    a = tl.load(ba_ptr + num_heads + head, mask=mask, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(a)))
    g = -tl.exp(tl.load(a_log_ptr + head)) * softplus
    return tl.where(mask, g, 0.0), tl.where(mask, beta, 0.0)


@triton.jit
def gated_norm(out, z, weight, eps, size, dtype: tl.constexpr):
    """Return the RMSNorm of `out` over its last dimension, of `size` values and zeros, times silu(z), in `dtype`.

    All are float32. The norm is rounded before it is multiplied by its weight, and after, as PyTorch does it.
    """
    out = out.to(dtype).to(tl.float32)
    out *= tl.rsqrt(tl.sum(out * out, axis=-1, keep_dims=True) / size + eps)
    out = (out.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    return (out * (z * tl.sigmoid(z))).to(dtype)
