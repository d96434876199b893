"""What a trainer does to an engine between rounds of sampling: give it new weights, and take its memory for a while."""

from collections.abc import Iterable, Mapping
from threading import RLock
from typing import Any

from torch import Tensor

from nanoinfer.device import is_out_of_memory
from nanoinfer.engine.interfaces import Runner
from nanoinfer.engine.interrupts import postponed_interrupt
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.errors import ConfigError, EngineStateError, ModelError

PAIRS = "a dict of names to tensors, or an iterable of pairs of a name and a tensor, with the names of the checkpoint"


class WeightControl:
    """The part of `LLM` that replaces the weights, sleeps and wakes up. Any thread may call it."""

    engine: LLMEngine
    _lock: RLock

    def update_weights(self, named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Copy new weights into the model in place, on all ranks, and forget every cached prefix.

        named_tensors: a dict or an iterable of the checkpoint's names and whole tensors, on any device; all or some.
        Raises ModelError, with close names, for one that does not fit, and for what is no pair: nothing of a dict is
        copied then; what came before it in an iterable stays. Raises EngineStateError while requests are unfinished, or
        the engine sleeps.
        """
        if not isinstance(named_tensors, Iterable) or isinstance(named_tensors, (str, bytes, Tensor)):
            raise ModelError(f"named_tensors is a {type(named_tensors).__name__}; give {PAIRS}")
        with self._lock:
            runner = self._idle_runner("update_weights")
            if runner.sleep_level is not None:
                raise EngineStateError("this engine sleeps; call wake_up before update_weights")
            if isinstance(named_tensors, Mapping):
                for name, tensor in named_tensors.items():
                    runner.weights.check(name, tensor)
                named_tensors = named_tensors.items()
            num_copied = 0
            try:
                for pair in named_tensors:
                    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                        raise ModelError(f"named_tensors has {pair!r:.100} in place of a pair; give {PAIRS}")
                    runner.weights.update(*pair)
                    num_copied += 1
            except ModelError as error:
                raise ModelError(f"{error}; the {num_copied} before it were copied, and stay") from None
            finally:
                self.engine.block_manager.reset_prefix_cache()  # its keys and values are those of the weights before

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake_up`; calls that need the model raise EngineStateError meanwhile.

        level: 1 keeps the weights in host memory; 2 drops them, to be given to `update_weights` after `wake_up`. Raises
        EngineStateError while requests are unfinished.
        """
        if level not in (1, 2):
            raise ConfigError(f"level={level!r} is not known; use 1 to keep the weights in host memory, 2 to drop them")
        with self._lock:
            runner = self._idle_runner("sleep")
            if runner.sleep_level is None:
                self.engine.block_manager.reset_prefix_cache()
                with postponed_interrupt():
                    runner.sleep(level)

    def wake_up(self) -> None:
        """Take the memory again. Raises ConfigError where it is not free; the engine sleeps on then, if on one GPU."""
        with self._lock:
            runner = self._idle_runner("wake_up")
            if runner.sleep_level is None:
                return
            try:
                with postponed_interrupt():
                    runner.wake_up()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                remedy = "make a new LLM" if runner.closed else "call wake_up again"
                message = f"too little memory is free to wake up ({error}); free what other programs hold, and {remedy}"
                raise ConfigError(message) from error

    def _idle_runner(self, call: str) -> Runner:
        """Return the runner of an engine without requests. Raises EngineStateError where some are unfinished."""
        engine = self.engine
        runner = engine.check_open(is_for_steps=False)
        if not engine.is_finished():
            engine.step(launch=False)  # hands over what was aborted
        if not engine.is_finished():
            scheduler = engine.scheduler
            count = scheduler.num_waiting + len(scheduler.running) + len(scheduler.paused)
            raise EngineStateError(f"{call} while {count} requests are unfinished; finish them first, or abort them")
        return runner
