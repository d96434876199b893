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


def test_steps_of_few_tokens_are_served_unless_the_memory_is_left_out() -> None:
    memory = object.__new__(SymmetricMemory)
    memory.max_tokens, memory._is_left_out = 4, False
    assert [memory.serves(num_tokens) for num_tokens in (1, 4, 5)] == [True, True, False]
    with memory.left_out():
        assert not memory.serves(1)
    assert memory.serves(1)
