"""The options of `LLM` as editors and type checkers read them; a test compares them with EngineConfig."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch


class EngineOptions(TypedDict, total=False):
    """Names what `LLM` takes beside the model, with every type that EngineConfig accepts and converts."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] | torch.dtype
    device: str | torch.device
    tensor_parallel_size: int
    distributed_executor_backend: Literal["mp", "external_launcher"]
    data_parallel_size: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kvcache_block_size: int
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "int8"]
    num_kvcache_blocks: int | None
    enable_prefix_caching: bool
    enforce_eager: bool
    attention_backend: Literal["auto", "flash_attn", "triton", "torch"]
    overlap: bool
    load_format: Literal["auto", "safetensors", "dummy"]
    runner: Literal["auto", "generate", "pooling"]
    model_impl: Literal["auto", "nanoinfer", "transformers"]
    compile: bool
    quantization: Literal["fp8", "int4"] | None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
    max_logprobs: int
    enable_return_routed_experts: bool
    revision: str | None
    tokenizer: str | Path | None
    download_dir: str | Path | None
    hf_overrides: Mapping[str, Any] | None
    structured_outputs_config: Mapping[str, Any] | None
    grammar_timeout: float
    trace: str | Path | None
    seed: int
