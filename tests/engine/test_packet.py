"""A step written as a packet and read again."""

import dataclasses
import re

import numpy as np
import pytest

from nanoinfer.engine import packet as packet_module
from nanoinfer.engine.packet import AllSections, Packet, UploadedSections, pack, read_header
from nanoinfer.engine.prefix_sharers import PrefixSharers
from nanoinfer.engine.row_options import AdmittedRow, read_admitted_rows
from nanoinfer.engine.scheduled_batch import BlockCopy, NewBlock, PrefillChunk, ScheduledBatch, StateCopy
from nanoinfer.engine.sequence import Sequence
from nanoinfer.engine.stopping import Stopping
from nanoinfer.sampling_params import SamplingParams
from tests.engine.helpers import make_sequence


def sections_of(packet: Packet) -> AllSections:
    return read_header(packet).on_host(packet)


def views(sections: UploadedSections) -> list[np.ndarray]:
    return [getattr(sections, item.name) for item in dataclasses.fields(sections)]


def sequence_in_row(row: int, token_ids: list[int], temperature: float = 1.0, seed: int = 0) -> Sequence:
    seq = Sequence(row, token_ids, SamplingParams(temperature=temperature), seed)
    seq.row = row
    return seq


def prefill_and_decode() -> ScheduledBatch:
    """Rows 2 and 5 are admitted, 5 with two tokens copied and its chunk cut; rows 0 and 7 decode, 7 in a new block."""
    whole, cut = sequence_in_row(2, [10, 11, 12]), sequence_in_row(5, [20, 21, 22, 23, 24, 25])
    whole.block_table, cut.block_table = [40, 41], [40, 42]
    return ScheduledBatch(
        admitted=[whole, cut],
        new_blocks=[NewBlock(2, 0, 40), NewBlock(2, 1, 41), NewBlock(5, 0, 42), NewBlock(7, 3, 43)],
        block_copies=[BlockCopy(30, 42, 2)],
        kept_states=[StateCopy(3, 9)],
        restored_states=[StateCopy(9, 1), StateCopy(8, 0)],
        prefill=[PrefillChunk(whole, 0, 3, samples=True), PrefillChunk(cut, 2, 3, samples=False)],
        decode=[sequence_in_row(0, [1]), sequence_in_row(7, [2])],
    )


def test_a_packet_is_one_flat_array_of_int32_whose_header_counts_what_it_carries() -> None:
    batch = prefill_and_decode()
    packet = pack(batch)
    assert packet.dtype == np.int32
    # header + 2 row records of 6 + 9 known tokens + 3 copies of states of 2
    # + 4 new blocks, 1 copy, 2 chunks and 2 decode rows of 3
    assert packet.shape == (16 + 2 * 6 + 9 + 3 * 2 + (4 + 1 + 2 + 2) * 3,)
    header = read_header(packet)
    assert header[:-1] == (6, 1, 3, 0, 12 + 9 + 27), (
        "tokens and samples of prefill, blocks (40 is both's), no masks; uploaded"
    )
    assert {name: count for name, count in header.counts.items() if count} == {
        "row_records": 2,
        "known_tokens": 9,
        "new_blocks": 4,
        "block_copies": 1,
        "chunks": 2,
        "decode_rows": 2,
        "kept_states": 1,
        "restored_states": 2,
    }
    assert all(type(number) is int for number in (*header[:-1], *header.counts.values()))
    assert pack(ScheduledBatch()).tolist() == [0] * 16
    assert not ScheduledBatch()


def test_a_packet_is_read_back_as_it_was_written() -> None:
    sections = sections_of(pack(prefill_and_decode()))
    assert sections.row_records[:, :3].tolist() == [[2, 3, 3], [5, 6, 6]]
    assert sections.known_tokens[:, 0].tolist() == [10, 11, 12, 20, 21, 22, 23, 24, 25]
    assert sections.new_blocks.tolist() == [[2, 0, 40], [2, 1, 41], [5, 0, 42], [7, 3, 43]]
    assert sections.block_copies.tolist() == [[30, 42, 2]]
    assert sections.kept_states.tolist() == [[3, 9]]
    assert sections.restored_states.tolist() == [[9, 1], [8, 0]]
    assert sections.chunks.tolist() == [[2, 0, 3], [5, 2, 3]]
    assert sections.decode_rows.tolist() == [[0, 0, 0], [7, 0, 0]]


def test_the_example_of_the_module() -> None:
    seq = sequence_in_row(3, [11, 12, 13, 14, 15], temperature=0.0, seed=42)
    seq.block_table = [6, 7]
    new_blocks, chunk = [NewBlock(3, 0, 6), NewBlock(3, 1, 7)], PrefillChunk(seq, 0, 5, samples=True)
    packets = (
        pack(ScheduledBatch(admitted=[seq], new_blocks=new_blocks, prefill=[chunk])),
        pack(ScheduledBatch(decode=[seq])),
    )
    shown = re.findall(r"^    ([\d ]+?)(?:   | *$)", packet_module.__doc__ or "", re.MULTILINE)
    numbers = [int(number) for line in shown for number in line.split()]
    assert numbers == [*packets[0].tolist(), *packets[1].tolist()]


def test_sections_are_views_of_the_packet() -> None:
    packet = pack(prefill_and_decode())
    sections = [view for view in views(sections_of(packet)) if view.size]
    assert len(sections) == 8
    assert all(np.shares_memory(section, packet) for section in sections)


def test_only_what_the_device_needs_is_uploaded() -> None:
    packet = pack(prefill_and_decode())
    header = read_header(packet)
    uploaded = header.uploaded(packet)
    assert len(uploaded) == len(packet) - 16 - 3 * 2, "neither the header nor the copies of states"
    on_device, on_host = header.on_device(uploaded), header.on_host(packet)
    for item in dataclasses.fields(on_device):
        assert np.array_equal(getattr(on_device, item.name), getattr(on_host, item.name)), item.name
    asking = Sequence(1, [10, 11], SamplingParams(logit_bias={3: 1.0}))
    asking.row = 0
    plain, with_bias = (
        pack(ScheduledBatch(admitted=[seq], prefill=[PrefillChunk(seq, 0, 2, samples=True)]))
        for seq in (sequence_in_row(0, [10, 11]), asking)
    )
    assert np.array_equal(read_header(with_bias).uploaded(with_bias), read_header(plain).uploaded(plain))


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.7, 100.0])
@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
def test_the_bits_of_temperature_and_seed_and_generated_tokens_travel(temperature: float, seed: int) -> None:
    seq = sequence_in_row(3, [10, 11], temperature, seed)
    seq.token_ids.extend((12, 13))  # as after a preemption
    sections = sections_of(pack(ScheduledBatch(admitted=[seq], prefill=[PrefillChunk(seq, 0, 4, samples=True)])))
    row, num_tokens, num_prompt_tokens, bits, seed_low, seed_high = sections.row_records[0]
    assert (row, num_tokens, num_prompt_tokens) == (3, 4, 2)
    assert sections.known_tokens[:, 0].tolist() == [10, 11, 12, 13]
    assert bits.view(np.float32) == np.float32(temperature)
    assert (int(seed_high) << 32) | (int(seed_low) & 0xFFFF_FFFF) == seed


def test_only_a_row_that_asks_for_something_is_told_of_by_each_option_that_asks() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.75,
        min_tokens=3,
        logprob_token_ids=[8, 2**31 - 1],
        prompt_logprobs=4,
        frequency_penalty=-0.5,
        logit_bias={9: 0.5, 4: -100.0},
    )
    asking, plain = Sequence(1, [10, 11], params), sequence_in_row(4, [20])
    asking.row, asking.prompt_logprobs_start = 3, 1
    asking.stopping = Stopping.of(params, 2, frozenset({7, 5}), max_model_len=100)
    asking.token_ids.append(12)
    chunks = [PrefillChunk(seq, 0, len(seq.token_ids), samples=True) for seq in (plain, asking)]
    sections = sections_of(pack(ScheduledBatch(admitted=[plain, asking], prefill=chunks)))
    options = {
        "top_p": [0.75],
        "min_tokens": [3, 5, 7],
        "frequency_penalty": [-0.5],
        "logprobs": [0],
        "prompt_logprobs": [4, 1],
        "logit_bias": [9, 4, 0.5, -100.0],
        "logprob_token_ids": [8, 2**31 - 1],
    }
    [row] = read_admitted_rows(sections)
    assert row == AdmittedRow(row=3, num_tokens=3, num_prompt_tokens=2, options=options)


@pytest.mark.parametrize("options", [{}, {"temperature": 0, "top_k": 5}, {"n": 3, "seed": 1}, {"stop_token_ids": [1]}])
def test_a_row_that_asks_for_nothing_more_is_told_of_no_option(options: dict) -> None:
    seq = Sequence(0, [1], SamplingParams(**options))
    seq.row = 0
    sections = sections_of(pack(ScheduledBatch(admitted=[seq], prefill=[PrefillChunk(seq, 0, 1, samples=True)])))
    assert (len(sections.option_records), len(sections.option_values), read_admitted_rows(sections)) == (0, 0, [])


def test_a_decode_step_without_news_is_a_header_and_its_rows() -> None:
    packet = pack(ScheduledBatch(decode=[sequence_in_row(4, [1]), sequence_in_row(1, [1])]))
    assert packet.tolist() == [0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 4, 0, 0, 1, 0, 0]
    sections = sections_of(packet)
    assert sections.decode_rows.shape == (2, 3)
    assert [view.shape for view in views(sections) if view is not sections.decode_rows] == [(0, 1)] * 10


def test_rows_of_several_tokens_tell_how_many_and_what_is_proposed() -> None:
    seqs = [sequence_in_row(row, [1]) for row in (4, 1, 2)]
    batch = ScheduledBatch(decode=seqs, num_tokens=3, proposals=[[7, 8], [], [9]])
    header, sections = read_header(pack(batch)), sections_of(pack(batch))
    assert sections.proposals[:, 0].tolist() == [3, 7, 8, 1, 0, 0, 2, 9, 0]
    assert header.num_uploaded == 3 * 3 + 3 * 3


def test_a_step_that_awaits_masks_says_so_and_is_otherwise_the_same() -> None:
    plain, awaiting = (pack(prefill_and_decode(), awaits) for awaits in (False, True))
    assert [read_header(packet).awaits_masks for packet in (plain, awaiting)] == [0, 1]
    for one, two in zip(views(sections_of(plain)), views(sections_of(awaiting)), strict=True):
        assert np.array_equal(one, two)


def test_prefix_sharers_tell_their_rows_how_many_blocks_they_share_and_the_first_how_many_rows_follow() -> None:
    decode = [sequence_in_row(row, [1]) for row in (4, 1, 6, 0, 3, 2)]
    sharers = [PrefixSharers(first_index=0, num_rows=3, num_blocks=5), PrefixSharers(3, num_rows=2, num_blocks=1)]
    sections = sections_of(pack(ScheduledBatch(decode=decode, prefix_sharers=sharers)))
    assert sections.decode_rows.tolist() == [[4, 5, 3], [1, 5, 0], [6, 5, 0], [0, 1, 2], [3, 1, 0], [2, 0, 0]]


def test_a_batch_that_cannot_be_is_noticed() -> None:
    cut, whole = sequence_in_row(0, [1, 2, 3]), sequence_in_row(1, [1, 2])
    chunks = [PrefillChunk(cut, 0, 2, samples=False), PrefillChunk(whole, 0, 2, samples=True)]
    with pytest.raises(AssertionError, match="the chunks that sample a token come first"):
        pack(ScheduledBatch(prefill=chunks))
    with pytest.raises(AssertionError, match="sequence 6 has no row"):
        pack(ScheduledBatch(prefill=[PrefillChunk(make_sequence(6, [1]), 0, 1, samples=True)]))


def test_a_packet_cut_short_is_noticed() -> None:
    packet = pack(prefill_and_decode())
    with pytest.raises((AssertionError, ValueError)):
        read_header(packet).on_host(packet[:-1])
    with pytest.raises(AssertionError, match="a packet of 55 numbers after its header has sections of 54"):
        read_header(packet).on_host(np.append(packet, np.int32(0)))
