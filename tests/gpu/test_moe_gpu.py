"""The mixture-of-experts kernels, compiled for the GPU, against specifications in float32; in CUDA graphs, too."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from nanoinfer.checkpoint.base_config import MoEConfig
from nanoinfer.distributed.tensor_parallel import TensorParallel
from nanoinfer.layers import moe
from nanoinfer.layers.moe import SigmoidRouter, SparseMoE
from nanoinfer.ops.activations.spec import gated_sum, sigmoid_and_mul
from nanoinfer.ops.experts.spec import ExpertWeights, expert_mlp
from nanoinfer.ops.norms.spec import add_rms_norm
from nanoinfer.ops.routing.spec import route, route_by_sigmoid

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NAN = float("nan")


class Sizes(NamedTuple):
    hidden: int
    inner: int
    experts: int
    choices: int


QWEN3_30B = Sizes(2048, 768, 128, 8)
QWEN3_30B_OVER_4 = Sizes(2048, 192, 128, 8)
MIXTRAL_OVER_8 = Sizes(4096, 1792, 8, 2)
ODD = Sizes(104, 40, 6, 3)
ONE_CHOICE = Sizes(256, 200, 20, 1)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


def build(sizes: Sizes, dtype: torch.dtype = torch.bfloat16, tp: TensorParallel | None = None) -> SparseMoE:
    with CUDA:
        config = MoEConfig(sizes.experts, sizes.choices, sizes.inner, norm_topk_prob=True, has_experts=(True,))
        layer = SparseMoE(sizes.hidden, config, tp or TensorParallel()).to(dtype)
    for param in layer.parameters():
        param.normal_(0.0, param.shape[-1] ** -0.5)
    return layer


def in_float32(layer: SparseMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    experts = layer.experts
    both = (ExpertWeights(part.weight.float()) for part in (experts.gate_up_proj, experts.down_proj))
    return expert_mlp.__wrapped__(x.float(), *both, ids, weights)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Within a few roundings of numbers of the size of their row."""
    assert actual.shape == expected.shape
    size = expected.square().mean(dim=-1, keepdim=True).sqrt()
    eps = max(torch.finfo(actual.dtype).eps, 1e-6)
    assert ((actual.float() - expected).abs() <= 4 * eps * (expected.abs() + size)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 7, 1000])
@pytest.mark.parametrize(("num_experts", "num_choices"), [(128, 8), (8, 2), (60, 4), (5, 1), (1, 1), (512, 10)])
@pytest.mark.parametrize("norm", [True, False])
def test_route_equals_its_specification(
    num_experts: int, num_choices: int, norm: bool, num_tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits = randn(num_tokens, num_experts, dtype=dtype)  # in 16 bits many are equal
    mask = torch.rand(num_tokens, device=CUDA) < 0.8
    for row_mask in (None, mask):
        ids, weights = route(logits[None], num_choices, norm, row_mask)
        mask_on_host = None if row_mask is None else row_mask.cpu()
        expected_ids, expected = route(logits[None].cpu(), num_choices, norm, mask_on_host)
        # Logits that differ in their last bits may have equal probabilities on one of the two.
        assert (ids.cpu() != expected_ids).float().mean() < 0.001
        torch.testing.assert_close(weights.cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "num_splits"), [(2048, 16), (2880, 15), (4096, 16), (104, 1)])
def test_the_router_scores_small_steps_in_float32(hidden: int, num_splits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = build(Sizes(hidden, 64, 32, 4), dtype), randn(5, hidden, dtype=dtype)
    terms = layer.gate.terms(x)
    assert terms.shape == (num_splits, 5, 32)
    expected = x.float() @ layer.gate.weight.float().t()
    if num_splits > 1:
        assert terms.dtype == torch.float32
        torch.testing.assert_close(terms.sum(0), expected, rtol=1e-4, atol=1e-4)
    else:
        torch.testing.assert_close(terms[0].float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 30, 300])  # 300: in one product
def test_a_router_by_sigmoids_scores_all_steps_in_float32(num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    moe = MoEConfig(128, 8, 64, norm_topk_prob=True, has_experts=(True,), scaling_factor=2.5)
    with CUDA:
        router = SigmoidRouter(4096, moe).to(dtype)
    router.e_score_correction_bias.data = randn(128)
    router.weight.normal_(0.0, 4096**-0.5)
    x, mask = randn(num_tokens, 4096, dtype=dtype), torch.rand(num_tokens, device=CUDA) < 0.9
    logits = x.float() @ router.weight.float().t()
    torch.testing.assert_close(router.terms(x).sum(0), logits, rtol=1e-4, atol=1e-4)
    ids, weights = router(x, mask)
    expected_ids, expected = route_by_sigmoid.__wrapped__(
        logits[None], router.e_score_correction_bias, 8, True, 2.5, mask
    )
    is_equal = ids == expected_ids  # two that are almost alike may change places
    assert is_equal.float().mean() > 0.99
    torch.testing.assert_close(weights[is_equal], expected[is_equal], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 40, 500])
def test_a_bias_of_the_router_is_added_to_its_logits(num_tokens: int) -> None:
    torch.manual_seed(0)
    terms, bias = randn(15, num_tokens, 32), randn(32, dtype=torch.bfloat16)
    ids, weights = route(terms, 4, True, None, bias)
    expected_ids, expected = route.__wrapped__(terms, 4, True, None, bias)
    assert (ids != expected_ids).float().mean() < 0.001
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_terms", "num_tokens", "size"), [(1, 1, 2048), (4, 256, 2048), (2, 33, 2880)])
def test_the_gated_sum_of_a_shared_expert_equals_its_specification(
    num_terms: int, num_tokens: int, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    terms, hidden = randn(num_terms, num_tokens, size, dtype=dtype), randn(num_tokens, size, dtype=dtype)
    gate = randn(1, size, dtype=dtype) / size**0.5
    assert_close(gated_sum(terms, hidden, gate), gated_sum.__wrapped__(terms.float(), hidden.float(), gate.float()))


@pytest.mark.parametrize("num_terms", [None, 2])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 4096), (33, 1000)])
def test_gates_of_attention_equal_their_specification(num_tokens: int, size: int, num_terms: int | None) -> None:
    torch.manual_seed(0)
    x, terms = (randn(count, num_tokens, 2 * size, dtype=torch.bfloat16)[..., :size] for count in (1, num_terms or 1))
    gates = terms if num_terms else terms[0]
    expected = sigmoid_and_mul.__wrapped__(x[0].float(), gates.float())
    assert_close(sigmoid_and_mul(x[0], gates), expected)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 16, 96])
@pytest.mark.parametrize("is_gated", [True, False])
def test_a_shared_expert_among_the_others_adds_what_it_adds_by_itself(
    num_tokens: int, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(num_tokens)
    config = MoEConfig(256, 8, 512, norm_topk_prob=True, has_experts=(True,), shared_size=512)
    torch.set_default_dtype(torch.bfloat16)
    with CUDA:
        layer = SparseMoE(2048, config, TensorParallel(), is_shared_gated=is_gated)
    torch.set_default_dtype(torch.float32)
    layer.settle_weights()
    for param in layer.parameters():
        param.normal_(0.0, param.shape[-1] ** -0.5)
    x, mask = randn(num_tokens, 2048, dtype=torch.bfloat16), torch.rand(num_tokens, device=CUDA) < 0.8
    joined = layer(x, mask)
    assert joined.other_terms is None
    assert len(joined.terms) == 9
    monkeypatch.setattr(moe, "MAX_JOINED_TOKENS", 0)
    apart = layer(x, mask)
    assert apart.other_terms is not None
    expected = apart.terms.float().sum(0) + apart.other_terms.float().sum(0)
    assert_close(joined.terms.float().sum(0).bfloat16()[mask], expected[mask])
    assert (joined.terms[:, ~mask] == 0).all()


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 16, 40, 128, 256, 600, 3000])
@pytest.mark.parametrize("sizes", [QWEN3_30B, QWEN3_30B_OVER_4, MIXTRAL_OVER_8, ODD, ONE_CHOICE])
def test_experts_in_bfloat16_equal_their_specification_in_float32(sizes: Sizes, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    layer, x = build(sizes), randn(num_tokens, sizes.hidden, dtype=torch.bfloat16)
    mask = torch.rand(num_tokens, device=CUDA) < 0.9
    routing = layer.gate(x, mask)
    terms = layer.experts(x, routing)
    assert_close(terms, in_float32(layer, x, *routing))
    assert (terms[:, ~mask] == 0).all()
    assert torch.equal(terms, layer.experts(x, routing)), "equal steps give equal bits"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [3, 300])
def test_experts_in_other_types_equal_their_specification_in_float32(num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    layer, x = build(ODD, dtype), randn(num_tokens, ODD.hidden, dtype=dtype)
    routing = layer.gate(x, None)
    assert_close(layer.experts(x, routing), in_float32(layer, x, *routing))


@pytest.mark.parametrize("num_tokens", [5, 300])
@pytest.mark.parametrize("sizes", [QWEN3_30B, MIXTRAL_OVER_8])
def test_experts_without_tokens_are_not_read(sizes: Sizes, num_tokens: int) -> None:
    torch.manual_seed(0)
    layer, x = build(sizes), randn(num_tokens, sizes.hidden, dtype=torch.bfloat16)
    chosen = torch.arange(sizes.choices, device=CUDA).int() * 3 % sizes.experts
    others = torch.ones(sizes.experts, dtype=torch.bool, device=CUDA).index_fill_(0, chosen.long(), False)
    layer.experts.gate_up_proj.weight[others] = NAN
    layer.experts.down_proj.weight[others] = NAN
    ids = chosen.repeat(num_tokens, 1)
    weights = torch.rand(num_tokens, sizes.choices, device=CUDA)
    both = (ExpertWeights(part.weight) for part in (layer.experts.gate_up_proj, layer.experts.down_proj))
    terms = expert_mlp(x, *both, ids, weights)
    assert_close(terms, in_float32(layer, x, ids, weights))


def test_a_row_with_nan_stays_alone_with_it() -> None:
    torch.manual_seed(0)
    layer, x = build(QWEN3_30B), randn(20, QWEN3_30B.hidden, dtype=torch.bfloat16)
    expected = layer(x).terms
    x[7, 100] = NAN
    terms = layer(x).terms
    assert terms[:, 7].isnan().all()
    others = torch.arange(20, device=CUDA) != 7
    assert torch.equal(terms[:, others], expected[:, others])


def test_the_next_norm_adds_up_the_terms() -> None:
    torch.manual_seed(0)
    layer, x = build(QWEN3_30B), randn(9, QWEN3_30B.hidden, dtype=torch.bfloat16)
    residual, weight = randn(9, QWEN3_30B.hidden, dtype=torch.bfloat16), torch.ones(2048, device=CUDA).bfloat16()
    _, total = add_rms_norm(layer(x).terms, residual, weight, 1e-6)
    expected = in_float32(layer, x, *layer.gate(x, None)).sum(0) + residual.float()
    assert_close(total, expected)


def test_the_shares_of_two_ranks_add_up_to_the_whole() -> None:
    torch.manual_seed(0)
    whole, x = build(QWEN3_30B), randn(30, QWEN3_30B.hidden, dtype=torch.bfloat16)
    routing = whole.gate(x, None)
    gate_up, down = whole.experts.gate_up_proj.weight, whole.experts.down_proj.weight
    total = torch.zeros(30, QWEN3_30B.hidden, device=CUDA)
    for rank in range(2):
        share = build(QWEN3_30B, tp=TensorParallel(rank, size=2)).experts
        for expert in range(QWEN3_30B.experts):
            gate, up = gate_up[expert].chunk(2)
            for module, part, full in (
                (share.gate_up_proj, "gate", gate),
                (share.gate_up_proj, "up", up),
                (share.down_proj, "down", down[expert]),
            ):
                module.weight_loader(module.weight, full, f"{expert}.{part}")
        total += share(x, routing).float().sum(0)
    expected = in_float32(whole, x, *routing).sum(0)
    torch.testing.assert_close(total, expected, rtol=0.03, atol=0.05 * expected.square().mean().sqrt().item())


@pytest.mark.parametrize("num_tokens", [1, 16, 48, 256])
@pytest.mark.parametrize("sizes", [QWEN3_30B, MIXTRAL_OVER_8])
def test_a_captured_graph_follows_its_inputs(sizes: Sizes, num_tokens: int) -> None:
    """Other tokens go to other experts, into other tiles; other rows are padding."""
    torch.manual_seed(0)
    layer = build(sizes)
    x = randn(num_tokens, sizes.hidden, dtype=torch.bfloat16)
    mask = torch.zeros(num_tokens, dtype=torch.bool, device=CUDA)
    layer(x, mask)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing = layer.gate(x, mask)
        terms = layer.experts(x, routing)
    alike = x.new_ones(num_tokens, 1)
    inputs = [
        (randn(num_tokens, sizes.hidden), torch.ones_like(mask)),
        (randn(1, sizes.hidden) * alike, torch.ones_like(mask)),  # all tokens go to the same experts
        (randn(num_tokens, sizes.hidden), torch.arange(num_tokens, device=CUDA) % 3 == 0),
        (torch.full_like(x, NAN), torch.zeros_like(mask)),
    ]
    for new_x, new_mask in inputs:
        x.copy_(new_x)
        mask.copy_(new_mask)
        terms.fill_(NAN)
        graph.replay()
        assert torch.equal((routing.expert_ids < sizes.experts).all(1), mask)
        assert torch.equal(terms, layer.experts(x, routing))
        assert_close(terms, in_float32(layer, x, *routing))
