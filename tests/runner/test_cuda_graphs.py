"""Which graph a decode step replays, and with what; graphs here are stand-ins that note what they would read."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer import device
from nanoinfer.layers.attention.metadata import DecodeBatch, SharedPrefixes
from nanoinfer.runner import graph_pool, stand_ins
from nanoinfer.runner.cuda_graphs import (
    DecodeGraphs,
    graph_sizes,
    several_tokens_graph_sizes,
    sharing_graph_sizes,
)
from nanoinfer.runner.stand_ins import GraphKey, StandIns, packed_graph_sizes, usual_packed_keys


class StandIn:
    """Reads its inputs when it is replayed, not when it is captured."""

    inputs: tuple[Tensor, ...]
    replays: list[list[list[int]]]

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self.replays.append([column.tolist() for column in self.inputs])


class Forward:
    """Notes its arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Tensor, ...]] = []
        self.replays: list[list[list[int]]] = []

        @contextmanager
        def capture(graph: Any, pool: object) -> Iterator[None]:
            yield
            graph.inputs, graph.replays = self.calls[-1], self.replays

        monkeypatch.setattr(torch.cuda, "CUDAGraph", StandIn)
        monkeypatch.setattr(graph_pool, "capturing", capture)

    def __call__(self, batch: DecodeBatch) -> None:
        assert (batch.num_tokens > 1) == (batch.num_row_tokens is not None)
        row_tokens = [] if batch.num_row_tokens is None else [batch.num_row_tokens]
        self.calls.append((batch.rows, *(batch.shared_prefixes or ()), *row_tokens))


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_a_step_runs_in_the_smallest_graph_that_holds_it_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Forward(monkeypatch)
    graphs = DecodeGraphs(forward, [1, 2, 4], [4], torch.device("cpu"))
    assert [len(rows) for (rows,) in forward.calls] == [4, 4, 2, 2, 1, 1], "each warms up, then is captured"
    for rows in ((7, 5, 9), (3,), (6, 8)):
        graphs.replay(DecodeBatch(int32(*rows), None))
    assert forward.replays == [[[7, 5, 9, -1]], [[3]], [[6, 8]]]


def test_warm_graphs_are_captured_without_a_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Forward(monkeypatch)
    graphs = DecodeGraphs(forward, [1, 2, 4], [4], torch.device("cpu"), is_warm=True)
    assert [len(rows) for (rows,) in forward.calls] == [4, 2, 1]
    graphs.replay(DecodeBatch(int32(7, 5), None))
    assert forward.replays == [[[7, 5]]]
    graphs.replay(
        DecodeBatch(int32(7, 5), SharedPrefixes(int32(2, 2), int32(2, 0)))
    )  # of which the process may have had none
    assert [len(rows) for rows, *_ in forward.calls[3:]] == [4, 4]


def test_a_step_that_shares_prefixes_has_a_graph_of_its_own_which_is_captured_once_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = Forward(monkeypatch)
    graphs = DecodeGraphs(forward, [1, 2, 4], [4], torch.device("cpu"))
    graphs.replay(DecodeBatch(int32(7, 5, 9), SharedPrefixes(int32(2, 2, 0), int32(2, 0, 0))))
    graphs.replay(DecodeBatch(int32(3, 1), SharedPrefixes(int32(5, 5), int32(2, 0))))
    assert [len(rows) for rows, *_ in forward.calls[6:]] == [4, 4]
    assert forward.replays == [
        [[7, 5, 9, -1], [2, 2, 0, 0], [2, 0, 0, 0]],
        [[3, 1, -1, -1], [5, 5, 0, 0], [2, 0, 0, 0]],  # nothing is left of the step before
    ]
    graphs.replay(DecodeBatch(int32(3, 1), None))
    assert forward.replays[-1] == [[3, 1]]


def test_graphs_of_sharing_steps_warm_up_on_padding_whatever_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Forward(monkeypatch)
    seen = []

    def note(batch: DecodeBatch) -> None:
        seen.append([column.tolist() for column in (batch.rows, *(batch.shared_prefixes or ()))])
        forward(batch)

    graphs = DecodeGraphs(note, [2], [2], torch.device("cpu"))
    graphs.replay(DecodeBatch(int32(7, 5), None))
    graphs.replay(DecodeBatch(int32(7, 5), SharedPrefixes(int32(1, 1), int32(2, 0))))
    assert seen[2:] == [[[-1, -1], [0, 0], [0, 0]]] * 2


def test_steps_of_several_tokens_a_row_have_a_graph_for_each_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding rows have one token. Fewer batch sizes have graphs than of one token: none of three rows here."""
    forward = Forward(monkeypatch)
    graphs = DecodeGraphs(forward, [1, 2, 3, 4], [4], torch.device("cpu"), is_warm=True)
    graphs.replay(DecodeBatch(int32(3), None, 2, int32(2)))
    graphs.replay(DecodeBatch(int32(7, 5, 9), None, 2, int32(2, 1, 2)))
    graphs.replay(DecodeBatch(int32(8, 7, 6), None, 2, int32(1, 1, 2)))
    graphs.replay(DecodeBatch(int32(7, 5, 9), SharedPrefixes(int32(2, 2, 0), int32(2, 0, 0)), 4, int32(4, 4, 3)))
    graphs.replay(DecodeBatch(int32(7, 5, 9), None))
    assert [len(rows) for rows, *_ in forward.calls[4:]] == [1, 1, 4, 4, 4, 4], "each warms up, then is captured"
    assert forward.replays == [
        [[3], [2]],
        [[7, 5, 9, -1], [2, 1, 2, 1]],
        [[8, 7, 6, -1], [1, 1, 2, 1]],
        [[7, 5, 9, -1], [2, 2, 0, 0], [2, 0, 0, 0], [4, 4, 3, 1]],
        [[7, 5, 9]],
    ]


def test_rows_of_padding_have_no_packed_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """So one graph serves any fewer rows."""
    forward = Forward(monkeypatch)
    graphs = DecodeGraphs(forward, [1, 32, 64], [64], torch.device("cpu"), is_warm=True)
    for num_rows in (64, 40):
        counts = torch.full((num_rows,), 2, dtype=torch.int32)
        graphs.replay(DecodeBatch(torch.arange(num_rows, dtype=torch.int32), None, 3, counts, num_packed=128))
    assert len(forward.calls) == 3 + 2, "one graph, which warms up"
    assert forward.replays[1] == [[*range(40)] + [-1] * 24, [2] * 40 + [0] * 24]


def test_few_graphs_of_packed_lines_are_captured_early() -> None:
    keys = usual_packed_keys(packed_graph_sizes(graph_sizes(256)), num_tokens=9)
    assert [(key.num_rows, key.num_packed) for key in keys] == [
        *((256, 1024), (256, 768), (256, 512), (128, 512), (128, 384), (128, 256)),
        *((64, 256), (64, 128), (32, 128)),
    ]
    few = usual_packed_keys(packed_graph_sizes(graph_sizes(20)), num_tokens=2)
    assert [(key.num_rows, key.num_packed) for key in few] == [(20, 40)], "no more than the rows can have"
    assert not packed_graph_sizes(graph_sizes(16)), "few rows are padded"


@pytest.mark.parametrize("num_tokens", [2, 3, 9])
@pytest.mark.parametrize("max_num_seqs", [20, 64, 200, 256, 300])
def test_graphs_of_packed_lines_that_are_captured_early_are_those_that_steps_need(
    max_num_seqs: int, num_tokens: int
) -> None:
    sizes = packed_graph_sizes(graph_sizes(max_num_seqs))
    needed = set[GraphKey]()
    for size in sizes:
        rows = torch.empty(size, dtype=torch.int32)
        for num_own in range(size + 1, size * min(4, num_tokens) + 1):
            needed.add(GraphKey.of(DecodeBatch(rows, None, num_tokens, rows, num_own), size))
    keys = usual_packed_keys(sizes, num_tokens)
    assert len({*keys}) == len(keys)
    assert {*keys} == needed


def test_a_larger_graph_serves_until_its_padding_has_taken_as_long_as_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stand_ins, "CAPTURE_LINES", 15)
    forward = Forward(monkeypatch)
    graphs = DecodeGraphs(forward, [1, 2, 4], [4], torch.device("cpu"), is_warm=True)
    graphs.replay(DecodeBatch(int32(7, 5, 9), None, 3, int32(2, 1, 3)))
    for row in range(4):
        graphs.replay(DecodeBatch(int32(row), None, 3, int32(2)))
    assert [len(rows) for rows, _ in forward.replays] == [4, 4, 1, 1, 1], "three rows of padding have 9 lines a step"
    assert forward.replays[1] == [[0, -1, -1, -1], [2, 1, 1, 1]]


@pytest.mark.parametrize("message", ["CUDA out of memory. Tried to allocate", "CUDA error: out of memory"])
def test_steps_without_memory_for_a_late_graph_are_launched_on_as_many_rows(
    message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = Forward(monkeypatch)
    graphs = DecodeGraphs(forward, [1, 2, 4], [4], torch.device("cpu"), is_warm=True)

    @contextmanager
    def fails(*_: object) -> Iterator[None]:
        yield
        raise RuntimeError(message)

    monkeypatch.setattr(graph_pool, "capturing", fails)
    for _ in range(2):
        graphs.replay(DecodeBatch(int32(7, 5, 9), None, 2, int32(2, 1, 2)))
    assert len(forward.calls) == 3 + 2 + 2, "it warms up and fails once, and runs twice"
    assert [column.tolist() for column in forward.calls[-1]] == [[7, 5, 9, -1], [2, 1, 2, 1]]
    assert caplog.text.count("go on without a CUDA graph") == 1
    message = "an illegal memory access"  # is no lack of memory
    with pytest.raises(RuntimeError, match="illegal"):
        graphs.replay(DecodeBatch(int32(7), None, 4, int32(2)))


def test_late_graphs_leave_the_memory_that_steps_need(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, free = Forward(monkeypatch), [2**31]
    pool, launch = graph_pool.GraphPool(torch.device("cuda"), 2**30), partial(forward, DecodeBatch(int32(7), None))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(graph_pool, "free_bytes", lambda _: free[0])
    assert isinstance(pool.capture_late(launch, "a graph"), StandIn)
    free[0] = 2**30
    one = pool.capture_late(launch, "a graph")
    assert isinstance(one, graph_pool.Launches)
    one.replay()
    assert len(forward.calls) == 2, "one captures, one runs"


def test_packed_lines_fit_into_the_graph_that_is_chosen_for_them() -> None:
    """Rows of padding have no line, and no graph has more lines than its rows can have."""
    rng, chosen = Random(0), StandIns()
    for num_tokens in (2, 3, 9):
        sizes, captured = packed_graph_sizes(graph_sizes(256)), set[GraphKey]()
        for _ in range(2000):
            size = rng.choice(sizes)
            num_rows = rng.randint(1 + (sizes[sizes.index(size) - 1] if size > sizes[0] else 0), size)
            num_own = rng.randint(num_rows, num_rows * num_tokens)
            rows = torch.empty(num_rows, dtype=torch.int32)
            key = GraphKey.of(DecodeBatch(rows, None, num_tokens, rows, num_own), size)
            key = key if key in captured else chosen.choose(key, captured)
            captured.add(key)
            assert num_own <= key.num_packed <= key.num_rows * num_tokens


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 7, 64, 65, 100, 512])
def test_every_batch_has_a_graph_that_holds_it(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert max(sizes) == max_num_seqs
    for num_rows in range(1, max_num_seqs + 1):
        smallest = min(size for size in sizes if size >= num_rows)
        assert smallest - num_rows < (16 if num_rows <= 256 else 32), "and not much is padding"


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 7, 64, 65, 100, 512])
def test_steps_that_share_prefixes_have_fewer_graphs_and_each_batch_has_one(max_num_seqs: int) -> None:
    sizes, sharing = graph_sizes(max_num_seqs), sharing_graph_sizes(max_num_seqs)
    several = several_tokens_graph_sizes(sizes)
    assert set(sharing) <= set(several) <= set(sizes)
    assert max(sharing) == max(several) == max_num_seqs


def test_up_to_128_rows_that_share_prefixes_have_graphs_of_seven_sizes() -> None:
    assert sharing_graph_sizes(128) == [4, 8, 16, 32, 64, 96, 128]


def test_a_capture_that_fails_leaves_the_stream_as_it_was_and_lets_others_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What PyTorch's `graph` does where the end of a capture fails: it stays on the stream of captures."""
    done: list[object] = []

    @contextmanager
    def graph(*_: object, **options: object) -> Iterator[None]:
        done.append(options)
        yield
        raise RuntimeError("the end fails")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: done.append("handle"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the user's")
    monkeypatch.setattr(torch.cuda, "set_stream", done.append)
    for _ in range(2):
        done.clear()
        a_graph: Any = "graph"
        with pytest.raises(RuntimeError, match="the end fails"), device.capturing(a_graph, "pool"):
            pass
        assert done == ["handle", {"pool": "pool", "capture_error_mode": "thread_local"}, "the user's"]
