"""The package compressed-tensors packs weights, and our reader means by them what the package itself does, bit for bit.

Runs where the package is installed: `pip install compressed-tensors`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanoinfer.checkpoint.fields import Fields
from nanoinfer.ops.int4.spec import PackedWeight, dequantize, pack
from nanoinfer.quantization.int4.formats import Int4Config, readers
from nanoinfer.quantization.method_selection import read_quantization

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Compressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

CASES = [("group", 32, True), ("group", 128, False), ("group", 64, True), ("channel", None, True)]


def our_weight(tensors: dict[str, Tensor]) -> Tensor:
    """What our reader makes of a checkpoint's tensors, in float32."""
    ours: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found = readers("compressed-tensors")[name]
        if found is not None:
            ours[found[0]] = found[1](tensor)
    zeros = ours.get("weight_zero_point")
    numbers = ours["weight"]
    return dequantize(PackedWeight(pack(numbers, 128), ours["weight_scale"], None if zeros is None else zeros.byte()))


@pytest.mark.parametrize(("strategy", "group_size", "symmetric"), CASES)
def test_packed_weights_mean_what_the_package_says(strategy: str, group_size: int | None, symmetric: bool) -> None:
    args = QuantizationArgs(num_bits=4, type="int", strategy=strategy, group_size=group_size, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    generator = torch.Generator().manual_seed(0)
    num_outputs, num_inputs = 48, 256
    shape = num_outputs, num_inputs // (group_size or num_inputs)
    tensors: dict[str, Any] = {
        "weight": torch.randn(num_outputs, num_inputs, generator=generator),
        "weight_scale": torch.rand(shape, generator=generator) * 0.3 + 0.1,
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.randint(-7, 8, shape, generator=generator, dtype=torch.int8)
    packed = Compressor.compress(tensors, scheme)
    theirs = Compressor.decompress(packed, scheme)["weight"]
    assert torch.equal(our_weight(packed), theirs.float())


def test_its_config_is_read() -> None:
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=64, symmetric=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    raw: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    raw = {**raw, "config_groups": {"group_0": scheme.model_dump(mode="json")}}
    config = read_quantization(Fields({"quantization_config": raw}), None, {}, {})
    assert isinstance(config, Int4Config)
    assert (config.group_size, config.has_zeros, config.orders_inputs) == (64, True, False)
