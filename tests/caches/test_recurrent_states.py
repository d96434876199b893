"""Recurrent states with pending tokens: copies, rows that change hands, memory, and which operation a step takes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoinfer.caches.recurrent_states import LayerStates, RecurrentStates, StateLayout
from nanoinfer.checkpoint.base_config import LinearAttentionConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.packet import RowRecord, StateCopy, join_sections, read_header
from nanoinfer.layers.attention.metadata import DecodeMetadata
from nanoinfer.layers.gated_delta_net import GatedDeltaNet
from nanoinfer.runner.device_state import DeviceState

CPU = torch.device("cpu")
LAYOUT = StateLayout(
    num_layers=3, matrices=(4, 8, 6), conv_inputs=(4, 40), dtype=torch.bfloat16, max_row_tokens=5
)  # two key heads of 8, four value heads of 6


def with_pending_tokens(num_counted: list[int]) -> RecurrentStates:
    """States of as many rows, which go on at position 10, and of two snapshots."""
    states = LAYOUT.allocate(len(num_counted), 2, CPU)
    assert states.pending is not None
    generator = torch.Generator().manual_seed(0)
    for tensor in (states.matrices, states.conv_inputs, *states.pending[2:]):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    states.pending.first_positions[:] = 10
    states.pending.num_counted[:-1] = torch.tensor(num_counted)
    return states


def test_a_copy_of_a_row_has_its_pending_tokens_and_nothing_is_pending_in_the_row_that_it_goes_to() -> None:
    states, flushed = (with_pending_tokens([2, 0, 3]) for _ in range(2))
    assert states.pending is not None
    flushed.flush(torch.tensor([0, 1, 2], dtype=torch.int32))
    untouched = states.matrices[:, 2].clone()
    states.copy([[0, 3], [1, 4], [3, 1]])  # rows 0 and 1 to the two snapshots, then the first of these to row 1
    for tensor, expected in ((states.matrices, flushed.matrices), (states.conv_inputs, flushed.conv_inputs)):
        for place, row in ((0, 0), (3, 0), (4, 1), (1, 0)):
            assert torch.equal(tensor[:, place], expected[:, row])
    assert torch.equal(states.matrices[:, 2], untouched)
    assert states.pending.num_counted.tolist() == [0, 0, 3, 0]


def test_a_row_may_be_kept_and_given_to_another_sequence_in_one_step() -> None:
    states, flushed = (with_pending_tokens([2, 3]) for _ in range(2))
    assert states.pending is not None
    flushed.flush(torch.tensor([0], dtype=torch.int32))
    record = RowRecord(row=0, num_tokens=1, num_prompt_tokens=1, temperature=0.0, seed=np.int64(7))
    sections = {"kept_states": [StateCopy(0, 2)], "row_records": [record], "known_tokens": [5]}
    packet = join_sections(sections, num_prefill_tokens=0, num_samples=0, num_blocks=0)
    header = read_header(packet)
    tables: Any = SimpleNamespace(recurrent_states=states, update=lambda *_: None)
    sampler: Any = SimpleNamespace(admit=lambda *_: None)
    state = DeviceState(None, None, tables, sampler, None, [], None)  # type: ignore[arg-type]
    state.enter(header, header.on_host(packet), header.on_device(torch.from_numpy(header.uploaded(packet))))
    assert torch.equal(states.matrices[:, 2], flushed.matrices[:, 0])
    assert states.pending.num_counted.tolist() == [0, 3, 0]


def test_pending_tokens_take_memory_in_rows_alone_and_only_where_rows_have_several_tokens() -> None:
    plain = replace(LAYOUT, max_row_tokens=1)
    assert plain.allocate(3, 2, CPU).pending is None
    assert plain.row_bytes == plain.snapshot_bytes == LAYOUT.snapshot_bytes
    num_bytes = LAYOUT.allocate(3, 2, CPU).num_bytes
    # Beside the tensors of layers, a row has the number that counts, of 4 bytes, and the first position, of 8.
    assert num_bytes == (3 + 1) * (LAYOUT.row_bytes + 12) + 2 * LAYOUT.snapshot_bytes
    # Of each of 5 tokens a layer has 4 keys of 8, 4 deltas of 6 and 4 decays; and inputs of 3 more for the convolution.
    assert LAYOUT.row_bytes - LAYOUT.snapshot_bytes == 3 * (5 * (4 * 8 * 2 + 4 * 6 * 4 + 4 * 4) + (5 + 3) * 40 * 2)
    assert LAYOUT.max_rows(100, 14 * LAYOUT.row_bytes) == 7


CONFIG = LinearAttentionConfig(
    num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=6, conv_width=4, is_linear=(True,)
)


@pytest.fixture
def layer() -> GatedDeltaNet:
    torch.manual_seed(0)
    layer = GatedDeltaNet(16, 1e-6, CONFIG, False, TensorParallel())
    for param in layer.parameters():
        torch.nn.init.normal_(param)
    return layer


def mix(layer: GatedDeltaNet, lines: list[Tensor], first: int, num_real: int | None, states: LayerStates) -> Tensor:
    """Compute lines of row 1. num_real: how many are no padding; None: the step has one token a row."""
    positions = torch.arange(first, first + len(lines[0]))
    several = {} if num_real is None else {"num_tokens": len(lines[0]), "num_row_tokens": torch.tensor([num_real])}
    metadata = DecodeMetadata(*torch.empty(3, 1), **several)  # type: ignore[arg-type]
    qkvz, ba = lines
    return layer.mix((qkvz, ba), torch.tensor([1], dtype=torch.int32), positions, metadata, states)


def test_a_layer_goes_from_steps_of_one_token_to_steps_of_several_and_back(layer: GatedDeltaNet) -> None:
    layout = StateLayout.of(SimpleNamespace(linear_attention=CONFIG), torch.float32, TensorParallel(), 4)  # type: ignore[arg-type]
    assert layout is not None
    states, plain = layout.allocate(2, 1, CPU), replace(layout, max_row_tokens=1).allocate(2, 1, CPU)
    assert states.pending is not None
    tokens = [torch.randn(9, 56 + 24), torch.randn(9, 8)]
    expected = torch.cat([mix(layer, [x[[i]] for x in tokens], i, None, plain.layer(0)) for i in range(9)])
    found = [mix(layer, [x[:1] for x in tokens], 0, None, states.layer(0))]
    for first, num_real, num_counted in ((1, 4, 3), (4, 3, 1), (5, 4, 3)):  # 8 tokens in all
        lines = [torch.cat((x[first : first + num_real], x[: 4 - num_real])) for x in tokens]
        found.append(mix(layer, lines, first, num_real, states.layer(0))[:num_counted])
        states.pending.num_counted[1] = num_counted
    states.flush(torch.tensor([1], dtype=torch.int32))
    found.append(mix(layer, [x[8:] for x in tokens], 8, None, states.layer(0)))
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states.matrices[:, 1], plain.matrices[:, 1], atol=1e-5, rtol=1e-5)
    assert torch.equal(states.conv_inputs[:, 1], plain.conv_inputs[:, 1])


def test_rows_of_several_tokens_need_states_with_room_for_pending_ones(layer: GatedDeltaNet) -> None:
    states = StateLayout(1, (4, 8, 6), (4, 56), torch.float32).allocate(2, 0, CPU)
    with pytest.raises(AssertionError, match="allocated with room for pending ones"):
        mix(layer, [torch.randn(2, 80), torch.randn(2, 8)], 0, 2, states.layer(0))
