"""The gated activations of the MLP, SwiGLU and GeGLU, in one pass over memory. Twins: `layers/activation.py`."""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.programmatic_launch import overlap_options

MAX_TILE = 1024  # outputs for each program


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr, out_ptr, row_stride, size, GELU: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < size
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=mask)
    up = tl.load(gate_up_ptr + row * row_stride + size + column, mask=mask)
    wide = gate.to(tl.float32)
    slope = wide
    if GELU:  # (1 + tanh(z)) / 2 is the logistic function of 2 z; here 2 z = sqrt(8 / pi) * (x + 0.044715 x^3)
        slope = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    activated = (wide / (1.0 + tl.exp(-slope))).to(gate.dtype)
    out = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * size + column, out.to(gate.dtype), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (num_tokens, size). gate_up: (num_tokens, 2 * size), gate first, rows contiguous."""
    return _launch(gate_up, GELU=False)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, (num_tokens, size), by the tanh approximation of GELU. gate_up: as for silu_and_mul."""
    return _launch(gate_up, GELU=True)


def _launch(gate_up: Tensor, **activation: bool) -> Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, f"the rows of gate_up must be contiguous, strides {gate_up.stride()}"
    out = gate_up.new_empty(num_tokens, size)
    if num_tokens == 0:
        return out
    tile = min(MAX_TILE, triton.next_power_of_2(size))
    _gated_activation_kernel[(num_tokens, triton.cdiv(size, tile))](
        gate_up, out, gate_up.stride(0), size, TILE=tile, **activation, **overlap_options(gate_up.device)
    )
    return out
