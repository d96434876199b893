"""What the kernel of the custom all-reduce is given: buffers and flags of all ranks. It runs nothing by itself."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PeerTensor:
    """Names a tensor in the memory of any GPU, with the two things that a Triton kernel asks of a tensor argument."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True)
class SymmetricBuffers:
    """Holds the buffers of an all-reduce that is still to be computed, by `layers.layernorm.all_reduce_add_rms_norm`.

    All-reduces are numbered from 1. The number is called the epoch, and a flag holds the epoch that it announces.
    """

    rank: int
    index: int  # which of the NUM_BUFFERS sets of buffers these are
    two_shot: bool  # each row is reduced and normalised by one rank, for all
    input: Tensor  # (num_tokens, hidden_size): this rank's partial sums
    output: Tensor  # (num_tokens, hidden_size): where this rank gets the result
    inputs: tuple[Tensor | PeerTensor, ...]  # one for each rank, (max_tokens, hidden_size); num_tokens rows are in use
    outputs: tuple[Tensor | PeerTensor, ...]  # likewise
    # (num_ranks + max_tokens,) int64, written by other ranks: the last epoch whose input each rank has announced, then
    # the last epoch whose output has been written, for each row.
    flags: Tensor
    flag_addresses: Tensor  # (num_ranks,) int64: the address of each rank's flags
    epochs: Tensor  # (NUM_BUFFERS,) int64: the last epoch that used each set of buffers
