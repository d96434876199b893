"""The tables on the device: what a decode step reads from them, and what sampling enters."""

import pytest
import torch
from torch import Tensor

from nanoinfer.runner.cuda_graphs import graph_sizes
from nanoinfer.runner.step_tables import PADDING_ROW, DeviceState


@pytest.fixture
def state() -> DeviceState:
    """Three rows of up to 8 tokens in blocks of 4: two tokens in row 0, five in row 2."""
    state = DeviceState(max_num_seqs=3, max_model_len=8, block_size=4, device=torch.device("cpu"))
    state.token_ids[0, :2] = torch.tensor([10, 11])
    state.token_ids[2, :5] = torch.tensor([20, 21, 22, 23, 24])
    state.context_lens[:3] = torch.tensor([2, 0, 5])
    state.block_tables[0, 0] = 7
    state.block_tables[2] = torch.tensor([3, 9])
    return state


def one_hot(*ids: int) -> Tensor:
    return torch.eye(30)[list(ids)]


def test_a_decode_step_computes_the_newest_token_of_each_row(state: DeviceState) -> None:
    inputs = state.decode_inputs(torch.tensor([2, 0]))
    assert inputs.token_ids.tolist() == [24, 11]
    assert inputs.positions.tolist() == [4, 1]
    assert inputs.metadata.slot_mapping.tolist() == [9 * 4, 7 * 4 + 1]
    assert inputs.metadata.context_lens.tolist() == [5, 2]


def test_a_row_has_room_for_the_longest_sequence_and_a_padding_row_comes_last() -> None:
    state = DeviceState(max_num_seqs=3, max_model_len=9, block_size=4, device=torch.device("cpu"))
    assert state.block_tables.shape == (4, 3), "whatever the batch: a captured graph keeps the width"
    assert state.token_ids.shape == (4, 10)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 7, 64, 65, 100, 512])
def test_every_batch_has_a_graph_that_holds_it(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert max(sizes) == max_num_seqs
    for num_rows in range(1, max_num_seqs + 1):
        smallest = min(size for size in sizes if size >= num_rows)
        assert smallest - num_rows < 16, "and not much is padding"


def test_padding_attends_to_nothing_and_writes_no_keys(state: DeviceState) -> None:
    inputs = state.decode_inputs(torch.tensor([PADDING_ROW, 0]))
    assert inputs.metadata.slot_mapping.tolist() == [-1, 7 * 4 + 1]
    assert inputs.metadata.context_lens.tolist() == [0, 2]


def test_the_next_step_finds_what_sampling_entered(state: DeviceState) -> None:
    rows = torch.tensor([2, 0])
    assert state.sample(one_hot(25, 12), rows).tolist() == [25, 12]
    inputs = state.decode_inputs(rows)
    assert inputs.token_ids.tolist() == [25, 12]
    assert inputs.positions.tolist() == [5, 2]


def test_sampling_leaves_all_rows_alone_but_those_of_the_step(state: DeviceState) -> None:
    before = [table.clone() for table in (state.token_ids, state.context_lens, state.block_tables)]
    assert state.sample(one_hot(25, 26, 27), torch.tensor([PADDING_ROW, 0, PADDING_ROW])).tolist() == [-1, 26, -1]
    before[0][0, 2], before[1][0] = 26, 3
    after = (state.token_ids, state.context_lens, state.block_tables)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
