"""What ranks 1 and up do, each in a process of its own; and how ranks find and leave each other."""

import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.config import EngineConfig
from nanoinfer.device import becomes_idle, select_dtype
from nanoinfer.distributed.tensor_parallel import TensorParallel, connect
from nanoinfer.engine.packet import read_header
from nanoinfer.executor.processes import PASSED
from nanoinfer.executor.shm_ring import Ring, RingReader
from nanoinfer.executor.worker_messages import is_command, read_masks, run_command
from nanoinfer.runner.device_runner import DeviceRunner
from nanoinfer.runner.memory import max_step_tokens

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
            if is_command(packet):
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
    dtype = select_dtype(config.dtype, model_config.dtype, devices[rank])
    max_tokens = max_step_tokens(config, model_config, config.max_num_seqs)
    return tp.with_shared_memory(config.max_num_seqs, max_tokens, model_config.hidden_size, dtype, devices)


def abort(tp: TensorParallel, seconds: float) -> None:
    """Abort the communication between the ranks, and wait at most so many seconds until NCCL has done so.

    NCCL waits for the CUDA graphs that communicate to be gone, which the traceback of an error may keep alive. So it is
    called in a thread of its own.
    """
    thread = threading.Thread(target=tp.abort, name="nanoinfer abort", daemon=True)
    with suppress(RuntimeError):  # some versions of Python start no thread while the interpreter exits
        thread.start()
        thread.join(seconds)
