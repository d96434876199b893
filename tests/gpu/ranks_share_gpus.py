"""Several ranks on one GPU, for tests of more ranks than there are GPUs: their kernels take turns of milliseconds.

Everything is as on GPUs of their own, except that NCCL, which refuses two ranks on one GPU, has a stand-in.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer.distributed import tensor_parallel
from nanoinfer.distributed.cuda_ipc import SharedGpuMemory, copy
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.executor import parallel_runner, worker
from nanoinfer.ops.barrier.triton import barrier

MAX_BYTES = 64 * 2**20  # of one rank, in one call


def have_their_own(num_ranks: int) -> bool:
    return num_ranks <= torch.cuda.device_count()


def devices(num_ranks: int) -> list[torch.device]:
    return [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(num_ranks)]


def let_ranks_share(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let the engines of a test share GPUs if there are not enough; return the options that they need for that."""
    if have_their_own(num_ranks):
        return {}
    monkeypatch.setattr(parallel_runner, "select_devices", lambda _requested, count: devices(count))
    monkeypatch.setattr(worker, "connect", connect)
    monkeypatch.setattr(parallel_runner, "run_worker", run_worker)
    return {"gpu_memory_utilization": 0.8 * torch.cuda.device_count() / num_ranks}


def connect(rank: int, size: int, device: torch.device, store_file: Path) -> TensorParallel:
    """Do what `tensor_parallel.connect` does, with the stand-in where ranks share GPUs."""
    if have_their_own(size):
        return tensor_parallel.connect(rank, size, device, store_file)
    on_host = tensor_parallel.connect(rank, size, torch.device("cpu"), store_file)
    with torch.cuda.device(device):
        return TensorParallel(rank, size, StandIn(on_host))


_run_worker = worker.run_worker


def run_worker(*args: Any) -> None:
    """Stand for `worker.run_worker` in a worker, which knows nothing of what the parent has patched."""
    worker.connect = connect
    _run_worker(*args)


class StandIn:
    """Does what `TensorParallel` asks of NCCL, on the current stream, through memory that all ranks reach.

    Each rank leaves its tensor in its own memory, and copies those of others when all have met.
    """

    def __init__(self, on_host: TensorParallel) -> None:
        self._on_host, self._rank, self._size = on_host, on_host.rank, on_host.size
        self._memory = SharedGpuMemory(MAX_BYTES, self._size, self._rank, self._size, self._all_gather)
        self._epoch = self._memory.flag_addresses.new_zeros(1)

    def name(self) -> str:
        return "nccl"

    def allreduce(self, tensors: list[Tensor], _options: Any) -> None:
        [x] = tensors
        x.copy_(self._gather(x, range(self._size)).sum(0, dtype=torch.float32 if x.is_floating_point() else None))

    def _allgather_base(self, out: Tensor, x: Tensor, _options: Any) -> None:
        out.view(self._size, *x.shape).copy_(self._gather(x, range(self._size)))

    def broadcast(self, tensors: list[Tensor], _options: Any) -> None:
        [x] = tensors
        x.copy_(self._gather(x, [0])[0])

    def abort(self) -> None:
        self._memory.release()

    def _all_gather(self, x: Tensor) -> Tensor:
        return self._on_host.all_gather(x.cpu()).to(x.device)

    def _gather(self, x: Tensor, ranks: Sequence[int]) -> Tensor:
        """Return the tensors of these ranks, (len(ranks), *x.shape)."""
        assert x.nbytes <= MAX_BYTES, f"{x.nbytes} bytes do not fit into {MAX_BYTES}"
        source, gathered = x.contiguous(), x.new_empty(len(ranks), *x.shape)
        addresses = self._memory.addresses
        with torch.cuda.device(x.device):
            if self._rank in ranks:
                copy(addresses[self._rank], source.data_ptr(), x.nbytes)
            self._meet()
            for place, rank in zip(gathered, ranks, strict=True):
                copy(place.data_ptr(), addresses[rank], x.nbytes)
            self._meet()
        return gathered

    def _meet(self) -> None:
        barrier(self._memory.flags, self._memory.flag_addresses, self._epoch, self._rank)
