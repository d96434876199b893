"""From logits to token ids: one kernel on CUDA, and its specification in plain PyTorch."""

import importlib.util

import torch
from torch import Tensor

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF


def sample(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a token id for each row from softmax(logits / temperature), or the best where that is 0: (num_rows,) int32.

    A row with NaN or infinity among its scores gives -1.

    logits: (num_rows, vocab_size). temperatures: (num_rows,) float32. seeds: (num_rows,) int64.
    positions: (num_rows,) int32, the drawn token's place in its sequence. The noise depends on (seed, position,
    vocabulary id) and nothing else.
    """
    if logits.is_cuda and importlib.util.find_spec("triton") is not None:
        from nanoinfer.kernels.sample import sample_triton

        return sample_triton(logits, temperatures, seeds, positions)
    return sample_torch(logits, temperatures, seeds, positions)


def sample_torch(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The specification of `kernels/sample.py`."""
    scores = logits.float()
    random = temperatures > 0
    if random.any():
        scores = scores.clone()  # float32 logits were not copied above
        noise = gumbel_noise(seeds[random], positions[random], scores.shape[1])
        scores[random] += temperatures[random].unsqueeze(1) * noise
    best = torch.where(scores.isnan(), torch.inf, scores).max(dim=1)
    return torch.where(best.values.isfinite(), best.indices, -1).int()


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for each (seed, position) and vocabulary id: (num_rows, vocab_size) float32."""
    counters = torch.arange(-(-vocab_size // 4), device=seeds.device)  # one Philox call serves four neighbouring ids
    bits = torch.stack(philox(seeds.unsqueeze(1), counters, positions.long().unsqueeze(1)), dim=-1)
    bits = bits.flatten(1)[:, :vocab_size]
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    # log(1 - u) is coarse where u is small, which is where the winners are.
    return -torch.log(-torch.log1p(-uniform))


def philox(seed: Tensor, counter0: Tensor, counter1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10 (Salmon et al. 2011) of the counters (counter0, counter1, 0, 0): four 32-bit numbers, as int64."""
    key0, key1 = seed & MASK32, (seed >> 32) & MASK32
    shape = torch.broadcast_shapes(seed.shape, counter0.shape, counter1.shape)
    c0, c1 = counter0.expand(shape), counter1.expand(shape)
    c2 = c3 = torch.zeros(shape, dtype=torch.int64, device=seed.device)
    for _ in range(10):
        # The products may pass 2^63: int64 wraps round, and the masked shift reads the right bits all the same.
        product0, product1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) & MASK32) ^ c1 ^ key0, ((product0 >> 32) & MASK32) ^ c3 ^ key1
        c1, c3 = product1 & MASK32, product0 & MASK32
        key0, key1 = (key0 + PHILOX_KEY_STEPS[0]) & MASK32, (key1 + PHILOX_KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3
