"""Runs the model on several GPUs by tensor parallelism: one process for each rank, behind the interface of one runner.

Rank 0 is this process; the others are spawned (`processes.py`), and do what `worker.py` says. Rank 0 sends each packet
through a ring in shared memory (`shm_ring.py`), and all ranks run it, each on its shard of the weights and of the KV
cache. A step that awaits masks is two messages: the packet, and what the workers must know of the masks. All sample the
same tokens, so the workers send nothing back.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.config import SLEEP_TAGS, EngineConfig
from nanoinfer.device import becomes_idle, select_devices
from nanoinfer.distributed.tensor_parallel import NCCL_ENVIRONMENT, TensorParallel
from nanoinfer.engine.interfaces import FailedImages
from nanoinfer.engine.interrupts import postponed_interrupt
from nanoinfer.engine.packet import Packet, read_header
from nanoinfer.engine.token_masks import TokenMasks
from nanoinfer.errors import NanoinferError, WorkerError, closed_by
from nanoinfer.executor.image_messages import send_image
from nanoinfer.executor.processes import Workers
from nanoinfer.executor.shm_ring import Ring, RingWriter
from nanoinfer.executor.worker import (
    ABORT_SECONDS,
    AllRanksWeights,
    Command,
    abort,
    barrier,
    connect_ranks,
    pack_command,
    pack_masks,
    run_worker,
)
from nanoinfer.runner.device_runner import DeviceRunner
from nanoinfer.runner.model_runner import LaunchedStep, StepHandle

logger = logging.getLogger("nanoinfer")

POLL_SECONDS = 20e-6
STEP_SECONDS = 300.0  # a step of GPUs that takes longer hangs; the first one of a process may compile kernels


class ParallelRunner:
    """Runs every step on all ranks.

    Raises WorkerError if a worker has ended. That closes the runner. So does any error in the middle of a step, since
    it leaves the other ranks waiting for this one.
    """

    def __init__(self, config: EngineConfig, model_config: BaseModelConfig, folder: Path) -> None:
        size = config.tensor_parallel_size
        model_config.check_tensor_parallel_size(size)
        devices = select_devices(config.device, size)
        model_config.longest_sequence(config.max_model_len)  # raises before there are processes
        if devices[0].type == "cuda":
            os.environ.update(NCCL_ENVIRONMENT)  # the workers inherit it
        ring = Ring(num_readers=size - 1)
        self.closed = False
        self.failure: NanoinferError | None = None
        self._device = devices[0]
        self._tp = TensorParallel()
        self._workers = Workers(size, run_worker, (ring, config, model_config, folder, devices))
        self._writer = RingWriter(ring, self._workers.links, self._workers.check)
        self._awaits_sample = False  # whether a step was launched and not sampled
        self._awaits_masks = False  # whether the workers sample that one when they have its masks
        self._resources = ExitStack()  # what rank 0 frees, last to first
        try:
            self._workers.wait_for_stage(1)  # all have started
            self._tp = connect_ranks(0, config, model_config, devices, self._workers.folder)
            self._workers.on_failure = self._tp.abort
            self._resources.callback(self._tp.close)  # after the workers, which have rank 0's shared memory open
            self._resources.callback(self._workers.close)
            self._resources.callback(abort, self._tp, ABORT_SECONDS)  # after the runner, whose graphs communicate
            self._runner = DeviceRunner(replace(config, device=str(self._device)), model_config, folder, self._tp)
            self._resources.callback(self._runner.close)
            self._workers.wait_for_stage(2)  # all have loaded the model
        except BaseException as error:
            self._fail(error)
        self.limits = self._runner.limits
        self.info = self._runner.info

    def launch(self, packet: Packet) -> LaunchedStep:
        """Start the forward pass of a step on all ranks; the workers sample it at once, unless it awaits masks."""
        with self._all_ranks():
            if self._awaits_sample:
                raise RuntimeError("a step was launched and not sampled, which the workers cannot know")
            self._writer.send(packet)
            self._awaits_sample, self._awaits_masks = True, bool(read_header(packet).awaits_masks)
            return self._runner.launch(packet)

    def sample(self, launched: LaunchedStep, masks: TokenMasks | None = None) -> StepHandle:
        """Draw the tokens of the step that was just launched, as the masks allow."""
        with self._all_ranks():
            self._awaits_sample = False
            if self._awaits_masks:
                self._writer.send(pack_masks(masks or TokenMasks()))
            elif masks is not None:
                raise RuntimeError("a step has masks and was not launched to await them: the workers have sampled it")
            return self._runner.sample(launched, masks)

    def wait(self, handle: StepHandle) -> list[int]:
        """Return the token ids of a sampled step, once they are there."""
        try:
            # Not by a blocking wait: a step never ends if another rank is gone.
            deadline = time.monotonic() + STEP_SECONDS
            while not (handle.is_done() or self._workers.failure):
                if time.monotonic() > deadline:
                    raise WorkerError(
                        f"a step of tensor_parallel_size={self._workers.size} did not end within {STEP_SECONDS:g} s: a "
                        "process hangs, or a GPU does not answer; make a new LLM"
                    )
                time.sleep(POLL_SECONDS)
            self._workers.check()
            return self._runner.wait(handle)
        except Exception as error:
            self._fail(error)

    def read_routed_experts(self, block_ids: list[int], start: int, end: int) -> Any:
        """Start to copy them from rank 0, which routes as all ranks do."""
        return self._runner.read_routed_experts(block_ids, start, end)

    def begin_reading(self, folder: Path) -> None:
        """Have the other ranks begin to read an adapter, while steps go on."""
        with self._all_ranks():
            self._writer.send(pack_command(Command.READ_ADAPTER, *str(folder.absolute()).encode()))

    def read_adapter(self, folder: Path) -> Any:
        """Return rank 0's share of an adapter. Raises ModelError for one that cannot be served."""
        return self._runner.read_adapter(folder)

    def keep_adapter(self, number: int, folder: Path, matrices: Any) -> None:
        """Keep an adapter that all ranks have read: each its share."""
        with self._all_ranks():
            self._writer.send(pack_command(Command.KEEP_ADAPTER, number, *str(folder.absolute()).encode()))
            self._runner.keep_adapter(number, folder, matrices)
            barrier(self._runner)

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter that no request uses, on all ranks."""
        with self._all_ranks():
            self._writer.send(pack_command(Command.DROP_ADAPTER, number))
            self._runner.drop_adapter(number)
            barrier(self._runner)

    def hold_image(
        self, image_id: int, token_ids: Sequence[int], tensors: Mapping[str, Any], _make_tensors: Any = None
    ) -> None:
        """Keep an image on all ranks, which all hold its tensors: see `Runner`."""
        with self._all_ranks():
            send_image(self._writer, Command.HOLD_IMAGE, image_id, token_ids, tensors)
            self._runner.hold_image(image_id, token_ids, tensors)

    def drop_images(self, image_ids: Sequence[int]) -> None:
        """Forget images on all ranks."""
        with self._all_ranks():
            self._writer.send(pack_command(Command.DROP_IMAGES, *image_ids))
            self._runner.drop_images(image_ids)

    def take_failed_images(self) -> FailedImages:
        """Return where the model failed with images; rank 0 knows, as all ranks encode the same ones."""
        return self._runner.take_failed_images()

    def sleep(self, level: int) -> None:
        """Give the devices' memory back; return when all ranks have."""
        with self._all_ranks():
            self._writer.send(pack_command(Command.SLEEP, level))
            self._runner.sleep(level)
            barrier(self._runner)

    def wake_up(self, tags: Set[str]) -> None:
        """Take the memory of these again. If it is short on one rank, the runner is closed."""
        with self._all_ranks():
            self._writer.send(pack_command(Command.WAKE_UP, *(SLEEP_TAGS.index(tag) for tag in tags)))
            self._runner.wake_up(tags)
            barrier(self._runner)

    @property
    def weights(self) -> AllRanksWeights:
        return AllRanksWeights(self._runner, self._writer, self._all_ranks)  # not kept: it holds this runner

    @property
    def sleeping_tags(self) -> frozenset[str]:
        return self._runner.sleeping_tags

    @property
    def unready_reason(self) -> str | None:
        return self._runner.unready_reason

    def close(self) -> None:
        """End the workers and free this rank's memory. Closing twice is fine; a fork of this process closes nothing."""
        if self._workers.are_ours:
            self._workers.hang_up()
            self._free(ABORT_SECONDS)

    @contextmanager
    def _all_ranks(self) -> Iterator[None]:
        """Guard what all ranks do together: it is not interrupted in the middle, and an error closes the runner."""
        with postponed_interrupt():
            try:
                yield
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> NoReturn:
        """Kill the workers, free this rank's memory, and raise `error` or the worker's error that caused it."""
        error = self._workers.explanation(error)
        self.failure = self.failure or closed_by(error)
        self._workers.close(patience=0.0)
        if not self._free(0.0):
            raise WorkerError(f"{error}\nThe step on {self._device} did not end; restart this process") from error
        raise error

    def _free(self, seconds: float) -> bool:
        """Close `_resources` once the GPU has ended its step, which is aborted after so many seconds.

        Return False if the step does not end even then. Its memory is still in use, so it is not freed.
        """
        self.closed = True
        self._tp.join()
        if not becomes_idle(self._device, seconds):
            abort(self._tp, 0.0)
            if not becomes_idle(self._device, ABORT_SECONDS):
                logger.warning("the step on %s did not end, and its memory is not freed", self._device)
                self._resources.pop_all()
                self._workers.close()
                return False
        self._resources.close()
        return True
