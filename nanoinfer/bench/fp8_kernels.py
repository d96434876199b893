"""`nanoinfer bench kernels --quantization fp8`: products, experts and the rounding of rows in FP8, on a GPU.

As in `kernels.py`, each figure is the median over replays of a CUDA graph whose calls all read other weights.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from nanoinfer.bench.kernels import HEAD_DIM, KV_HEADS, MODELS, MOE_MODELS, MOE_TOKENS, microseconds, randn
from nanoinfer.bench.report import describe_source, print_row
from nanoinfer.bench.throughput import describe_machine
from nanoinfer.checkpoint.moe_config import MoEConfig
from nanoinfer.checkpoint.quantization_config import Fp8Config
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ConfigError
from nanoinfer.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoinfer.layers.moe import Experts, Routing
from nanoinfer.ops.activations.spec import silu_and_mul
from nanoinfer.ops.common.device_properties import has_fp8_products
from nanoinfer.ops.common.fp8_format import RowFormat
from nanoinfer.ops.fp8.spec import quantize_rows
from nanoinfer.ops.norms.spec import add_rms_norm, add_rms_norm_to_fp8
from nanoinfer.quantization.method_selection import with_quantization

DEVICE = torch.device("cuda")
BANDWIDTH, FP8_RATE = 4.39e12, 1400e12  # of an H200: bytes/s, and FLOP/s of products with a scale for each row
ROWS = (1, 8, 16, 64, 128, 192, 256, 512, 4096)
FORMATS = {
    "channels": Fp8Config(),
    "blocks": Fp8Config(weight_granularity="block", in_checkpoint=True, scale_name="weight_scale_inv"),
}


def run() -> None:
    """Print all tables. Raises ConfigError where there is no GPU that multiplies FP8."""
    if not torch.cuda.is_available() or not has_fp8_products(DEVICE):
        raise ConfigError("--quantization fp8 times FP8 products, which this machine has not; leave it out")
    print(describe_source(describe_machine("cuda")))
    with torch.inference_mode(), DEVICE:
        rounding()
        for name, config in FORMATS.items():
            products(name, config)
            experts(name, config)


def rounding() -> None:
    """Print microseconds of the norm and of SwiGLU in 16 bits and with rounding, and of rounding alone."""
    print_row("us in 16 bits / in FP8; rows", "norm of 4 splits", "SwiGLU", "attention's rows alone")
    by_token, by_group = RowFormat(), RowFormat(group_size=128)
    for hidden, inner in ((1024, 3072), (4096, 12288)):
        weight = randn(hidden)
        for rows in (1, 16, 256, 4096):
            sums, residual, gate_up = randn(4, rows, hidden), randn(rows, hidden), randn(rows, 2 * inner)
            norm = partial(add_rms_norm, sums, residual, weight, 1e-6)
            norm_fp8 = partial(add_rms_norm_to_fp8, sums, residual, weight, 1e-6, None, by_token)
            pairs = ((norm, norm_fp8), (partial(silu_and_mul, gate_up), partial(silu_and_mul, gate_up, by_group)))
            figures = [" / ".join(f"{microseconds([call] * 20):.1f}" for call in pair) for pair in pairs]
            alone = microseconds([partial(quantize_rows, residual, by_group)] * 20)
            print_row(f"{hidden}, {inner}", rows, *figures, f"{alone:.1f}")


def products(name: str, config: Fp8Config) -> None:
    """Print microseconds of each product of rows that are rounded already, and the floor."""
    print_row(f"products of {name}, us / floor", "rows", "qkv", "o (split-K)", "gate, up", "down (split-K)")
    tp = TensorParallel()
    for model, (hidden, intermediate, heads, _) in MODELS.items():
        width = heads * HEAD_DIM
        kinds: list[tuple[int, int, Any]] = [
            (hidden, width + 2 * KV_HEADS * HEAD_DIM, lambda i, o: ColumnParallelLinear(i, {"a": o}, False, tp)),
            (width, hidden, lambda i, o: RowParallelLinear(i, o, False, tp)),
            (hidden, 2 * intermediate, lambda i, o: ColumnParallelLinear(i, {"a": o}, False, tp)),
            (intermediate, hidden, lambda i, o: RowParallelLinear(i, o, False, tp)),
        ]
        table: dict[int, list[str]] = {rows: [] for rows in ROWS}
        for inputs, outputs, make in kinds:
            count = max(2, min(28, 600 * 2**20 // (inputs * outputs)))  # more than the L2 cache holds
            layers = quantized([make(inputs, outputs).bfloat16() for _ in range(count)], config)
            for rows, figures in table.items():
                x = layers[0].quant_method.round_input(randn(rows, inputs))
                num_bytes = inputs * outputs + rows * (inputs + 2 * outputs)
                floor = max(num_bytes / BANDWIDTH, 2 * rows * inputs * outputs / FP8_RATE) * 1e6
                figures.append(f"{microseconds([partial(layer, x) for layer in layers]):.1f} / {floor:.1f}")
            del layers
        for rows, figures in table.items():
            print_row(model, rows, *figures)


def experts(name: str, config: Fp8Config) -> None:
    """Print microseconds of the MLPs of a layer's experts, which tokens choose at random, and the floor."""
    print_row(f"experts of {name}, us / floor; tokens", *MOE_TOKENS)
    for model, (hidden, inner, num_experts, num_choices) in MOE_MODELS.items():
        tp, figures = TensorParallel(), []
        moe = MoEConfig(num_experts, num_choices, inner, norm_topk_prob=True, has_experts=(True,))
        layers = quantized([Experts(hidden, moe, tp).bfloat16() for _ in range(4)], config)
        for num_tokens in MOE_TOKENS:
            x, calls, num_read = layers[0].gate_up_proj.quant_method.round_input(randn(num_tokens, hidden)), [], 0
            for layer in layers:
                weights, ids = torch.rand(num_tokens, num_experts).topk(num_choices)
                calls.append(partial(layer, x, Routing(ids.int(), weights)))
                num_read += len(ids.unique())
            num_bytes = 3 * hidden * inner * num_read / len(layers)
            num_flops = 2 * 3 * hidden * inner * num_tokens * num_choices
            figures.append(f"{microseconds(calls):.1f} / {max(num_bytes / BANDWIDTH, num_flops / FP8_RATE) * 1e6:.1f}")
        print_row(model, *figures)


def quantized(layers: list[nn.Module], config: Fp8Config) -> list[Any]:
    """Return the layers with random weights in FP8."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    for layer in with_quantization(layers, config):
        module: Any
        for module in layer.modules():
            if hasattr(module, "quant_method"):
                module.quant_method.fill_with_random_weights(module, 0.02, generator)
    return layers
