"""The FP8 kernels, compiled for the GPU, against their specifications; FP8 layers in CUDA graphs; engines with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoinfer import LLM, SamplingParams, tiny_model_path
from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import MergedColumnParallelLinear, PartialSum, RowParallelLinear
from nanoinfer.layers.moe import SparseMoE
from nanoinfer.ops.activations.spec import gelu_tanh_and_mul, silu_and_mul
from nanoinfer.ops.common.device_properties import has_fp8_products
from nanoinfer.ops.common.fp8_format import QuantizedRows, RowFormat
from nanoinfer.ops.experts.spec import ExpertWeights, fp8_expert_mlp
from nanoinfer.ops.fp8.spec import (
    dequantize_rows,
    dequantize_weight,
    fp8_product,
    quantize_rows,
    quantize_weight,
    widen_weight,
)
from nanoinfer.ops.norms.spec import add_rms_norm, add_rms_norm_to_fp8
from nanoinfer.quantization.fp8_linear import Fp8Config
from nanoinfer.quantization.method_selection import quantize_layer
from tests.fp8_cases import (
    assert_experts_are_as_good_as_specified,
    assert_few_differ,
    assert_near,
    unrounded_expert_mlp,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and not has_fp8_products(torch.device("cuda")), reason="the GPU has no FP8 products"
    ),
]

CUDA = torch.device("cuda")
NAN, INFINITY = float("nan"), float("inf")
TOKENS = [1, 3, 16, 17, 48, 100, 256, 257, 3000]
# (inputs, outputs): qkv, o, gate-up and down of 0.6B and 8B, and sizes that end inside a tile
SHAPES = [(1024, 4096), (2048, 1024), (3072, 1024), (4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096), (208, 40)]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


def formats() -> dict[str, RowFormat]:
    return {
        "token": RowFormat(),
        "group": RowFormat(group_size=128),
        "static": RowFormat(scale=torch.tensor(0.01, device=CUDA)),
        "wide": RowFormat(keeps_wide=True),
    }


def quantized(layer: nn.Module, **options: Any) -> Any:
    """The layer as the only one of a model; its weights are random."""
    module = nn.ModuleDict({"it": layer})
    quantize_layer(module, "model.layers.0", Fp8Config(**options))
    # With the seed of the inputs a weight would consist of their numbers.
    generator = torch.Generator(CUDA).manual_seed(1)
    for part in module.modules():
        if hasattr(part, "quant_method"):
            part.quant_method.fill_with_random_weights(part, 0.02, generator)
    return module["it"]


def assert_equal_rows(actual: QuantizedRows, expected: QuantizedRows) -> None:
    """To the last bit, NaN included."""
    torch.testing.assert_close(actual.scales.cpu(), expected.scales.cpu(), rtol=0, atol=0, equal_nan=True)
    values = [rows.values.cpu().float() for rows in (actual, expected)]
    torch.testing.assert_close(*values, rtol=0, atol=0, equal_nan=True)


# --- rows ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 7, 1000])
@pytest.mark.parametrize("size", [96, 128, 1000, 1024, 4096, 5120, 12288])
@pytest.mark.parametrize("name", ["token", "group", "static", "wide"])
def test_rows_are_rounded_to_the_specified_bits(name: str, size: int, num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = randn(num_rows, size + 8, dtype=dtype)[:, :size]
    x[::3, 3] = 1000.0
    x[1::5] = 0.0
    x[2::5, 5] = NAN
    x[3::5, 6] = INFINITY
    row_format = formats()[name]
    assert_equal_rows(quantize_rows(x, row_format), quantize_rows.__wrapped__(x, row_format))


@pytest.mark.parametrize("num_rows", [1, 7, 1000])
@pytest.mark.parametrize("size", [96, 1024, 4096, 5120])
@pytest.mark.parametrize("name", ["token", "group", "static", "wide"])
def test_a_norm_in_fp8_is_the_norm_rounded(name: str, size: int, num_rows: int) -> None:
    torch.manual_seed(0)
    x, residual, weight = randn(4, num_rows, size), randn(num_rows, size), randn(size)
    row_format = formats()[name]
    rows, total = add_rms_norm_to_fp8(x, residual, weight, 1e-6, None, row_format)
    wide, expected_total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    # The two kernels may add up the squares of a row in another order; then a value may get its neighbour in 16 bits,
    # or, rounded before the weight and after it, the next one. Then also a value in 8 bits may get its neighbour.
    expected = quantize_rows.__wrapped__(wide, row_format)
    torch.testing.assert_close(rows.scales, expected.scales, rtol=2**-6, atol=0)
    assert_few_differ(rows.values, expected.values, rtol=2**-3, atol=2**-9)
    assert (rows.wide is None) == (name != "wide")
    if rows.wide is not None:
        assert_few_differ(rows.wide, wide, rtol=2**-6)
        assert_equal_rows(rows, quantize_rows.__wrapped__(rows.wide, row_format))


@pytest.mark.parametrize("function", [silu_and_mul, gelu_tanh_and_mul])
@pytest.mark.parametrize("num_rows", [1, 7, 1000])
@pytest.mark.parametrize("size", [40, 768, 3072, 12288])
@pytest.mark.parametrize("name", ["group", "static"])
def test_gated_activations_in_fp8_are_the_activations_rounded(
    name: str, size: int, num_rows: int, function: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    gate_up, row_format = 3 * randn(num_rows, 2 * size), formats()[name]
    assert_equal_rows(function(gate_up, row_format), quantize_rows.__wrapped__(function(gate_up), row_format))


# --- products ---


@pytest.mark.parametrize("block_size", [None, 128])
@pytest.mark.parametrize("name", ["token", "group", "static"])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SHAPES)
def test_a_product_equals_its_specification(
    num_inputs: int, num_outputs: int, num_tokens: int, name: str, block_size: int | None
) -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = quantize_rows(randn(num_tokens, num_inputs), formats()[name])
    weight = quantize_weight(randn(num_outputs, num_inputs), block_size)
    operands, bias = (rows.values, rows.scales, *weight), randn(num_outputs)
    for dtype, its_bias in ((torch.bfloat16, None), (torch.bfloat16, bias), (torch.float16, None)):
        actual = fp8_product(*operands, its_bias, dtype)
        assert_near(actual, fp8_product.__wrapped__(*operands, its_bias, torch.float32), 2e-2)
        assert torch.equal(actual, fp8_product(*operands, its_bias, dtype)), "equal steps give equal bits"


@pytest.mark.parametrize("num_tokens", [1, 16, 100, 256])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2048, 1024), (3072, 1024), (4096, 4096), (12288, 4096)])
@pytest.mark.parametrize("options", [{}, {"weight_granularity": "block", "in_checkpoint": True}], ids=str)
def test_a_row_parallel_product_of_few_tokens_is_split_over_k(
    options: dict[str, Any], num_inputs: int, num_outputs: int, num_tokens: int
) -> None:
    torch.manual_seed(0)
    with CUDA:
        layer = quantized(RowParallelLinear(num_inputs, num_outputs, False, TensorParallel()).bfloat16(), **options)
    x = randn(num_tokens, num_inputs)
    terms = layer(x).terms
    assert len(terms) > 1
    assert layer.input_format.group_size == (128 if options else num_inputs // 8)
    wide = dequantize_rows(quantize_rows(x, layer.input_format)).double()
    expected = wide @ dequantize_weight(layer.weight, layer.quant_method.scales(layer)).double().t()
    actual = terms.double().sum(0)
    assert_near(actual, expected, 2e-2)
    # Rounding partial sums to bfloat16 costs 0.17%, adding them up in tensor cores up to 0.1%.
    assert (actual - expected).norm() / expected.norm() < 3e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [None, 128])
@pytest.mark.parametrize("shape", [(1000, 3072), (3, 129, 200)], ids=str)
def test_a_weight_is_widened_to_the_last_bit(
    shape: tuple[int, ...], block_size: int | None, dtype: torch.dtype
) -> None:
    """As GPUs without products in FP8 need it."""
    torch.manual_seed(0)
    numbers = torch.randint(256, shape, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    _, scales = quantize_weight(randn(*shape), block_size)
    expected = dequantize_weight(numbers, scales).to(dtype)
    torch.testing.assert_close(widen_weight(numbers, scales, dtype), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("group_size", "largest"), [(128, 4e-4), (1536, 1.5e-3), (None, 4e-3)])
@pytest.mark.parametrize("num_tokens", [16, 100, 256])
def test_sums_lose_far_less_than_rounding_does(num_tokens: int, group_size: int | None, largest: float) -> None:
    """Tensor cores add up FP8 products with about 14 bits; what e4m3 loses of a random product is 3.7%."""
    torch.manual_seed(0)
    rows = quantize_rows(randn(num_tokens, 12288), RowFormat(group_size=group_size))
    weight, scales = quantize_weight(randn(1024, 12288))
    actual = fp8_product(rows.values, rows.scales, weight, scales, None, torch.float32)[0]
    expected = dequantize_rows(rows).double() @ dequantize_weight(weight, scales).double().t()
    assert (actual - expected).norm() / expected.norm() < largest


@pytest.mark.parametrize(
    ("num_inputs", "group_size", "largest"), [(12288, 128, 2e-3), (12288, 1536, 4e-2), (4096, None, 1e-1)]
)
@pytest.mark.parametrize("num_tokens", [16, 100, 256])
def test_sums_of_one_sign_come_out_a_little_too_small(
    num_tokens: int, num_inputs: int, group_size: int | None, largest: float
) -> None:
    """Tensor cores cut off what does not fit into their 14 bits, which adds up where all products have one sign."""
    torch.manual_seed(0)
    rows = quantize_rows(randn(num_tokens, num_inputs).abs(), RowFormat(group_size=group_size))
    weight, scales = quantize_weight(randn(1024, num_inputs).abs())
    actual = fp8_product(rows.values, rows.scales, weight, scales, None, torch.float32)[0]
    expected = dequantize_rows(rows).double() @ dequantize_weight(weight, scales).double().t()
    assert (actual >= (1 - largest) * expected).all()
    assert (actual <= (1 + 1e-4) * expected).all()


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 256])
def test_a_captured_graph_of_an_mlp_follows_its_inputs(num_tokens: int) -> None:
    """Norm, gate-up, SwiGLU, down and the next norm, as a decode step runs them."""
    torch.manual_seed(0)
    with CUDA:
        norm = RMSNorm(4096, 1e-6).bfloat16()
        norm.weight.fill_(1.0)
        up = quantized(MergedColumnParallelLinear(4096, 12288, False, TensorParallel()).bfloat16())
        down = quantized(RowParallelLinear(12288, 4096, False, TensorParallel()).bfloat16())
    terms, residual = randn(2, num_tokens, 4096), randn(num_tokens, 4096)

    def mlp() -> tuple[Tensor, Tensor]:
        rows, total = norm(PartialSum(terms), residual, up.input_format)
        return norm(down(silu_and_mul(up(rows), down.input_format)), total)

    mlp()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, total = mlp()
    for _ in range(3):
        terms.copy_(randn(2, num_tokens, 4096))
        residual.copy_(randn(num_tokens, 4096))
        graph.replay()
        expected, expected_total = mlp()
        assert torch.equal(out, expected)
        assert torch.equal(total, expected_total)
        assert out.isfinite().all()


# --- experts ---

GEMMA4 = (2816, 704, 128, 8)  # with GeGLU


@pytest.mark.parametrize("block_size", [None, 128])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 40, 128, 256, 600, 3000])
@pytest.mark.parametrize(
    ("hidden", "inner", "experts", "choices"),
    [
        (2048, 768, 128, 8),
        (4096, 1792, 8, 2),
        (384, 256, 6, 3),
        (480, 256, 6, 3),
        (384, 128, 6, 3),
        (384, 96, 6, 3),
        GEMMA4,
    ],
)
def test_experts_equal_their_specification(
    hidden: int, inner: int, experts: int, choices: int, num_tokens: int, block_size: int | None
) -> None:
    is_geglu = (hidden, inner, experts, choices) == GEMMA4
    if inner % 128 and block_size is not None:
        pytest.skip("the gate's rows would end inside a block")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    ids = torch.rand(num_tokens, experts, device=CUDA).argsort(dim=1)[:, :choices].int().contiguous()
    ids[torch.rand(num_tokens, device=CUDA) < 0.1] = experts
    weights = torch.rand(num_tokens, choices, device=CUDA)
    rows = quantize_rows(randn(num_tokens, hidden), RowFormat(group_size=128 if block_size else None))
    gate_up = ExpertWeights(*quantize_weight(randn(experts, 2 * inner, hidden) / hidden**0.5, block_size))
    down = ExpertWeights(*quantize_weight(randn(experts, hidden, inner) / inner**0.5, block_size))
    unrounded = None
    for row_format in (RowFormat(group_size=128), RowFormat(scale=torch.tensor(0.02, device=CUDA))):
        arguments = (rows.values, rows.scales, gate_up, down, row_format, ids, weights, torch.bfloat16, is_geglu)
        actual, specified = fp8_expert_mlp(*arguments), fp8_expert_mlp.__wrapped__(*arguments)
        unrounded = unrounded_expert_mlp(*arguments) if unrounded is None else unrounded
        assert_experts_are_as_good_as_specified(actual, specified, unrounded)
        assert (actual[:, ids[:, 0] == experts] == 0).all()


@pytest.mark.parametrize("num_tokens", [1, 16, 256])
def test_a_captured_graph_of_experts_follows_its_inputs(num_tokens: int) -> None:
    torch.manual_seed(0)
    with CUDA:
        moe = MoEConfig(128, 8, 768, norm_topk_prob=True, has_experts=(True,))
        layer = quantized(SparseMoE(2048, moe, TensorParallel()).bfloat16())
        layer.gate.weight.normal_(0.0, 0.02)
    x, mask = randn(num_tokens, 2048), torch.ones(num_tokens, dtype=torch.bool, device=CUDA)
    layer(x, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        terms = layer(x, mask).terms
    for share in (1.0, 0.5):
        x.copy_(randn(num_tokens, 2048))
        mask.copy_(torch.rand(num_tokens, device=CUDA) < share)
        graph.replay()
        assert torch.equal(terms, layer(x, mask).terms)
        assert (terms[:, ~mask] == 0).all()


# --- engines ---


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_tiny_checkpoint_answers_in_fp8(enforce_eager: bool) -> None:
    questions = ["What is 312 + 48?", "What is 312 - 48?", "list all prime numbers within 30"]
    right = ["312 + 48 = 360", "312 - 48 = 264", "2, 3, 5, 7, 11, 13, 17, 19, 23, 29"]
    with LLM(tiny_model_path(), quantization="fp8", enforce_eager=enforce_eager, gpu_memory_utilization=0.3) as llm:
        chats = [[{"role": "user", "content": question}] for question in questions]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    assert [output.text for output in outputs] == right


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("blocks", [False, True])
def test_decode_steps_of_graphs_agree_with_prefill(architecture: str, blocks: bool, tmp_path: Path) -> None:
    """A token's log-probability is nearly the same when it is drawn and when it is read again in a prompt."""
    sizes = {
        **{"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "torch_dtype": "bfloat16"},
        **{"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.05},
    }
    quantization: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    raw = {"architectures": [architecture], **sizes, **({"quantization_config": quantization} if blocks else {})}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    options: dict[str, Any] = {"load_format": "dummy", "gpu_memory_utilization": 0.3, "max_model_len": 1024}
    with LLM(tmp_path, quantization=None if blocks else "fp8", enable_prefix_caching=False, **options) as llm:
        prompt = [*range(100, 400)]
        params = SamplingParams(temperature=0, max_tokens=64, logprobs=0, ignore_eos=True)
        [drawn] = llm.generate([prompt], params, use_tqdm=False)
        again = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        [read] = llm.generate([prompt + drawn.token_ids], again, use_tqdm=False)
    found = [step[token].logprob for token, step in zip(drawn.token_ids, drawn.outputs[0].logprobs, strict=True)]
    entries = (read.prompt_logprobs or [])[len(prompt) :]
    expected = [entry[token].logprob for token, entry in zip(drawn.token_ids, entries, strict=True)]
    assert torch.tensor(found).sub(torch.tensor(expected)).abs().median() < 0.1
