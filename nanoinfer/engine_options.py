"""The options of `LLM` as editors and type checkers read them; a test compares them with EngineConfig."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch

from nanoinfer.config import (
    AttentionBackendName,
    Dtype,
    ExecutorBackend,
    KVCacheDtype,
    LoadFormat,
    LogprobsMode,
    ModelImplementation,
    Quantization,
    RunnerKind,
)


class EngineOptions(TypedDict, total=False):
    """Names what `LLM` takes beside the model, with every type that EngineConfig accepts and converts."""

    dtype: Dtype | torch.dtype
    device: str | torch.device
    tensor_parallel_size: int
    distributed_executor_backend: ExecutorBackend
    data_parallel_size: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kvcache_block_size: int
    kv_cache_dtype: KVCacheDtype
    num_kvcache_blocks: int | None
    enable_prefix_caching: bool
    enforce_eager: bool
    attention_backend: AttentionBackendName
    overlap: bool
    load_format: LoadFormat
    runner: RunnerKind
    model_impl: ModelImplementation
    compile: bool
    quantization: Quantization | None
    logprobs_mode: LogprobsMode
    max_logprobs: int
    enable_return_routed_experts: bool
    revision: str | None
    tokenizer: str | Path | None
    download_dir: str | Path | None
    hf_overrides: Mapping[str, Any] | None
    structured_outputs_config: Mapping[str, Any] | None
    response_template: str | Mapping[str, Any] | None
    grammar_timeout: float
    trace: str | Path | None
    seed: int
