"""The tables on the device: what a decode step reads from them, and what sampling enters."""

import dataclasses

import pytest
import torch
from torch import Tensor

from nanoinfer.caches.block_layout import BlockLayout
from nanoinfer.caches.kv_cache import KVCache
from nanoinfer.caches.kv_cache_layout import KVCacheLayout, LayerKind
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.packet import Header, UploadedSections
from nanoinfer.layers.attention.metadata import DecodeBatch, SharedPrefixes
from nanoinfer.runner.step_tables import PADDING_ROW, StepTables
from nanoinfer.sampling.sampler import Sampler

# One layer that keeps a key and a value of 2 numbers each: 10 blocks of 4 tokens.
ONE_LAYER = KVCacheLayout.arrange([LayerKind(None, BlockLayout.of_kv(1, 2))])
KV_CACHE = KVCache(ONE_LAYER, 10, 4, torch.float32, torch.device("cpu"))


@pytest.fixture
def tables() -> StepTables:
    """Three rows of up to 8 tokens in blocks of 4: two tokens in row 0, five in row 2."""
    tables = StepTables(max_num_seqs=3, max_model_len=8, kv_cache=KV_CACHE)
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
    step = tables.decode_step(DecodeBatch(torch.tensor([2, 0])))
    assert step.token_ids.tolist() == [24, 11]
    assert step.positions.tolist() == [4, 1]
    assert step.attention.slot_mapping.tolist() == [9 * 4, 7 * 4 + 1]
    assert step.attention.context_lens.tolist() == [5, 2]
    assert (step.kv_cache, step.outputs) == (KV_CACHE, None), "all rows have logits"


def test_a_step_of_several_tokens_computes_those_that_follow_the_newest_one(tables: StepTables) -> None:
    """Three tokens are proposed after row 2's newest one, and two of them are computed; row 0 has only its newest."""
    tables.token_ids[2, 5:8] = torch.tensor([25, 26, 27])
    counts = torch.tensor([3, 1, 2], dtype=torch.int32)
    step = tables.decode_step(DecodeBatch(torch.tensor([2, 0, PADDING_ROW]), None, 3, counts))
    assert step.token_ids.tolist() == [24, 25, 26, 11, 11, 11, 0, 0, 0]
    assert step.positions.tolist() == [4, 5, 6, 1, 1, 1, 0, 0, 0]
    assert step.attention.slot_mapping.tolist() == [9 * 4, 9 * 4 + 1, 9 * 4 + 2, 7 * 4 + 1, -1, -1, -1, -1, -1]
    assert step.attention.context_lens.tolist() == [5, 2, 0]
    assert (step.attention.num_tokens, step.attention.num_row_tokens) == (3, counts)
    assert step.attention.with_a_row_for_each_token().context_lens.tolist() == [5, 6, 7, 2, 2, 2, 0, 0, 0]


def test_a_prefill_step_computes_chunks_and_has_logits_of_those_that_end_a_prompt(tables: StepTables) -> None:
    """All of row 0; of row 2 tokens 1 to 3, after which others are to come."""
    chunks = [[0, 0, 2], [2, 1, 3]]
    header = Header(*[0] * len(Header._fields))._replace(num_prefill_tokens=5, num_prefill_samples=1)
    step = tables.prefill_step(header, torch.tensor(chunks, dtype=torch.int32), chunks)
    assert step.token_ids.tolist() == [10, 11, 21, 22, 23]
    assert step.positions.tolist() == [0, 1, 1, 2, 3]
    assert step.attention.slot_mapping.tolist() == [7 * 4, 7 * 4 + 1, 3 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3]
    assert (step.attention.query_lens, step.attention.context_lens) == ((2, 3), (2, 4))
    assert step.outputs.tolist() == [1], "the last token of row 0"


def test_a_decode_step_hands_on_which_rows_share_blocks(tables: StepTables) -> None:
    shared = SharedPrefixes(num_shared_blocks=torch.tensor([1, 1]), num_sharers=torch.tensor([2, 0]))
    assert tables.decode_step(DecodeBatch(torch.tensor([2, 0]), shared)).attention.shared_prefixes is shared
    assert tables.decode_step(DecodeBatch(torch.tensor([2, 0]))).attention.shared_prefixes is None


def test_a_row_has_room_for_the_longest_sequence_and_a_padding_row_comes_last() -> None:
    tables = StepTables(max_num_seqs=3, max_model_len=9, kv_cache=KV_CACHE)
    assert tables.block_tables.shape == (4, 3), "whatever the batch: a captured graph keeps the width"
    assert tables.token_ids.shape == (4, 10)


def test_layers_that_see_several_blocks_in_a_page_get_ids_that_far_apart() -> None:
    wide, narrow = BlockLayout.of_kv(1, 4), BlockLayout.of_kv(1, 2)
    layout = KVCacheLayout.arrange([LayerKind(None, narrow), LayerKind(None, narrow), LayerKind(8, wide)])
    tables = StepTables(2, 8, KVCache(layout, 10, 4, torch.float32, torch.device("cpu")))
    nothing = {item.name: 0 for item in dataclasses.fields(UploadedSections)}
    header = Header(*[0] * (len(Header._fields) - 1), counts={**nothing, "new_blocks": 3})
    new_blocks = torch.tensor([[1, 0, 7], [1, 1, 9], [3 + 1, 0, 5]], dtype=torch.int32)
    tables.update(header, UploadedSections(**(nothing | {"new_blocks": new_blocks})))
    assert [table[1].tolist() for table in tables.tables] == [[14, 18], [5, 0]]
    assert new_blocks.tolist() == [[1, 0, 7], [1, 1, 9], [4, 0, 5]], "the packet stays as it is"
    tables.context_lens[1] = 6
    step = tables.decode_step(DecodeBatch(torch.tensor([1])))
    assert step.attention.slot_mapping.tolist() == [18 * 4 + 1]


def test_padding_attends_to_nothing_and_writes_no_keys(tables: StepTables) -> None:
    step = tables.decode_step(DecodeBatch(torch.tensor([PADDING_ROW, 0])))
    assert step.attention.slot_mapping.tolist() == [-1, 7 * 4 + 1]
    assert step.attention.context_lens.tolist() == [0, 2]


def test_the_next_step_finds_what_sampling_entered(tables: StepTables) -> None:
    assert sample(tables, one_hot(25, 12), [2, 0]) == [25, 12]
    step = tables.decode_step(DecodeBatch(torch.tensor([2, 0])))
    assert step.token_ids.tolist() == [25, 12]
    assert step.positions.tolist() == [5, 2]


def test_sampling_leaves_all_rows_alone_but_those_of_the_step(tables: StepTables) -> None:
    before = [table.clone() for table in (tables.token_ids, tables.context_lens, tables.block_tables)]
    assert sample(tables, one_hot(25, 26, 27), [PADDING_ROW, 0, PADDING_ROW]) == [-1, 26, -1]
    before[0][0, 2], before[1][0] = 26, 3
    after = (tables.token_ids, tables.context_lens, tables.block_tables)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
