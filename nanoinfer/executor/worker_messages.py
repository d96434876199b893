"""What rank 0 tells the workers beside packets: commands between two steps, and a step's token masks.

A command says to replace a weight, to sleep or to wake up. It is a message of the ring, as a packet is. A packet begins
with a count, a command with a negative number. A weight follows its command: through the ring's shared memory on a CPU,
and by NCCL from GPU to GPU.

Of masks the workers are told which tokens of the step have any, by batch_idx. That is all they need to do the same as
rank 0, which has the bits and the users' functions. It sends them the bits, and the logits that functions have changed,
from device to device: masks can be larger than the whole ring.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.config import SLEEP_TAGS
from nanoinfer.device import computing
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.engine.token_masks import RowMasks, TokenMasks
from nanoinfer.executor.shm_ring import RingReader, RingWriter
from nanoinfer.runner.device_runner import DeviceRunner

Message = NDArray[np.int32]
# Tensors of these are sent as they are; others are converted to float32.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class Command(IntEnum):
    """The first number of a command, and what follows it."""

    UPDATE = -1  # index of the dtype, number of dimensions, shape, bytes of the name
    SLEEP = -2  # level
    WAKE_UP = -3  # indices of SLEEP_TAGS


def pack_command(command: Command, *numbers: int) -> Message:
    return np.array([command, *numbers], np.int32)


def is_command(message: Message) -> bool:
    return bool(message[0] < 0)


def run_command(message: Message, runner: DeviceRunner, reader: RingReader) -> None:
    """Run a command, in a worker."""
    command, *numbers = message.tolist()
    if command == Command.UPDATE:
        dtype, num_dims = DTYPES[numbers[0]], numbers[1]
        shape, name = numbers[2 : 2 + num_dims], bytes(numbers[2 + num_dims :]).decode()
        with computing(runner.device, None):
            tensor = torch.empty(shape, dtype=dtype, device=runner.device)
            runner.weights.copy(name, _receive(reader, runner.tp, tensor))  # rank 0 has checked it
        return
    if command == Command.SLEEP:
        runner.sleep(numbers[0])
    else:
        runner.wake_up({SLEEP_TAGS[number] for number in numbers})
    barrier(runner)


def barrier(runner: DeviceRunner) -> None:
    """Wait for all ranks."""
    with computing(runner.device, None):
        runner.tp.minimum(0, runner.device)


def pack_masks(masks: TokenMasks) -> Message:
    """Return how many tokens of the step grammars, token sets and functions are for, then the batch_idx of each."""
    of_grammars, of_token_sets = (part.batch_indices if part else [] for part in (masks.grammars, masks.token_sets))
    lists = of_grammars, of_token_sets, list(masks.functions)
    return np.array([*map(len, lists), *of_grammars, *of_token_sets, *masks.functions], np.int32)


def read_masks(message: Message) -> TokenMasks:
    """Return the masks without their bits and without functions."""
    numbers = message.tolist()
    num_grammars, num_token_sets = numbers[:2]
    indices, no_bits = numbers[3:], np.empty((0, 0), np.int32)
    of_grammars, indices = indices[:num_grammars], indices[num_grammars:]
    of_token_sets, of_functions = indices[:num_token_sets], indices[num_token_sets:]
    return TokenMasks(
        grammars=RowMasks(of_grammars, no_bits),
        token_sets=RowMasks(of_token_sets, no_bits),
        functions={batch_idx: ((), []) for batch_idx in of_functions},
    )


class AllRanksWeights:
    """Replaces weights on all ranks, behind the interface of one rank's ModelWeights.

    runner: rank 0's. all_ranks: guards what all ranks do together.
    """

    def __init__(
        self, runner: DeviceRunner, writer: RingWriter, all_ranks: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._runner, self._writer, self._all_ranks = runner, writer, all_ranks

    def check(self, name: str, tensor: Any) -> None:
        """Raise ModelError unless a tensor can take the place of the weight of this name in the checkpoint."""
        self._runner.weights.check(name, tensor)

    def update(self, name: str, tensor: Any, given: dict[Any, str] | None = None) -> None:
        """Check a tensor and copy it there, or each rank's share of it."""
        # Checked and brought to the device before: what the ranks do together must not fail.
        if not self._runner.weights.check(name, tensor, given):
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
        self._writer.send(pack_command(Command.UPDATE, dtype, tensor.dim(), *tensor.shape, *name.encode()))
        values = tensor.view(-1).view(torch.uint8)
        if tensor.is_cuda:
            self._runner.tp.broadcast(values)
        else:
            padded = np.zeros(-(-len(values) // 4), np.int32)
            padded.view(np.uint8)[: len(values)] = values.numpy()
            self._writer.send(padded)


def _receive(reader: RingReader, tp: TensorParallel, tensor: Tensor) -> Tensor:
    """Receive a tensor from rank 0 into this one, and return it."""
    values = tensor.view(-1).view(torch.uint8)
    if tensor.is_cuda:
        tp.broadcast(values)
    else:
        values.copy_(torch.from_numpy(reader.receive().view(np.uint8))[: len(values)])
    return tensor
