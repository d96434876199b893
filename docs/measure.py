"""Times decode attention and the matrix products on a GPU, or sums over several: the tables of performance.md.

Run it in the repository root:  python docs/measure.py [number of GPUs]

Each figure is the median over replays of a CUDA graph whose calls all read other weights or another layer's cache, as
in a decode step, so that nothing is found in the L2 cache.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nanoinfer.distributed import tensor_parallel as distributed
from nanoinfer.kernels.paged_decode_attention import paged_decode_attention, plan_decode
from nanoinfer.layers.layernorm import add_rms_norm, all_reduce_add_rms_norm

DTYPE = torch.bfloat16
BYTES_PER_SECOND, FLOP_PER_SECOND = 4.39e12, 790e12  # what the floors are at
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = (16, 32), 8, 128, 256
VOCAB_SIZE = 151936
MODELS = {  # hidden size, intermediate size, query heads, parts of o and down
    "0.6B": (1024, 3072, 16, 4),
    "4B": (2560, 9728, 32, 4),
    "8B": (4096, 12288, 32, 2),
}


def microseconds(calls: list[Callable[[], object]], repeats: int = 7) -> float:
    """The time of one of these calls, inside a CUDA graph of them all."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device="cuda")


def attention() -> None:
    """TB/s of keys and values, for contexts of 100 to 2,048 tokens, or one of 32,768."""
    loads = [(rows, 100, 2048) for rows in (256, 128, 64, 32, 16, 8, 1)] + [(1, 32768, 32768)]
    num_layers, num_blocks = 8, 2200
    keys, values = (randn(num_layers, num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM) for _ in range(2))
    for heads in HEADS:
        line = [f"{heads} query heads"]
        for rows, shortest, longest in loads:
            order = torch.randperm(rows, device="cuda")
            lens = torch.linspace(shortest, longest, rows + 2, device="cuda")[1:-1][order].int()
            width = -(-longest // BLOCK_SIZE)
            tables = torch.randperm(num_blocks, device="cuda")[: rows * width].view(rows, width).int()
            plan, q = plan_decode(lens, tables, BLOCK_SIZE, HEAD_DIM), randn(rows, heads, HEAD_DIM)
            time = microseconds(
                [
                    lambda k=k, v=v, plan=plan, q=q: paged_decode_attention(q, k, v, *plan)
                    for k, v in zip(keys, values, strict=True)
                ]
            )
            num_bytes = int(lens.sum()) * KV_HEADS * HEAD_DIM * 2 * DTYPE.itemsize
            line.append(f"{num_bytes / time / 1e6:.2f}")
        print("|", " | ".join(line), "|", flush=True)


def weights(inputs: int, outputs: int) -> list[Tensor]:
    """Enough of them that no call finds its own in the L2 cache."""
    return [randn(outputs, inputs) * 0.02 for _ in range(max(2, min(28, 600 * 2**20 // (2 * inputs * outputs))))]


def products() -> None:
    """Microseconds of each product by one call of cuBLAS, and of o and down in parts as well."""
    for name, (hidden, intermediate, heads, parts) in MODELS.items():
        shapes = {
            "qkv": (hidden, (heads + 2 * KV_HEADS) * HEAD_DIM),
            "o": (heads * HEAD_DIM, hidden),
            "gate, up": (hidden, 2 * intermediate),
            "down": (intermediate, hidden),
            "lm_head": (hidden, VOCAB_SIZE),
        }
        lines: dict[int, list[str]] = {rows: [] for rows in (1, 8, 16, 64, 128, 192, 256, 512)}
        for product, (inputs, outputs) in shapes.items():
            all_weights = weights(inputs, outputs)
            for rows, line in lines.items():
                x = randn(rows, inputs)
                time = microseconds([lambda x=x, w=w: torch.mm(x, w.t()) for w in all_weights])
                num_bytes = DTYPE.itemsize * (inputs * outputs + rows * (inputs + outputs))
                floor = max(num_bytes / BYTES_PER_SECOND, 2 * rows * inputs * outputs / FLOP_PER_SECOND) * 1e6
                figure = f"{time:.1f} / {floor:.1f}"
                if product in ("o", "down") and rows <= 256:
                    xs = x.view(rows, parts, -1).transpose(0, 1)
                    ws = [w.view(outputs, parts, -1).permute(1, 2, 0) for w in all_weights]
                    in_parts = microseconds([lambda xs=xs, w=w: torch.bmm(xs, w) for w in ws])
                    figure = f"{time:.1f} ({in_parts:.1f}) / {floor:.1f}"
                line.append(figure)
            del all_weights
        for rows, line in lines.items():
            print(f"| {name} | {rows} |", " | ".join(line), "|", flush=True)


@torch.inference_mode()
def sums(rank: int, size: int, folder: str) -> None:
    """Microseconds of a sum over the ranks and the norm of it and the residual, for 8B, in five ways; in each rank."""
    devices = [torch.device("cuda", index) for index in range(size)]
    torch.cuda.set_device(rank)
    distributed.MAX_BYTES_IN_MEMORY = {size: 2**30}
    tp = distributed.connect(rank, size, devices[rank], Path(folder) / "store")
    max_tokens, hidden_size = 512, 4096
    tp = tp.with_symmetric_memory(max_tokens, hidden_size, DTYPE, devices)
    assert tp.memory is not None, "the GPUs do not reach each other's memory"
    group = dist.ProcessGroup(dist.FileStore(f"{folder}/other", size), rank, size)
    dist.distributed_c10d._register_process_group("sums", group)
    shared = symmetric_memory.empty(max_tokens, hidden_size, dtype=DTYPE, device=devices[rank])
    symmetric_memory.rendezvous(shared, "sums")
    x, residual, weight = randn(max_tokens, hidden_size), randn(max_tokens, hidden_size), randn(hidden_size)

    def by_nccl(num_tokens: int) -> None:
        add_rms_norm(tp.all_reduce(x[:num_tokens]), residual[:num_tokens], weight, 1e-6)

    def by_pytorch(name: str, num_tokens: int) -> None:
        total = getattr(torch.ops.symm_mem, name)(shared[:num_tokens], "sum", "sums")
        add_rms_norm(total, residual[:num_tokens], weight, 1e-6)

    def by_us(two_shot: bool, num_tokens: int) -> None:
        buffers = replace(tp.memory.next_buffers(num_tokens), two_shot=two_shot)
        all_reduce_add_rms_norm(residual[:num_tokens], buffers, weight, 1e-6)

    for num_tokens in (1, 8, 16, 32, 64, 128, 192, 256, 512):
        ways = (
            by_nccl,
            partial(by_pytorch, "one_shot_all_reduce"),
            partial(by_pytorch, "two_shot_all_reduce_"),
            partial(by_us, False),
            partial(by_us, True),
        )
        times = [microseconds([partial(way, num_tokens)] * 40) for way in ways]
        if rank == 0:
            print(f"| {num_tokens} |", " | ".join(f"{time:.1f}" for time in times), "|", flush=True)
    torch.cuda.synchronize()
    tp.all_gather(x[0, 0])  # all are done with each other's memory
    os._exit(0)  # not by way of destructors that communicate


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("measure.py: PyTorch finds no CUDA GPU; run it where there is one")
    print(torch.cuda.get_device_name(), torch.__version__)
    with torch.inference_mode():
        if len(sys.argv) > 1:
            os.environ.update(distributed.NCCL_ENVIRONMENT)
            num_gpus = int(sys.argv[1])
            multiprocessing.spawn(sums, (num_gpus, tempfile.mkdtemp()), nprocs=num_gpus)
        else:
            attention()
            products()
