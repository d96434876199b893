"""Runs a rank of an engine whose processes somebody else has started, such as torchrun for a trainer.

Every process has the whole engine, with a scheduler of its own. With tensor_parallel_size=1 it has its own prompts.
With more, neighbouring ranks of the user's process group share one model: all of them must make the same calls, so that
they schedule the same steps. Nothing is sent but what the model needs; each rank cuts its share from the weights of
`update_weights`.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import xxhash

from nanoinfer.checkpoint.base_config import BaseModelConfig
from nanoinfer.config import EngineConfig
from nanoinfer.device import computing, select_device
from nanoinfer.distributed.tensor_parallel import TensorParallel, connect
from nanoinfer.engine.packet import Packet, read_header
from nanoinfer.errors import ConfigError, WorkerError
from nanoinfer.runner.device_runner import DeviceRunner
from nanoinfer.runner.model_runner import LaunchedStep

STORE: Any = torch.distributed.distributed_c10d  # whose stores are hardly typed


class ExternalRunner(DeviceRunner):
    """Runs every step on this rank.

    Raises ConfigError where there is no process group, or it cannot be cut into groups of tensor_parallel_size ranks,
    and WorkerError for a step that differs from that of the other ranks.
    """

    def __init__(self, config: EngineConfig, model_config: BaseModelConfig, folder: Path) -> None:
        size = config.tensor_parallel_size
        model_config.check_tensor_parallel_size(size)
        device = own_device(config.device)
        tp = TensorParallel() if size == 1 else join_group(size, device)
        super().__init__(replace(config, device=str(device)), model_config, folder, tp)

    def launch(self, packet: Packet) -> LaunchedStep:
        """Start the forward pass of a step, up to its logits."""
        if self.tp.size > 1 and read_header(packet).counts["row_records"]:
            self._check_same(packet)
        return super().launch(packet)

    def close(self) -> None:
        """Free this rank's memory, and leave the other ranks. Closing twice is fine."""
        if not self.closed:
            super().close()
            self.tp.abort()

    def _check_same(self, packet: Packet) -> None:
        """Raise WorkerError on all ranks if they have not been given the same requests."""
        digest = torch.tensor([xxhash.xxh64_intdigest(packet.tobytes()) >> 1], device=self.device)
        with computing(self.device, None):
            digests = self.tp.all_gather(digest).flatten().tolist()
        if len({*digests}) > 1:
            raise WorkerError(
                f"the {self.tp.size} ranks of this engine make different calls, and rank {self.tp.rank} cannot go on; "
                "give all of them the same prompts and parameters, in the same order, and make new LLMs"
            )


def own_device(name: str) -> torch.device:
    """Return the device of this process: where `name` says no number, the GPU of the LOCAL_RANK that torchrun sets."""
    if name in ("auto", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return select_device(name)


def join_group(size: int, device: torch.device) -> TensorParallel:
    """Connect to the neighbouring ranks of the user's process group that share a model with this one.

    Each engine gets a group of its own: the user's is used for meeting alone.
    """
    if not torch.distributed.is_initialized():
        raise ConfigError(
            f"tensor_parallel_size={size} with distributed_executor_backend='external_launcher' needs a process group; "
            "call torch.distributed.init_process_group first, in a script that torchrun runs"
        )
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if world_size % size:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the {world_size} processes of the group; use a divisor"
        )
    store, first = STORE._get_default_store(), rank - rank % size
    # The ranks make their engines in the same order, so the n-th of each meet.
    count = store.add(f"nanoinfer/{rank}", 1)
    return connect(rank - first, size, device, STORE.PrefixStore(f"nanoinfer/{first}/{count}", store))
