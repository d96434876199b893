"""The mixture-of-experts kernels in Triton's interpreter, against their specifications. On a GPU: tests/gpu."""

import pytest
import torch
from torch import Tensor

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.device import default_dtype
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers.experts import Experts
from nanoinfer.ops.activations.spec import gated_sum
from nanoinfer.ops.experts.spec import ExpertWeights, expert_mlp
from nanoinfer.ops.routing import spec as routing_spec
from nanoinfer.ops.routing.spec import route, route_by_sigmoid
from nanoinfer.quantization.linear_method import ProductKind

triton = pytest.importorskip("triton")

from nanoinfer.ops.activations import triton as activation_kernels  # noqa: E402
from nanoinfer.ops.experts import triton as expert_kernels  # noqa: E402
from nanoinfer.ops.routing import triton as routing_kernels  # noqa: E402
from nanoinfer.ops.routing.triton import max_tiles, plan_tiles, tile_rows  # noqa: E402
from tests.kernels.helpers import loops_are_interpreted  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here")

CPU = torch.device("cpu")
NAN = float("nan")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- route, route_by_sigmoid ---


def assert_equal_routing(
    logits: Tensor,
    num_choices: int,
    norm: bool,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    expert_scales: Tensor | None = None,
) -> None:
    ids, weights = routing_kernels.route(logits[None], num_choices, norm, mask, bias, expert_scales=expert_scales)
    expected_ids, expected = route(logits[None], num_choices, norm, mask, bias, expert_scales=expert_scales)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize(
    ("num_experts", "num_choices", "norm"),
    [(8, 2, True), (128, 8, True), (60, 4, False), (5, 1, False), (1, 1, True), (6, 6, False)],
)
def test_route_equals_its_specification(num_experts: int, num_choices: int, norm: bool) -> None:
    logits = 3 * randn(6, num_experts)
    assert_equal_routing(logits, num_choices, norm)
    assert_equal_routing(logits.half(), num_choices, norm, torch.tensor([True, False, True, True, True, False]))
    assert_equal_routing(torch.cat([logits, logits], dim=1)[:, :num_experts], num_choices, norm)
    assert_equal_routing(logits, num_choices, norm, bias=randn(num_experts, seed=1))
    mask, scales = torch.tensor([True, False, True, True, True, False]), randn(num_experts, seed=2)
    assert_equal_routing(logits, num_choices, norm, mask, expert_scales=scales)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize(
    ("num_experts", "num_choices", "norm"),
    [(8, 2, True), (128, 8, True), (60, 4, False), (5, 1, False), (1, 1, True), (6, 6, True)],
)
def test_route_by_sigmoid_equals_its_specification(
    num_experts: int, num_choices: int, norm: bool, scale: float
) -> None:
    terms, bias = 2 * randn(3, 7, num_experts), randn(num_experts, seed=1)
    terms[:, 1], terms[0, 2, 0], terms[:, 3] = -90, NAN, -60  # scores of 0, one that is none, and all alike
    for mask in (None, torch.arange(7) != 4):
        arguments = terms, bias, num_choices, norm, scale, mask
        ids, weights = routing_kernels.route_by_sigmoid(*arguments)
        expected_ids, expected = route_by_sigmoid(*arguments)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("num_columns", [12, 13, 16])
@pytest.mark.parametrize("num_choices", [3, 4])
def test_an_expert_for_all_tokens_is_appended_to_those_that_are_chosen(num_choices: int, num_columns: int) -> None:
    """Its weight is 1 where the terms have no column for it, and else the sigmoid of that."""
    terms, mask = randn(2, 6, num_columns), torch.arange(6) != 2
    terms[0, 1, -1] = NAN  # of the last column alone
    bias = randn(12, seed=1)
    for row_mask in (None, mask):
        for name, arguments in {
            "route": (terms, num_choices, True, row_mask, None, 12),
            "route_by_sigmoid": (terms, bias, num_choices, False, 2.5, row_mask, 12),
        }.items():
            ids, weights = getattr(routing_kernels, name)(*arguments)
            expected_ids, expected = getattr(routing_spec, name)(*arguments)
            assert torch.equal(ids, expected_ids)
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert ids.shape == (6, num_choices + 1)
    assert (ids[mask, -1] == 12).all()
    assert (ids[2] == 13).all()
    gates = torch.ones(6) if num_columns == 12 else terms.sum(0)[:, 12].sigmoid()
    torch.testing.assert_close(weights[mask, -1], gates[mask], equal_nan=True)
    ids, chosen = route_by_sigmoid(terms[..., :12], bias, num_choices, False, 2.5, mask)
    torch.testing.assert_close(weights[mask, :-1], chosen[mask], equal_nan=True)


def test_route_adds_up_the_terms_of_the_logits() -> None:
    terms = randn(16, 6, 40)
    ids, weights = routing_kernels.route(terms, 4, True)
    expected_ids, expected = route(terms.sum(0, keepdim=True), 4, True)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_route_takes_equal_logits_by_their_ids() -> None:
    logits = torch.randint(0, 3, (20, 12), generator=torch.Generator().manual_seed(0)).float()
    assert_equal_routing(logits, 5, True)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
def test_route_gives_rows_of_nan_and_infinities_experts_that_exist() -> None:
    logits = randn(6, 5)
    logits[0, 2] = logits[1] = NAN
    logits[2, 3] = float("inf")
    logits[3] = float("-inf")
    logits[4, 1:] = float("-inf")  # one expert is certain, the others impossible
    assert_equal_routing(logits, 3, True)
    ids, weights = routing_kernels.route(logits[None], 3, True)
    assert ((ids >= 0) & (ids < 5)).all()
    assert weights[:4].isnan().all()
    assert weights[4].tolist() == [1.0, 0.0, 0.0]


# --- plan_tiles ---


def random_ids(num_tokens: int, num_experts: int, num_choices: int, share_of_padding: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :num_choices].int()
    padding = torch.rand(num_tokens, 1, generator=generator) < share_of_padding
    return ids.masked_fill(padding, num_experts).contiguous()


@loops_are_interpreted
@pytest.mark.parametrize("segment", [routing_kernels.SEGMENT, 256])
@pytest.mark.parametrize("share_of_padding", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_choices", "tile_size"),
    [(2, 8, 2, 16), (2, 1, 1, 16), (19, 40, 8, 16), (50, 3, 2, 32), (400, 20, 6, 128)],
)
def test_a_plan_has_every_pair_once_in_a_tile_of_its_expert(
    num_tokens: int,
    num_experts: int,
    num_choices: int,
    tile_size: int,
    share_of_padding: float,
    segment: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the pairs are looked through in segments."""
    monkeypatch.setattr(routing_kernels, "SEGMENT", segment)
    monkeypatch.setattr(routing_kernels, "MAX_CHUNK", min(segment, routing_kernels.MAX_CHUNK))
    ids = random_ids(num_tokens, num_experts, num_choices, share_of_padding)
    plan = plan_tiles(ids, num_experts, tile_size)
    num_tiles = int(plan.num_tiles)
    counts = ids.flatten().bincount()
    assert num_tiles == int((-(-counts // tile_size)).sum())
    assert num_tiles <= len(plan.tile_experts) == max_tiles(ids.numel(), num_experts, tile_size)
    pairs, tile_experts = plan.pairs[: num_tiles * tile_size], plan.tile_experts[:num_tiles]
    is_pair = pairs < ids.numel()
    assert torch.equal(pairs[is_pair], ids.flatten().sort(stable=True).indices.int())
    assert (pairs[~is_pair] == ids.numel()).all()
    experts = tile_experts.repeat_interleave(tile_size)
    assert torch.equal(experts[is_pair], ids.flatten()[pairs[is_pair].long()])
    assert is_pair.view(-1, tile_size)[:, 0].all(), "no tile is empty"


def test_the_plan_of_one_token_is_its_experts() -> None:
    """Each of its pairs is a tile, so there is nothing to sort."""
    ids = random_ids(1, 8, 3)
    plan = plan_tiles(ids, 8, 16)
    assert plan.pairs is plan.num_tiles is None
    assert plan.tile_experts.tolist() == ids[0].tolist()


@loops_are_interpreted
def test_the_most_tiles_are_needed_when_each_expert_has_one_pair_and_one_has_the_rest() -> None:
    ids = torch.tensor([0, 1, 2, 3, *[3] * 32]).int().unsqueeze(1)  # 3 is no expert: there are three
    assert int(plan_tiles(ids, 3, 16).num_tiles) == max_tiles(36, 3, 16) == 4 + 2
    assert max_tiles(8, 128, 16) == 8
    assert max_tiles(0, 128, 16) == 0


# --- expert_mlp ---


def weights_of(num_experts: int, hidden_size: int, inner_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = randn(num_experts, 2 * inner_size, hidden_size, seed=1) / hidden_size**0.5
    return gate_up.to(dtype), (randn(num_experts, hidden_size, inner_size, seed=2) / inner_size**0.5).to(dtype)


def assert_equal_mlp(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, pair_weights: Tensor) -> Tensor:
    arguments = x, ExpertWeights(gate_up), ExpertWeights(down), ids, pair_weights
    actual, expected = expert_kernels.expert_mlp(*arguments), expert_mlp(*arguments)
    assert actual.dtype == x.dtype
    tolerance = 8 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return actual


CASES = [  # tokens, experts, choices, hidden size, inner size: the tiles have 16 rows, but in the last two
    (1, 8, 2, 96, 80),
    (5, 5, 1, 64, 48),
    (3, 10, 8, 32, 24),
    (20, 6, 2, 200, 33),
    (40, 3, 2, 40, 72),
    (150, 2, 1, 72, 40),
]


@loops_are_interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_choices", "hidden_size", "inner_size"), CASES)
def test_expert_mlp_equals_its_specification(
    num_tokens: int, num_experts: int, num_choices: int, hidden_size: int, inner_size: int, dtype: torch.dtype
) -> None:
    x = randn(num_tokens, hidden_size + 8, dtype=dtype)[:, :hidden_size]  # rows out of wider ones
    weights = weights_of(num_experts, hidden_size, inner_size, dtype)
    ids = random_ids(num_tokens, num_experts, num_choices, share_of_padding=0.2)
    assert_equal_mlp(x, *weights, ids, torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)))


def test_the_cases_reach_all_sizes_of_tiles() -> None:
    rows = {tile_rows(case[0] * case[2], case[1], torch.float16) for case in CASES}
    assert rows >= {16, 64, 128}
    assert tile_rows(256 * 8, 128, torch.float16) == 32


def test_sizes_of_tiles_between_decode_and_the_longest_prefill_are_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No token has an expert, so no weight is read for it; and none is widened."""
    with default_dtype(torch.bfloat16):
        layer, steps = Experts(64, MoEConfig(128, 8, 16, True, has_experts=(True,)), TensorParallel()), []
    monkeypatch.setattr(type(layer.gate_up_proj.quant_method), "expert_mlp", lambda _, __, *step: steps.append(step))
    for function in (*layer.compiled_ahead(1), *layer.compiled_ahead(2)):
        function()
    assert [tile_rows(ids.numel(), 128, hidden.dtype) for hidden, ids, _ in steps] == [32, 64, 128]
    assert all(hidden.shape == (len(ids), 64) and (ids == 128).all() for hidden, ids, _ in steps)
    monkeypatch.setattr(layer.gate_up_proj.quant_method, "kind", ProductKind.WIDENED)
    assert layer.compiled_ahead(1) == []


@loops_are_interpreted
def test_one_expert_takes_all_tokens_and_the_others_are_not_read() -> None:
    x, (gate_up, down) = randn(20, 32), weights_of(4, 32, 24, torch.float32)
    gate_up[[0, 1, 3]] = down[[0, 1, 3]] = NAN
    ids = torch.full((20, 1), 2, dtype=torch.int32)
    assert assert_equal_mlp(x, gate_up, down, ids, torch.ones(20, 1)).isfinite().all()


@loops_are_interpreted
def test_rows_without_experts_get_zeros_whatever_they_hold() -> None:
    x, weights = randn(20, 32), weights_of(4, 32, 24, torch.float32)
    x[::2] = NAN
    mask = torch.arange(20) % 2 == 1
    ids, pair_weights = routing_kernels.route(randn(1, 20, 4), 2, True, mask)
    out = assert_equal_mlp(x, *weights, ids, pair_weights)
    assert (out[:, ~mask] == 0).all()
    assert out.isfinite().all()


@loops_are_interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_with_nan_stays_alone_with_it() -> None:
    x, weights = randn(6, 32), weights_of(3, 32, 24, torch.float32)
    x[4, 7] = NAN
    ids, pair_weights = routing_kernels.route((x @ randn(32, 3))[None], 2, True)
    out = assert_equal_mlp(x, *weights, ids, pair_weights)
    assert out[:, 4].isnan().all()
    assert out[:, [0, 1, 2, 3, 5]].isfinite().all()


def test_no_tokens_give_no_rows() -> None:
    ids, pair_weights = routing_kernels.route(randn(1, 0, 4), 2, True)
    assert ids.shape == pair_weights.shape == (0, 2)
    weights = map(ExpertWeights, weights_of(4, 32, 24, torch.float32))
    out = expert_kernels.expert_mlp(randn(0, 32), *weights, ids, pair_weights)
    assert out.shape == (2, 0, 32)


def test_few_tiles_are_cut_into_more_columns() -> None:
    """The interpreter stands for a GPU of eight multiprocessors."""
    few, many = (expert_kernels.choose_tiling(16, num_tiles, 128, torch.float16, CPU) for num_tiles in (2, 8))
    assert (few.columns, many.columns) == (32, 64)


# --- gated_sum ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_terms", "size"), [(1, 64), (4, 200), (2, 1025)])
def test_the_gated_sum_of_a_shared_expert_equals_its_specification(
    num_terms: int, size: int, dtype: torch.dtype
) -> None:
    terms, hidden = randn(num_terms, 5, size, dtype=dtype), randn(5, size + 8, seed=1, dtype=dtype)[:, :size]
    gate = randn(1, size, seed=2, dtype=dtype) / size**0.5
    out = activation_kernels.gated_sum(terms, hidden, gate)
    expected = gated_sum(terms, hidden, gate)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=1e-5 if dtype == torch.float32 else 1e-3, atol=1e-5)
    assert activation_kernels.gated_sum(terms[:, :0], hidden[:0], gate).shape == (1, 0, size)
