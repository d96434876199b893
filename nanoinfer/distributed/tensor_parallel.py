"""Describes a rank among the processes that share a model: how dimensions are sharded, what ranks exchange.

Each engine has a process group of its own; PyTorch's global one is left to the user.
"""

import datetime
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from nanoinfer.device import import_error
from nanoinfer.distributed.cuda_ipc import SharedGpuMemory
from nanoinfer.distributed.symmetric_memory import SymmetricMemory
from nanoinfer.errors import ConfigError
from nanoinfer.integers import ceil_div

if TYPE_CHECKING:
    from nanoinfer.distributed.copy_engines import CopyEngines

logger = logging.getLogger("nanoinfer")
dist: Any = torch.distributed  # its process groups are hardly typed

VOCAB_UNIT = 64  # shards of the vocabulary begin at multiples of it: four groups of ids, whose noise one call draws
CONNECT_TIMEOUT = datetime.timedelta(seconds=8)
TIMEOUT = datetime.timedelta(minutes=30)
# All-reduces up to this size go through symmetric memory. On two and four ranks it was measured to be faster than NCCL
# up to here; eight were not measured.
MAX_BYTES_IN_MEMORY = 4 * 2**20
SIZES_WITH_MEMORY = (2, 4, 8)  # ranks; the kernel takes powers of two
NCCL_ENVIRONMENT = {
    # Multicast over NVLink needs rights that not every container has, and fails without them.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # We notice ourselves when a rank dies, and raise; PyTorch would end the user's process as well.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Its monitor would look for news in the ranks' folder once a second, and hold up our end where that is gone.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
SLICE_TOKENS = 4096  # the most that a slice of a large prefill step has; see `models/sliced_prefill.py`


class VocabShard(NamedTuple):
    """Names the ids [start, start + size) of the vocabulary."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Stands for rank `rank` of `size` processes. With size 1 nothing is communicated, and no process group is needed.

    `ModelConfig.check_tensor_parallel_size` has made sure that heads and MLP can be split.

    share_multiple: every share is a multiple of this, so that none ends inside a group of values that have one scale.
        If equal shares are no multiples, the last ones are filled up with zeros, which add nothing to an MLP's output.
    """

    rank: int = 0
    size: int = 1
    group: Any = None  # a process group of PyTorch's, see `connect`
    # Where the GPUs reach each other's memory: for sums of few tokens, and of the slices of large prefill steps.
    symmetric_memory: SymmetricMemory | None = None
    copy_engines: "CopyEngines | None" = None
    share_multiple: int = 1

    def shard_size(self, total: int, name: str, values_per_entry: int = 1) -> int:
        """Return this rank's share of a dimension. values_per_entry: how many values one entry of it stands for."""
        if self.share_multiple == 1 or self.size == 1:
            assert total % self.size == 0, f"{name}={total} cannot be split over {self.size} ranks"
            return total // self.size
        multiple = max(1, self.share_multiple // values_per_entry)
        return ceil_div(total, self.size * multiple) * multiple

    def shard(self, tensor: Tensor, dim: int, values_per_entry: int = 1) -> Tensor:
        """Return this rank's part of a full tensor: a view, unless it is filled up."""
        total = tensor.shape[dim]
        length = self.shard_size(total, f"dimension {dim} of a weight", values_per_entry)
        start = min(self.rank * length, total)
        part = tensor.narrow(dim, start, min(length, total - start))
        if part.shape[dim] == length:
            return part
        filled = tensor.new_zeros((*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]))
        filled.narrow(dim, 0, part.shape[dim]).copy_(part)
        return filled

    def split_of_kv_heads(self, num_kv_heads: int) -> "TensorParallel":
        """Return how KV heads are split: like all else, or, if they are fewer than the ranks, several ranks hold each.

        These are neighbouring ranks, which hold the query heads of that KV head.
        """
        if num_kv_heads >= self.size:
            return self
        return TensorParallel(self.rank * num_kv_heads // self.size, num_kv_heads)

    def vocab_shard_size(self, vocab_size: int) -> int:
        """Return how many ids each rank has; the last one may have fewer."""
        return ceil_div(vocab_size, self.size * VOCAB_UNIT) * VOCAB_UNIT

    def vocab_shard(self, vocab_size: int) -> VocabShard:
        """Return this rank's ids; the last rank has what is left. Raises ConfigError where that would be none."""
        if self.size == 1:
            return VocabShard(0, vocab_size)
        size = self.vocab_shard_size(vocab_size)
        if size * (self.size - 1) >= vocab_size:
            raise ConfigError(
                f"vocab_size={vocab_size} is too small for tensor_parallel_size={self.size}: in shards of {size} ids "
                f"it is enough for {ceil_div(vocab_size, size)}"
            )
        start = self.rank * size
        return VocabShard(start, min(size, vocab_size - start))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, in its place."""
        if self.size > 1:
            _finish(self.group.allreduce([x], _options(dist.AllreduceOptions())))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' `x`, of the same shape: (size, *x.shape)."""
        if self.size == 1:
            return x.unsqueeze(0)
        gathered = x.new_empty(self.size * x.numel())
        _finish(self.group._allgather_base(gathered, x.flatten(), _options(dist.distributed_c10d.AllgatherOptions())))
        return gathered.view(self.size, *x.shape)

    def gather_vocab(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Return all ranks' logits (num_rows, vocab_size), given those of this rank's shard."""
        if self.size == 1:
            return logits
        padding = self.vocab_shard_size(vocab_size) - logits.shape[1]
        shards = self.all_gather(torch.nn.functional.pad(logits, (0, padding)))  # (num_ranks, num_rows, shard_size)
        return shards.transpose(0, 1).flatten(1)[:, :vocab_size]

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's `x`, in the place of all others' of the same shape."""
        if self.size > 1:
            _finish(self.group.broadcast([x], _options(dist.BroadcastOptions())))
        return x

    def minimum(self, value: int, device: torch.device) -> int:
        """Return the smallest of all ranks' values."""
        return int(self.all_gather(torch.tensor([value], device=device)).min())

    def with_shared_memory(
        self, max_rows: int, max_tokens: int, hidden_size: int, dtype: torch.dtype, devices: list[torch.device]
    ) -> "TensorParallel":
        """Return the same with `symmetric_memory` and `copy_engines`, if all ranks can have them and steps are large.

        max_rows: the most tokens of a decode step. max_tokens: the most of a prefill step.
        """
        device = devices[self.rank]
        if device.type == "cpu" or self.size not in SIZES_WITH_MEMORY or import_error("triton"):
            return self
        peers = [peer for peer in devices if peer != device]
        if not self.minimum(all(torch.cuda.can_device_access_peer(device, peer) for peer in peers), device):
            logger.info("%s does not reach all other GPUs' memory: all sums go over NCCL", device)
            return self
        max_rows = min(max_rows, MAX_BYTES_IN_MEMORY // (hidden_size * dtype.itemsize))
        from nanoinfer.distributed.copy_engines import CopyEngines  # which needs Triton

        memory = copy_engines = None
        try:
            with torch.cuda.device(device):
                if max_rows > 0:
                    memory = SymmetricMemory(self.rank, self.size, self.all_gather, (max_rows, hidden_size), dtype)
                if max_tokens > SLICE_TOKENS:
                    num_slices, shape = ceil_div(max_tokens, SLICE_TOKENS), (SLICE_TOKENS, hidden_size)
                    copy_engines = CopyEngines(self.rank, self.size, self.all_gather, num_slices, shape, dtype)
        except RuntimeError as error:
            logger.info("%s: %s sums go over NCCL", error, "all" if memory is None else "large")
        return replace(self, symmetric_memory=memory, copy_engines=copy_engines)

    @property
    def num_shared_bytes(self) -> int:
        """The bytes of this rank's GPU that `symmetric_memory` and `copy_engines` take."""
        return sum(memory.own.nbytes for memory in self._memories)

    @property
    def _memories(self) -> list[SharedGpuMemory]:
        return [memory for memory in (self.symmetric_memory, self.copy_engines) if memory is not None]

    def join(self) -> None:
        """Let the current stream wait for the copy engines: a step that failed may have left them something."""
        if self.copy_engines is not None:
            self.copy_engines.join()

    def abort(self) -> None:
        """End all communication, that of other threads included. On a CPU it ends when a rank does."""
        for memory in self._memories:
            memory.release()
        if self.size > 1 and self.group.name() == "nccl":
            self.group.abort()

    def close(self) -> None:
        """Free the memory for sums. Nothing may be running on this rank's GPU."""
        for memory in self._memories:
            memory.close()


def connect(rank: int, size: int, device: torch.device, meeting: Any) -> TensorParallel:
    """Meet the other ranks, by NCCL between GPUs and by gloo on a CPU; return when all have come.

    meeting: where they leave their addresses: a file that only these ranks use, which must stay while they run, or a
    store of PyTorch's; rank 0 may wait longer for the others then.
    """
    is_file = isinstance(meeting, Path)
    store = dist.FileStore(str(meeting), size) if is_file else meeting
    if device.type == "cuda":
        with torch.cuda.device(device):
            group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
            tp = TensorParallel(rank, size, group)
            tp.minimum(0, device)  # NCCL meets at its first use, which must not be in a CUDA graph
        return tp
    options = dist.ProcessGroupGloo._Options()
    # Rank 0 connects last, so it never waits long: a timeout means that another rank has died.
    options._timeout = CONNECT_TIMEOUT if rank == 0 and is_file else TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # the host's name may not resolve
    group = dist.ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(TIMEOUT)
    return TensorParallel(rank, size, group)


def _options(options: Any) -> Any:
    """Set a collective's options so that it runs on the current stream, like any kernel, not on one of NCCL's."""
    options.asyncOp = False
    return options


def _finish(work: Any) -> None:
    """Wait for a collective, unless it is a kernel on the current stream, for which NCCL returns None."""
    if work is not None:
        work.wait()
