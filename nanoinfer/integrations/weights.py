"""For training loops: new weights for a running engine, and an engine that gives its memory back for a while."""

from collections.abc import Iterable, Mapping
from typing import Any

from nanoinfer.device import is_out_of_memory
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.errors import ConfigError, EngineStateError, ModelError
from nanoinfer.executor.interrupts import postponed_interrupt
from nanoinfer.executor.runner import Runner


def update_weights(engine: LLMEngine, named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
    """Copy new weights into the model, and forget cached prefixes: `LLM.update_weights` says the rest."""
    runner = _idle_runner(engine, "update_weights")
    if runner.sleep_level is not None:
        raise EngineStateError("this engine sleeps; call wake_up before update_weights")
    if isinstance(named_tensors, Mapping):
        for name, tensor in named_tensors.items():
            runner.weights.check(name, tensor)
        named_tensors = named_tensors.items()
    num_copied = 0
    try:
        for name, tensor in named_tensors:
            runner.weights.update(name, tensor)
            num_copied += 1
    except ModelError as error:
        raise ModelError(f"{error}; the {num_copied} before it were copied, and stay") from None
    finally:
        engine.block_manager.reset_prefix_cache()  # its keys and values are those of the weights before


def sleep(engine: LLMEngine, level: int) -> None:
    """Give the device's memory back: `LLM.sleep` says the rest."""
    if level not in (1, 2):
        raise ConfigError(f"level={level!r} is not known; use 1 to keep the weights in host memory, 2 to drop them")
    runner = _idle_runner(engine, "sleep")
    if runner.sleep_level is None:
        engine.block_manager.reset_prefix_cache()
        with postponed_interrupt():
            runner.sleep(level)


def wake_up(engine: LLMEngine) -> None:
    """Take the memory again: `LLM.wake_up` says the rest."""
    runner = _idle_runner(engine, "wake_up")
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


def _idle_runner(engine: LLMEngine, call: str) -> Runner:
    """Return the runner of an engine without requests. Raises EngineStateError where some are unfinished."""
    runner = engine.check_open(is_for_steps=False)
    if not engine.is_finished() and not runner.unready:
        engine.step()  # hands over what was aborted
    if not engine.is_finished():
        scheduler = engine.scheduler
        count = scheduler.num_waiting + len(scheduler.running) + len(scheduler.paused)
        raise EngineStateError(f"{call} while {count} requests are unfinished; finish them first, or abort them")
    return runner
