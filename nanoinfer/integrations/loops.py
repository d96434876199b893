"""What `LLM` has for other programs' loops: event loops, and those of trainers."""

from collections.abc import AsyncGenerator, Iterable, Mapping
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.integrations import weights
from nanoinfer.outputs import RequestOutput, StreamChunk

if TYPE_CHECKING:
    from nanoinfer.llm import LLM


class LoopCalls:
    """The part of `LLM` that serves tasks of asyncio, and gets new weights between rounds of sampling."""

    engine: LLMEngine
    _lock: RLock
    async_driver: Any = None  # steps for `agenerate` and `astream`, made by the first of them

    async def agenerate(
        self, prompts: Any, sampling_params: Any = None, use_tqdm: bool = False, **options: Any
    ) -> list[RequestOutput]:
        """Do as `generate`, with its arguments and errors, while other tasks of the event loop run.

        Calls of all tasks and threads share batches. If the task is cancelled, its requests are aborted.
        """
        from nanoinfer.integrations.aio import agenerate

        return await agenerate(cast("LLM", self), prompts, sampling_params, use_tqdm, **options)

    def astream(self, prompts: Any, sampling_params: Any = None) -> AsyncGenerator[StreamChunk, None]:
        """Do as `stream`, for `async for`; the errors are raised when the first chunk is asked for."""
        from nanoinfer.integrations.aio import astream

        return astream(cast("LLM", self), prompts, sampling_params)

    def update_weights(self, named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Copy new weights into the model in place, on all ranks, and forget every cached prefix.

        named_tensors: a dict or an iterable of the checkpoint's names and whole tensors, on any device; all or some.
        Raises ModelError, with close names, for one that does not fit: nothing of a dict is copied then; what came
        before it in an iterable stays. Raises EngineStateError while requests are unfinished, or the engine sleeps.
        """
        with self._lock:
            weights.update_weights(self.engine, named_tensors)

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back until `wake_up`; calls that need the model raise EngineStateError meanwhile.

        level: 1 keeps the weights in host memory; 2 drops them, to be given to `update_weights` after `wake_up`. Raises
        EngineStateError while requests are unfinished.
        """
        with self._lock:
            weights.sleep(self.engine, level)

    def wake_up(self) -> None:
        """Take the memory again. Raises ConfigError where it is not free; the engine sleeps on then, if on one GPU."""
        with self._lock:
            weights.wake_up(self.engine)
