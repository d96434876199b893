"""The soft cap of logits (Gemma 2): they come close to it, and never pass it. That of scores is part of attention."""

from torch import Tensor

from nanoinfer import kernels
from nanoinfer.kernels.triton_twins import triton_on_cuda


@triton_on_cuda(lambda: kernels.soft_cap.cap_logits)
def cap_logits(logits: Tensor, soft_cap: float) -> Tensor:
    """Replace logits (num_rows, size) by soft_cap * tanh(logits / soft_cap), computed in float32, and return them."""
    return logits.copy_((logits.float() / soft_cap).tanh_() * soft_cap)
