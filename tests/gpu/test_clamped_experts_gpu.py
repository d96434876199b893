"""gpt-oss's experts on the GPU, in 16 bits and in MXFP4, against the specification in float32; and in a CUDA graph."""

import pytest
import torch
from torch import Tensor

from nanoinfer.ops.experts.spec import ExpertWeights, expert_mlp
from nanoinfer.ops.int4.spec import BLOCK, PackedWeight, dequantize, pack_e2m1
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
    return PackedWeight(pack_e2m1(numbers, BLOCK), torch.nn.functional.pad(scales, (0, filling // 32)), is_e2m1=True)


def sum_of_parts(terms: Tensor, num_choices: int) -> Tensor:
    """Return a term for each choice, (num_choices, num_tokens, hidden_size), float32."""
    return terms.unflatten(0, (-1, num_choices)).float().sum(0)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Within a few roundings of numbers of the size of their row."""
    size = expected.square().mean(dim=-1, keepdim=True).sqrt()
    assert ((actual.float() - expected).abs() <= 2**-5 * (expected.abs() + size)).all()


@pytest.mark.parametrize("num_tokens", [1, 4, 16, 100, 250, 600, 3000, 6000])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("in_mxfp4", [False, True])
def test_experts_equal_their_specification_in_float32(sizes: tuple[int, ...], num_tokens: int, in_mxfp4: bool) -> None:
    torch.manual_seed(num_tokens)
    hidden_size, inner_size, num_experts, num_choices = sizes
    x = randn(num_tokens, hidden_size)
    ids, weights = route(torch.randn(1, num_tokens, num_experts, device=CUDA), num_choices, True)
    first = random_mxfp4(num_experts, 2 * inner_size, hidden_size)
    second = random_mxfp4(num_experts, hidden_size, inner_size)
    packed = [
        ExpertWeights(weight.numbers, weight.scales, bias=randn(num_experts, weight.numbers.shape[1]), is_e2m1=True)
        for weight in (first, second)
    ]
    wide = [
        ExpertWeights(dequantize(weight)[..., :size].contiguous(), bias=narrow.bias.float())
        for weight, narrow, size in zip((first, second), packed, (hidden_size, inner_size), strict=True)
    ]
    in_16_bits = [ExpertWeights(weight.values.bfloat16(), bias=weight.bias.bfloat16()) for weight in wide]
    both = packed if in_mxfp4 else in_16_bits
    specification = expert_mlp.__wrapped__
    expected = specification(x.float(), *wide, ids, weights, CLAMPS)

    def compute() -> Tensor:
        return sum_of_parts(expert_mlp(x, *both, ids, weights, CLAMPS), num_choices)

    assert_close(compute(), expected)
    if num_tokens <= 256:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compute()
        x.neg_()
        expected = specification(x.float(), *wide, ids, weights, CLAMPS)
        graph.replay()
        assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_common_kernel", [False, True])
def test_tiles_with_few_pairs_and_full_ones_equal_their_specification(
    by_common_kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts have from none to hundreds of pairs, so tiles have less than half of their rows, more, or all."""
    if by_common_kernel:
        monkeypatch.setattr("nanoinfer.ops.experts.triton.has_hopper_kernels", lambda *_: False)
    torch.manual_seed(0)
    num_experts, size = 16, 640
    weights_of_both = [random_mxfp4(num_experts, outputs, size) for outputs in (2 * size, size)]
    packed = [
        ExpertWeights(
            weight.numbers, weight.scales, bias=randn(num_experts, weight.numbers.shape[1]).to(dtype), is_e2m1=True
        )
        for weight in weights_of_both
    ]
    wide = [
        ExpertWeights(dequantize(weight), bias=narrow.bias.float())
        for weight, narrow in zip(weights_of_both, packed, strict=True)
    ]
    for num_tokens in (100, 200):
        x = randn(num_tokens, size).to(dtype) * 0.1
        chances = torch.arange(num_experts, device=CUDA).float().square() / 20
        ids, weights = route(torch.randn(1, num_tokens, num_experts, device=CUDA) + chances, 4, True)
        expected = expert_mlp.__wrapped__(x.float(), *wide, ids, weights, CLAMPS)
        assert_close(sum_of_parts(expert_mlp(x, *packed, ids, weights, CLAMPS), 4), expected)
