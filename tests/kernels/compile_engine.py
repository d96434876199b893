"""Compiles what an engine launches on a GPU, without one: Triton needs it to run kernels, not to compile them.

    python -m tests.kernels.compile_engine '{"capability": 90, "config": {...}, "options": {...}}'

An engine on a CPU runs the step that is measured at load, and decode steps of all sizes of CUDA graphs. Wherever it
would launch a kernel on a GPU, the kernel is compiled, and its specification computes the result; slow ones are left
out, as no kernel is chosen by values. Prints a line of JSON for each kernel: its name, the shared memory of a program
in bytes, whether products and sums are fused, the arguments that it reads too early (see `early_reads.py`), and the
seconds of its compilation.
"""

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nanoinfer.device import computing
from nanoinfer.ops import dispatch
from nanoinfer.ops.common import device_properties, programmatic_launch
from tests.kernels.early_reads import early_reads

# What the slow specifications return, without the values.
ZEROS: dict[str, Callable[..., torch.Tensor]] = {
    "expert_mlp": lambda hidden, _gate_up, _down, expert_ids, *_: hidden.new_zeros(expert_ids.shape[1], *hidden.shape),
    "fp8_product": lambda x, _scales, weight, _weight_scales, _bias, dtype, num_splits=1: x.new_zeros(
        num_splits, len(x), len(weight), dtype=dtype
    ),
    "gated_delta_step": lambda qkvz, *others: qkvz.new_zeros(len(qkvz), qkvz.shape[1] - len(others[-1].conv)),
    "int4_product": lambda x, weight, num_splits: x.new_zeros(num_splits, len(x), len(weight.numbers)),
    "widen": lambda words, _scales, _zeros, dtype, **_: words.new_zeros(
        *words.shape[:-1], 8 * words.shape[-1], dtype=dtype
    ),
}
MULTIPROCESSORS = {80: 108, 86: 82, 89: 128, 90: 132, 120: 170}  # A100, RTX 3090, 4090, H200, 5090


class AbsentGpu:
    """Stands for Triton's driver. capability: of the GPU that code believes in, such as 90."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    @property
    def is_hopper(self) -> bool:
        return self.capability == 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def replace_launches(launch: Callable[..., Any]) -> None:
    """Have every launch call `launch(kernel, *args, grid=..., warmup=..., **kwargs)`."""
    JITFunction.run = launch


def compile_instead_of_launching() -> None:
    """Have every launch compile its kernel, and print what came out."""
    run, known = JITFunction.run, set[int]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        started = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if id(kernel) not in known:
            known.add(id(kernel))
            figures = {
                "shared": kernel.metadata.shared,
                "fuses": kernel.metadata.enable_fp_fusion,
                "early": early_reads(kernel.asm, kernel.metadata.num_stages),
                "seconds": time.perf_counter() - started,
            }
            sys.stdout.write(json.dumps({"kernel": self.fn.__name__, **figures}) + "\n")  # threads may write, too
            sys.stdout.flush()

    replace_launches(compile_only)


def with_kernel(spec: Callable[..., Any]) -> Callable[..., Any]:
    """Stand for `op`: each call launches the kernel, and returns what the specification computes."""
    compute = ZEROS.get(spec.__name__, spec)

    @functools.wraps(spec)
    def both(*args: Any, **kwargs: Any) -> Any:
        dispatch.kernel_of(spec)(*args, **kwargs)
        return compute(*args, **kwargs)

    return both


def pretend(gpu: AbsentGpu) -> None:
    """Have our code believe that it is on a GPU. Must come before operations are imported."""
    driver.set_active(gpu)
    dispatch.op = with_kernel
    programmatic_launch.overlap_options = lambda _device: (
        {"OVERLAP": True, "launch_pdl": True} if gpu.capability >= 90 else {"OVERLAP": False}
    )
    device_properties.num_multiprocessors = lambda _device: MULTIPROCESSORS[gpu.capability]
    device_properties.has_large_shared_memory = lambda _device: gpu.is_hopper
    device_properties.has_rowwise_scaled_mm = lambda _device: gpu.is_hopper
    device_properties.has_hopper_kernels = lambda _device: gpu.is_hopper

    from nanoinfer.layers.attention import backend_selection
    from nanoinfer.quantization import method_selection as methods

    backend_selection.AttentionBackends.select = partialmethod(select_backend, gpu)
    backend_selection.AttentionBackends.obstacle_of_device = lambda *_: None
    methods.has_fp8_products = lambda _device: gpu.capability >= 89
    torch.Tensor.is_cpu = False  # type: ignore[assignment, misc]  # for what has a way of its own on a CPU
    # Products on a GPU have options that CPUs lack. No kernel is chosen by the values, so these are all zero.
    torch.bmm = lambda x, weight, out_dtype=None, out=None: (
        x.new_zeros(*x.shape[:-1], weight.shape[-1], dtype=out_dtype) if out is None else out.zero_()
    )
    torch.mm = lambda x, weight, out_dtype=None, out=None: (
        x.new_zeros(len(x), weight.shape[1], dtype=out_dtype) if out is None else out.zero_()
    )
    torch.nn.functional.linear = lambda x, weight, *_: x.new_zeros(*x.shape[:-1], len(weight))
    torch._scaled_mm = lambda x, weight, *_, **__: x.new_zeros(len(x), weight.shape[1], dtype=torch.bfloat16)


def select_backend(backends: Any, gpu: AbsentGpu, spec: Any) -> Any:
    from nanoinfer.layers.attention.triton import TritonBackend
    from nanoinfer.ops.prefill_attention.hopper import serves

    is_plain = spec.window is None and not spec.has_sinks and spec.soft_cap is None
    serves_layer = is_plain and serves(spec.head_dim, spec.group_size, backends.block_size, backends.dtype)
    return TritonBackend(spec, has_hopper_kernel=gpu.is_hopper and serves_layer)


def run_steps(runner: Any, max_num_seqs: int) -> None:
    """Run what an engine on a GPU runs while it loads, and decode steps whose rows share a prefix or have adapters."""
    from nanoinfer.layers.attention import triton
    from nanoinfer.layers.attention.metadata import DecodeBatch, SharedPrefixes
    from nanoinfer.models.execution import compiling_few_rows
    from nanoinfer.runner.cuda_graphs import graph_sizes, several_tokens_graph_sizes
    from nanoinfer.runner.setup import largest_prefill
    from nanoinfer.sampling.logprobs import MAX_SCANNED, compute_logprobs

    steps = runner.model_runner
    torch.Tensor.is_cuda = True  # type: ignore[assignment, misc]  # for what asks a tensor
    try:
        with computing(runner.device, None):
            with compiling_few_rows(runner.model.model, graph_sizes(max_num_seqs)):
                runner.setup.run_largest_prefills(steps, runner.limits)
            triton.LONG_CONTEXT = 0
            runner.setup.run_largest_prefills(steps, runner.limits)
            if runner.setup.model_config.latent_attention is not None:  # which may read vectors of earlier steps
                step = largest_prefill(steps.state.tables, torch.zeros(1, dtype=torch.int64), 64)
                ends = torch.tensor([0, 65], dtype=torch.int32)
                metadata = tuple(replace(one, context_lens=(65,), cu_context_lens=ends) for one in step.metadata)
                steps.forward(steps.planned(replace(step, metadata=metadata)))
            for size in reversed(graph_sizes(max_num_seqs)):
                rows = torch.full((size,), -1, dtype=torch.int32)
                steps.decode(DecodeBatch(rows))
            if steps.state.adapters is not None:
                steps.state.adapters.use(True)
                for size in several_tokens_graph_sizes(graph_sizes(max_num_seqs)):
                    steps.decode(DecodeBatch(torch.full((size,), -1, dtype=torch.int32)))
                steps.state.adapters.use(False)
            steps.state.kv_cache.copy_blocks(torch.zeros(1, 3, dtype=torch.int32))
            for num_best in (0, 1, MAX_SCANNED):
                compute_logprobs(steps.state.buffers.logits[:1], torch.zeros(1, dtype=torch.int32), num_best)
            if runner.limits.max_prefix_sharers > 1:
                steps.decode(DecodeBatch(rows, SharedPrefixes(torch.zeros_like(rows), torch.zeros_like(rows))))
    finally:
        del torch.Tensor.is_cuda


def run_engine(config: dict[str, Any], options: dict[str, Any]) -> None:
    """Load an engine and run its steps, after `pretend`. options: of the engine, beside the sizes given here."""
    from nanoinfer import LLM

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # nothing is compiled yet
        (Path(folder) / "config.json").write_text(json.dumps(config))
        sizes = {"max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 256, "num_kvcache_blocks": 4}
        options = {**sizes, **options}
        with LLM(folder, load_format="dummy", device="cpu", dtype="bfloat16", **options) as llm:
            run_steps(llm.engine.runner, options["max_num_seqs"])


def attend_from_several_tokens(head_dim: int, num_tokens: int) -> None:
    """Attend from rows of so many tokens, with four heads a KV head: in 16 and 8 bits, with windows and prefixes."""
    from nanoinfer.layers.attention.backend import AttentionSpec
    from nanoinfer.layers.attention.metadata import DecodeMetadata, SharedPrefixes
    from nanoinfer.layers.attention.triton import TritonBackend
    from nanoinfer.ops.kv_cache.spec import LayerCache

    torch.Tensor.is_cuda = True  # type: ignore[assignment, misc]  # for what asks a tensor
    numbers, tables = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 16, dtype=torch.int32)
    q = torch.zeros(4 * num_tokens, 32, head_dim, dtype=torch.bfloat16)
    for dtype, scales in ((torch.bfloat16, ()), (torch.int8, torch.zeros(2, 8, 8, 256))):
        cache = LayerCache(*torch.zeros(2, 8, 8, 256, head_dim, dtype=dtype), *scales)
        for window, prefixes in ((None, None), (100, None), (None, SharedPrefixes(numbers, numbers))):
            backend = TritonBackend(AttentionSpec(32, 8, head_dim, 0.1, window))
            step = DecodeMetadata(numbers.long(), numbers, tables, prefixes, num_tokens, numbers + 1)
            backend.decode(q, cache, backend.plan(step, cache))


def attend_in_segments(lens: list[int]) -> None:
    """Attend within segments of these lengths, as towers do, with heads of each size that there is a kernel for."""
    from nanoinfer.ops.segment_attention import hopper

    tiles = torch.tensor(hopper.tiles_of(lens), dtype=torch.int32)
    for head_dim in hopper.HEAD_DIMS:
        q, k, v = torch.zeros(sum(lens), 3, 16, head_dim, dtype=torch.bfloat16).unbind(1)
        assert hopper.serves(q, k, v)
        assert hopper.segment_attention(q, k, v, tiles, scale=0.1).shape == q.shape


def add_adapters(num_adapted: list[int]) -> None:
    """Compute what adapters add to an MLP of 100 inputs and 2,000 values between, for these numbers of tokens."""
    from nanoinfer.ops.activations.spec import silu_and_mul
    from nanoinfer.ops.lora.spec import LoRAMatrices, LoRARows
    from nanoinfer.ops.lora.triton import add_lora, gated_with_lora

    def matrices(num_inputs: int, *sizes: int) -> LoRAMatrices:
        shapes = (1, len(sizes) * 16, num_inputs), (1, sum(sizes), 16)
        return LoRAMatrices(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes), sizes)

    gate_up, down = matrices(100, 2000, 2000), matrices(2000, 100)
    for number in num_adapted:
        rows = LoRARows(torch.zeros(number, dtype=torch.int32))
        x, out, both = (torch.zeros(number, size, dtype=torch.bfloat16) for size in (100, 100, 4000))
        activated, shrunk = gated_with_lora(both, x, rows, gate_up, silu_and_mul, down.a)
        add_lora(out, activated, rows, down, shrunk)


def main(capability: int, options: dict[str, Any], config: dict[str, Any] | None = None) -> None:
    """Run an engine of a config, or some operations alone with `options`, on a GPU that is absent."""
    pretend(AbsentGpu(capability))
    compile_instead_of_launching()
    if config is not None:
        run_engine(config, options)
        return
    operations = {"lens": attend_in_segments, "num_adapted": add_adapters, "head_dim": attend_from_several_tokens}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        operations[next(iter(options))](**options)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
