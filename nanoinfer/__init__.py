"""nanoinfer: fast, readable offline LLM inference.

    from nanoinfer import LLM, SamplingParams

Importing the package costs little: PyTorch is imported with `LLM`, when that is first asked for.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.checkpoint.hub import TINY
from nanoinfer.errors import (
    ConfigError,
    EngineClosedError,
    EngineStateError,
    JobError,
    ModelError,
    NanoinferError,
    RequestError,
    WorkerError,
)
from nanoinfer.flat_logprobs import FlatLogprobs
from nanoinfer.lora.lora_request import LoRARequest
from nanoinfer.metrics import EngineMetrics, RequestChange, StepEvent
from nanoinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, Score, StreamChunk
from nanoinfer.pooling_outputs import ClassificationOutput, EmbeddingOutput, PoolingRequestOutput, RewardOutput
from nanoinfer.pooling_params import PoolingParams
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from nanoinfer.llm import LLM
    from nanoinfer.responses.parse import parse_response

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "ClassificationOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EngineClosedError",
    "EngineMetrics",
    "EngineStateError",
    "FlatLogprobs",
    "JobError",
    "LoRARequest",
    "Logprob",
    "ModelError",
    "NanoinferError",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestChange",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RewardOutput",
    "SamplingParams",
    "Score",
    "StepEvent",
    "StreamChunk",
    "StructuredOutputsParams",
    "WorkerError",
    "parse_response",
    "tiny_model_path",
]


def tiny_model_path() -> Path:
    """Return the folder of the small trained Qwen3 checkpoint that comes with the package: that of LLM("tiny")."""
    return TINY


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from nanoinfer.llm import LLM

        return LLM
    if name == "parse_response":
        from nanoinfer.responses.parse import parse_response

        return parse_response
    raise AttributeError(f"module 'nanoinfer' has no attribute {name!r}")
