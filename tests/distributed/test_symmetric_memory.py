"""The order in which all-reduces take their buffers, without a GPU."""

import pytest
import torch

from nanoinfer.distributed.symmetric_memory import SymmetricMemory


def test_a_step_with_an_odd_number_of_all_reduces_is_noticed_at_its_end() -> None:
    memory = object.__new__(SymmetricMemory)  # its constructor shares memory between GPUs
    memory._rank, memory.max_tokens, memory._min_two_shot_tokens, memory._next_index = 0, 4, 5, 0
    memory._parts, memory._outputs = [(), ()], [(), ()]
    memory.flags = torch.zeros(1, dtype=torch.int64)
    memory.check_even()
    for _ in range(2):
        memory.next_buffers(num_tokens=1)
    memory.check_even()
    memory.next_buffers(num_tokens=1)
    with pytest.raises(AssertionError, match="odd number of all-reduces"):
        memory.check_even()
