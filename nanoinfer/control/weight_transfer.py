"""New weights over a process group that trainer and engine are both in: NCCL between GPUs, gloo between CPUs.

    send_weights(model.named_parameters(), group)       # in the trainer
    llm.update_weights(receive_weights(0, group))       # in the engine's process, of a trainer that has rank 0

Tensors travel in buckets, each a single broadcast of bytes. The list of what a bucket holds is sent before the bytes
of the previous bucket, so that nobody waits between two buckets. Lists are JSON, so that received data cannot run code.
The sender and each receiver need memory for three buckets.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nanoinfer.errors import ModelError
from nanoinfer.integers import ceil_div

BUCKET_BYTES = 2**29
LIST_BYTES = 2**16  # of the list of what is in a bucket, filled up with spaces
ALIGNMENT = 16  # of a tensor in its bucket, so that it can be viewed in its type


class Described(NamedTuple):
    """Describes a tensor in a bucket. dtype: its name in PyTorch."""

    name: str
    dtype: str
    shape: list[int]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Described":
        return cls(name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape])

    @property
    def num_bytes(self) -> int:
        num_bytes = torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize
        return ceil_div(num_bytes, ALIGNMENT) * ALIGNMENT

    def place(self, data: Tensor, start: int) -> Tensor:
        """Return where the tensor is in the bytes of its bucket, as a view."""
        dtype = getattr(torch, self.dtype)
        size = torch.Size(self.shape).numel() * dtype.itemsize
        return data[start : start + size].view(dtype).view(self.shape)


Bucket = list[Described]


def send_weights(
    named_tensors: Iterable[tuple[str, Tensor]], group: Any = None, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Broadcast names and whole tensors to all others of a process group, each of which calls `receive_weights`.

    group: of torch.distributed; None is the default one. bucket_bytes: what is sent at once; a larger tensor is a
    bucket of its own. Tensors that are not on the group's device are brought there. One bucket is filled while the one
    before it travels. Raises ModelError for a name that no list has room for.
    """
    device, source = _device_of(group), dist.get_rank()
    data: Tensor | None = None
    travels: Any = None
    for bucket, tensors in _buckets(named_tensors, bucket_bytes):
        before, data = data, _filled(bucket, tensors, device)
        listed = torch.frombuffer(bytearray(_written(bucket).ljust(LIST_BYTES)), dtype=torch.uint8).to(device)
        if travels is not None:
            travels.wait()
        dist.broadcast(listed, source, group)
        if before is not None:
            travels = dist.broadcast(before, source, group, async_op=True)
    if travels is not None:
        travels.wait()


def receive_weights(source: int, group: Any = None) -> Iterator[tuple[str, Tensor]]:
    """Yield what the process of this rank sends by `send_weights`: names and tensors, for `LLM.update_weights`.

    source: the sender's global rank. Every process of the group must take all tensors; one that stops early, because a
    tensor does not fit, say, leaves the others waiting. Tensors are views of their bucket, whose memory is freed with
    the last reference to any of them. The next bucket arrives while the tensors of one are taken.
    """
    device = _device_of(group)
    listed, bucket = _receive(LIST_BYTES, source, group, device), None
    while True:
        listed.wait()
        before, described = bucket, [Described(*entry) for entry in json.loads(listed.data.cpu().numpy().tobytes())]
        if described:
            listed = _receive(LIST_BYTES, source, group, device)
            num_bytes = sum(entry.num_bytes for entry in described)
            bucket = described, _receive(num_bytes, source, group, device)
        if before is not None:
            yield from _taken(*before)
        if not described:
            return


class Arriving(NamedTuple):
    """Holds bytes that are on their way, and the work that brings them."""

    data: Tensor
    work: Any

    def wait(self) -> None:
        """Make whatever the device does next wait for the bytes."""
        self.work.wait()


def _receive(num_bytes: int, source: int, group: Any, device: torch.device) -> Arriving:
    data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return Arriving(data, dist.broadcast(data, source, group, async_op=True))


def _taken(bucket: Bucket, arriving: Arriving) -> Iterator[tuple[str, Tensor]]:
    arriving.wait()
    start = 0
    for described in bucket:
        yield described.name, described.place(arriving.data, start)
        start += described.num_bytes


def _buckets(named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[Bucket, list[Tensor]]]:
    """Yield each bucket: descriptions of its tensors, and the tensors. An empty one marks the end."""
    bucket: Bucket = []
    tensors: list[Tensor] = []
    size = length = 0
    for name, tensor in named_tensors:
        described = Described.of(name, tensor)
        num_letters = len(_written([described]))
        if num_letters > LIST_BYTES:
            raise ModelError(f"the name {name:.99}... has {len(name)} letters; use the names of the checkpoint")
        if bucket and (size + described.num_bytes > bucket_bytes or length + num_letters > LIST_BYTES):
            yield bucket, tensors
            bucket, tensors, size, length = [], [], 0, 0
        bucket.append(described)
        tensors.append(tensor.detach())
        size, length = size + described.num_bytes, length + num_letters
    if bucket:
        yield bucket, tensors
    yield [], []


def _written(bucket: Bucket) -> bytes:
    return json.dumps(bucket).encode()


def _filled(bucket: Bucket, tensors: list[Tensor], device: torch.device) -> Tensor | None:
    """Return the bytes of a bucket; None for the end."""
    if not bucket:
        return None
    data, start = torch.empty(sum(one.num_bytes for one in bucket), dtype=torch.uint8, device=device), 0
    for described, tensor in zip(bucket, tensors, strict=True):
        described.place(data, start).copy_(tensor)
        start += described.num_bytes
    return data


def _device_of(group: Any) -> torch.device:
    """Return the device whose tensors a group can send."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
