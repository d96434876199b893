"""The Philox random number generator in plain PyTorch; the kernels draw the same numbers.

A number depends on its key and counters alone, so the order of draws and the batch do not matter.
"""

import torch
from torch import Tensor

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF


def exponential(bits: Tensor) -> Tensor:
    """Turn 32 random bits into a standard exponential number, float32; its -log is standard Gumbel noise."""
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-uniform)  # log(1 - u) is coarse where u is small, which is where the winners are


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Philox-4x32-10 (Salmon et al. 2011) of the counters (c0, c1, c2, 0): four 32-bit numbers, as int64."""
    key0, key1 = seed & MASK32, (seed >> 32) & MASK32
    c3 = torch.zeros_like(c2)
    for _ in range(10):
        # The products may pass 2^63: int64 wraps round, and the masked shift reads the right bits all the same.
        product0, product1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) & MASK32) ^ c1 ^ key0, ((product0 >> 32) & MASK32) ^ c3 ^ key1
        c1, c3 = product1 & MASK32, product0 & MASK32
        key0, key1 = (key0 + PHILOX_KEY_STEPS[0]) & MASK32, (key1 + PHILOX_KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3
