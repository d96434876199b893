"""Runs the model in this process and in spawned ones, which the engine need not know.

Under tensor parallelism every rank runs the same packets on its share of the weights and of the KV cache, and samples
the same tokens. Rank 0 is here; the others get each packet through a ring in shared memory.
"""

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from nanoinfer.checkpoint.model_config import ModelConfig
from nanoinfer.config import EngineConfig
from nanoinfer.device import becomes_idle, select_devices, select_dtype
from nanoinfer.distributed.tensor_parallel import NCCL_ENVIRONMENT, TensorParallel, connect
from nanoinfer.engine.batch import Packet
from nanoinfer.errors import WorkerError
from nanoinfer.executor.shm_ring import Ring, RingReader, RingWriter
from nanoinfer.executor.workers import PASSED, Workers, postponed_interrupt
from nanoinfer.runner.model_runner import ModelRunner, PendingStep, StepHandle

logger = logging.getLogger("nanoinfer")

POLL_SECONDS = 20e-6
ABORT_SECONDS = 5.0  # in which a GPU ends its step after the communication was aborted


class ParallelRunner:
    """A ModelRunner on every rank, with the interface of one.

    Raises WorkerError where a worker has ended. That closes it, and so does an error in the middle of a launch, which
    leaves the other ranks waiting for this one.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path) -> None:
        size = config.tensor_parallel_size
        model_config.check_tensor_parallel_size(size)
        devices = select_devices(config.device, size)
        if devices[0].type == "cuda":
            os.environ.update(NCCL_ENVIRONMENT)  # the workers inherit it
        ring = Ring(num_readers=size - 1)
        self.closed = False
        self._device, self._tp = devices[0], TensorParallel()
        self._workers = Workers(size, _work, (ring, config, model_config, folder, devices))
        self._writer = RingWriter(ring, self._workers.links, self._workers.check)
        try:
            self._workers.wait_for_stage(1)  # all are there to be met
            self._tp = _join(0, config, model_config, devices, self._workers.folder)
            self._workers.on_failure = self._tp.abort
            self._runner = ModelRunner(replace(config, device=str(self._device)), model_config, folder, self._tp)
            self._workers.wait_for_stage(2)  # all are ready
        except BaseException as error:
            self._fail(error)
        self.num_blocks, self.max_model_len = self._runner.num_blocks, self._runner.max_model_len

    def launch(self, packet: Packet) -> PendingStep:
        """Start a step on all ranks; the workers sample it at once."""
        with postponed_interrupt():
            try:
                self._writer.send(packet)
                return self._runner.launch(packet)
            except BaseException as error:
                self._fail(error)

    def sample(self, pending: PendingStep) -> StepHandle:
        """Draw the tokens of the step that was just launched."""
        with postponed_interrupt():
            try:
                return self._runner.sample(pending)
            except BaseException as error:
                self._fail(error)

    def wait(self, handle: StepHandle) -> list[int]:
        """The token ids of a launched step."""
        try:
            while not (handle.is_done() or self._workers.have_failed):
                time.sleep(POLL_SECONDS)
            if self._workers.have_failed:
                raise RuntimeError("the ranks' communication was aborted")
            return self._runner.wait(handle)
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """End the workers and free this rank's memory. Closing twice is fine; a fork of this process closes nothing."""
        if not self._workers.are_ours:
            return
        try:
            if not self.closed:
                self._workers.hang_up()
                self._free(ABORT_SECONDS)
        finally:
            self._workers.close()
        self._tp.close()  # the memory for sums last: the workers had it open

    def _fail(self, error: BaseException) -> NoReturn:
        """Close without the workers' help, and raise what is behind `error`."""
        error = self._workers.explanation(error)
        self._workers.close(patience=0.0)
        if not self._free(0.0):
            raise WorkerError(f"{error}\nThe step on {self._device} did not end; restart this process") from error
        self._tp.close()
        raise error

    def _free(self, seconds: float) -> bool:
        """Free this rank's share once the GPU has ended its step, which is aborted after so many seconds.

        False where it does not end even so: then nothing can be freed.
        """
        self.closed = True
        if not becomes_idle(self._device, seconds):
            self._abort(0.0)
            if not becomes_idle(self._device, ABORT_SECONDS):
                self._tp = TensorParallel()  # its memory is in use
                logger.warning("the step on %s did not end, and its memory is not freed", self._device)
                return False
        if hasattr(self, "_runner"):
            self._runner.close()
            del self._runner
        self._abort(ABORT_SECONDS)
        return True

    def _abort(self, seconds: float) -> None:
        """End the ranks' communication, and wait so long for NCCL to be done with that.

        It is not before the graphs that communicate are gone; an error may still hold them.
        """
        thread = threading.Thread(target=self._tp.abort, name="nanoinfer abort", daemon=True)
        with suppress(RuntimeError):  # some versions of Python start no thread at their end
            thread.start()
            thread.join(seconds)


def _join(
    rank: int, config: EngineConfig, model_config: ModelConfig, devices: list[torch.device], shared_folder: Path
) -> TensorParallel:
    """Meet the other ranks, in a folder that they share, and each other's memory."""
    tp = connect(rank, len(devices), devices[rank], shared_folder / "store")
    dtype = select_dtype(config.dtype, model_config.dtype, devices[rank])
    return tp.with_symmetric_memory(config.max_num_seqs, model_config.hidden_size, dtype, devices)


def _work(
    rank: int,
    link: socket.socket,
    shared_folder: Path,
    ring: Ring,
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    devices: list[torch.device],
) -> None:
    """A worker: load, and run the packets that come until there are no more."""
    torch.set_num_threads(max(1, torch.get_num_threads() // len(devices)))
    torch.zeros(1, device=devices[rank])  # a GPU that cannot be used says so here, while nobody waits for this rank
    link.sendall(PASSED)
    tp = _join(rank, config, model_config, devices, shared_folder)
    runner = ModelRunner(replace(config, device=str(devices[rank])), model_config, folder, tp)
    link.sendall(PASSED)
    reader = RingReader(ring, rank - 1, link)
    with suppress(EOFError):  # rank 0 has closed its end, or is gone
        while True:
            runner.sample(runner.launch(reader.receive()))
    if becomes_idle(devices[rank], ABORT_SECONDS):
        runner.close()
        tp.abort()  # what it shares goes with this process
