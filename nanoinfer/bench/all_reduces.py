"""`nanoinfer bench kernels --gpus N`: all-reduces over several GPUs, small ones, and exchanges beside products."""

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanoinfer.bench.kernels import DTYPE, HEAD_DIM, KV_HEADS, MODELS, check_gpus, microseconds, randn
from nanoinfer.bench.report import print_row
from nanoinfer.distributed import tensor_parallel
from nanoinfer.distributed.tensor_parallel import NCCL_ENVIRONMENT, SLICE_TOKENS, TensorParallel

multiprocessing: Any = torch.multiprocessing  # hardly typed
FEW_TOKENS = (1, 8, 16, 32, 64, 128, 192, 256, 512)
HIDDEN_SIZE, INTERMEDIATE_SIZE = MODELS["8B"][:2]
NUM_REPEATS = 40
NUM_SLICES = 4  # as in a step of 16,384 tokens: products wait for the all-reduces of four slices before


def run(num_gpus: int) -> None:
    """Print both tables. Raises ConfigError where there are fewer GPUs."""
    check_gpus(num_gpus)
    os.environ.update(NCCL_ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_run_on, (num_gpus, folder), nprocs=num_gpus)


@torch.inference_mode()
def _run_on(rank: int, size: int, folder: str) -> None:
    devices = [torch.device("cuda", index) for index in range(size)]
    torch.cuda.set_device(rank)
    tensor_parallel.MAX_BYTES_IN_MEMORY = 2**30
    tp = tensor_parallel.connect(rank, size, devices[rank], Path(folder) / "store")
    tp = tp.with_shared_memory(FEW_TOKENS[-1], (2 * NUM_SLICES + 2) * SLICE_TOKENS, HIDDEN_SIZE, DTYPE, devices)
    of_few_tokens(tp)
    in_the_background(tp)
    torch.cuda.synchronize()
    tp.all_gather(torch.zeros(1, device="cuda"))  # all are done with each other's memory
    os._exit(0)  # not by way of destructors that communicate


def of_few_tokens(tp: TensorParallel) -> None:
    """Print microseconds of an all-reduce and the norm of it and the residual, in three ways."""
    from nanoinfer.ops.all_reduce_norm.spec import all_reduce_add_rms_norm
    from nanoinfer.ops.norms.spec import add_rms_norm

    assert tp.symmetric_memory is not None, "the GPUs do not reach each other's memory"
    memory, shape = tp.symmetric_memory, (FEW_TOKENS[-1], HIDDEN_SIZE)
    x, residual, weight = randn(*shape), randn(*shape), randn(HIDDEN_SIZE)

    def nccl(num_tokens: int) -> None:
        add_rms_norm(tp.all_reduce(x[:num_tokens]), residual[:num_tokens], weight, 1e-6)

    def ours(two_shot: bool, num_tokens: int) -> None:
        buffers = replace(memory.next_buffers(num_tokens), two_shot=two_shot)
        all_reduce_add_rms_norm(x[None, :num_tokens], residual[:num_tokens], buffers, weight, 1e-6)

    ways: dict[str, Callable[[int], None]] = {
        "NCCL": nccl,
        "our one-shot": partial(ours, False),
        "our two-shot": partial(ours, True),
    }
    if tp.rank == 0:
        print_row("all-reduce + norm, us; tokens", *ways)
    for num_tokens in FEW_TOKENS:
        times = [microseconds([partial(way, num_tokens)] * NUM_REPEATS) for way in ways.values()]
        if tp.rank == 0:
            print_row(num_tokens, *(f"{time:.1f}" for time in times))


def in_the_background(tp: TensorParallel) -> None:
    """Print microseconds of a layer's largest products for a slice of tokens, alone and beside a slice's exchanges.

    These are two all-reduces by NCCL, or two reduce-scatters and two all-gathers by copy engines, where norms add up.
    """
    engines = tp.copy_engines
    assert engines is not None, "the GPUs do not reach each other's memory"
    inner = INTERMEDIATE_SIZE // tp.size
    hidden, gated = randn(SLICE_TOKENS, HIDDEN_SIZE), randn(SLICE_TOKENS, inner)
    num_outputs = (MODELS["8B"][2] + 2 * KV_HEADS) * HEAD_DIM // tp.size
    gate_up, down, qkv = randn(2 * inner, HIDDEN_SIZE), randn(HIDDEN_SIZE, inner), randn(num_outputs, HIDDEN_SIZE)
    sums = torch.zeros(2 * NUM_SLICES + 2, SLICE_TOKENS, HIDDEN_SIZE, dtype=DTYPE, device="cuda")

    def nccl(slot: int) -> Callable[[], object]:
        work = tp.group.allreduce([sums[slot]], torch.distributed.AllreduceOptions())
        return lambda: work.wait()

    def copied(slot: int) -> Callable[[], object]:
        engines.start_reduce_scatter(slot, sums[slot])
        engines.start_all_gather(slot, SLICE_TOKENS)
        return lambda: engines.gathered(slot, SLICE_TOKENS)

    def time_with(start: Callable[[int], Callable[[], object]] | None) -> float:
        waits: list[Callable[[], object]] = []
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for index in range(NUM_REPEATS + NUM_SLICES):
            if index == NUM_SLICES:
                begin.record()
            if start is not None:
                waits += [start(2 * index % len(sums)), start((2 * index + 1) % len(sums))]
                for wait in waits[: -2 * NUM_SLICES]:
                    wait()
                del waits[: -2 * NUM_SLICES]
            hidden @ gate_up.t(), gated @ down.t(), hidden @ qkv.t()
        end.record()
        for wait in waits:
            wait()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / NUM_REPEATS * 1e3

    ways = {"alone": None, "NCCL": nccl, "copy engines": copied}
    if tp.rank == 0:
        print_row(f"QKV, gate, up and down of {SLICE_TOKENS} tokens, us, beside two exchanges", *ways)
    rounds = [[time_with(start) for start in ways.values()] for _ in range(7)]  # in turns, as hot GPUs slow down
    if tp.rank == 0:
        print_row("Qwen3-8B", *(f"{statistics.median(times):.0f}" for times in zip(*rounds, strict=True)))
