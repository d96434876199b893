"""Which rows go where in an all-reduce by copy engines: ranks as threads, whose GPUs' memory lies on the CPU."""

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanoinfer.distributed import copy_engines
from nanoinfer.distributed.copy_engines import CopyEngines
from nanoinfer.distributed.cuda_ipc import SharedGpuMemory


def add_parts(rows: Tensor, parts: Tensor, sums: Tensor) -> None:
    """The twin of the kernel."""
    rows += parts[:, : rows.numel()].sum(0).view(rows.shape)
    sums[: rows.numel()] = rows.flatten()


def copy(name: str, target: ctypes.c_void_p, source: ctypes.c_void_p, num_bytes: ctypes.c_size_t, *_: object) -> None:
    assert name == "cudaMemcpyAsync"
    assert target.value is not None
    assert source.value is not None
    ctypes.memmove(target.value, source.value, num_bytes.value)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, tuple[int, int]], list[CopyEngines]]:
    memories: list[Tensor] = []

    def allocate(self: Any, num_bytes: int, num_flags: int, rank: int, num_ranks: int, _: object) -> None:
        memories.append(torch.zeros(num_bytes, dtype=torch.uint8))
        self.own, self.flags, self.flag_addresses = memories[-1], None, torch.zeros(num_ranks, dtype=torch.int64)

    def make(num_ranks: int, shape: tuple[int, int]) -> list[CopyEngines]:
        all_meet = threading.Barrier(num_ranks, timeout=10)
        monkeypatch.setattr(copy_engines, "meet", lambda *args: all_meet.wait())
        ranks = [CopyEngines(rank, num_ranks, lambda x: x, shape, torch.float32) for rank in range(num_ranks)]
        for engines in ranks:
            engines.addresses = [memory.data_ptr() for memory in memories]
        return ranks

    monkeypatch.setattr(SharedGpuMemory, "__init__", allocate)
    monkeypatch.setattr(copy_engines, "add_parts", add_parts)
    monkeypatch.setattr(copy_engines, "cuda", copy)
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: MagicMock(cuda_stream=0))
    for name in ("Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    return make


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_each_rank_gets_all_sums_of_slices_of_any_size(
    on_cpu: Callable[[int, tuple[int, int]], list[CopyEngines]], num_ranks: int
) -> None:
    """A rank that is ready goes on with the next slice at once, in the same buffers."""
    max_tokens, hidden_size = 43, 6
    ranks = on_cpu(num_ranks, (max_tokens, hidden_size))
    generator = torch.Generator().manual_seed(0)
    slices = [
        torch.randint(-8, 9, (num_ranks, num_tokens, hidden_size), generator=generator).float()
        for num_tokens in [max_tokens, num_ranks, 17, 40] * 10
    ]
    expected = [parts.sum(0) for parts in slices]

    def run(rank: int) -> None:
        for parts in slices:
            ranks[rank].start(parts[rank])

    with ThreadPoolExecutor(num_ranks) as threads:
        list(threads.map(run, range(num_ranks)))
    for parts, total in zip(slices, expected, strict=True):
        assert torch.equal(parts, total.expand_as(parts))
