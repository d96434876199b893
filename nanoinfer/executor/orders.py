"""What rank 0 tells the workers to do between two steps: replace a weight, sleep, wake up.

An order is a message of the ring, as a packet is. A packet begins with a count, an order with a negative number. A
weight follows its order: through the ring's shared memory on a CPU, and by NCCL from GPU to GPU.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.device import computing
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.executor.shm_ring import RingReader, RingWriter
from nanoinfer.runner.model_runner import ModelRunner

Message = NDArray[np.int32]
# Of the tensors that are sent as they are; others are widened or narrowed to float32.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class Order(IntEnum):
    """The first number of an order, and what follows it."""

    UPDATE = -1  # index of the dtype, number of dimensions, shape, bytes of the name
    SLEEP = -2  # level
    WAKE_UP = -3


def pack_order(order: Order, *numbers: int) -> Message:
    return np.array([order, *numbers], np.int32)


def is_order(message: Message) -> bool:
    return bool(message[0] < 0)


def obey(message: Message, runner: ModelRunner, reader: RingReader) -> None:
    """Carry an order out, in a worker."""
    order, *numbers = message.tolist()
    if order == Order.UPDATE:
        dtype, num_dims = DTYPES[numbers[0]], numbers[1]
        shape, name = numbers[2 : 2 + num_dims], bytes(numbers[2 + num_dims :]).decode()
        with computing(runner.device, None):
            tensor = torch.empty(shape, dtype=dtype, device=runner.device)
            runner.weights.copy(name, _receive(reader, runner.tp, tensor))  # rank 0 has checked it
        return
    if order == Order.SLEEP:
        runner.sleep(numbers[0])
    else:
        runner.wake_up()
    all_have_done_so(runner)


def all_have_done_so(runner: ModelRunner) -> None:
    """Wait until all ranks have come here."""
    with computing(runner.device, None):
        runner.tp.minimum(0, runner.device)


class AllRanksWeights:
    """Replaces weights on all ranks, behind the interface of one rank's ModelWeights.

    runner: rank 0's. all_ranks: guards what all ranks do together.
    """

    def __init__(
        self, runner: ModelRunner, writer: RingWriter, all_ranks: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._runner, self._writer, self._all_ranks = runner, writer, all_ranks

    def check(self, name: str, tensor: Any) -> None:
        """Raise ModelError unless a tensor can take the place of the weight of this name in the checkpoint."""
        self._runner.weights.check(name, tensor)

    def update(self, name: str, tensor: Any) -> None:
        """Check a tensor and copy it there, or each rank's share of it."""
        # Checked and brought to the device before: what the ranks do together must not fail.
        if not self._runner.weights.check(name, tensor):
            return
        with computing(self._runner.device, None):
            tensor = tensor.detach().to(self._runner.device)
            tensor = (tensor if tensor.dtype in DTYPES else tensor.float()).contiguous()
        with self._all_ranks(), computing(self._runner.device, None):
            self._send(name, tensor)
            self._runner.weights.copy(name, tensor)

    def _send(self, name: str, tensor: Tensor) -> None:
        """Send a tensor on rank 0's device to the workers."""
        dtype = DTYPES.index(tensor.dtype)
        self._writer.send(pack_order(Order.UPDATE, dtype, tensor.dim(), *tensor.shape, *name.encode()))
        values = tensor.view(-1).view(torch.uint8)
        if tensor.is_cuda:
            self._runner.tp.broadcast(values)
        else:
            padded = np.zeros(-(-len(values) // 4), np.int32)
            padded.view(np.uint8)[: len(values)] = values.numpy()
            self._writer.send(padded)


def _receive(reader: RingReader, tp: TensorParallel, tensor: Tensor) -> Tensor:
    """Return a tensor that was sent, in the place of this one."""
    values = tensor.view(-1).view(torch.uint8)
    if tensor.is_cuda:
        tp.broadcast(values)
    else:
        values.copy_(torch.from_numpy(reader.receive().view(np.uint8))[: len(values)])
    return tensor
