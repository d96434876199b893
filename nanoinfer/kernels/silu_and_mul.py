"""SwiGLU, the gated activation of the MLP, in one pass over memory. Twin: `layers/activation.py`."""

import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.programmatic_launch import overlap_options

MAX_TILE = 1024  # outputs for each program


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, row_stride, size, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < size
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up_ptr + row * row_stride + column, mask=mask)
    up = tl.load(gate_up_ptr + row * row_stride + size + column, mask=mask)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    out = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * size + column, out.to(gate.dtype), mask=mask)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (num_tokens, size). gate_up: (num_tokens, 2 * size), gate first, rows contiguous."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, f"the rows of gate_up must be contiguous, strides {gate_up.stride()}"
    out = gate_up.new_empty(num_tokens, size)
    if num_tokens == 0:
        return out
    tile = min(MAX_TILE, triton.next_power_of_2(size))
    _silu_and_mul_kernel[(num_tokens, triton.cdiv(size, tile))](
        gate_up, out, gate_up.stride(0), size, TILE=tile, **overlap_options(gate_up.device)
    )
    return out
