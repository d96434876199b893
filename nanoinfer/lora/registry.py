"""Knows the adapters that calls may name, and loads each one when it is first named.

Any thread may call any method.
"""

from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nanoinfer.engine.engine import Engine
from nanoinfer.errors import EngineStateError, ModelError, RequestError
from nanoinfer.lora.adapter_weights import temporary_folder
from nanoinfer.lora.lora_request import EXAMPLE, LoRARequest


class Loader(Protocol):
    """Loads adapters on all ranks, and knows them by number. It is a runner, or stands for all replicas."""

    def begin_reading(self, folder: Path) -> None:
        """Have all ranks begin to read an adapter, while steps go on. No step may be launched during the call."""

    def read_adapter(self, folder: Path) -> Any:
        """Return what this rank keeps of an adapter. Raises ModelError for one that cannot be served."""

    def keep_adapter(self, number: int, folder: Path, matrices: Any) -> None:
        """Keep an adapter that `read_adapter` has read, on all ranks."""

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter that no request uses."""


@dataclass(slots=True, eq=False)
class Adapter:
    """Describes a loaded adapter. It is the `identity` of its sequences, which share prefixes with each other alone.

    number: no adapter before it had this number, so a lora_int_id that is removed and used again gets a new number.
    slot: the slot that it has on the device, or None. users: unfinished sequences, or requests on their way to
    replicas.
    """

    request: LoRARequest
    number: int
    slot: int | None = None
    is_removed: bool = False
    users: set[Hashable] = field(default_factory=set)

    def enter(self, user: Hashable) -> None:
        """Note a user. Raises RequestError if the adapter was removed since the request was prepared."""
        if self.is_removed:
            raise RequestError(f"{self.request} was removed; name it again")
        self.users.add(user)


class AdapterRegistry:
    """Knows the adapters of an engine. loader: of the engine's runner. lock: keeps steps waiting while it is held."""

    def __init__(self, engine: Engine, loader: Loader, lock: AbstractContextManager[Any]) -> None:
        self._engine, self.loader, self._lock = engine, loader, lock
        self._by_id: dict[int, Adapter] = {}
        self._num_loaded = 0

    def adapters_of(self, lora_request: Any, count: int) -> list[Adapter | None]:
        """Return the adapter for each of `count` prompts, given one for all or a list; load what is not loaded."""
        given = list(lora_request) if isinstance(lora_request, list | tuple) else [lora_request] * count
        if len(given) != count:
            raise RequestError(f"{len(given)} lora_request for {count} prompts; give one for all, or one for each")
        loaded = {one: None if one is None else self.get(one) for one in dict.fromkeys(map(_checked, given))}
        return [loaded[one] for one in given]

    def get(self, request: LoRARequest) -> Adapter:
        """Return an adapter, loaded. Raises RequestError if its id stands for another, ModelError for a bad folder."""
        adapter, folder = self._by_id.get(request.lora_int_id), Path(request.lora_path)
        if adapter is None:
            self._engine.guard.check()
            self._engine.check_open(is_for_steps=False)
            matrices = self._read(folder)
            with self._lock:
                adapter = self._by_id.get(request.lora_int_id)  # another thread may have loaded it
                if adapter is None:
                    adapter = self._keep(request, folder, matrices)
        if adapter.request != request:
            raise RequestError(
                f"lora_int_id={request.lora_int_id} stands for {adapter.request}, not for {request}; use another id, "
                "or call remove_lora first"
            )
        return adapter

    def add(self, request: LoRARequest) -> bool:
        """Load an adapter; return False if it was loaded already."""
        self._engine.check_open(is_for_steps=False)
        is_new = _checked(request, LoRARequest).lora_int_id not in self._by_id
        self.get(request)
        return is_new

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter; return whether it was known. Raises EngineStateError while requests use it."""
        self._engine.guard.check()
        self._engine.check_open(is_for_steps=False)
        with self._lock:
            adapter = self._by_id.get(lora_int_id)
            if adapter is None:
                return False
            self._check_unused(adapter)
            del self._by_id[lora_int_id]
            self._drop(adapter)
            return True

    def update(self, lora_name: str, named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Give a loaded adapter new matrices, by peft's names. Its config stays. If this fails, nothing changes.

        Raises RequestError for a name that is not loaded, ModelError for tensors that do not fit, EngineStateError
        while requests use it.
        """
        self._engine.guard.check()
        self._engine.check_open(is_for_steps=False)
        known = {adapter.request.lora_name: adapter for adapter in self._by_id.values()}
        if lora_name not in known:
            raise RequestError(f"lora={lora_name!r} is no loaded adapter; use add_lora first; loaded are {[*known]}")
        adapter = known[lora_name]
        # Through a file, which all ranks and replicas can read.
        with temporary_folder(Path(adapter.request.lora_path), named_tensors) as folder:
            try:
                matrices = self._read(folder)
            except ModelError as error:
                raise ModelError(f"the new matrices of {adapter.request} do not fit: {error}") from None
            with self._lock:
                self._check_unused(adapter)
                self._keep(adapter.request, folder, matrices)
                self._drop(adapter)

    def _read(self, folder: Path) -> Any:
        """Read an adapter on all ranks, while steps go on; return what this rank keeps of it."""
        with self._lock:
            self.loader.begin_reading(folder)
        return self.loader.read_adapter(folder)

    def _keep(self, request: LoRARequest, folder: Path, matrices: Any) -> Adapter:
        """Have all ranks keep an adapter, which its id stands for from now on."""
        self._num_loaded += 1
        adapter = Adapter(request, self._num_loaded)
        self.loader.keep_adapter(adapter.number, folder, matrices)
        self._by_id[request.lora_int_id] = adapter
        return adapter

    def _check_unused(self, adapter: Adapter) -> None:
        """Raise EngineStateError where requests use an adapter, once those that were aborted have ended."""
        if adapter.users:
            self._engine.settle()
        if adapter.users:
            raise EngineStateError(
                f"{adapter.request} is used by unfinished requests ({len(adapter.users)} samples); wait for them, or "
                "abort them"
            )

    def _drop(self, adapter: Adapter) -> None:
        adapter.is_removed = True
        self.loader.drop_adapter(adapter.number)

    def ids(self) -> set[int]:
        """Return the ids of the adapters that are loaded."""
        return set(self._by_id)


def _checked(request: Any, kind: Any = LoRARequest | None) -> Any:
    """Return the request if it is of this kind. Raises RequestError otherwise."""
    if not isinstance(request, kind):
        raise RequestError(f"lora_request={request!r} is a {type(request).__name__}; {EXAMPLE}, or a list of these")
    return request
