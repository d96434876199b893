"""The numbers of FP8 in plain PyTorch: what rounding keeps, what it spoils, and what ranks agree on."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.errors import ModelError
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import ColumnParallelLinear, PartialSum, QKVParallelLinear, RowParallelLinear
from nanoinfer.layers.moe import SparseMoE
from nanoinfer.ops.activations.spec import silu_and_mul
from nanoinfer.ops.common.device_properties import has_fp8_products
from nanoinfer.ops.common.fp8_format import FP8, QuantizedRows, RowFormat
from nanoinfer.ops.experts.spec import ExpertWeights, fp8_expert_mlp
from nanoinfer.ops.fp8.spec import (
    dequantize_rows,
    dequantize_weight,
    fit_weight,
    fp8_product,
    quantize_rows,
    quantize_weight,
)
from nanoinfer.quantization import method_selection
from nanoinfer.quantization.fp8_linear import Fp8Config, Fp8LinearMethod, Fp8WeightOnlyMethod
from nanoinfer.quantization.method_selection import quantize_layer
from tests.fp8_cases import assert_experts_are_as_good_as_specified, unrounded_expert_mlp

NAN, INFINITY = float("nan"), float("inf")
WHOLE, RANKS = TensorParallel(), [TensorParallel(rank, size=2) for rank in range(2)]
FORMATS = [RowFormat(), RowFormat(group_size=128), RowFormat(scale=torch.tensor(1000.0 / 448))]
HALF_A_STEP = 1 / 16  # of e4m3's three bits behind the point, relative to the number


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def fp8_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the specifications of the FP8 products run on the CPU."""
    monkeypatch.setattr(method_selection, "has_fp8_products", lambda device: True)


# --- rows ---


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("size", [1, 127, 128, 300])
def test_what_is_rounded_is_near_what_it_was(size: int, row_format: RowFormat) -> None:
    x = randn(5, size)
    rows = quantize_rows(x, row_format)
    assert rows.values.dtype == FP8
    assert rows.scales.shape == (5, 1 if row_format.group_size is None else math.ceil(size / 128))
    # Numbers below the least normal one, 2**-6 of the scale, have steps of 2**-9.
    spread = dequantize_rows(QuantizedRows(torch.ones_like(rows.values.float()).to(FP8), rows.scales))
    assert ((dequantize_rows(rows) - x).abs() <= HALF_A_STEP * x.abs() + spread * 2**-10).all()


@pytest.mark.parametrize("row_format", FORMATS[:2])
def test_the_largest_value_of_a_group_is_kept(row_format: RowFormat) -> None:
    x = randn(5, 256)
    torch.testing.assert_close(dequantize_rows(quantize_rows(x, row_format)).abs().amax(1), x.abs().amax(1))


@pytest.mark.parametrize("row_format", FORMATS)
def test_zeros_stay_zeros_and_nan_and_infinity_spoil_their_own_row(row_format: RowFormat) -> None:
    x = randn(5, 256)
    x[1], x[2, 200], x[3, 3] = 0.0, NAN, INFINITY
    others = [0, 1, 4]
    rows = quantize_rows(x, row_format)
    wide = dequantize_rows(rows)
    assert (wide[1] == 0).all()
    assert wide[2, 200].isnan()
    assert torch.equal(wide[others], dequantize_rows(quantize_rows(x[others], row_format)))
    out = fp8_product(rows.values, rows.scales, *quantize_weight(randn(7, 256)), None, torch.float32)[0]
    assert (out[1] == 0).all()
    assert out[2].isnan().all()
    assert out[others].isfinite().all()
    if row_format.scale is None:
        assert out[3].isnan().all()
    else:
        assert out[3].isfinite().all(), "a static scale clamps whatever is too large"


def test_a_static_scale_clamps_to_the_largest_number() -> None:
    rows = quantize_rows(torch.tensor([[1.0, -500.0, 449.0]]), RowFormat(scale=torch.tensor(1.0)))
    assert rows.values.float().tolist() == [[1.0, -448.0, 448.0]]


@pytest.mark.parametrize("row_format", FORMATS[:2])
def test_the_tiniest_numbers_are_rounded_to_zero_and_not_to_nan(row_format: RowFormat) -> None:
    x = torch.tensor([[1e-42, 0.0], [-1e-40, 1e-45]])
    assert (dequantize_rows(quantize_rows(x, row_format)) == 0).all()


@pytest.mark.parametrize(("outlier", "least", "most"), [(1e3, 0.0, 0.03), (1e5, 0.1, 0.5)])
def test_an_outlier_costs_accuracy_in_its_own_group_only(outlier: float, least: float, most: float) -> None:
    """One of 1,000 times the rest costs hardly anything: e4m3 has numbers down to a 200,000th of its largest."""
    x = randn(1, 512)
    x[0, 3] = outlier
    by_token, by_group = (dequantize_rows(quantize_rows(x, row_format)) for row_format in FORMATS[:2])
    error = [((wide - x).abs() / x.abs())[0, 128:].median() for wide in (by_token, by_group)]
    assert least < error[0] < most
    assert error[1] < 0.03
    assert by_token[0, 3] == by_group[0, 3] == outlier


# --- weights ---


@pytest.mark.parametrize("block_size", [None, 128])
@pytest.mark.parametrize("shape", [(5, 300), (130, 128), (256, 256), (3, 200, 130)])
def test_a_rounded_weight_is_near_what_it_was(shape: tuple[int, ...], block_size: int | None) -> None:
    weight = randn(*shape)
    values, scales = quantize_weight(weight, block_size)
    blocks = tuple(math.ceil(size / 128) for size in shape[-2:])
    assert scales.shape == (shape[:-1] if block_size is None else (*shape[:-2], *blocks))
    error = dequantize_weight(values, scales) - weight
    assert (error.abs() <= HALF_A_STEP * weight.abs() + 1e-4).all()


def test_a_scale_that_fits_a_row_has_a_smaller_error_than_the_largest_value_asks_for() -> None:
    weight = randn(1500, 200)  # more rows than are fitted at a time
    weight[3], weight[4, 5], weight[5, 6] = 0.0, NAN, INFINITY
    (plain, plain_scales), (values, scales) = quantize_weight(weight), fit_weight(weight)
    assert torch.equal(values[3:6].view(torch.uint8), plain[3:6].view(torch.uint8))
    ratios = (scales / plain_scales)[6:]
    assert ((ratios >= 1) & (ratios < 2)).all()
    errors = [
        (dequantize_weight(*rounded) - weight)[6:].square().sum(1)
        for rounded in ((values, scales), (plain, plain_scales))
    ]
    assert (errors[0] <= errors[1]).all()
    assert errors[0].mean() < 0.95 * errors[1].mean()
    assert torch.equal(fit_weight(weight[7:8])[0].float(), values[7:8].float()), "a row does not depend on others"


def test_a_bad_row_of_a_weight_spoils_its_own_output() -> None:
    weight = randn(4, 64)
    weight[1, 3], weight[2, 5] = NAN, INFINITY
    rows = quantize_rows(randn(3, 64), RowFormat())
    out = fp8_product(rows.values, rows.scales, *quantize_weight(weight), None, torch.float32)[0]
    assert out.isfinite().all(dim=0).tolist() == [True, False, False, True]


def test_hopper_and_ada_multiply_fp8_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability, expected in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert has_fp8_products(torch.device("cuda")) is expected
    assert not has_fp8_products(torch.device("cpu"))


# --- layers ---


def quantized(layer: nn.Module, **options: Any) -> Any:
    """The layer as the only one of a model."""
    module = nn.ModuleDict({"it": layer})
    quantize_layer(module, "model.layers.0", Fp8Config(**options))
    return module["it"]


@pytest.mark.usefixtures("fp8_hardware")
@pytest.mark.parametrize(
    ("num_inputs", "size", "group_size"), [(3072, 1, 384), (3072, 8, 384), (3072, 3, 128), (640, 1, 128)]
)
def test_inputs_that_ranks_split_have_a_scale_for_each_eighth_that_no_rank_cuts(
    num_inputs: int, size: int, group_size: int
) -> None:
    layer = quantized(RowParallelLinear(num_inputs, 64, False, TensorParallel(0, size)))
    assert layer.input_format.group_size == group_size


@pytest.mark.usefixtures("fp8_hardware")
def test_a_row_parallel_layer_of_two_ranks_computes_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs are rounded in groups that no share cuts, and its weights by whole rows."""
    monkeypatch.setattr(TensorParallel, "all_reduce", lambda self, x: x)  # the test adds them up
    x, weight, bias = randn(6, 512), randn(40, 512, seed=1), randn(40, seed=2)
    x[:, 300] = 1000.0  # rank 1's

    def run(tp: TensorParallel) -> Tensor:
        layer = quantized(RowParallelLinear(512, 40, bias=True, tp=tp))
        assert isinstance(layer.quant_method, Fp8LinearMethod)
        layer.weight_loader(layer.weight, weight)
        layer.weight_loader(layer.bias, bias)
        return layer(tp.shard(x, dim=1)).terms.sum(0)

    expected = run(WHOLE)
    torch.testing.assert_close(run(RANKS[0]) + run(RANKS[1]), expected, rtol=1e-5, atol=1e-2)
    exact = dequantize_rows(quantize_rows(x, RowFormat(group_size=128))) @ dequantize_weight(*fit_weight(weight)).T
    torch.testing.assert_close(expected, exact + bias, rtol=1e-5, atol=1e-2)


@pytest.mark.usefixtures("fp8_hardware")
def test_sums_of_few_tokens_go_to_the_symmetric_memory() -> None:
    x, weight, buffers = randn(3, 256), randn(5, 256, seed=1), object()
    memory: Any = SimpleNamespace(serves=lambda num_tokens: num_tokens <= 3, next_buffers=lambda num_tokens: buffers)
    layer = quantized(RowParallelLinear(256, 5, bias=False, tp=TensorParallel(0, 2, symmetric_memory=memory)))
    layer.weight_loader(layer.weight, weight)
    out = layer(x[:, :128])
    assert out.buffers is buffers
    torch.testing.assert_close(out.terms.sum(0), x[:, :128] @ weight[:, :128].T, rtol=0.1, atol=2.0)


@pytest.mark.usefixtures("fp8_hardware")
@pytest.mark.parametrize("tp", [WHOLE, RANKS[1]])
def test_packed_shards_are_rounded_and_placed_one_by_one(tp: TensorParallel) -> None:
    full = {"q": randn(512, 64), "k": 10 * randn(256, 64, seed=1), "v": randn(256, 64, seed=2)}
    layer = quantized(QKVParallelLinear(64, 128, num_heads=4, num_kv_heads=2, bias=False, tp=tp))
    for name in reversed(full):
        layer.weight_loader(layer.weight, full[name], name)
    expected = torch.cat([tp.shard(dequantize_weight(*fit_weight(part)), 0) for part in full.values()])
    assert torch.equal(dequantize_weight(layer.weight, layer.weight_scale), expected)


def test_updated_weights_take_the_same_way() -> None:
    layer = quantized(ColumnParallelLinear(32, {"a": 4, "b": 6}, bias=False, tp=WHOLE))
    assert isinstance(layer.quant_method, Fp8WeightOnlyMethod)
    for seed in (0, 1):
        a, b = randn(4, 32, seed=seed), 100 * randn(6, 32, seed=seed + 2)
        layer.weight_loader(layer.weight, a, "a")
        layer.weight_loader(layer.weight, b, "b")
        wide = torch.cat([dequantize_weight(*fit_weight(part)) for part in (a, b)])
        torch.testing.assert_close(layer(torch.eye(32)), wide.T)


@pytest.mark.usefixtures("fp8_hardware")
def test_scalar_scales_are_spread_and_the_largest_scale_of_inputs_counts() -> None:
    layer = quantized(
        ColumnParallelLinear(32, {"a": 2, "b": 3}, bias=False, tp=WHOLE),
        weight_granularity="tensor",
        static_inputs=True,
        in_checkpoint=True,
    )
    for name, rows, scale in (("a", 2, 0.5), ("b", 3, 2.0)):
        layer.weight_loader(layer.weight, torch.ones(rows, 32).to(FP8), name)
        layer.weight_loader(layer.weight_scale, torch.tensor(scale), name)
        layer.weight_loader(layer.input_scale, torch.tensor([scale / 100]), name)
    assert layer.weight_scale.tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    assert layer.input_format.scale.item() == pytest.approx(0.02)
    x = torch.full((1, 32), 0.02 * 448)
    assert layer(x)[0].tolist() == pytest.approx([32 * 448 * 0.02 * scale for scale in (0.5, 0.5, 2.0, 2.0, 2.0)])
    layer.weight_loader(layer.input_scale, torch.tensor(0.001), "b")  # an update may also lower it
    assert layer.input_format.scale.item() == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("in_checkpoint", "dtype", "message"),
    [(True, torch.bfloat16, "16 bits .torch.bfloat16., and must be in 8"), (False, FP8, "8 bits, and must be in 16")],
)
def test_a_weight_of_another_type_than_the_config_says_is_refused(
    in_checkpoint: bool, dtype: torch.dtype, message: str
) -> None:
    layer = quantized(ColumnParallelLinear(8, {"a": 2}, bias=False, tp=WHOLE), in_checkpoint=in_checkpoint)
    with pytest.raises(ModelError, match=message):
        layer.check_weight(layer.weight, torch.zeros(2, 8).to(dtype), "a")


@pytest.mark.usefixtures("fp8_hardware")
def test_norm_and_swiglu_round_for_the_layer_that_follows() -> None:
    norm, residual, hidden = RMSNorm(256, 1e-6), randn(3, 256), randn(2, 3, 256, seed=1)
    norm.weight.copy_(randn(256, seed=2))
    column = quantized(ColumnParallelLinear(256, {"a": 8}, bias=False, tp=WHOLE))
    column.weight_loader(column.weight, randn(8, 256, seed=3), "a")
    for sums in (None, PartialSum(hidden)):
        wide, expected_total = norm(sums, residual)
        rows, total = norm(sums, residual, column.input_format)
        assert torch.equal(total, expected_total)
        assert torch.equal(rows.values.float(), quantize_rows(wide, RowFormat()).values.float())
        assert torch.equal(column(rows), column(wide)), "the layer rounds what nobody has rounded"
    row = quantized(RowParallelLinear(256, 8, bias=False, tp=WHOLE))
    gate_up = randn(3, 512)
    gated = silu_and_mul(gate_up, row.input_format)
    expected = quantize_rows(silu_and_mul(gate_up), RowFormat(group_size=128))
    assert torch.equal(gated.values.float(), expected.values.float())


# --- experts ---


def build_experts(tp: TensorParallel, **options: Any) -> SparseMoE:
    moe = MoEConfig(4, 2, 256, norm_topk_prob=True, has_experts=(True,))
    layer: SparseMoE = quantized(SparseMoE(128, moe, tp), **options)
    layer.gate.weight.copy_(randn(4, 128))
    for module in (layer.experts.gate_up_proj, layer.experts.down_proj):
        for shard in module.shards:
            shape = (128, 256) if "down" in shard else (256, 128)
            module.weight_loader(module.weight, randn(*shape, seed=sum(map(ord, shard))) / 12, shard)
    return layer


@pytest.mark.usefixtures("fp8_hardware")
def test_experts_of_two_ranks_add_up_to_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorParallel, "all_reduce", lambda self, x: x)
    x, layers = randn(7, 128), [build_experts(tp) for tp in (WHOLE, *RANKS)]
    expected, *parts = (layer(x).terms.sum(0) for layer in layers)
    torch.testing.assert_close(parts[0] + parts[1], expected, rtol=1e-5, atol=1e-5)
    assert layers[0].gate.weight.dtype == torch.float32, "the router is not rounded"


def test_experts_in_fp8_are_near_those_with_widened_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    x = randn(7, 128)
    widened = build_experts(WHOLE)
    expected = widened(x).terms.sum(0)
    assert widened.input_format is None
    monkeypatch.setattr(method_selection, "has_fp8_products", lambda device: True)
    layer = build_experts(WHOLE)
    rows = quantize_rows(x, layer.input_format or RowFormat())
    assert rows.wide is x, "the router reads what was not rounded"
    out = layer(rows).terms.sum(0)
    assert torch.equal(out, layer(x).terms.sum(0))
    assert (out - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("fault", ["scales", "expert", "value"])
def test_what_is_asked_of_experts_finds_a_fault_in_one_pair(fault: str) -> None:
    """The specification passes. Scales that are 5% off, another expert's weight or one wrong value fail."""
    rows = quantize_rows(randn(12, 384), RowFormat())
    gate_up, gate_up_scales = quantize_weight(randn(4, 512, 384, seed=1) / 384**0.5)
    down, down_scales = quantize_weight(randn(4, 384, 256, seed=2) / 16)
    ids, weights = torch.tensor([[0, 1], [1, 2], [2, 0]] * 4, dtype=torch.int32), torch.full((12, 2), 0.5)
    ids[5, 1] = 3  # the only pair of this expert
    both = ExpertWeights(gate_up, gate_up_scales), ExpertWeights(down, down_scales)
    arguments = rows.values, rows.scales, *both, RowFormat(group_size=128)
    specified = fp8_expert_mlp(*arguments, ids, weights, torch.bfloat16)
    unrounded = unrounded_expert_mlp(*arguments, ids, weights, torch.bfloat16)
    assert_experts_are_as_good_as_specified(specified, specified, unrounded)
    if fault == "scales":
        down_scales[3] *= 1.05
    elif fault == "expert":
        down[3] = down[2]
    wrong = fp8_expert_mlp(*arguments, ids, weights, torch.bfloat16)
    if fault == "value":
        wrong[1, 5, specified[1, 5].abs().argmax()] = 0.0
    assert (wrong != specified).any(-1).sum() == 1
    with pytest.raises(AssertionError):
        assert_experts_are_as_good_as_specified(wrong, specified, unrounded)
