"""gpt-oss's experts on the GPU, in 16 bits and in MXFP4, against their twin in float32; and inside a CUDA graph."""

import pytest
import torch
from torch import Tensor

from nanoinfer.ops.experts.spec import clamped_expert_mlp
from nanoinfer.ops.int4.spec import BLOCK, PackedWeight, dequantize, pack
from nanoinfer.ops.routing.spec import route
from nanoinfer.quantization.int4.formats import mxfp4_numbers

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
CLAMPS = (7.0, 1.702)
SIZES = [(2880, 2880, 32, 4), (2880, 1440, 32, 4), (160, 96, 5, 2)]  # hidden, inner, experts, choices


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16)


def random_mxfp4(num_experts: int, num_outputs: int, num_inputs: int) -> PackedWeight:
    groups = num_experts, num_outputs, num_inputs // 32
    numbers = mxfp4_numbers(torch.randint(0, 256, (*groups, 16), device=CUDA, dtype=torch.uint8))
    scales = torch.randint(119, 122, groups, device=CUDA, dtype=torch.uint8)
    filling = -num_inputs % BLOCK
    numbers = torch.nn.functional.pad(numbers, (0, filling))
    return PackedWeight(pack(numbers, BLOCK), torch.nn.functional.pad(scales, (0, filling // 32)), is_e2m1=True)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Within a few roundings of numbers of the size of their row."""
    size = expected.square().mean(dim=-1, keepdim=True).sqrt()
    assert ((actual.float() - expected).abs() <= 2**-5 * (expected.abs() + size)).all()


@pytest.mark.parametrize("num_tokens", [1, 4, 16, 100, 600, 3000])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("in_mxfp4", [False, True])
def test_experts_equal_their_twin_in_float32(sizes: tuple[int, ...], num_tokens: int, in_mxfp4: bool) -> None:
    from nanoinfer.ops.experts.spec import ExpertWeights
    from nanoinfer.ops.experts.triton import mxfp4_expert_mlp

    torch.manual_seed(num_tokens)
    hidden_size, inner_size, num_experts, num_choices = sizes
    x = randn(num_tokens, hidden_size)
    ids, weights = route(torch.randn(1, num_tokens, num_experts, device=CUDA), num_choices, True)
    first = random_mxfp4(num_experts, 2 * inner_size, hidden_size)
    second = random_mxfp4(num_experts, hidden_size, inner_size)
    wide = dequantize(first)[..., :hidden_size].contiguous(), dequantize(second)[..., :inner_size].contiguous()
    biases = randn(num_experts, 2 * inner_size), randn(num_experts, hidden_size)
    twin = clamped_expert_mlp.__wrapped__
    expected = twin(x.float(), *wide, *(bias.float() for bias in biases), ids, weights, CLAMPS)

    def compute() -> Tensor:
        if not in_mxfp4:
            narrow = (weight.bfloat16() for weight in wide)
            return clamped_expert_mlp(x, *narrow, *biases, ids, weights, CLAMPS)
        packed = (
            ExpertWeights(weight.numbers, weight.scales, bias=bias, is_e2m1=True)
            for weight, bias in zip((first, second), biases, strict=True)
        )
        return mxfp4_expert_mlp(x, *packed, inner_size, ids, weights, CLAMPS)

    assert_close(compute(), expected)
    if num_tokens <= 256:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compute()
        x.neg_()
        expected = twin(x.float(), *wide, *(bias.float() for bias in biases), ids, weights, CLAMPS)
        graph.replay()
        assert_close(out, expected)
