"""`nanoinfer bench kernels --quantization int4`: products by weights in 4 bits, beside those in 16, on a GPU.

As in `kernels.py`, each figure is the median over replays of a CUDA graph whose calls all read other weights.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from nanoinfer.bench.floor import INT4_BYTES
from nanoinfer.bench.kernels import HEAD_DIM, KV_HEADS, MODELS, RATES, microseconds, randn
from nanoinfer.bench.report import describe_source, print_row
from nanoinfer.bench.throughput import describe_machine
from nanoinfer.checkpoint.int4_config import Int4Config
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ConfigError
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoinfer.quantization.method_selection import with_quantization

DEVICE = torch.device("cuda")
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


def run() -> None:
    """Print the table. Raises ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("--quantization int4 times kernels of a GPU, which this machine has not; leave it out")
    print(describe_source(describe_machine("cuda")))
    with torch.inference_mode(), DEVICE:
        products()


def products() -> None:
    """Print microseconds of each product in 4 bits, in 16 bits, and the floor of 4 bits."""
    print_row("products, us in 4 bits / in 16 / floor", "rows", "qkv", "o", "gate, up", "down")
    tp = TensorParallel()
    for name, (hidden, intermediate, heads, _) in MODELS.items():
        sizes = {
            "qkv": (ColumnParallelLinear, hidden, (heads + 2 * KV_HEADS) * HEAD_DIM),
            "o": (RowParallelLinear, heads * HEAD_DIM, hidden),
            "gate, up": (ColumnParallelLinear, hidden, 2 * intermediate),
            "down": (RowParallelLinear, intermediate, hidden),
        }
        table: dict[int, list[str]] = {rows: [] for rows in ROWS}
        for kind, inputs, outputs in sizes.values():
            count = max(2, min(28, 600 * 2**20 // (2 * inputs * outputs)))  # more than the L2 cache holds
            shape: Any = {"all": outputs} if kind is ColumnParallelLinear else outputs
            wide = [kind(inputs, shape, False, tp).to(torch.bfloat16) for _ in range(count)]
            narrow = quantized([kind(inputs, shape, False, tp) for _ in range(count)])
            for layer in wide:
                layer.weight.normal_(0.0, 0.02)
            for rows, figures in table.items():
                x = randn(rows, inputs)
                times = [microseconds([partial(layer, x) for layer in layers]) for layers in (narrow, wide)]
                num_bytes = inputs * outputs * INT4_BYTES + 2 * rows * (inputs + outputs)
                floor = max(num_bytes / RATES.bandwidth, 2 * rows * inputs * outputs / RATES.matrix_rate) * 1e6
                figures.append(" / ".join(f"{figure:.1f}" for figure in (*times, floor)))
        for rows, figures in table.items():
            print_row(name, rows, *figures)


def quantized(layers: list[nn.Module]) -> list[Any]:
    """Return layers with random weights in 4 bits."""
    generator, modules = torch.Generator(DEVICE).manual_seed(0), []
    for layer in layers:
        [held] = with_quantization([nn.ModuleDict({"it": layer.to(torch.bfloat16)})], Int4Config())
        module: Any = next(held.children())
        module.quant_method.fill_with_random_weights(module, 0.02, generator)
        modules.append(module)
    return modules
