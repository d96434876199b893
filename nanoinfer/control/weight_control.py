"""Lets a trainer give an engine new weights between rounds of sampling, and take its memory for a while."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from threading import RLock
from typing import Any

from torch import Tensor

from nanoinfer.config import SLEEP_TAGS
from nanoinfer.device import is_out_of_memory
from nanoinfer.engine.engine import Engine
from nanoinfer.engine.interrupts import postponed_interrupt
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.errors import ConfigError, EngineStateError, ModelError

PAIRS = "a dict of names to tensors, or an iterable of pairs of a name and a tensor, with the names of the checkpoint"


class Control(ABC):
    """Does the work of `LLM.update_weights`, `sleep` and `wake_up` on one engine or several. Any thread may call it.

    lock: the queue's lock. While it is held, no step runs.
    """

    def __init__(self, engine: Engine, lock: RLock) -> None:
        self._engine, self._lock = engine, lock

    def update_weights(self, named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        if not isinstance(named_tensors, Iterable) or isinstance(named_tensors, (str, bytes, Tensor)):
            raise ModelError(f"named_tensors is a {type(named_tensors).__name__}; give {PAIRS}")
        with self._lock:
            self._check_idle("update_weights")
            self._update_weights(named_tensors)

    def sleep(self, level: int) -> None:
        if level not in (1, 2):
            raise ConfigError(f"level={level!r} is not known; use 1 to keep the weights in host memory, 2 to drop them")
        with self._lock:
            self._check_idle("sleep")
            self._sleep(level)

    def wake_up(self, tags: Collection[str] | None) -> None:
        wanted = checked_tags(tags)
        with self._lock:
            self._check_idle("wake_up")
            self._wake_up(wanted)

    def _check_idle(self, call: str) -> None:
        """Raise EngineStateError if requests are unfinished after aborted ones have ended."""
        self._engine.check_open(is_for_steps=False)
        if count := self._engine.settle():
            raise EngineStateError(f"{call} while {count} requests are unfinished; finish them first, or abort them")

    @abstractmethod
    def _update_weights(self, named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None: ...

    @abstractmethod
    def _sleep(self, level: int) -> None: ...

    @abstractmethod
    def _wake_up(self, tags: set[str]) -> None: ...


class WeightControl(Control):
    """Controls the engine of this process."""

    _engine: LLMEngine

    def _update_weights(self, named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        runner = self._engine.check_open(is_for_steps=False)
        if "weights" in runner.sleeping_tags:
            raise EngineStateError(
                "this engine sleeps; call wake_up, or wake_up(tags=['weights']), before update_weights"
            )
        if isinstance(named_tensors, Mapping):
            for name, tensor in named_tensors.items():
                runner.weights.check(name, tensor)
            named_tensors = named_tensors.items()
        num_copied, given = 0, dict[Any, str]()
        try:
            for pair in named_tensors:
                check_pair(pair)
                name, tensor = pair
                runner.weights.update(name, tensor, given)
                num_copied += 1
        except ModelError as error:
            raise ModelError(f"{error}; the {num_copied} before it were copied, and stay") from None
        finally:
            self._engine.reset_prefix_cache()  # its keys and values are those of the weights before

    def _sleep(self, level: int) -> None:
        runner = self._engine.check_open(is_for_steps=False)
        if len(runner.sleeping_tags) < len(SLEEP_TAGS):
            self._engine.reset_prefix_cache()
            with postponed_interrupt():
                runner.sleep(level)

    def _wake_up(self, tags: set[str]) -> None:
        runner = self._engine.check_open(is_for_steps=False)
        if "weights" in runner.sleeping_tags - tags:
            raise EngineStateError("the weights sleep; call wake_up(tags=['weights']) before, or wake_up for both")
        if not runner.sleeping_tags & tags:
            return
        try:
            with postponed_interrupt():
                runner.wake_up(tags)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            remedy = "make a new LLM" if runner.closed else "call wake_up again"
            message = f"too little memory is free to wake up ({error}); free what other programs hold, and {remedy}"
            raise ConfigError(message) from error


def check_pair(pair: Any) -> None:
    """Raise ModelError for anything that is not a pair."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ModelError(f"named_tensors has {pair!r:.100} in place of a pair; give {PAIRS}")


def checked_tags(tags: Any) -> set[str]:
    """Return the tags to wake up; None means all. Raises ConfigError for an unknown tag."""
    if tags is None:
        return {*SLEEP_TAGS}
    if isinstance(tags, str) or not isinstance(tags, Collection) or not tags:
        raise ConfigError(f"tags={tags!r} is no list of tags; use {[*SLEEP_TAGS]}, or leave it out to wake up all")
    for tag in tags:
        if tag not in SLEEP_TAGS:
            why = "requests run whenever the engine is awake" if tag == "scheduling" else "it names nothing that sleeps"
            raise ConfigError(f"tag {tag!r} is not supported: {why}; use 'weights' or 'kv_cache'")
    return {*tags}
