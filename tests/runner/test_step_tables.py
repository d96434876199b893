"""The tables on the device: what a decode step reads from them, and what sampling enters."""

import pytest
import torch
from torch import Tensor

from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.attention.metadata import SharedPrefixes
from nanoinfer.runner.step_tables import PADDING_ROW, StepTables
from nanoinfer.sampling.sampler import Sampler


@pytest.fixture
def tables() -> StepTables:
    """Three rows of up to 8 tokens in blocks of 4: two tokens in row 0, five in row 2."""
    tables = StepTables(max_num_seqs=3, max_model_len=8, block_size=4, device=torch.device("cpu"))
    tables.token_ids[0, :2] = torch.tensor([10, 11])
    tables.token_ids[2, :5] = torch.tensor([20, 21, 22, 23, 24])
    tables.context_lens[:3] = torch.tensor([2, 0, 5])
    tables.block_tables[0, 0] = 7
    tables.block_tables[2] = torch.tensor([3, 9])
    return tables


def sample(tables: StepTables, logits: Tensor, rows: list[int]) -> list[int]:
    sampler = Sampler(tables.token_ids, tables.context_lens, logits.shape[1], TensorParallel())
    return sampler.sample(logits, 0, torch.tensor(rows), rows).token_ids.tolist()


def one_hot(*ids: int) -> Tensor:
    return torch.eye(30)[list(ids)]


def test_a_decode_step_computes_the_newest_token_of_each_row(tables: StepTables) -> None:
    token_ids, positions, metadata = tables.decode_inputs(torch.tensor([2, 0]))
    assert token_ids.tolist() == [24, 11]
    assert positions.tolist() == [4, 1]
    assert metadata.slot_mapping.tolist() == [9 * 4, 7 * 4 + 1]
    assert metadata.context_lens.tolist() == [5, 2]


def test_a_decode_step_hands_on_which_rows_share_blocks(tables: StepTables) -> None:
    shared = SharedPrefixes(num_shared_blocks=torch.tensor([1, 1]), num_group_rows=torch.tensor([2, 0]))
    assert tables.decode_inputs(torch.tensor([2, 0]), shared).metadata.shared_prefixes is shared
    assert tables.decode_inputs(torch.tensor([2, 0])).metadata.shared_prefixes is None


def test_a_row_has_room_for_the_longest_sequence_and_a_padding_row_comes_last() -> None:
    tables = StepTables(max_num_seqs=3, max_model_len=9, block_size=4, device=torch.device("cpu"))
    assert tables.block_tables.shape == (4, 3), "whatever the batch: a captured graph keeps the width"
    assert tables.token_ids.shape == (4, 10)


def test_padding_attends_to_nothing_and_writes_no_keys(tables: StepTables) -> None:
    _, _, metadata = tables.decode_inputs(torch.tensor([PADDING_ROW, 0]))
    assert metadata.slot_mapping.tolist() == [-1, 7 * 4 + 1]
    assert metadata.context_lens.tolist() == [0, 2]


def test_the_next_step_finds_what_sampling_entered(tables: StepTables) -> None:
    assert sample(tables, one_hot(25, 12), [2, 0]) == [25, 12]
    token_ids, positions, _ = tables.decode_inputs(torch.tensor([2, 0]))
    assert token_ids.tolist() == [25, 12]
    assert positions.tolist() == [5, 2]


def test_sampling_leaves_all_rows_alone_but_those_of_the_step(tables: StepTables) -> None:
    before = [table.clone() for table in (tables.token_ids, tables.context_lens, tables.block_tables)]
    assert sample(tables, one_hot(25, 26, 27), [PADDING_ROW, 0, PADDING_ROW]) == [-1, 26, -1]
    before[0][0, 2], before[1][0] = 26, 3
    after = (tables.token_ids, tables.context_lens, tables.block_tables)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
