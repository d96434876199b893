"""Draw one token for each row straight from the logits. Twin: `sample_torch` in `layers/sampler.py`.

argmax(logits + temperature * gumbel noise) is a draw from softmax(logits / temperature) (Gumbel 1954; Maddison et al.
2014), and greedy at temperature 0. So nothing is normalised, sorted or copied: the logits are read once. The noise is
Philox-4x32-10 (Salmon et al. 2011) of (the request's seed, the token's position, the vocabulary id), so that a
request's random stream is its own, whatever else is in the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # vocabulary ids for each program


@triton.jit
def _gumbel(bits):
    """32 random bits to standard Gumbel noise, -log(E) with E exponential."""
    uniform = (bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    uniform = tl.minimum(uniform, 0.99999994)  # the float32 below 1
    # log(1 - u) is coarse where u is small, which is where the winners are: two terms more of the series there.
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333333))
    return -tl.log(tl.where(uniform < 1e-3, series, -tl.log(1.0 - uniform)))


@triton.jit
def _best_in_tile_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    best_scores_ptr,
    best_ids_ptr,
    vocab_size,
    logits_row_stride,
    num_tiles,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    mask = ids < vocab_size
    scores = tl.load(logits_ptr + row * logits_row_stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row).to(tl.int32)
        counter = tile * (TILE // 4) + tl.arange(0, TILE // 4)  # one Philox call serves four neighbouring ids
        zero = counter * 0
        r0, r1, r2, r3 = tl.philox(seed, counter, zero + position, zero, zero)
        bits = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
        scores += temperature * _gumbel(bits)
    scores = tl.where(scores == scores, scores, float("inf"))  # NaN wins too, so that it is seen
    best_score, best = tl.max(scores, axis=0, return_indices=True)
    tl.store(best_scores_ptr + row * num_tiles + tile, best_score)
    tl.store(best_ids_ptr + row * num_tiles + tile, tile * TILE + best)


@triton.jit
def _best_of_tiles_kernel(best_scores_ptr, best_ids_ptr, out_ptr, num_tiles, TILES: tl.constexpr):
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    scores = tl.load(best_scores_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    best_score, best = tl.max(scores, axis=0, return_indices=True)  # ties go to the lower tile, so to the lower id
    is_finite = tl.abs(best_score) < float("inf")
    tl.store(out_ptr + row, tl.where(is_finite, tl.load(best_ids_ptr + row * num_tiles + best), -1))


def sample_triton(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a token id for each row: (num_rows,) int32; -1 for a row with NaN or infinity among its scores.

    logits: (num_rows, vocab_size), rows contiguous. temperatures: (num_rows,) float32, 0 for greedy.
    seeds: (num_rows,) int64. positions: (num_rows,) the drawn token's place in its sequence.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, f"the logits of a row must be contiguous, strides {logits.stride()}"
    num_tiles = triton.cdiv(vocab_size, TILE)
    best_scores = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return out
    _best_in_tile_kernel[(num_rows, num_tiles)](
        logits,
        temperatures,
        seeds,
        positions,
        best_scores,
        best_ids,
        vocab_size,
        logits.stride(0),
        num_tiles,
        TILE=TILE,
        num_warps=4,
    )
    _best_of_tiles_kernel[(num_rows,)](
        best_scores, best_ids, out, num_tiles, TILES=triton.next_power_of_2(num_tiles), num_warps=1
    )
    return out
