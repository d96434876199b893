"""The methods of `LLM` that change its weights, or give its memory back."""

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from nanoinfer.control.weight_control import Control
from nanoinfer.lora.lora_methods import LoRAMethods


class ControlMethods(LoRAMethods):
    """Gives `LLM`, which sets these fields, the methods that control weights and memory."""

    _control: Control
    _weights: object  # names them for `datasets`

    def update_weights(
        self, named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, lora: str | None = None
    ) -> None:
        """Copy new weights into the model in place, on all ranks, and forget every cached prefix.

        named_tensors: a dict or an iterable of the checkpoint's names and whole tensors, on any device; all or some.
        Raises ModelError, with close names, for a tensor that does not fit, and for what is no pair. Nothing of a dict
        is copied then; of an iterable, the tensors before it stay. Raises EngineStateError while requests are
        unfinished, or the weights sleep.

        lora: the lora_name of a loaded adapter, which gets new matrices in the place of the model: all of them, by the
        names that peft has in memory or in its files. What others have cached stays, and requests without this adapter
        may be unfinished. Raises RequestError for a name that is not loaded.
        """
        if lora is not None:
            self._registry().update(lora, named_tensors)
            return
        self._weights = time.time_ns()  # those of no folder, even if some cannot be copied
        self._control.update_weights(named_tensors)

    load_weights = update_weights  # what trainers call on vLLM's models

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake_up`; calls that need the model raise EngineStateError meanwhile.

        level: 1 keeps the weights in host memory; 2 drops them, to be given to `update_weights` after `wake_up`. Raises
        EngineStateError while requests are unfinished.
        """
        self._control.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the memory again. Raises ConfigError where it is not free; the engine sleeps on then, if on one GPU.

        tags: ["weights"], then ["kv_cache"], to take it in two parts, with `update_weights` between them; None is both.
        Raises ConfigError for other tags, EngineStateError for the cache before the weights.
        """
        self._control.wake_up(tags)
