"""What `LLM` has for event loops. `aio.py` does the work, and is imported by the first call."""

from collections.abc import AsyncGenerator
from typing import Any

from nanoinfer.outputs import RequestOutput, StreamChunk


class AsyncCalls:
    """The part of `LLM` that serves tasks of asyncio."""

    async_driver: Any = None  # steps for these calls, made by the first of them

    async def agenerate(
        self: Any, prompts: Any, sampling_params: Any = None, use_tqdm: bool = False, **options: Any
    ) -> list[RequestOutput]:
        """Do as `generate`, with its arguments and errors, while other tasks of the event loop run.

        Calls of all tasks and threads share batches. If the task is cancelled, its requests are aborted.
        """
        from nanoinfer.integrations.aio import agenerate

        return await agenerate(self, prompts, sampling_params, use_tqdm, **options)

    def astream(self: Any, prompts: Any, sampling_params: Any = None) -> AsyncGenerator[StreamChunk, None]:
        """Do as `stream`, for `async for`; the errors are raised when the first chunk is asked for."""
        from nanoinfer.integrations.aio import astream

        return astream(self, prompts, sampling_params)
