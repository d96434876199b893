"""New weights over a process group that trainer and engine are both in: NCCL between GPUs, gloo between CPUs.

    send_weights(model.named_parameters(), group)       # in the trainer
    llm.update_weights(receive_weights(0, group))       # in the engine's process, of a trainer that has rank 0

Tensors travel in buckets: a list of names, types and shapes, then all their bytes in one broadcast. The list is JSON,
so that nothing that is received can run. Whoever sends or receives needs memory for two buckets.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 2**29
ALIGNMENT = 16  # of a tensor in its bucket, so that it can be viewed in its type


def send_weights(
    named_tensors: Iterable[tuple[str, Tensor]], group: Any = None, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Broadcast names and whole tensors to all others of a process group, each of which calls `receive_weights`.

    group: of torch.distributed; None is the default one. bucket_bytes: what is sent at once; a larger tensor is a
    bucket of its own. Tensors that are not on the group's device are brought there. One bucket is filled while the one
    before it travels.
    """
    device, source = _device_of(group), dist.get_rank()
    travels = None
    for bucket, size in _buckets(named_tensors, bucket_bytes):
        data = _filled(bucket, size, device)
        described = [[name, str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for name, tensor in bucket]
        header = torch.tensor([*json.dumps(described).encode()], dtype=torch.uint8, device=device)
        if travels is not None:
            travels.wait()
        dist.broadcast(torch.tensor([len(header), size], device=device), source, group)
        dist.broadcast(header, source, group)
        travels = dist.broadcast(data, source, group, async_op=True) if bucket else None


def receive_weights(source: int, group: Any = None) -> Iterator[tuple[str, Tensor]]:
    """Yield what the process of this rank sends by `send_weights`: names and tensors, for `LLM.update_weights`.

    source: its global rank. Every process of the group must take all of them; one that stops early, as where a tensor
    does not fit, leaves the others waiting. A tensor is part of its bucket, whose memory is freed with the last
    reference to any of them. The next bucket arrives while one is taken.
    """
    bucket = _receive_bucket(source, group)
    while bucket is not None:
        tensors, data, arrives = bucket
        arrives.wait()
        bucket = _receive_bucket(source, group)
        start = 0
        for name, dtype_name, shape in tensors:
            dtype = getattr(torch, dtype_name)
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            yield name, data[start : start + num_bytes].view(dtype).view(shape)
            start += _aligned(num_bytes)


def _buckets(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[tuple[list[tuple[str, Tensor]], int]]:
    """Yield tensors to be sent at once, and how many bytes they take; at last none, which is the end."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        num_bytes = _aligned(tensor.numel() * tensor.dtype.itemsize)
        if bucket and size + num_bytes > bucket_bytes:
            yield bucket, size
            bucket, size = [], 0
        bucket.append((name, tensor.detach()))
        size += num_bytes
    if bucket:
        yield bucket, size
    yield [], 0


def _filled(bucket: list[tuple[str, Tensor]], size: int, device: torch.device) -> Tensor:
    data, start = torch.empty(size, dtype=torch.uint8, device=device), 0
    for _, tensor in bucket:
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        data[start : start + num_bytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start += _aligned(num_bytes)
    return data


def _receive_bucket(source: int, group: Any) -> tuple[list[Any], Tensor, Any] | None:
    """Return what a bucket holds, its bytes, and the work that brings them; None at the end."""
    device = _device_of(group)
    lengths = torch.empty(2, dtype=torch.int64, device=device)
    dist.broadcast(lengths, source, group)
    header_length, size = lengths.tolist()
    header = torch.empty(header_length, dtype=torch.uint8, device=device)
    dist.broadcast(header, source, group)
    tensors = json.loads(bytes(header.tolist()))
    if not tensors:
        return None
    data = torch.empty(size, dtype=torch.uint8, device=device)
    return tensors, data, dist.broadcast(data, source, group, async_op=True)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _device_of(group: Any) -> torch.device:
    """Return the device whose tensors a group can send."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
