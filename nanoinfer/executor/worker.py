"""Runs ranks 1 and up, each in a process of its own, and defines what rank 0 tells them besides packets.

Rank 0 tells them commands between two steps, and a step's token masks. A command says to replace a weight, to sleep or
to wake up. It is a message of the ring, as a packet is. A packet begins with a count, a command with a negative number.
A weight follows its command: through the ring's shared memory on a CPU, and by NCCL from GPU to GPU.

Of masks the workers are told which tokens of the step have any, by batch_idx. That is all they need to do the same as
rank 0, which has the bits and the users' functions. It sends them the bits, and the logits that functions have changed,
from device to device: masks can be larger than the whole ring.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.config import SLEEP_TAGS, EngineConfig
from nanoinfer.device import becomes_idle, computing, select_dtype
from nanoinfer.distributed.tensor_parallel import TensorParallel, connect
from nanoinfer.engine.packet import read_header
from nanoinfer.engine.token_masks import RowMasks, TokenMasks
from nanoinfer.executor.image_messages import receive_image
from nanoinfer.executor.processes import PASSED
from nanoinfer.executor.shm_ring import Ring, RingReader, RingWriter
from nanoinfer.runner.device_runner import DeviceRunner
from nanoinfer.runner.memory import max_step_tokens

Message = NDArray[np.int32]
# Tensors of these are sent as they are; others are converted to float32.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
ABORT_SECONDS = 5.0  # how long a GPU may take to end its step, also after its communication was aborted


def run_worker(
    rank: int,
    link: socket.socket,
    shared_folder: Path,
    ring: Ring,
    config: EngineConfig,
    model_config: BaseModelConfig,
    folder: Path,
    devices: list[torch.device],
) -> None:
    """Run in a worker: load this rank's shard of the model, and run packets until rank 0 sends no more."""
    torch.set_num_threads(max(1, torch.get_num_threads() // len(devices)))
    torch.zeros(1, device=devices[rank])  # a GPU that cannot be used raises here, before other ranks wait for this one
    link.sendall(PASSED)
    tp = connect_ranks(rank, config, model_config, devices, shared_folder)
    runner = DeviceRunner(replace(config, device=str(devices[rank])), model_config, folder, tp)
    link.sendall(PASSED)
    reader = RingReader(ring, rank - 1, link)
    with suppress(EOFError):  # rank 0 has closed the runner, or is gone
        while True:
            packet = reader.receive()
            if packet[0] < 0:
                run_command(packet, runner, reader)
                continue
            launched = runner.launch(packet)
            runner.sample(launched, read_masks(reader.receive()) if read_header(packet).awaits_masks else None)
    if becomes_idle(devices[rank], ABORT_SECONDS):
        runner.close()
        tp.abort()  # the memory that it shares is freed when this process ends


def connect_ranks(
    rank: int, config: EngineConfig, model_config: BaseModelConfig, devices: list[torch.device], shared_folder: Path
) -> TensorParallel:
    """Connect to the other ranks through a folder that all of them know, and share GPU memory with them."""
    tp = connect(rank, len(devices), devices[rank], shared_folder / "store")
    dtype = select_dtype(config.dtype, model_config.dtype, model_config.prefers_bfloat16, devices[rank])
    longest = model_config.longest_sequence(config.max_model_len)
    max_tokens = max_step_tokens(config.max_num_batched_tokens, config.max_num_seqs, longest)
    max_rows = config.max_num_seqs * config.max_row_tokens
    return tp.with_shared_memory(max_rows, max_tokens, model_config.hidden_size, dtype, devices)


def abort(tp: TensorParallel, seconds: float) -> None:
    """Abort the communication between the ranks, and wait at most so many seconds until NCCL has done so.

    NCCL waits for the CUDA graphs that communicate to be gone, which the traceback of an error may keep alive. So it is
    called in a thread of its own.
    """
    thread = threading.Thread(target=tp.abort, name="nanoinfer abort", daemon=True)
    with suppress(RuntimeError):  # some versions of Python start no thread while the interpreter exits
        thread.start()
        thread.join(seconds)


class Command(IntEnum):
    """Names the commands by their first number. The comments say which numbers follow it."""

    UPDATE = -1  # index of the dtype, number of dimensions, shape, bytes of the name
    SLEEP = -2  # level
    WAKE_UP = -3  # indices of SLEEP_TAGS
    KEEP_ADAPTER = -4  # its number, bytes of its folder's path
    DROP_ADAPTER = -5  # its number
    HOLD_IMAGE = -6  # see `image_messages.py`
    DROP_IMAGES = -7  # ids
    READ_ADAPTER = -8  # bytes of its folder's path


def pack_command(command: Command, *numbers: int) -> Message:
    return np.array([command, *numbers], np.int32)


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
    if command == Command.HOLD_IMAGE:
        runner.hold_image(*receive_image(message, reader))
        return
    if command == Command.DROP_IMAGES:
        runner.drop_images(numbers)
        return
    if command == Command.READ_ADAPTER:
        runner.begin_reading(Path(bytes(numbers).decode()))
        return
    if command == Command.SLEEP:
        runner.sleep(numbers[0])
    elif command == Command.WAKE_UP:
        runner.wake_up({SLEEP_TAGS[number] for number in numbers})
    elif command == Command.KEEP_ADAPTER:
        folder = Path(bytes(numbers[1:]).decode())
        runner.keep_adapter(numbers[0], folder, runner.read_adapter(folder))  # rank 0 has checked it
    elif command == Command.DROP_ADAPTER:
        runner.drop_adapter(numbers[0])
    else:
        raise AssertionError(f"no worker knows command {command}")
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
            self._writer.send_bytes(values.numpy())


def _receive(reader: RingReader, tp: TensorParallel, tensor: Tensor) -> Tensor:
    """Receive rank 0's tensor into this one, and return it."""
    values = tensor.view(-1).view(torch.uint8)
    if tensor.is_cuda:
        tp.broadcast(values)
    else:
        values.copy_(torch.from_numpy(reader.receive_bytes(len(values))))
    return tensor
