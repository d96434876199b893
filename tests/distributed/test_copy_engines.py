"""Which rows copy engines bring where: ranks as threads, whose GPUs' memory lies on the CPU."""

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

MakeEngines = Callable[[int, int, tuple[int, int]], list[CopyEngines]]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> MakeEngines:
    memories: list[Tensor] = []

    def allocate(self: Any, num_bytes: int, num_flags: int, rank: int, num_ranks: int, _: object) -> None:
        memories.append(torch.zeros(num_bytes, dtype=torch.uint8))
        self.own, self.flags, self.flag_addresses = memories[-1], None, torch.zeros(num_ranks, dtype=torch.int64)

    def make(num_ranks: int, num_slices: int, shape: tuple[int, int]) -> list[CopyEngines]:
        all_meet = threading.Barrier(num_ranks, timeout=10)
        monkeypatch.setattr(copy_engines, "barrier", lambda *args: all_meet.wait())
        ranks = [
            CopyEngines(rank, num_ranks, lambda x: x, num_slices, shape, torch.float32) for rank in range(num_ranks)
        ]
        for engines in ranks:
            engines.addresses = [memory.data_ptr() for memory in memories]
        return ranks

    monkeypatch.setattr(SharedGpuMemory, "__init__", allocate)
    monkeypatch.setattr(copy_engines, "copy", ctypes.memmove)
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock())
    for name in ("Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    return make


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_each_rank_gets_the_terms_of_its_rows_and_then_the_rows_of_all(on_cpu: MakeEngines, num_ranks: int) -> None:
    """In steps of slices of any size, always in the same places; a rank that is ready goes on at once."""
    sizes, hidden_size = [43, num_ranks, 17, 40], 6
    ranks = on_cpu(num_ranks, len(sizes), (max(sizes), hidden_size))
    generator = torch.Generator().manual_seed(0)

    def draw(num_tokens: int) -> Tensor:
        return torch.randint(-8, 9, (num_ranks, num_tokens, hidden_size), generator=generator).float()

    steps = [[draw(num_tokens) for num_tokens in torch.tensor(sizes).roll(shift).tolist()] for shift in range(10)]

    def run(rank: int) -> list[Tensor]:
        engines, found = ranks[rank], []
        for step in steps:
            for index, terms in enumerate(step):
                engines.start_reduce_scatter(index, terms[rank])
            for index, terms in enumerate(step):
                own = terms[rank].tensor_split(num_ranks)[rank]
                total = own + engines.received(index, len(own)).sum(0)
                engines.own_rows(index, terms.shape[1]).copy_(total)
                engines.start_all_gather(index, terms.shape[1])
            found += [engines.gathered(index, terms.shape[1]).clone() for index, terms in enumerate(step)]
        return found

    with ThreadPoolExecutor(num_ranks) as threads:
        results = list(threads.map(run, range(num_ranks)))
    expected = [terms.sum(0) for step in steps for terms in step]
    for found in results:
        for rows, total in zip(found, expected, strict=True):
            assert torch.equal(rows, total)
