"""Holds what several kernels share: the wait for their inputs, gated activations, soft caps, e4m3.

The arithmetic rounds where the specifications round.
"""

import math

import triton
import triton.language as tl

from nanoinfer.ops.common.fp8_format import FP8_MAX, TINY, TO_SCALE

INF = tl.constexpr(float("inf"))
LARGEST_E4M3 = tl.constexpr(FP8_MAX)
LARGEST_TO_SCALE = tl.constexpr(TO_SCALE)
SMALLEST_SCALE = tl.constexpr(TINY)
SQRT_HALF = tl.constexpr(math.sqrt(0.5))
TWO_LOG2_E = tl.constexpr(2 * math.log2(math.e))


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait for what earlier kernels compute, and let the next kernel start: see `programmatic_launch.py`."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def gated(gate, up, dtype: tl.constexpr, GELU: tl.constexpr = False, ERF: tl.constexpr = False):
    """Return silu(gate) * up in float32, or gelu(gate) * up: by the tanh approximation, or with ERF as it is defined.

    Gate, up and the activated gate are rounded to `dtype`, as separate kernels would leave them.
    """
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    slope = gate
    if ERF:
        return (0.5 * gate * (1.0 + tl.erf(gate * SQRT_HALF))).to(dtype).to(tl.float32) * up
    if GELU:  # (1 + tanh(z)) / 2 is the logistic function of 2 z; here 2 z = sqrt(8 / pi) * (x + 0.044715 x^3)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(-slope))).to(dtype).to(tl.float32) * up


@triton.jit
def soft_capped(x, CAP: tl.constexpr):
    """Return CAP * tanh(x / CAP) of float32 values. Written so that nothing overflows, however large they are."""
    decay = tl.exp2(tl.abs(x) * (-TWO_LOG2_E / CAP))  # exp(-2 |x| / CAP)
    magnitude = CAP * (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def e4m3_scale(x, axis: tl.constexpr):
    """Return the scales of float32 values along an axis; NaN does not count."""
    return tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=axis) * LARGEST_TO_SCALE


@triton.jit
def to_e4m3(x, scale):
    """Return float32 values / scale in e4m3; NaN stays NaN, and what has no scale to speak of becomes zero."""
    x *= tl.where(scale < SMALLEST_SCALE, 0.0, tl.div_rn(1.0, scale))
    x = tl.maximum(x, -LARGEST_E4M3, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, LARGEST_E4M3, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
