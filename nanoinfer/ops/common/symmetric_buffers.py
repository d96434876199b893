"""Holds the buffers of all ranks for the kernel of the custom all-reduce. It runs nothing by itself."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Buffers hold the bits of numbers as integers. An entry that nothing has come to holds -0.0, which is never sent.
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def empty_bits(dtype: torch.dtype) -> int:
    """Return the bits of -0.0 as a signed integer."""
    return torch.iinfo(BITS[dtype]).min


@dataclass(frozen=True, slots=True)
class PeerTensor:
    """Names a tensor in the memory of any GPU, with the two things that a Triton kernel asks of a tensor argument."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True)
class SymmetricBuffers:
    """Holds the buffers of one all-reduce, `all_reduce_add_rms_norm`, in which ranks leave what they send each other.

    two_shot: each row is added up and normalised by one rank, for all.
    parts: for each rank, (num_ranks, max_tokens, hidden_size), where the others leave their partial sums, by sender.
    outputs: for each rank, (max_tokens, hidden_size), where they leave rows that they have normalised.
    released: (1,) int64; when it is not 0, this rank waits for nothing any more.
    """

    rank: int
    max_tokens: int
    two_shot: bool
    parts: tuple[Tensor | PeerTensor, ...]
    outputs: tuple[Tensor | PeerTensor, ...]
    released: Tensor
