"""Lets a trainer give all replicas new weights between rounds of sampling, and take their memory."""

import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from nanoinfer.checkpoint.weights import check_plain
from nanoinfer.control.weight_control import Control, check_pair
from nanoinfer.errors import ModelError, WorkerError
from nanoinfer.executor.shm_ring import RingWriter
from nanoinfer.replicas.replica_messages import Call
from nanoinfer.replicas.replicated_engine import ReplicatedEngine

CLOSED = "this engine is closed; make a new LLM"


class ReplicaAdapters:
    """Has all replicas keep adapters: a Loader of their registry."""

    def __init__(self, engine: ReplicatedEngine) -> None:
        self._engine = engine

    def begin_reading(self, folder: Path) -> None:
        """Leave it to the replicas, which read it where they keep it."""

    def read_adapter(self, folder: Path) -> None:
        """Leave it to the replicas, which read it where they keep it."""

    def keep_adapter(self, number: int, folder: Path, _matrices: None) -> None:
        """Keep an adapter on all replicas, or on none. Raises what the first of them raised."""
        if errors := self._call("keep_adapter", number, folder.absolute()):
            self._call("drop_adapter", number)
            raise errors[0]

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter that no request uses."""
        self._call("drop_adapter", number)

    def _call(self, name: str, *arguments: Any) -> list[Exception]:
        with self._engine.whole_messages():
            return self._engine.call(name, *arguments)


class ReplicaControl(Control):
    """Controls all replicas."""

    _engine: ReplicatedEngine

    def __init__(self, engine: ReplicatedEngine, lock: RLock) -> None:
        super().__init__(engine, lock)
        self._writer: RingWriter | None = None  # for all updates
        self._doorbells: list[socket.socket] = []

    def _update_weights(self, named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Read the tensors once, and send each to all replicas. If only some can take it, the engine is closed."""
        if isinstance(named_tensors, Mapping):
            for name, tensor in named_tensors.items():
                check_plain(name, tensor)
            described = [(name, one.dtype, tuple(one.shape)) for name, one in named_tensors.items()]
            self._call("check_weights", described)
            named_tensors = named_tensors.items()
        self._send_all(named_tensors)

    def _sleep(self, level: int) -> None:
        self._call("sleep", level)

    def _wake_up(self, tags: set[str]) -> None:
        self._call("wake_up", tags)

    def _call(self, name: str, *arguments: Any) -> None:
        """Have all replicas do something. Raises what the first of them raised."""
        with self._engine.whole_messages():
            errors = self._engine.call(name, *arguments)
        if errors:
            raise errors[0]

    def _send_all(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Send weights one after another, each when all replicas have copied the one before."""
        engine = self._engine
        num_replicas, num_copied, is_taken = len(engine.alive()), 0, True
        try:
            self._call("update_weights")
            for pair in weights:
                check_pair(pair)
                check_plain(*pair)
                with engine.whole_messages():
                    is_taken = False
                    errors = self._send(*pair)
                    if len(engine.alive()) < num_replicas or 0 < len(errors) < num_replicas:
                        reason = errors[0] if errors else "a replica has ended"
                        raise WorkerError(
                            f"some replicas have the new {pair[0]!r} and some have not ({reason}); {CLOSED}"
                        )
                    is_taken = not errors  # within the scope, at whose end Ctrl-C may be raised
                if errors:
                    raise errors[0]  # of all, which have ended their update
                num_copied += 1
        except ModelError as error:
            if not is_taken:
                raise
            raise ModelError(f"{error}; the {num_copied} before it were copied, and stay") from None
        finally:
            if is_taken:
                self._call("end_update")

    def _send(self, name: str, tensor: Tensor) -> list[Exception]:
        """Send a tensor through shared memory; return the errors of replicas that did not take it."""
        engine = self._engine
        values = tensor.detach().to("cpu").contiguous()
        for replica in engine.alive():
            replica.send(Call("weight", (name, values.dtype, tuple(values.shape))))
        if self._writer is None:
            self._writer = RingWriter(engine.ring, self._doorbells, self._check)
        self._doorbells[:] = [replica.workers.links[0] for replica in engine.alive()]
        try:
            self._writer.send_bytes(values.view(-1).view(torch.uint8).numpy())
        except OSError as error:
            raise WorkerError(f"a replica has ended while it got {name!r} ({error}); {CLOSED}") from error
        return engine.collect_replies()

    def _check(self) -> None:
        for replica in self._engine.alive():
            replica.workers.check()
